"""Float32 on GPUs where rows, columns or results are few; on a GPU where there is one, else on a driver that emulates it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import bank_ways, is_clean
from engines import same
from test_cuda import EMULATOR, compiled_for_gpu, decoded, gpu

import deplo

pytestmark = pytest.mark.usefixtures("fresh_inference")


def chosen_by_a_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.dtype == torch.float64 or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v)
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, False)[0]
    return result


@pytest.mark.parametrize(
    ("fn", "heads", "rows", "keys", "width", "kernels"),
    [
        (functools.partial(F.scaled_dot_product_attention, enable_gqa=True), (8, 2), 1, 640, 64, 2),
        (decoded, (2, 2), 1, 643, 64, 2),
        (decoded, (24, 2), 1, 200, 32, 1),
        (chosen_by_a_gpu, (3, 3), 1, 520, 128, 2),
    ],
    ids=["grouped", "position", "twelve rows", "chosen by a GPU"],
)
def test_few_rows_over_many_keys(
    fn: Callable[..., Any], heads: tuple[int, int], rows: int, keys: int, width: int, kernels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Keys come by copies of 16 bytes, once for all rows that share them; long ones are cut into parts, which a second kernel combines."""
    torch.manual_seed(0)
    q = torch.randn(2, heads[0], rows, width)
    k, v = (torch.randn(2, heads[1], keys, width) for _ in range(2))
    inputs = [q, k, v, *([torch.tensor([80, keys - 1])] if fn is decoded else [])]
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    made = deplo.explain(fn, *inputs, options=gpu()).graphs[0].kernels
    assert "gpu_online" in made[0].schedule and "register_block" in made[0].schedule and len(made) == kernels
    torch._dynamo.reset()
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    got, eager, exact = compiled_for_gpu(fn, fullgraph=True)(*inputs), fn(*inputs), fn(*wide)
    assert got.dtype == eager.dtype
    assert (got.double() - exact).norm() <= 1.2 * (eager.double() - exact).norm() + 1e-7 * exact.norm()
    if gpu() == EMULATOR:
        assert is_clean(tmp_path / "judge")
        assert max(bank_ways(tmp_path / "judge").values()) <= 1.1


