"""Errors in ulp, on a sample of the values that `make exhaustive` takes all of; special values inside of fused chains."""

from __future__ import annotations

import copy
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from engines import feature_sets, needs_core

from deplo import numerics
from deplo.backend import compile_with
from deplo.numerics import DTYPES, Function, bound, error_of_double, errors, exact_value, functions, measure, spacing
from deplo.options import read_options

FUNCTIONS = {fn.name: fn for fn in functions()}
INF, NAN = math.inf, math.nan
EPS, SMALLEST = 2**-23, 2**-149  # of float32
SPECIAL = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, -3e38, 0.5]


@needs_core
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_within_their_bounds(name, monkeypatch):
    """float32 at 16,000 bit patterns with every exponent, all values of one dtype of 16 bits, float64 at 300 values."""
    monkeypatch.setattr(numerics, "SAMPLE_STRIDE", 262_139)
    fn = FUNCTIONS[name]
    narrow = (torch.bfloat16, torch.float16)[len(name) % 2]
    for dtype in (torch.float32, torch.float64, narrow):
        torch._dynamo.reset()
        found = measure(fn, dtype, count=300)
        if not found:
            assert name in ("erfcx", "ndtri") and dtype == narrow  # eager refuses
            continue
        assert found["deplo"].ulp <= bound(fn, dtype, found["eager"].ulp), (dtype, found)


@needs_core
@pytest.mark.parametrize("reduction", numerics.reductions(), ids=lambda r: r.name)
def test_reductions_are_as_exact_as_eager(reduction, monkeypatch):
    inputs = [(text, x[:, :1000]) for text, x in numerics.reduction_inputs(reduction.name, torch.float32)]
    monkeypatch.setattr(numerics, "reduction_inputs", lambda name, dtype: [(text, x.to(dtype)) for text, x in inputs])
    for dtype in DTYPES:
        torch._dynamo.reset()
        found = numerics.measure_reduction(reduction, dtype)
        assert found["deplo"][0] <= found["eager"][0] + 1, (dtype, found)


@needs_core
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_numbers_have_no_variance(dtype):
    """As in eager mode, whose running mean stays where it is; a sum of float64 divided by their number is not always one of them."""
    f = torch.compile(lambda x: (x.var(0), x.std(1), *torch.var_mean(x, 0)), backend="deplo", options={"strict": True}, dynamic=False)
    column = torch.randn(1, 40, dtype=dtype, generator=torch.Generator().manual_seed(0))
    var, std, again, _ = f(column.expand(7, 40).contiguous())
    assert not var.any() and not again.any() and std.all()
    _, std, _, _ = f(column[:, :7].T.expand(7, 40).contiguous())
    assert not std.any()


@needs_core
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_round_once(dtype):
    """Of factors that nearly cancel, over all and over rows and columns; eager's error grows with their number."""
    options = read_options(options={"strict": True})
    x = (1 + (torch.rand((3, 20_011), generator=torch.Generator().manual_seed(3), dtype=torch.float64) - 0.5) * 0.02).to(dtype)
    for fn in (lambda x: x.prod(), lambda x: x.prod(1), lambda x: x.T.contiguous().prod(0)):
        torch._dynamo.reset()
        got = torch.compile(lambda x, fn=fn: fn(x), backend=lambda gm, inputs: compile_with(options, gm, inputs))(x)
        wide = x.double().numpy().astype(np.longdouble)
        exact = wide.prod() if got.ndim == 0 else wide.prod(1)
        if dtype == torch.float64:
            error = float(np.max(np.abs(got.numpy() - exact) / np.spacing(np.abs(exact).astype(np.float64))))
        else:
            error = float(errors(got, torch.from_numpy(np.asarray(exact, dtype=np.float64))).max())
        assert error <= 0.51


