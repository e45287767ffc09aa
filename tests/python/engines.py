"""What runs the Torch IR in a test: deplo's core, or ATen node by node (which needs no extension and judges the front alone)."""

from __future__ import annotations

import functools
import gc
import json

import harness
import pytest
import torch
import torch_ir_eager

from deplo import backend
from deplo.options import read_options


def _has_core() -> bool:
    try:
        import deplo._C  # noqa: F401
    except ImportError:
        return False
    return True


def feature_sets():
    """Values of the option `features` that this CPU has, from the most capable."""
    if not _has_core():
        return []
    from deplo.core import core

    found = json.loads(core().env(""))["cpu features"]
    return [name for name, needs in (("avx512", "avx512f"), ("avx2", "avx2"), ("sse", "sse2")) if needs in found or name == "sse"]


needs_core = pytest.mark.skipif(not _has_core(), reason="deplo's extension is not built")
ENGINES = ["aten", pytest.param("deplo", marks=needs_core)]


class Compiler:
    """torch.compile with deplo and strict; `graphs` counts what Dynamo captured, `programs` holds what was made."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, fn, options=None, **keywords):
        checked = read_options(options={"strict": True, **(options or {})})

        def compile_one(gm, example_inputs):
            self.graphs += 1
            return backend.compile_with(checked, gm, example_inputs)

        return torch.compile(fn, backend=compile_one, **keywords)


@pytest.fixture(params=ENGINES)
def compiler(request, monkeypatch):
    if request.param == "aten":
        monkeypatch.setattr(backend, "core", lambda: torch_ir_eager.Core)
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


def same(actual, expected, scale: float = 8.0, strides: bool = True, exact=None) -> None:
    """Equal; floats up to rounding.

    With `exact`, the same computed in float64: no further from it than eager mode's `expected`, but for what the order of sums
    makes of both (harness.allowed_error). Without: up to `scale` units in the last place of the largest value, as many as one
    element has terms and functions.
    """
    leaves = functools.partial(torch.utils._pytree.tree_leaves)
    judges = leaves(exact) if exact is not None else [None] * len(leaves(expected))
    for got, want, judge in zip(leaves(actual), leaves(expected), judges, strict=True):
        if not isinstance(want, torch.Tensor):
            assert got == want
            continue
        got, want = got.detach(), want.detach()
        assert got.dtype == want.dtype and got.shape == want.shape
        assert not strides or got.stride() == want.stride()
        if want.is_floating_point() and judge is not None:
            assert judge.dtype == torch.float64, "the judge must be computed in float64"
            allowed = harness.allowed_error(harness.max_error(want, judge.detach()), torch.finfo(want.dtype).eps)
            assert harness.max_error(got, judge.detach()) <= allowed
        elif want.is_floating_point():
            largest = float(want[want.isfinite()].abs().max()) if want.isfinite().any() else 0.0
            torch.testing.assert_close(got, want, rtol=0, atol=scale * torch.finfo(want.dtype).eps * max(largest, 1e-30), equal_nan=True)
        else:
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def equal(compiled, f, *inputs):
    """Asserts that both give the same bits for the inputs, but for those of NaN."""
    got, wanted = compiled(*inputs), f(*inputs)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    alike = (got == wanted) & (got.signbit() == wanted.signbit()) | (got.isnan() & wanted.isnan())
    assert alike.all(), (got[~alike], wanted[~alike])


def packed_by_others() -> int:
    """Bytes that programs keep of packed weights, once those that nobody holds any more are gone."""
    from deplo.core import core

    torch._dynamo.reset()
    gc.collect()
    return core().packed_bytes()
