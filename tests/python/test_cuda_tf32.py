"""Products of float32 on matrix units of GPUs, where PyTorch allows tf32; on a GPU where there is one, else on a driver that emulates it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import is_clean
from engines import same
from test_cuda import EMULATOR, compiled_for_gpu, gpu

import deplo
from deplo import tf32

pytestmark = pytest.mark.usefixtures("fresh_inference")

HALF = 2.0**-11  # most that rounding an operand costs


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Both are on, and what they were afterwards."""
    torch.manual_seed(0)
    was = tf32.state()
    allow(True, True)
    yield
    torch.set_float32_matmul_precision("highest")  # of oneDNN too: with "medium" it rounds operands to bfloat16 on CPUs that have a unit for it
    allow(*was)


def allow(products: bool, convolutions: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = products
    allow_in_convolutions(convolutions)


def allow_in_convolutions(allowed: bool) -> None:
    with torch.backends.__allow_nonbracketed_mutation():  # torch.testing, which other tests import, freezes it
        torch.backends.cudnn.allow_tf32 = allowed


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To 10 bits of mantissa, halves away from 0, in float64."""
    bits = (x.view(torch.int32) + 0x1000) & ~0x1FFF
    return torch.where(x.isfinite(), bits.view(torch.float32), x).double()


def check(
    fn: Callable[..., Any], inputs: list[torch.Tensor], path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, linear: bool = True
) -> None:
    """Results are those of rounded operands, but for sums of float32; `linear`: operands are inputs as they are."""
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={path / 'judge'},late=1,reversed=1")
    kernels = deplo.explain(fn, *inputs, options=gpu()).graphs[0].kernels
    if gpu() == EMULATOR:
        assert any(kernel.schedule.startswith(schedule) for kernel in kernels), [kernel.schedule for kernel in kernels]
    torch._dynamo.reset()
    got = compiled_for_gpu(fn)(*inputs).double()
    exact = fn(*(x.double() for x in inputs))
    bound = fn(*(x.double().abs() for x in inputs))
    assert ((got - exact).abs() <= 2.1 * HALF * bound).all()
    assert (got - exact).norm() > 2.0**-16 * exact.norm()  # operands were rounded
    if linear:
        of_rounded = fn(*(rounded(x) for x in inputs))
        assert (got - of_rounded).norm() <= 2.0**-21 * bound.norm()
    if gpu() == EMULATOR:
        assert is_clean(path / "judge")


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (F.linear, [(40, 72), (56, 72)]),
        (lambda a, b: a @ b, [(39, 61), (61, 70)]),
        (lambda a, b: a.mT @ b, [(96, 40), (96, 56)]),
        (lambda a, b: a.transpose(1, 2) @ b.permute(0, 2, 3, 1), [(2, 40, 3, 32), (2, 48, 3, 32)]),
        (lambda a, b: F.linear(a[1:].view(34, 64), b), [(34 * 64 + 1,), (40, 64)]),
        (lambda a, b: a @ b.mT, [(5, 256), (48, 256)]),
    ],
    ids=["layer", "edges", "turned", "heads", "unaligned", "few rows"],
)
def test_products(fn: Callable[..., Any], shapes: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check(fn, [torch.randn(shape) for shape in shapes], tmp_path, monkeypatch, "gpu_matrix")


def test_computed_operands_and_epilogues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return F.relu(F.linear(a * 2, b)) + c

    check(fn, [torch.randn(40, 64), torch.randn(72, 64), torch.randn(40, 72).abs()], tmp_path, monkeypatch, "gpu_matrix", linear=False)


@pytest.mark.parametrize(
    ("shape", "weight", "window", "last"),
    [
        ((2, 16, 7, 7), (24, 16, 3, 3), {"padding": 1}, True),
        ((1, 16, 7, 8), (24, 8, 3, 2), {"padding": 1, "stride": 2, "groups": 2}, False),
    ],
    ids=["channels last", "planes"],
)
def test_convolutions(shape: tuple[int, ...], weight: tuple[int, ...], window: dict[str, int], last: bool, tmp_path: Path, monkeypatch):
    layout = torch.channels_last if last else torch.contiguous_format
    inputs = [torch.randn(s).to(memory_format=layout) for s in (shape, weight)]
    check(lambda x, w: F.conv2d(x, w, **window), inputs, tmp_path, monkeypatch, "gpu_matrix")


def test_a_call_follows_the_switches():
    """Those of products, and of convolutions, which Dynamo's guards do not know; a graph that was compiled with one state serves no other."""

    def fn(x: torch.Tensor, w: torch.Tensor, image: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ w, F.conv2d(image, weight)

    inputs = torch.randn(24, 64), torch.randn(64, 24), torch.randn(1, 16, 5, 5), torch.randn(16, 16, 3, 3)
    exact = fn(*(x.double() for x in inputs))
    compiled = compiled_for_gpu(fn)
    for state in ((False, False), (False, True), (True, True), (True, False), (False, False)):
        allow(*state)
        errors = [((got.double() - best).norm() / best.norm()).item() for got, best in zip(compiled(*inputs), exact, strict=True)]
        assert [error > 1e-5 for error in errors] == list(state)
        assert max(errors) < 1e-3


def test_switches_of_new_and_old_names():
    for precision, allowed in (("high", True), ("highest", False), ("medium", True)):
        torch.set_float32_matmul_precision(precision)
        assert tf32.state()[0] == allowed
    allow_in_convolutions(False)
    assert tf32.state() == (False, False) or tf32.state() == (True, False)
    with torch.backends.cudnn.flags(enabled=False):
        assert tf32.state()[0] == tf32.state()[1]


def test_products_without_rows_or_columns_of_their_own_stay_exact():
    """A layer's only row, products of vectors, one channel a group: their time is what they read."""
    for fn, shapes in (
        (F.linear, [(1, 64), (40, 64)]),
        (torch.mv, [(40, 64), (64,)]),
        (lambda x, w: F.conv2d(x, w, groups=16), [(1, 16, 5, 5), (16, 1, 3, 3)]),
        (lambda a, b: (a[:, :, None] * b[None]).sum(1), [(24, 64), (64, 24)]),
    ):
        inputs = [torch.randn(shape) for shape in shapes]
        exact = fn(*(x.double() for x in inputs))
        assert (compiled_for_gpu(fn)(*inputs).double() - exact).norm() <= 1e-6 * exact.norm()


def test_infinities_and_nan():
    a, b = torch.randn(24, 64), torch.randn(64, 24)
    a[3, 5], a[7, 9], b[0, 0] = math.inf, math.nan, 3.4e38
    a[9, 9] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]  # a NaN that a carry would end
    got, eager = compiled_for_gpu(torch.matmul)(a, b), a @ b
    assert torch.equal(got.isnan(), eager.isnan())


def test_gradients():
    def gradients(layer: torch.nn.Module, step: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 32 * 40, dtype=dtype).sin().reshape(32, 40).requires_grad_()
        step(x).square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    layer = torch.nn.Linear(40, 24)
    exact = torch.nn.Linear(40, 24).double()
    exact.load_state_dict(layer.state_dict())
    with torch.enable_grad():
        made, best = gradients(layer, compiled_for_gpu(layer), torch.float32), gradients(exact, exact, torch.float64)
    for mine, theirs in zip(made[:2], best[:2], strict=True):
        assert 1e-5 < (mine.double() - theirs).norm() / theirs.norm() < 2e-3


def test_attention_is_one_kernel_and_exact():
    """Products beside a softmax, scales, masks and casts between: roundings among them would part them."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT) * 0.25
        weights = scores.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
        return weights.to(v.dtype) @ v

    inputs = [torch.randn(2, 64, 32) for _ in range(3)]
    kernels = deplo.explain(attention, *inputs, options=gpu()).graphs[0].kernels
    assert [kernel.schedule.split()[0] for kernel in kernels] == ["gpu_online"]
    torch._dynamo.reset()
    same(compiled_for_gpu(attention)(*inputs), attention(*inputs), exact=attention(*(x.double() for x in inputs)))
