"""Attention as models write it by hand, or as PyTorch takes it apart: one streaming kernel on CPUs and GPUs; eager mode and float64 judge it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_cuda import compiled_for_gpu
from test_cuda_chains import kernels_of, no_further

import deplo

pytestmark = pytest.mark.usefixtures("fresh_inference")

BATCH, HEADS, ROWS, WIDTH = 2, 3, 49, 32
FEATURES = HEADS * WIDTH


def weighed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * 0.2, -1) @ v


def merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(weighed(q, k, v).transpose(1, 2).reshape(BATCH, ROWS, FEATURES), w)


def from_one_layer(x: torch.Tensor, qkv: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = F.linear(x, qkv).reshape(BATCH, ROWS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
    return merged(q, k, v, w)


def window_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Differences of lines and of columns in a window of 7 x 7 have a bias each."""
    steps = torch.arange(7)[:, None] - torch.arange(7) + 6
    bias = table[:, steps][:, :, :, steps].permute(0, 1, 3, 2, 4).reshape(1, HEADS, 49, 49)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def learned_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def mask_of_rows(dtype: torch.dtype) -> torch.Tensor:
    """One that wants a gradient, so that PyTorch takes attention apart; nothing is left of row 5 of the second head."""
    mask = torch.randn(1, HEADS, ROWS, ROWS)
    mask[0, 1, 5] = -torch.inf
    mask[0, 0, :, 7:] = -torch.inf
    return mask.to(dtype).requires_grad_()


def heads(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(BATCH, HEADS, ROWS, WIDTH).to(dtype) for _ in range(3)]


def layer(dtype: torch.dtype, columns: int, rows: int) -> torch.Tensor:
    return (torch.randn(rows, columns) / columns**0.5).to(dtype)


CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[torch.dtype], list[torch.Tensor]]]] = {
    "merged heads": (merged, lambda dtype: [*heads(dtype), layer(dtype, FEATURES, FEATURES)]),
    "one layer": (
        from_one_layer,
        lambda dtype: [torch.randn(BATCH, ROWS, FEATURES).to(dtype), layer(dtype, FEATURES, 3 * FEATURES), layer(dtype, FEATURES, FEATURES)],
    ),
    "window bias": (window_bias, lambda dtype: [*heads(dtype), torch.randn(HEADS, 13, 13).to(dtype)]),
    "learned mask": (learned_mask, lambda dtype: [*heads(dtype), mask_of_rows(dtype)]),
}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_one_kernel(case: str, dtype: torch.dtype, device: str, tmp_path: Path):
    torch.manual_seed(0)
    fn, make = CASES[case]
    inputs = make(dtype)
    options = {"dump_dir": str(tmp_path), "allow_library": []}
    with torch.no_grad():
        compiled = compiled_for_gpu(fn, options, fullgraph=True) if device == "gpu" else torch.compile(fn, backend="deplo", options=options)
        no_further([compiled(*inputs)], [fn(*inputs)], [fn(*(x.double() for x in inputs))])
    kinds = kernels_of(tmp_path)
    assert kinds.count("gpu_online" if device == "gpu" else "online") == 1, kinds


def test_gradient_of_a_mask():
    """Rows of which no key is left have gradients of zero."""
    torch.manual_seed(0)
    q, k, v = heads(torch.float32)
    mask = mask_of_rows(torch.float32)
    weights = torch.randn(BATCH, HEADS, ROWS, WIDTH)
    with torch.enable_grad():
        wanted = torch.autograd.grad(learned_mask(q, k, v, mask), mask, weights)[0]
        got = torch.autograd.grad(deplo.jit(learned_mask)(q, k, v, mask), mask, weights)[0]
    assert not got[0, 1, 5].any()
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