@needs_core
@pytest.mark.parametrize("features", feature_sets())
@pytest.mark.parametrize("terms", [768, 3072])
def test_products_are_summed_in_short_chains(features, terms):
    """Rounding errs by 0.43 * 2^-24 of a random number in the mean square; those of all partial sums in a chain, and of chains, add up."""
    generator = torch.Generator().manual_seed(terms)
    x, w = (torch.randn(shape, generator=generator) for shape in ((40, terms), (64, terms)))
    image = torch.randn(2, terms // 16, 12, 12, generator=generator)
    taps = torch.randn(48, terms // 16, 4, 4, generator=generator)
    chain = 128
    bound = 1.1 * 0.43 * 2**-24 * math.sqrt((chain + terms / chain) / 2)
    options = read_options(texts={"features": features})
    for fn, inputs in ((torch.nn.functional.linear, (x, w)), (torch.matmul, (x, w.t())), (torch.nn.functional.conv2d, (image, taps))):
        torch._dynamo.reset()
        result = torch.compile(fn, backend=lambda gm, ex: compile_with(options, gm, ex), dynamic=False)(*inputs)
        exact = fn(*(t.double() for t in inputs))
        assert float((result - exact).norm() / exact.norm()) <= bound


@needs_core
@pytest.mark.parametrize("features", feature_sets())
@pytest.mark.parametrize("shape", [(200, 4096), (64, 32768), (32, 80, 17, 17)])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_sums_along_lanes_are_taken_in_short_chains(features, shape, dynamic):
    """As in the test before: chains of 32 additions, as many of them, and 64 accumulators in a tree; of symbolic sizes, first small, chains of 16."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    axes = (0, 2, 3) if len(shape) == 4 else (1,)
    chains = 16 + 16 + 8 if dynamic else 32 + 32
    bound = 1.1 * 0.43 * 2**-24 * math.sqrt(chains / 2 + 6)
    options = read_options(texts={"features": features})
    torch._dynamo.reset()
    total = torch.compile(lambda x: x.sum(axes), backend=lambda gm, ex: compile_with(options, gm, ex), dynamic=dynamic)
    if dynamic:
        total(x[tuple(slice(0, 5) for _ in shape)].contiguous())
    result = total(x)
    exact = x.double().sum(axes)
    assert float((result - exact).norm() / exact.norm()) <= bound


@needs_core
@pytest.mark.parametrize("features", feature_sets())
@pytest.mark.parametrize("terms", [12, 20, 32, 96])
def test_sums_over_columns_are_taken_in_short_chains(features, terms):
    """Chains of 8, or one of up to 12."""
    x = torch.randn((terms, 32768), generator=torch.Generator().manual_seed(terms))
    bound = 1.2 * 0.43 * 2**-24 * math.sqrt((terms if terms <= 12 else 8 + terms / 8) / 2)
    options = read_options(texts={"features": features})
    torch._dynamo.reset()
    result = torch.compile(lambda x: x.sum(0), backend=lambda gm, ex: compile_with(options, gm, ex), dynamic=False)(x)
    exact = x.double().sum(0)
    assert float((result - exact).norm() / exact.norm()) <= bound


@needs_core
@pytest.mark.parametrize("grad", [False, True], ids=["alone", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(100), torch.nn.GroupNorm(3, 21), torch.nn.InstanceNorm1d(21)], ids=lambda m: type(m).__name__)
def test_norms_of_equal_numbers_are_zero(norm, dtype, grad):
    """Though their mean is rounded; eager mode's group norms give 0.03 at 1e4."""
    torch._dynamo.reset()
    norm = copy.deepcopy(norm).to(dtype)
    shape = (5, 100) if isinstance(norm, torch.nn.LayerNorm) else (2, 21, 13)
    compiled = torch.compile(norm, backend="deplo", dynamic=False)
    for number in (0.1, 1e4 + 0.1, -3e7, 1e-9, 0.0):
        with torch.set_grad_enabled(grad):
            y = compiled(torch.full(shape, number, dtype=dtype))
        assert not y.any(), (number, y)


@needs_core
@pytest.mark.parametrize("shape", [(40, 200), (3, 40, 200)])
def test_norms_of_numbers_far_from_zero(shape):
    """The mean is as exact as float32 allows: half an ulp of 1000, over the deviation, is what remains."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)) + 1000
    groups = len(shape) == 3
    norm = (lambda x: torch.nn.functional.group_norm(x, 4)) if groups else (lambda x: torch.nn.functional.layer_norm(x, (200,)))
    torch._dynamo.reset()
    got = torch.compile(norm, backend="deplo", dynamic=False)(x)
    assert float((got - norm(x.double())).abs().max()) <= 1.2 * 2**-15


@needs_core
@pytest.mark.parametrize("grad", [False, True], ids=["alone", "training"])
@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu_tanh"])
def test_small_results_of_gates_keep_their_digits(name, grad):
    """Where eager mode's formulas give 0, or a few of their digits: far below 0. float64 judges by forms in which nothing cancels."""
    beta = math.sqrt(8 / math.pi)
    fn, inner = {
        "sigmoid": (torch.sigmoid, None),
        "silu": (torch.nn.functional.silu, lambda x: x),
        "gelu_tanh": (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), lambda x: beta * (x + 0.044715 * x**3)),
    }[name]
    x = torch.linspace(-9.5 if name == "gelu_tanh" else -100, 0, 20_001).requires_grad_(grad)
    wide = x.detach().double()
    gate = torch.sigmoid(wide if inner is None else inner(wide))
    torch._dynamo.reset()
    y = torch.compile(fn, backend="deplo", dynamic=False)(x)
    torch.testing.assert_close(y.detach().double(), gate if inner is None else wide * gate, rtol=EPS, atol=SMALLEST)
    if grad:
        (slope,) = torch.autograd.grad(y.sum(), x)
        of_inner = 1 if name != "gelu_tanh" else beta * (1 + 3 * 0.044715 * wide**2)
        away = (1 - gate) * of_inner
        expected = gate * (1 - gate) if inner is None else gate * (1 + wide * away)
        # relative to the terms, for they cancel where the function turns
        terms = gate if inner is None else gate * (1 + wide.abs() * away)
        assert bool(((slope - expected).abs() <= 2e-5 * terms + 2e-43).all())


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [False, True], ids=["alone", "training"])
def test_gelu_keeps_its_digits(grad, dtype):
    """From where it underflows on, by mpmath, for PyTorch's float64 cancels, too; at 0 the slope is exactly 1/2."""
    mpmath = pytest.importorskip("mpmath")
    last = -14.4 if dtype == torch.float32 else -38.4
    x = torch.cat([torch.linspace(last, -1, 300), torch.linspace(-1.01, 6, 200), torch.tensor([0.0, -0.0])]).to(dtype).requires_grad_(grad)
    torch._dynamo.reset()
    y = torch.compile(torch.nn.functional.gelu, backend="deplo", dynamic=False)(x)
    smallest = 2**-149 if dtype == torch.float32 else 2**-1074
    eps = torch.finfo(dtype).eps
    with mpmath.workprec(200):
        places = [mpmath.mpf(v) for v in x.tolist()]
        for got, v in zip(y.tolist(), places, strict=True):
            want = v * mpmath.ncdf(v)
            assert abs(got - want) <= (1 if dtype == torch.float32 else 3) * eps * abs(want) + smallest, (v, got, want)
        assert math.copysign(1, y[-1].item()) == -1
        if grad:
            (slope,) = torch.autograd.grad(y.sum(), x)
            for got, v in zip(slope.tolist(), places, strict=True):
                cdf, rest = mpmath.ncdf(v), v * mpmath.npdf(v)
                # relative to the terms: they cancel where the function turns
                assert abs(got - cdf - rest) <= 4 * eps * (cdf + abs(rest)) + 16 * smallest, (v, got, cdf + rest)
            assert slope[-2:].tolist() == [0.5, 0.5]