@pytest.mark.skipif(gpu() != EMULATOR, reason="one device's memory stands for another's")
@pytest.mark.parametrize(("heads", "keys"), [(2, 640), (8, 300)], ids=["in parts", "whole"])
def test_wide_heads_fit_small_shared_memory(heads: int, keys: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEPLO_FAKE_CUDA", "capability=89,shared=101376")
    q, k, v = (torch.randn(1, heads, rows, 256) for rows in (1, keys, keys))
    fn = F.scaled_dot_product_attention
    got, eager, exact = compiled_for_gpu(fn, fullgraph=True)(q, k, v), fn(q, k, v), fn(q.double(), k.double(), v.double())
    same(got, eager, exact=exact)


@pytest.mark.parametrize(
    ("fn", "shapes", "words"),
    [
        (lambda x: (x > 3).any(-1), [(70, 300)], ["keep(registers)"]),
        (lambda x: (x > -3).all(0), [(300, 70)], ["split"]),
        (lambda x: x.std(0), [(2048, 520)], ["split", "gpu_points", "split"]),
        (lambda x: x.cumsum(0), [(200, 40)], ["by=2) split"]),
        (lambda x: torch.cat([x.cumsum(-1)[:, -1:] - x.cumsum(-1), x.cumsum(-1)[:, ::299].exp()], 1), [(3, 300)], ["gpu_rows threads(256)"]),
        (lambda x, y: x @ y, [(3, 512), (512, 300)], ["tile(i1=16) tile(i2=128)"]),
        (lambda x, y: F.linear(x, y), [(200, 512), (5, 512)], ["tile(i1=128) tile(i2=16)"]),
        (lambda x, y: x @ y, [(16, 16384), (16384, 16)], ["gpu_contraction", "split"]),
        (lambda x, y: torch.bmm(x, y), [(3, 1, 70), (3, 70, 130)], ["vectorize(i1"]),
        (lambda x: F.group_norm(x, 2), [(2, 12, 128, 96)], ["gpu_rows", "gpu_points", "gpu_rows", "gpu_points", "gpu_points"]),
        (lambda x: F.instance_norm(x), [(2, 3, 64, 64)], ["gpu_rows"]),
    ],
    ids=[
        "any",
        "all down",
        "deviations down",
        "sums down",
        "sums beside others",
        "few rows",
        "few columns",
        "few results",
        "vectors",
        "groups",
        "instances",
    ],
)
def test_few_results(fn: Callable[..., Any], shapes: list[tuple[int, ...]], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Threads share what few results would leave to few of them; `words` are in the schedules, one after the other."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    rest = "\n".join(kernel.schedule for kernel in deplo.explain(fn, *inputs, options=gpu()).graphs[0].kernels)
    for word in words:
        assert word in rest, word
        rest = rest[rest.index(word) + len(word) :]
    torch._dynamo.reset()
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    got, eager, exact = compiled_for_gpu(fn, fullgraph=True)(*inputs), fn(*inputs), fn(*(x.double() for x in inputs))
    same(got, eager, exact=exact)
    if gpu() == EMULATOR:
        assert is_clean(tmp_path / "judge")


def result_or_gradient(fn: Callable[..., Any], inputs: list[torch.Tensor], gradient: bool) -> torch.Tensor:
    with torch.set_grad_enabled(gradient):
        first = inputs[0].detach().requires_grad_(gradient)
        result: torch.Tensor = fn(first, *inputs[1:])
        return torch.autograd.grad(result.sum(), first)[0] if gradient else result


@pytest.mark.parametrize("deterministic", [True, False], ids=["in order", "atomically"])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, y, at: x.index_add(0, at.remainder(50), y), [(50, 24), (200, 24)]),
        (lambda x, y, at: x.index_put((at - 30,), y, accumulate=True), [(50, 24), (200, 24)]),
        (lambda x, y, at: x.scatter_add(1, at.remainder(40).repeat(6, 1), y), [(6, 40), (6, 200)]),
        (lambda x, at: F.embedding(at.remainder(50), x) * at[:, None], [(50, 24)]),
    ],
    ids=["added", "put from the end", "scattered", "embedding"],
)
def test_sums_at_loaded_places(
    fn: Callable[..., Any], shapes: list[tuple[int, ...]], deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where PyTorch asks for it they keep their order, and no two threads meet; each index in many rows, some counted from the end."""
    torch.manual_seed(0)
    inputs = [*(torch.randn(shape) for shape in shapes), torch.randint(0, 79, (200,))]
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    gradient = len(shapes) == 1
    made = compiled_for_gpu(fn, {"dump_dir": str(tmp_path)}, fullgraph=True)
    expected, exact = result_or_gradient(fn, inputs, gradient), result_or_gradient(fn, wide, gradient)
    torch.use_deterministic_algorithms(deterministic)
    try:
        same(result_or_gradient(made, inputs, gradient), expected, exact=exact)
        same(result_or_gradient(made, inputs, gradient), expected, exact=exact)
    finally:
        torch.use_deterministic_algorithms(False)
    schedules = "".join(path.read_text() for path in tmp_path.glob("*/*tile_lower*.ir"))
    assert (") share(" in schedules, ") atomic" in schedules) == (deterministic, not deterministic)
    if gpu() == EMULATOR:
        assert is_clean(tmp_path / "judge")


def test_truths_of_nothing():
    for fn in (lambda x: (x > 3).any(1), lambda x: (x > 3).all(1)):
        for columns in (0, 3):
            x = torch.full((4, columns), 5.0)
            torch._dynamo.reset()
            assert torch.equal(compiled_for_gpu(fn, dynamic=False)(x), fn(x))
