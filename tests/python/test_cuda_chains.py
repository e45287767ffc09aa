"""Chains of products on matrix units: the gradients of attention, and others that compute the same; eager mode and float64 judge their numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import bank_ways, is_clean
from engines import Compiler, same
from test_cuda import EMULATOR, check_for_gpus, compiled_for_gpu, gpu
from torch.nn.attention import flex_attention as flex

pytestmark = pytest.mark.usefixtures("fresh_inference")

_C = pytest.importorskip("deplo._C")
_MOST_WAYS = 1.1


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def gradients(fn: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    given = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    with torch.enable_grad():
        result = fn(*given)
        weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).reshape(result.shape).to(inputs[0].dtype).to(result.dtype)
        return list(torch.autograd.grad(result, given, weights))


def no_further(got: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    for ours, theirs, true in zip(got, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert (ours.double() - true).norm() <= 1.2 * (theirs.double() - true).norm()


def kernels_of(folder: Path) -> list[str]:
    """Of the last graph: the kind of each kernel's schedule."""
    tile = max(folder.glob("*/*_tile_lower.ir"), key=lambda path: (len(path.parent.name), path))  # graph99 comes before graph100
    return [line.split()[2] for line in tile.read_text().splitlines() if line.startswith("schedule @")]


def check_judge(path: Path, lines_are_whole: bool = True) -> None:
    """No race, no read of what nobody wrote; no conflict of banks in gradients whose tiles have lines of 128 bytes, or parts of them."""
    if gpu() != EMULATOR:
        return
    assert is_clean(path)
    assert not lines_are_whole or all(ways <= _MOST_WAYS for line, ways in bank_ways(path).items() if "backward" in line)


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    ahead = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(ahead >= 0) & (ahead < 50))


causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
grouped = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(
    ("fn", "shapes", "dtype"),
    [
        (causal, [(1, 2, 200, 64)] * 3, torch.bfloat16),
        (grouped, [(1, 4, 130, 64), *[(1, 2, 130, 64)] * 2], torch.bfloat16),
        (F.scaled_dot_product_attention, [(1, 2, 130, 80), (1, 2, 150, 80), (1, 2, 150, 80)], torch.float16),
        (windowed, [(1, 1, 300, 32)] * 3, torch.bfloat16),
    ],
    ids=["causal", "grouped", "widths", "window"],
)
def test_gradients_of_attention(fn: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype, tmp_path: Path, monkeypatch):
    """One kernel for queries, one for keys and values: neither scores nor weights are in memory."""
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    got = gradients(compiled_for_gpu(fn, {"dump_dir": str(tmp_path)}, fullgraph=True), inputs)
    no_further(got, gradients(fn, inputs), gradients(fn, inputs, torch.float64))
    assert kernels_of(tmp_path) == ["gpu_rows", "gpu_chain", "gpu_chain"]
    check_judge(tmp_path / "judge", shapes[0][-1] != 80)
    if fn is grouped:
        assert check_for_gpus(tmp_path) == 2


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (causal, [(1, 1, 80, 16)] * 3),
        (functools.partial(F.scaled_dot_product_attention, enable_gqa=True), [(1, 2, 50, 12), *[(1, 1, 70, 12)] * 2]),
    ],
    ids=["causal", "grouped widths"],
)
def test_gradients_of_attention_in_float32(fn: Callable[..., Any], shapes: list[tuple[int, ...]], tmp_path: Path, monkeypatch):
    """The same by multiply-adds, many rows a block; weights pass through shared memory as they are."""
    inputs = [torch.randn(shape) for shape in shapes]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    got = gradients(compiled_for_gpu(fn, {"dump_dir": str(tmp_path)}, fullgraph=True), inputs)
    for ours, theirs, true in zip(got, gradients(fn, inputs), gradients(fn, inputs, torch.float64), strict=True):
        # Sums are chains as long as rows or keys.
        assert (ours.double() - true).norm() <= 1.2 * (theirs.double() - true).norm() + 2.0**-24 * shapes[-1][-2] ** 0.5 * true.norm()
    assert kernels_of(tmp_path)[-2:] == ["gpu_chain", "gpu_chain"]
    check_judge(tmp_path / "judge", lines_are_whole=False)


