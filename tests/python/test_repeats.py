"""Equal layers are worked on once: the programs are those that come out when each is worked on by itself."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deplo import subgraphs
from deplo.backend import collect_records
from deplo.capture import capture
from deplo.core import core

pytest.importorskip("deplo._C")


class Layer(nn.Module):
    """Attention over a cache that is written in place, causal over all keys or over the last few, and a gated pair of layers."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(32), nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.window = window
        self.register_buffer("keys", torch.zeros(1, 4, 16, 8))
        self.register_buffer("values", torch.zeros(1, 4, 16, 8))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if not torch.is_grad_enabled():
            self.keys.index_copy_(2, positions, k)
            self.values.index_copy_(2, positions, v)
            k, v = self.keys, self.values
        distance = positions[:, None] - torch.arange(k.shape[2])
        mask = (distance >= 0) & (distance < self.window)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    """Layers of two kinds in turn, with others before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(20, 32), nn.Linear(32, 20)
        self.layers = nn.ModuleList(Layer(4 if k % 2 else 16) for k in range(5))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.first(ids)
        for layer in self.layers:
            x = layer(x, positions)
        return F.log_softmax(self.last(x), -1)


@pytest.mark.parametrize("kind", ["inference", "dynamic", "training"])
def test_programs_are_those_of_layers_one_by_one(kind: str) -> None:
    net = Net()
    inputs = [torch.zeros(1, 6, dtype=torch.int64), torch.arange(6)]
    with torch.set_grad_enabled(kind == "training"):
        records = capture(net, inputs, dynamic=kind == "dynamic", backward=kind == "training")
    assert len(records) == (2 if kind == "training" else 1)
    for record in records:
        options = {"verify": False, "hints": record.hints, "training": kind == "training"}
        shared, apart = (core().lower(record.torch_ir, "kernel", json.dumps({**options, "disable": off})) for off in ([], ["share_repeats"]))
        assert shared == apart


class Regions(nn.Module):
    """A region that is called for each layer and gives a value, a view of what it is made from, and a part of that, maybe by strides, which a region
    in it may take."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 8 for _ in range(4))

        @torch.compiler.nested_compile_region
        def inner(y: torch.Tensor) -> torch.Tensor:
            return y.as_strided((4, 8), (8, 1)) * 2

        def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = torch.tanh(x @ w.t()).relu()
            z = inner(y) if kind == "by strides within" else y.as_strided((4, 8), (8, 1)) if kind == "by strides" else y[:4]
            return y * 2, y.transpose(0, 1), z.t() + w[0, 0]

        self.step = torch.compiler.nested_compile_region(step)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for k, w in enumerate(self.weights):
            x, turned, cut = self.step(x[: 8 - k // 3], w)  # the last one is of another size
            results += [turned, turned.t(), cut, x]
        return results


@pytest.mark.parametrize("kind", ["inference", "training", "by strides", "by strides within"])
def test_regions_are_the_graph_of_layers_that_are_traced_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of equal layers keep the values that the region was traced with: the graph is that of values for each."""
    net = Regions(kind)
    x = torch.randn(8, 8)
    texts, aliases = [], []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(subgraphs, "_ValuesAlike", lambda region: subgraphs.with_own_values)
        torch._dynamo.reset()
        with torch.set_grad_enabled(kind == "training"), collect_records() as records:
            results = torch.compile(net, backend="deplo", options={"strict": True})(x)
            if kind == "training":
                sum(r.sum() for r in results).backward()
        assert len(records) == (2 if kind == "training" else 1)
        texts.append([record.torch_ir for record in records])
        storages = [r.untyped_storage().data_ptr() for r in results]
        aliases.append([storages.index(s) for s in storages])
        torch.testing.assert_close(results, net(x))
    assert texts[0] == texts[1] and aliases[0] == aliases[1]