@needs_core
def test_logit_and_hardswish_keep_their_digits():
    """Around 1/2, where the quotient of logit is near 1; and where six times a number overflows."""
    x = torch.cat([torch.linspace(0.2, 0.8, 10_001), torch.nextafter(torch.tensor(0.5), torch.tensor([0.0, 1.0]))])
    got = torch.compile(torch.logit, backend="deplo", dynamic=False)(x)
    torch.testing.assert_close(got.double(), torch.logit(x.double()), rtol=EPS, atol=0)
    for grad in (False, True):
        large = torch.tensor([3.0, 1e30, 3e38, INF]).requires_grad_(grad)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(torch.nn.functional.hardswish, backend="deplo", dynamic=False)(large), large)


@needs_core
def test_products_of_special_values():
    """Of zeros with their signs, infinities, NaN and what leaves the range of the dtype: pairs among ones, in whose product the order has no say."""
    pairs = torch.tensor(list(itertools.product((-0.0, 3.0, -INF, NAN, 1e-200, -1e200, 5e-324), repeat=2)), dtype=torch.float64)
    options = read_options(options={"strict": True})
    for first, second in ((0, 1), (2, 36)):
        x = torch.ones((len(pairs), 37), dtype=torch.float64)
        x[:, first], x[:, second] = pairs.unbind(1)
        for rows in (x, x.float()):
            torch._dynamo.reset()
            got = torch.compile(lambda x: x.prod(1), backend=lambda gm, inputs: compile_with(options, gm, inputs))(rows)
            want = rows.prod(1)
            torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)
            number = ~want.isnan()
            assert torch.equal(got[number].signbit(), want[number].signbit())