def turned(q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return q * w.cos() + torch.cat([-q[..., 32:], q[..., :32]], -1) * w.sin()


over_a_cache = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)


@pytest.mark.parametrize("keys", [48, 640])
@pytest.mark.parametrize(
    "attend",
    [
        lambda q, w, k, v: over_a_cache(F.rms_norm(q, (64,), w), k, v),
        lambda q, w, k, v: over_a_cache(turned(q, w), k, v),
        lambda q, w, k, v: over_a_cache(turned(F.rms_norm(q, (64,)), w), k, v),
        lambda q, w, k, v: F.rms_norm(over_a_cache(q, k, v), (64,), w),
    ],
    ids=["norm", "rotation", "norm and rotation", "norm of the result"],
)
def test_norms_and_rotations_leave_attention_over_a_cache_what_it_is(attend: Callable[..., torch.Tensor], keys: int, tmp_path: Path):
    """In one kernel with attention they would keep it from streaming keys."""
    inputs = [torch.randn(shape).bfloat16() for shape in [(1, 4, 1, 64), (64,), *[(1, 2, keys, 64)] * 2]]
    got = compiled_for_gpu(attend, {"dump_dir": str(tmp_path), "allow_library": []}, fullgraph=True)(*inputs)
    no_further([got], [attend(*inputs)], [attend(*(x.double() for x in inputs))])
    assert "gpu_online" in kernels_of(tmp_path)
    assert check_for_gpus(tmp_path) == 1


def test_gradients_of_flex_attention(tmp_path: Path, monkeypatch):
    """Soft caps of scores, keys of two heads each; gradients of scores are rounded by the program."""
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: 5 * torch.tanh(s / 5), block_mask=mask, enable_gqa=True)

    inputs = [torch.randn(shape).bfloat16() for shape in [(1, 4, 128, 32), *[(1, 2, 128, 32)] * 2]]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1")
    got = gradients(compiled_for_gpu(attend, {"dump_dir": str(tmp_path)}, fullgraph=True), inputs)
    # The program rounds more often than eager mode does: the CPU runs the same one.
    no_further(got, gradients(Compiler()(attend), inputs), gradients(attend, inputs, torch.float64))
    assert kernels_of(tmp_path).count("gpu_chain") == 2
    check_judge(tmp_path / "judge")


def test_the_gradient_that_pytorch_chose_for_a_gpu(tmp_path: Path):
    def gradient(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not torch.compiler.is_compiling():
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*x, 0.0, True)
        seed = torch.zeros(2, dtype=torch.int64)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(*x, None, None, 200, 200, 0.0, True, seed, seed)

    q, k, v, grad = (torch.randn(1, 2, 200, 32).bfloat16() for _ in range(4))
    result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    inputs = [grad, q, k, v, result, sums]
    got = compiled_for_gpu(gradient, {"dump_dir": str(tmp_path)}, fullgraph=True)(*inputs)
    no_further(got, gradient(*inputs), gradient(*(x.double() for x in inputs)))
    assert kernels_of(tmp_path).count("gpu_chain") == 2


def chained(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return F.relu(a @ b.mT) @ c


def test_products_that_the_program_rounds_are_chains(tmp_path: Path):
    """Those of float32 numbers are multiplied as such: a product of rounded ones would show."""
    inputs = [torch.randn(rows, 48).bfloat16() for rows in (160, 200, 200)]
    got = compiled_for_gpu(chained, {"dump_dir": str(tmp_path)})(*inputs)
    no_further([got], [chained(*inputs)], [chained(*(x.double() for x in inputs))])
    assert kernels_of(tmp_path) == ["gpu_chain"]

    def wide(*x: torch.Tensor) -> torch.Tensor:
        return chained(*(part.float() for part in x))

    same(compiled_for_gpu(wide)(*inputs), wide(*inputs), exact=chained(*(x.double() for x in inputs)))
