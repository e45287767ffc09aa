"""The option `weights`: layers that read the model's own weights, and those that keep copies."""

from __future__ import annotations

import copy

import pytest
import torch
from engines import feature_sets, packed_by_others, same
from torch import nn

import deplo
from deplo.core import core

torch.manual_seed(0)


class Gated(nn.Module):
    """Two products of the same rows, one of theirs, a residual; and a product over two axes."""

    def __init__(self, width: int = 256, hidden: int = 352) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        y = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        heads = y.view(*y.shape[:-1], 8, -1).transpose(-3, -2).contiguous()
        return self.out(heads.transpose(-3, -2).flatten(-2)).relu()


def compiled(model: nn.Module, weights: str, features: str = "", dynamic: bool | None = None):
    torch._dynamo.reset()
    return torch.compile(model, backend="deplo", dynamic=dynamic, options={"strict": True, "weights": weights, "features": features, "verify": True})


@pytest.mark.parametrize("features", feature_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_read_the_models_weights(features, dtype):
    model = Gated().to(dtype)
    with torch.no_grad():
        before = packed_by_others()
        run = compiled(model, "original", features)
        for rows in (1, 3, 16, 33, 64, 130):
            x = torch.randn(rows, 256).to(dtype)
            same(run(x), model(x))
        assert core().packed_bytes() == before  # nothing was copied
        model.down.weight.data.zero_()  # not even PyTorch counts this write
        same(run(x), model(x))


def test_one_program_for_all_lengths_reads_them_too():
    model = Gated()
    with torch.no_grad():
        before = packed_by_others()
        run = compiled(model, "original", dynamic=True)
        for rows in (40, 2, 7, 33, 64, 200):
            x = torch.randn(2, rows, 256)
            same(run(x), model(x))
        assert core().packed_bytes() == before


def test_gradients_beside_weights_that_stay():
    model, x = Gated(), torch.randn(48, 256)
    other, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled(model, "original")(x).square().sum().backward()
    other(x).square().sum().backward()
    exact(x.double()).square().sum().backward()
    for mine, eagers, best in zip(model.parameters(), other.parameters(), exact.parameters(), strict=True):
        same(mine.grad, eagers.grad, exact=best.grad)


@pytest.mark.parametrize(("rows", "weights", "copies"), [(64, "auto", False), (5, "auto", True), (64, "pack", True), (5, "original", False)])
def test_copies_are_kept_where_they_are_much_faster(rows, weights, copies):
    layer, x = nn.Linear(256, 512), torch.randn(rows, 256)
    with torch.no_grad():
        before = packed_by_others()
        run = compiled(layer, weights, feature_sets()[0])  # a matrix unit takes copies in three parts
        same(run(x), layer(x))
        assert core().packed_bytes() - before == (layer.weight.nbytes if copies else 0)


def test_convolutions_that_read_the_models_weights():
    model = nn.Sequential(
        nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 96, 1), nn.Conv2d(96, 96, 3, stride=2), nn.ConvTranspose2d(96, 48, 2, stride=2)
    )
    with torch.no_grad():
        before = packed_by_others()
        run = compiled(model, "original")
        for size in (14, 15):
            x = torch.randn(2, 48, size, size)
            same(run(x), model(x))
        assert core().packed_bytes() - before < 1 << 16


def test_other_values_are_refused():
    with pytest.raises(deplo.UserError, match="'auto', 'pack', 'own', 'original'"):
        torch.compile(nn.Linear(2, 2), backend="deplo", options={"weights": "originals"})(torch.ones(1, 2))


def test_checks_by_versions_see_the_writes_that_are_counted():
    layer, x = nn.Linear(256, 512), torch.randn(5, 256)
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(layer, backend="deplo", options={"strict": True, "weights": "pack", "weight_checks": "versions"})
        before = layer(x)
        same(run(x), before)
        layer.weight.data.mul_(2)
        same(run(x), before)  # nobody counted this one
        deplo.repack(layer)
        same(run(x), layer(x))
        layer.weight.mul_(2)
        same(run(x), layer(x))


@pytest.mark.parametrize("features", feature_sets())
def test_rows_that_lie_along_both_axes(features):
    """Windows with a step of one: rows and what is summed lie side by side in memory."""
    torch._dynamo.reset()
    weight = nn.Parameter(torch.randn(512, 64))

    def framed(x):
        return x.unfold(0, weight.shape[0], 1) @ weight.to(x.dtype)

    x = torch.randn(480 + 511)
    with torch.no_grad():
        same(torch.compile(framed, backend="deplo", options={"features": features})(x), framed(x), exact=framed(x.double()))
