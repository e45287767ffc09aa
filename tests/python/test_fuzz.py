"""A fixed sample of random programs; `make fuzz` draws new ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fuzz.check import Wrong, check, difference, inputs_of, run, run_in
from fuzz.ir import IrProgram, IrWrong, check_ir, ir_programs
from fuzz.loop import loop_programs
from fuzz.programs import Input, Program, programs
from hypothesis import HealthCheck, Phase, given, settings

from deplo import _C

SAMPLE = settings(derandomize=True, phases=[Phase.generate], deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(SAMPLE, max_examples=60)
@given(programs(backward=False, dynamic=False))
def test_static(program: Program) -> None:
    check(program)


@settings(SAMPLE, max_examples=30)
@given(programs(backward=True, dynamic=False))
def test_gradients(program: Program) -> None:
    check(program)


@settings(SAMPLE, max_examples=15)
@given(programs(backward=False, dynamic=True))
def test_dynamic(program: Program) -> None:
    check(program)


@settings(SAMPLE, max_examples=40)
@given(ir_programs())
def test_ir(program: IrProgram) -> None:
    assert check_ir(program)


@settings(SAMPLE, max_examples=60)
@given(loop_programs())
def test_loop_ir(program: IrProgram) -> None:
    check_ir(program)


@pytest.mark.parametrize(
    "lines, judged",
    [
        (("mul(%x0, %x0)", "reduce sum(%v0) axes=[0]", "sin(%v1)"), True),
        (("exp(%x0)", "reduce sum(%v0) axes=[0]", "exp(%v1)", "sin(%v2)"), False),  # the sine of some 1e19
        (("exp(%x0)", "reduce sum(%v0) axes=[0]", "exp(%v1)", "tanh(%v2)"), True),
        (("exp(%x0)", "reduce sum(%v0) axes=[0]", "add(%v1, %v1)", "exp(%v2)", "sub(%v3, %v3)"), False),  # infinity in float32
    ],
)
def test_programs_without_digits_are_not_judged(lines: tuple[str, ...], judged: bool) -> None:
    body = "".join(f"  %v{k}: f32[{40 if line.endswith('x0)') and 'reduce' not in line else ''}] = {line}\n" for k, line in enumerate(lines))
    text = f"tensor @f(%x0: f32[40] user)\n{body}  return %v{len(lines) - 1} strides []\n"
    assert check_ir(IrProgram(text, ((40,),), 3, (), 0)) is judged


def test_a_wrong_lowering_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "tensor @f(%x0: f32[4] user)\n  %v0: f32[4] = tanh(%x0)\n  return %v0 strides [1]\n"
    program = IrProgram(text, ((4,),), 3, (), 0)
    check_ir(program)
    lowered = _C.lower
    monkeypatch.setattr("fuzz.ir._lowered", lambda text, level, options: lowered(text.replace("tanh", "sin"), level, options))
    with pytest.raises(IrWrong, match="loop IR without nothing: result 0"):
        check_ir(program)


def test_the_judge_sees_small_differences() -> None:
    given_input = Input("x0", ("n0", "n0"), "f32", "transposed", "floats")
    program = Program((given_input,), {"n0": 9}, ("v0 = x0.softmax(0)", "v1 = x0 > 0"), ("v0", "v1"), (False, True), (False,))
    want = run(program.function(), inputs_of(program, program.sizes), False)
    assert not difference(program, program.sizes, want, want)
    for k in range(2):
        got = [t.clone() for t in want]
        got[k][3, 4] = got[k][3, 4] + 1e-5 if k == 0 else ~got[k][3, 4]
        assert difference(program, program.sizes, got, want)


def test_float64_sees_the_same_views() -> None:
    # A copy, for x0 has gaps between its rows: the write to x0 does not show.
    lines = ("v0 = x0.reshape(-1)", "x0.add_(2)", "v1 = v0.sum()", "v2 = x0[0].to(f64, copy=True)", "x0.mul_(3)")
    program = Program((Input("x0", ("n0", "n0"), "f32", "sliced", "floats"),), {"n0": 9}, lines, ("v1", "v2"), (False, False), (False,))
    for turn in range(2):
        x = inputs_of(program, program.sizes, turn)[0]
        assert x.stride() == (12, 1)
        want = [x.double().sum(), x[0].double() + 2]
        got = run_in(torch.float64, program, program.sizes, turn)
        assert got is not None and all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(got, want, strict=False))


def test_what_float64_refuses_is_judged_by_eager_mode() -> None:
    lines = ("v0 = x0.view(i32) * 0 + x0.softmax(0)",)  # of float64 the view has twice as many elements
    program = Program((Input("x0", ("n0",), "f32", "contiguous", "floats"),), {"n0": 9}, lines, ("v0",), (False,), (False,))
    assert run_in(torch.float64, program, program.sizes) is None
    want = run(program.function(), inputs_of(program, program.sizes), False)
    assert not difference(program, program.sizes, [want[0] * (1 + 1e-7), *want[1:]], want)
    assert difference(program, program.sizes, [want[0] + 1e-5, *want[1:]], want)
    check(program)


def test_float64_products_may_be_more_exact_than_eager_mode() -> None:
    lines = ("v0 = x1 >= -1", "v1 = x0.masked_fill(v0, 2)", "v2 = (v1 @ v1.mT).abs().sqrt()", "v3 = v2.var([1, 2], correction=0)")
    given_inputs = (Input("x0", (), "f64", "contiguous", "floats"), Input("x1", (5, 31, "n0"), "i16", "contiguous", "ints"))
    program = Program(given_inputs, {"n0": 31}, lines, ("v3",), (False,), (False, True))
    x0, x1 = (t.numpy() for t in inputs_of(program, program.sizes))
    v1 = np.where(x1 >= -1, np.longdouble(2), np.longdouble(x0))
    exact = torch.from_numpy(np.sqrt(np.abs(v1 @ np.swapaxes(v1, 1, 2))).var((1, 2)).astype(np.float64))
    want = run(program.function(), inputs_of(program, program.sizes), False)
    assert not difference(program, program.sizes, [exact, *want[1:]], want)
    assert difference(program, program.sizes, [exact * (1 + 1e-11), *want[1:]], want)


def test_float64_variances_may_be_more_exact_than_eager_mode() -> None:
    """Eager's is 205 ulp off."""
    lines = ("v0 = x0 * x0 + x0", "v1 = x0 * v0 - v0", "v2 = v1.var(correction=0)")
    program = Program((Input("x0", (4, "n1", "n0", 4), "f64", "transposed", "ints"),), {"n0": 9, "n1": 8}, lines, ("v2",), (False,), (False,))
    v1 = inputs_of(program, program.sizes)[0].numpy().astype(np.longdouble)
    exact = torch.tensor(float((v1 * (v1 * v1 + v1) - (v1 * v1 + v1)).var()), dtype=torch.float64)
    want = run(program.function(), inputs_of(program, program.sizes), False)
    assert not difference(program, program.sizes, [exact, *want[1:]], want)
    assert not difference(program, program.sizes, want, want)
    assert difference(program, program.sizes, [exact * (1 + 1e-12), *want[1:]], want)


def test_a_wrong_answer_of_deplo_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program((Input("x0", ("n0",), "f32", "contiguous", "ints"),), {"n0": 5}, ("v0 = x0 * 2",), ("v0",), (True,), (True,))
    check(program)
    monkeypatch.setattr("fuzz.check.compiled", lambda program, engine, options: lambda x: [x * 3 if engine == "deplo" else x * 2])
    with pytest.raises(Wrong, match="exact values differ"):
        check(program)


def test_programs_keep_their_meaning_as_source() -> None:
    program = Program((Input("x0", ("n0", 4), "bf16", "sliced", "ints"),), {"n0": 3}, ("v0 = x0.T", "v0.add_(1)"), ("v0",), (True,), (True,))
    x = inputs_of(program, {"n0": 6})[0]
    assert x.shape == (6, 4) and x.stride() == (7, 1) and x.storage_offset() == 2
    result = run(program.function(), [x], False)
    assert torch.equal(result[0], x.T + 1) and torch.equal(result[1], x + 1)
