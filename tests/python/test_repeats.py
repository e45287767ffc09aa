"""Equal layers are worked on once: the programs are those that come out when each is worked on by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deplo
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
        self.layers = nn.ModuleList(Layer(4 if k % 2 else 16) for k in range(14))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.first(ids)
        for layer in self.layers:
            x = layer(x, positions)
        return F.log_softmax(self.last(x), -1)


def with_numbered_buffers(text: str) -> str:
    """The text with buffers named in the order in which steps name them: some have names from the pass that made them."""
    program, kernels = text.split("\nkernel @", 1)
    declared = [line for line in program.splitlines() if line.startswith("  buffer ")]
    known = {line.split()[1].rstrip(":") for line in declared}
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"b{len(numbers)}") if match[0] in known else match[0]

    steps = [re.sub(r"\w+", number, line) for line in program.splitlines() if line not in declared]
    return "\n".join([*steps, *sorted(re.sub(r"\w+", number, line) for line in declared), kernels])


@pytest.mark.parametrize("kind", ["inference", "dynamic", "training"])
def test_programs_are_those_of_layers_one_by_one(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Passes work on four of seven pairs of layers; the steps of one of them are those of the others."""
    net = Net()
    inputs = [torch.zeros(1, 6, dtype=torch.int64), torch.arange(6)]
    with torch.set_grad_enabled(kind == "training"):
        records = capture(net, inputs, dynamic=kind == "dynamic", backward=kind == "training")
    assert len(records) == (2 if kind == "training" else 1)
    for record in records:
        options = {"verify": False, "time": True, "hints": record.hints, "training": kind == "training"}
        shared, apart = (core().lower(record.torch_ir, "kernel", json.dumps({**options, "disable": off})) for off in ([], ["share_repeats"]))
        assert with_numbered_buffers(shared) == with_numbered_buffers(apart)
        assert capfd.readouterr().err.count("loop/unroll_layers") == 1


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


@pytest.mark.parametrize("last", ["alike", "in other groups"])
def test_regions_take_quantised_weights_apart(last: str) -> None:
    """Weights that are made of tensors, which AOTAutograd does not give to a region; what is put together otherwise is of another region."""
    quantization = pytest.importorskip("torchao.quantization")
    torch._dynamo.reset()
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).requires_grad_(False)
    for k, layer in enumerate(layers):
        group = quantization.PerGroup(16 if k == 3 and last == "in other groups" else 32)
        quantization.quantize_(layer, quantization.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=group))
    step = torch.compiler.nested_compile_region(lambda layer, x: torch.relu(layer(x)))

    def run(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = step(layer, x)
        count.add_(1)
        return x @ layers[0].weight.dequantize() + layers[1](x)  # read outside of regions, too

    x, count = torch.randn(5, 64), torch.zeros(2)
    with torch.no_grad(), collect_records() as records:
        compiled = torch.compile(run, backend="deplo", options={"strict": True})
        direct = deplo.jit(run, guards="inputs", options={"strict": True})
        expected = run(x, torch.zeros(2))
        for call in (compiled, compiled, direct, direct):
            torch.testing.assert_close(call(x, count), expected)
        layers[1].weight.copy_(layers[2].weight)  # a write into the parts is seen
        expected = run(x, torch.zeros(2))
        for call in (compiled, direct):
            torch.testing.assert_close(call(x, count), expected)
        quantization.quantize_(layers.append(nn.Linear(64, 64))[-1], quantization.IntxWeightOnlyConfig(weight_dtype=torch.int8))
        torch.testing.assert_close(compiled(x, count), run(x, torch.zeros(2)))
    assert count.tolist() == [7, 7] and len(records) == 3
    assert all("i8" in record.torch_ir for record in records)


def chain(
    x: torch.Tensor, w: list[torch.Tensor], step: Callable[[int, torch.Tensor, torch.Tensor, list[torch.Tensor]], torch.Tensor]
) -> list[torch.Tensor]:
    """What nine layers give, each from its number, the last value, its weight, and what all layers before it gave."""
    values = [x]
    for k in range(9):
        values.append(step(k, values[-1], w[k], values))
    return values


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(x, (8,))
    return x + (torch.tanh(F.softmax(y @ w, -1) * y) * 0.5) @ w


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w[3:5] = x[3:5]
    return layer(x, w)


NETS: dict[str, tuple[bool, Callable[[torch.Tensor, list[torch.Tensor]], object]]] = {
    "plain": (True, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y, v))[-1]),
    "each value is given": (True, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y, v))),
    "in another order": (True, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y, v))[::-1]),
    "some values are given": (False, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y, v))[3:]),
    "transposed behind all layers": (True, lambda x, w: [y.t() for y in chain(x, w, lambda k, y, v, all_: layer(y, v))]),
    "summed behind all layers": (False, lambda x, w: sum(chain(x, w, lambda k, y, v, all_: layer(y, v)), torch.zeros(()))),
    "all read the first": (True, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y + all_[0], v))[-1]),
    "each reads the one before the last": (True, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y + all_[max(k - 1, 0)], v))[-1]),
    "skips across all": (False, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y + all_[8 - k] if k > 4 else y, v))[-1]),
    "one has another factor": (False, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y * (3 if k == 4 else 2), v))[-1]),
    "two share a weight": (False, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y, w[3] if k == 5 else v))[-1]),
    "all share a weight": (True, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y, v) @ w[9])[-1]),
    "a weight is read again at the end": (False, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y, v))[-1] @ w[4]),
    "a weight is given": (False, lambda x, w: [chain(x, w, lambda k, y, v, all_: layer(y, v))[-1], w[4] * 2]),
    "begins with the weight of another layer": (False, lambda x, w: chain(w[3], w, lambda k, y, v, all_: layer(y, v))[-1] + x),
    "random numbers": (True, lambda x, w: chain(x, w, lambda k, y, v, all_: y + F.dropout(layer(y, v), 0.5, True))[-1]),
    "calls of a library": (True, lambda x, w: chain(x, w, lambda k, y, v, all_: layer(y, v) + torch.linalg.inv(v @ v.t() + 8 * torch.eye(8)))[-1]),
    "weights are written": (True, lambda x, w: chain(x, w, lambda k, y, v, all_: written(y, v))[-1]),
    "one weight is written": (False, lambda x, w: chain(x, w, lambda k, y, v, all_: written(y, v) if k == 4 else layer(y, v))[-1]),
}


@pytest.mark.parametrize("name", NETS)
def test_layers_that_are_left_out_come_back_as_they_were(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Where they are not equal, all stay."""
    rolls, net = NETS[name]
    torch.manual_seed(0)
    make = lambda: (torch.randn(8, 8).double(), [torch.randn(8, 8).double() for _ in range(10)])  # noqa: E731
    x, w = make()
    (record,) = capture(lambda x, *w: net(x, list(w)), [x, *w], dynamic=False)
    options = {"verify": True, "time": True, "hints": record.hints}
    shared, apart = (core().lower(record.torch_ir, "kernel", json.dumps({**options, "disable": off})) for off in ([], ["share_repeats"]))
    assert with_numbered_buffers(shared) == with_numbered_buffers(apart)
    assert capfd.readouterr().err.count("loop/unroll_layers") == rolls
    results = []
    for run in (net, torch.compile(net, backend="deplo", dynamic=False)):
        torch.manual_seed(1)
        x, w = make()
        results.append([run(x, w), w])
    torch.testing.assert_close(results[1], results[0])
