"""Products on GPUs whose factors are gathered, or whose rows something else takes: tiles all the same; float64 and eager mode judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_cuda import compiled_for_gpu
from test_cuda_chains import kernels_of, no_further

pytestmark = pytest.mark.usefixtures("fresh_inference")

Tensors = list[torch.Tensor]


def neighbours_embedded(ids: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As MobileBERT does it: each word beside the one before and the one after."""
    x = F.embedding(ids, table)
    return F.linear(torch.cat([F.pad(x[:, 1:], [0, 0, 0, 1]), x, F.pad(x[:, :-1], [0, 0, 1, 0])], 2), w)


def blocks_chosen(at: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.bmm(q, k.index_select(0, at).view(4, 96, 64).transpose(1, 2))


def scores_beside(q: torch.Tensor, k: torch.Tensor, far: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As BigBird does it: one softmax over the scores of two products, whose weights go to two others."""
    keys = k.shape[1]
    weights = torch.softmax(torch.cat([torch.bmm(q, k.transpose(1, 2)) * 0.125, torch.bmm(q, far.transpose(1, 2)) * 0.1], 2), -1)
    return torch.bmm(weights[..., :keys], v) + torch.bmm(weights[..., keys:], v)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Tensors], tuple[int, int]]] = {
    "neighbours": (neighbours_embedded, lambda: [torch.randint(0, 50, (2, 32)), half(50, 64), half(128, 192) / 14], (1, 2)),
    "blocks": (blocks_chosen, lambda: [torch.randint(0, 20, (24,)), half(4, 64, 64), half(20, 16, 64) / 8], (1, 1)),
    "beside": (scores_beside, lambda: [half(2, 96, 64) for _ in range(4)], (3, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_products_keep_to_tiles(case: str, tmp_path: Path):
    torch.manual_seed(0)
    fn, make, kernels = CASES[case]
    inputs = make()
    made = compiled_for_gpu(fn, {"dump_dir": str(tmp_path)}, fullgraph=True)(*inputs)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    no_further([made], [fn(*inputs)], [fn(*wide)])
    kinds = kernels_of(tmp_path)
    tiles = [kind for kind in kinds if kind in ("gpu_matrix", "gpu_tiles", "gpu_groups", "gpu_online")]
    assert (len(tiles), len(kinds)) == kernels, kinds


def test_places_of_factors_are_checked():
    at, q, k = CASES["blocks"][1]()
    at[7] = 20
    with pytest.raises((IndexError, RuntimeError), match="index"):
        compiled_for_gpu(blocks_chosen, fullgraph=True)(at, q, k)