def test_the_measure_of_errors():
    one = torch.ones(1, dtype=torch.float64)
    assert spacing(one, torch.float32).item() == 2.0**-23 and spacing(one * 0, torch.float16).item() == 2.0**-24
    exact = torch.tensor([1 + 2.0**-24, 2.0**128, 1e300, NAN, 1.0, NAN], dtype=torch.float64)
    got = torch.tensor([1.0, torch.finfo(torch.float32).max, INF, NAN, NAN, 1.0])
    assert errors(got, exact).tolist() == [0.5, 1.0, 0.0, 0.0, INF, INF]
    assert error_of_double(1.0, 1 + numerics._mp().mpf(2) ** -53) == 0.5
    assert error_of_double(INF, numerics._mp().mpf(10) ** 400) == 0 and error_of_double(1e308, numerics._mp().mpf(10) ** 400) == INF
    wrong = Function("exp", torch.exp, numerics._mp().expm1, (0, 1))
    assert measure(wrong, torch.float64, count=50)["eager"].ulp > 1e6


def test_long_double_agrees_with_mpmath():
    """What the judge of reductions rests on: NumPy's long double functions to 80 bits."""
    assert np.finfo(np.longdouble).nmant >= 63
    for name, fn in (("exp", np.exp), ("log", np.log), ("tanh", np.tanh), ("log1p", np.log1p)):
        for x in (0.1, 0.7, 1.3, 9.0):
            exact = exact_value(FUNCTIONS[name], (x,))
            assert abs(numerics._mp().mpf(str(fn(np.longdouble(x)))) - exact) <= abs(exact) * 2.0**-61


def chain_of_casts(x):
    return ((x * 2).to(torch.bfloat16) * 0.1).to(torch.float32).to(torch.float16).double().to(torch.float32) + x.to(torch.int8).to(torch.float32)


CHAINS = {
    "times zero": lambda x: torch.relu(x * 0.0 + x) * 0.0,
    "times minus zero": lambda x: (x * -0.0) + (-0.0),
    "zero minus": lambda x: 0.0 - x * 0.0,
    "infinite difference": lambda x: (x * 2 - x * 2) / x,
    "maximum and sign": lambda x: torch.maximum(x, -x).sign() * x,
    "where not equal": lambda x: torch.where(x != x, x * 0, 1 / x),
    "clamp and sum": lambda x: x.clamp(-1, 1).cumsum(0),
}


@needs_core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_special_values_inside_of_chains(name, dtype):
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).repeat(5)
    chain = CHAINS[name]
    options = read_options(options={"strict": True})
    torch._dynamo.reset()
    got = torch.compile(lambda x: chain(x), backend=lambda gm, inputs: compile_with(options, gm, inputs))(x)
    want = chain(x)
    assert torch.equal(got.isnan(), want.isnan())
    finite = ~want.isnan()
    assert torch.equal(got[finite], want[finite]) and torch.equal(got[finite].signbit(), want[finite].signbit())


@needs_core
def test_explicit_casts_round_inside_of_a_chain():
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(999, generator=generator) * 50, torch.tensor([0.0, -0.0, 1e-8, 65519.0 / 0.2, 1e30])])
    options = read_options(options={"strict": True})
    torch._dynamo.reset()
    got = torch.compile(chain_of_casts, backend=lambda gm, inputs: compile_with(options, gm, inputs))(x)
    assert torch.equal(got, chain_of_casts(x))


@needs_core
def test_softmax_of_rows_without_a_finite_maximum():
    rows = [list(row) for row in itertools.product((0.0, 1.0, INF, -INF, NAN), repeat=3)]
    options = read_options(options={"strict": True})
    for fn in (lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x.logsumexp(-1), lambda x: torch.ops.aten._safe_softmax(x, -1)):
        x = torch.tensor(rows)
        torch._dynamo.reset()
        got = torch.compile(lambda x, fn=fn: fn(x), backend=lambda gm, inputs: compile_with(options, gm, inputs))(x)
        torch.testing.assert_close(got, fn(x), equal_nan=True, rtol=1e-6, atol=0)


@needs_core
def test_command():
    command = [sys.executable, "-m", "deplo", "numerics", "exp", "sum", "--dtype", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["function", "dtype"], ["exp", "bfloat16"], ["sum", "bfloat16"]]
    assert 0 < float(lines[1].split()[2]) <= 0.51


@needs_core
def test_the_measured_results_are_deplos(monkeypatch):
    """Past Dynamo's limit of compilations too."""
    calls = []
    monkeypatch.setattr(numerics, "compile_with", lambda *arguments: calls.append(1) or compile_with(*arguments))
    for count in range(1, 21):
        numerics.compiled(torch.exp)(torch.ones(count))
        assert len(calls) == count


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(300, 64), (4225, 4), (50000, 8)])
def test_sums_of_columns_are_as_exact_as_eager(dtype, shape):
    def total(x):
        return x.sum(0)

    fast = torch.compile(total, backend="deplo", options={"strict": True}, dynamic=False)
    errors = []
    for seed in range(4):
        x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        exact = x.numpy().astype(np.longdouble).sum(0)
        errors.append([float(abs(y.numpy().astype(np.longdouble) - exact).max()) for y in (fast(x), total(x))])
    error, eager = (max(column) for column in zip(*errors, strict=True))
    assert error <= eager + 2 * torch.finfo(dtype).eps * float(np.abs(exact).max())


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_slopes_of_gelu_by_tanh_far_from_zero(dtype):
    """Where the slope of the inner product overflows beside a gate that is closed: 0 below and 1 above, as in eager mode."""
    x = torch.tensor([-1e4, -1.2e13, -1e17, 1e4, 1.2e13, 1e17], dtype=dtype)
    if dtype == torch.float64:
        x = x.abs().pow(8).copysign(x)  # to 1e136
    slopes = []
    for fn in (gelu_by_tanh, torch.compile(gelu_by_tanh, backend="deplo", dynamic=False)):
        given = x.clone().requires_grad_()
        slopes += torch.autograd.grad(fn(given).sum(), given)
    assert torch.equal(*slopes)
    assert slopes[1].tolist() == [0, 0, 0, 1, 1, 1]


def gelu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-6, 0.25, 0.5, 0.6, 1.0, NAN])
def test_logit_with_bounds(eps, dtype):
    """From 1/2 on they cross: the lower one comes first."""
    x = torch.tensor([-1.0, 0.0, 0.2, 0.45, 0.5, 0.55, 0.8, 1.0, 2.0, NAN], dtype=dtype)
    torch._dynamo.reset()
    got = torch.compile(torch.logit, backend="deplo", dynamic=False)(x, eps)
    torch.testing.assert_close(got, torch.logit(x, eps), equal_nan=True)


@needs_core
def test_gradient_of_binary_cross_entropy_beside_its_poles():
    """What bounds p (1 - p) is a float32 number in float64, too."""
    x = torch.tensor([3.3e-13, 1 - 3e-13, 1e-13, 0.0, 1.0, 0.5], dtype=torch.float64)
    target = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 1.0], dtype=torch.float64)
    loss = torch.nn.functional.binary_cross_entropy
    torch._dynamo.reset()
    slopes = []
    for fn in (loss, torch.compile(loss, backend="deplo", dynamic=False)):
        given = x.clone().requires_grad_()
        slopes += torch.autograd.grad(fn(given, target), given)
    torch.testing.assert_close(slopes[1], slopes[0], rtol=4e-16, atol=0)


@needs_core
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_first_derivative_of_digamma_has_no_limit_far_below(dtype):
    x = torch.tensor([-INF, INF, NAN, -1.0, 2.5], dtype=dtype, requires_grad=True)
    torch.compile(torch.digamma, backend="deplo", options={"strict": True})(x).sum().backward()
    slopes = x.grad.tolist()
    assert math.isnan(slopes[0]) and slopes[1] == 0 and math.isnan(slopes[2]) and slopes[3] == INF
    assert abs(slopes[4] - 0.4903577561002349) <= torch.finfo(dtype).eps
