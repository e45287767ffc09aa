"""Errors of scalar functions and reductions in ulp, deplo's beside eager's, and the inputs where they are largest.

The judge of float32 and narrower dtypes is PyTorch's float64; that of float64 is mpmath at 200 bits (functions) or NumPy's 80-bit format
(reductions). An error is |result - exact| in units of the spacing of the dtype at the exact value; a misplaced NaN or infinity is inf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .backend import compile_with
from .capture import unwrapped_errors
from .errors import Error, UserError
from .options import Options, read_options

F = torch.nn.functional
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SAMPLE_STRIDE = 1021  # of the bit patterns of float32 that a run takes unless it takes all of them: prime, so that no mantissa bit is constant
CHUNK = 1 << 18  # values at a time: they stay in cache


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of single elements; `exact` is its meaning for mpmath numbers (finite ones, inside of its domain)."""

    name: str
    torch: Callable[..., torch.Tensor]
    exact: Callable[..., Any]
    range: tuple[float, float]  # where float64 is sampled densely
    arity: int = 1
    formula: bool = False  # ATen's formula of several functions, each of which rounds
    wide: Callable[..., Any] | None = None  # the judge in float64 where PyTorch's own loses its digits
    domain: tuple[float, float] | None = None  # outside of which it is NaN: PyTorch, whose library may be slow there, is not asked
    wide_ulp: float | None = None  # what the error may be in float64 where the C library has no such function: eager's may be anything there


@dataclasses.dataclass(frozen=True)
class Worst:
    """The largest error in ulp, and the operands that gave it."""

    ulp: float
    operands: tuple[float, ...] = ()

    def or_worse(self, other: Worst) -> Worst:
        return other if other.ulp > self.ulp or not self.operands else self


def _mp() -> Any:
    import mpmath  # type: ignore[import-untyped]

    mpmath.mp.prec = 200
    return mpmath.mp


def functions() -> list[Function]:
    """Every scalar function of the core's table that rounds, and formulas of ATen that are built from them."""
    mp = _mp()
    one = mp.mpf(1)
    root2 = mp.sqrt(2)

    def small(x: Any) -> Any:
        if abs(x) > 1000:
            raise ValueError("mpmath's series would take too long")
        return x

    def sigmoid(x: Any) -> Any:
        return one / (1 + mp.exp(-x))

    def softplus(x: Any) -> Any:
        return x if x > 20 else mp.log1p(mp.exp(x))

    def gelu_tanh(x: Any) -> Any:
        # 0.5 (1 + tanh t) is a sigmoid, which does not cancel
        return x * sigmoid(2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf(0.044715) * x**3))

    def log_add_exp(x: Any, y: Any) -> Any:
        return max(x, y) + mp.log1p(mp.exp(-abs(x - y)))

    def log2_add_exp2(x: Any, y: Any) -> Any:
        return max(x, y) + mp.log1p(mp.power(2, -abs(x - y))) / mp.ln2

    def remainder(x: Any, y: Any) -> Any:
        # exact for every pair of floats: the quotient has up to 2100 bits
        with mp.workprec(2400):
            return x - y * mp.floor(x / y)

    def fmod(x: Any, y: Any) -> Any:
        with mp.workprec(2400):
            q = x / y
            return x - y * (mp.floor(q) if q > 0 else mp.ceil(q))

    def power(x: Any, y: Any) -> Any:
        if x < 0 and y != mp.floor(y):
            raise ValueError("a fractional power of a negative number")
        return (abs(x) ** y) * (-1 if x < 0 and y % 2 == 1 else 1)

    unary = [
        ("exp", torch.exp, mp.exp, (-30, 30)),
        ("exp2", torch.exp2, lambda x: mp.mpf(2) ** x, (-30, 30)),
        ("expm1", torch.expm1, mp.expm1, (-3, 3)),
        ("log", torch.log, mp.log, (0, 4)),
        ("log2", torch.log2, lambda x: mp.log(x, 2), (0, 4)),
        ("log10", torch.log10, mp.log10, (0, 4)),
        ("log1p", torch.log1p, mp.log1p, (-1, 3)),
        ("sqrt", torch.sqrt, mp.sqrt, (0, 4)),
        ("rsqrt", torch.rsqrt, lambda x: one / mp.sqrt(x), (0, 4)),
        ("reciprocal", torch.reciprocal, lambda x: one / x, (-4, 4)),
        ("sin", torch.sin, mp.sin, (-20, 20)),
        ("cos", torch.cos, mp.cos, (-20, 20)),
        ("tan", torch.tan, mp.tan, (-20, 20)),
        ("asin", torch.asin, mp.asin, (-1, 1)),
        ("acos", torch.acos, mp.acos, (-1, 1)),
        ("atan", torch.atan, mp.atan, (-4, 4)),
        ("sinh", torch.sinh, mp.sinh, (-4, 4)),
        ("cosh", torch.cosh, mp.cosh, (-4, 4)),
        ("tanh", torch.tanh, mp.tanh, (-4, 4)),
        ("asinh", torch.asinh, mp.asinh, (-4, 4)),
        ("acosh", torch.acosh, mp.acosh, (1, 5)),
        ("atanh", torch.atanh, mp.atanh, (-1, 1)),
        ("erf", torch.erf, mp.erf, (-6, 6)),
        ("erfc", torch.erfc, mp.erfc, (-6, 27)),
        ("erfinv", torch.erfinv, mp.erfinv, (-1, 1)),
        ("lgamma", torch.lgamma, lambda x: mp.log(abs(mp.gamma(x))) if abs(x) < 200 else _lgamma(mp, x), (-6, 10)),
        ("digamma", torch.digamma, lambda x: mp.digamma(x), (-6, 10)),
        ("i0", torch.special.i0, lambda x: mp.besseli(0, small(x)), (-40, 40)),
        ("i0e", torch.special.i0e, lambda x: mp.besseli(0, small(x)) * mp.exp(-abs(x)), (-40, 40)),
        ("i1", torch.special.i1, lambda x: mp.besseli(1, small(x)), (-40, 40)),
        ("i1e", torch.special.i1e, lambda x: mp.besseli(1, small(x)) * mp.exp(-abs(x)), (-40, 40)),
        ("erfcx", torch.special.erfcx, lambda x: mp.erfc(small(x)) * mp.exp(x * x), (-26, 40)),
        ("ndtri", torch.special.ndtri, lambda p: root2 * mp.erfinv(2 * p - 1) if p > 1e-30 else small(mp.inf), (0, 1)),
        ("sinc", torch.sinc, lambda x: one if x == 0 else mp.sinpi(x) / (mp.pi * x), (-6, 6)),
        ("sigmoid", torch.sigmoid, sigmoid, (-30, 30)),
        ("logsigmoid", F.logsigmoid, lambda x: min(x, 0) - mp.log1p(mp.exp(-abs(x))), (-30, 30)),
        ("logit", torch.logit, lambda x: mp.log(x / (1 - x)), (0, 1)),
        ("silu", F.silu, lambda x: x * sigmoid(x), (-30, 30)),
        ("gelu", F.gelu, lambda x: x * mp.erfc(-x / root2) / 2, (-9, 9)),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), gelu_tanh, (-9, 9)),
        ("mish", F.mish, lambda x: x * mp.tanh(mp.log1p(mp.exp(x))), (-20, 20)),
        ("softplus", F.softplus, softplus, (-30, 30)),
        ("elu", F.elu, lambda x: x if x > 0 else mp.expm1(x), (-4, 4)),
        ("tanhshrink", F.tanhshrink, lambda x: x - mp.tanh(x), (-4, 4)),
        ("hardsigmoid", F.hardsigmoid, lambda x: min(max(x + 3, 0), 6) / 6, (-4, 4)),
        ("hardswish", F.hardswish, lambda x: x * min(max(x + 3, 0), 6) / 6, (-4, 4)),
        ("special_entr", torch.special.entr, lambda x: mp.mpf(0) if x == 0 else -x * mp.log(x), (0, 4)),
    ]
    binary = [
        ("div", torch.div, lambda x, y: x / y, (-10, 10)),
        ("fmod", torch.fmod, fmod, (-10, 10)),
        ("remainder", torch.remainder, remainder, (-10, 10)),
        ("pow", torch.pow, power, (0, 20)),
        ("atan2", torch.atan2, mp.atan2, (-10, 10)),
        ("hypot", torch.hypot, mp.hypot, (-10, 10)),
        ("logaddexp", torch.logaddexp, log_add_exp, (-10, 10)),
        ("logaddexp2", torch.logaddexp2, log2_add_exp2, (-10, 10)),
        ("xlogy", torch.xlogy, lambda x, y: mp.mpf(0) if x == 0 else x * mp.log(y), (0, 10)),
    ]
    rows = [Function(*row) for row in unary] + [Function(*row, arity=2) for row in binary]  # type: ignore[arg-type]
    formulas = {"tanhshrink"}

    def wide_sinc(x: torch.Tensor) -> torch.Tensor:
        n = x.round()
        sign = 1 - 2 * (n / 2 - (n / 2).floor()).ceil()
        return torch.where(x == 0, 1.0, sign * torch.sin(math.pi * (x - n)) / (math.pi * x))

    # 1 + tanh and 1 + erf cancel, and pi x is not exact
    wide = {
        "sinc": wide_sinc,
        "gelu": lambda x: x * torch.special.erfc(-x / math.sqrt(2)) / 2,
        "gelu_tanh": lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    }
    wide_ulp = {"gelu": 3.0, "hardswish": 2.0}
    wide_ulp |= dict.fromkeys(("sigmoid", "logsigmoid", "softplus", "silu", "mish", "gelu_tanh"), 1.55)
    wide_ulp |= dict.fromkeys(("logit", "sinc", "special_entr", "xlogy"), 0.51)
    domain = {"logit": (0.0, 1.0)}

    def completed(row: Function) -> Function:
        name = row.name
        return dataclasses.replace(row, formula=name in formulas, wide=wide.get(name), domain=domain.get(name), wide_ulp=wide_ulp.get(name))

    return [completed(row) for row in rows]


def bound(fn: Function, dtype: torch.dtype, eager: float) -> float:
    """What deplo's error may be in ulp: 1 (16 bits: half of one and what float32 adds); formulas of ATen may err by 1 more than eager's, and in
    float64 a function may err as eager's does, but for those of deplo's own."""
    if fn.formula:
        return max(1.0, eager) + 1.0
    if dtype == torch.float64:
        return max(1.0, eager) if fn.wide_ulp is None else fn.wide_ulp
    return 1.0 if dtype == torch.float32 else 0.51


def _lgamma(mp: Any, x: Any) -> Any:
    """log |Gamma(x)| of large numbers, negative ones by reflection; their distance to the next integer is exact."""
    if x > 0:
        return mp.loggamma(x)
    with mp.workprec(mp.prec + 60):
        return mp.log(mp.pi / abs(mp.sinpi(x))) - mp.loggamma(1 - x)


# Distances


def spacing(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbours of `dtype` at the float64 values `exact`, as float64."""
    info = torch.finfo(dtype)
    power = (exact.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    return torch.clamp(power, min=info.tiny, max=2.0 ** math.floor(math.log2(info.max))) * info.eps


def errors(got: torch.Tensor, exact: torch.Tensor, unit: torch.Tensor | None = None) -> torch.Tensor:
    """|got - exact| in ulp of got's dtype, for a dtype narrower than float64; `unit` is the spacing, if the caller has it."""
    dtype = got.dtype
    unit = spacing(exact, dtype) if unit is None else unit
    error = got.double().sub_(exact).abs_().div_(unit)
    if math.isfinite(error.max()):
        return error
    # Where the exact value or the result passes the largest number: infinity counts as the number that would follow.
    rounded, wide = exact.to(dtype), got.double()
    special = ~(got.isfinite() & rounded.isfinite())
    beyond = 2.0 ** math.ceil(math.log2(torch.finfo(dtype).max))
    near = torch.where(got.isinf(), torch.copysign(torch.full_like(wide, beyond), wide), wide)
    fine = (got == rounded) | (got.isnan() & rounded.isnan())
    wrong = torch.where(exact.isfinite() & ~got.isnan(), (near - exact).abs() / unit, math.inf)
    return torch.where(special, torch.where(fine, 0.0, wrong), error)


def error_of_double(got: float, exact: Any) -> float:
    """The same for float64; `exact` is a number of mpmath or NumPy's long double."""
    mp = _mp()
    exact = mp.mpf(exact)
    if mp.isnan(exact) or math.isnan(got):
        return 0.0 if mp.isnan(exact) and math.isnan(got) else math.inf
    if abs(exact) >= mp.ldexp(mp.mpf(2) ** 54 - 1, 970):  # rounds to infinity
        return 0.0 if got == math.copysign(math.inf, exact) else math.inf
    exponent = mp.frexp(exact)[1] - 1 if exact else -1100
    ulp = mp.ldexp(mp.mpf(1), min(max(exponent, -1022), 1023) - 52)
    value = mp.mpf(got) if math.isfinite(got) else mp.ldexp(mp.mpf(math.copysign(1, got)), 1024)
    return float(abs(value - exact) / ulp)


# Inputs


def patterns(dtype: torch.dtype, first: int, count: int, stride: int) -> torch.Tensor:
    """`count` values of a dtype of 16 or 32 bits: every `stride`-th bit pattern from `first` on."""
    bits = torch.arange(first, first + count * stride, stride, dtype=torch.int64)
    if dtype == torch.float32:
        return bits.to(torch.int32).view(torch.float32)  # the upper half wraps
    return bits.to(torch.int16).view(dtype)


def unary_inputs(dtype: torch.dtype, every: bool) -> Iterator[torch.Tensor]:
    """All values of a dtype of 16 bits; every one, or every SAMPLE_STRIDE-th, of float32."""
    stride = SAMPLE_STRIDE if dtype == torch.float32 and not every else 1
    total = -(-(1 << (32 if dtype == torch.float32 else 16)) // stride)
    for first in range(0, total, CHUNK):
        yield patterns(dtype, first * stride, min(CHUNK, total - first), stride)


def double_inputs(fn: Function, count: int) -> list[tuple[float, ...]]:
    """float64 operands: spread over all bit patterns, and over the interval where the function does most of its work."""
    generator = torch.Generator().manual_seed(5)
    everywhere = torch.randint(-(2**63), 2**63 - 1, (count // 2, fn.arity), generator=generator, dtype=torch.int64).view(torch.float64)
    low, high = fn.range
    dense = torch.rand((count - count // 2, fn.arity), generator=generator, dtype=torch.float64) * (high - low) + low
    return [tuple(row) for row in torch.cat([everywhere, dense]).tolist()]


def binary_inputs(dtype: torch.dtype, fn: Function, count: int = 1 << 20) -> list[torch.Tensor]:
    """Two operands: pairs of random bit patterns, and pairs from the function's interval."""
    generator = torch.Generator().manual_seed(6)
    bits, whole = (32, torch.int32) if dtype == torch.float32 else (16, torch.int16)
    low, high = fn.range
    operands = []
    for _ in range(2):
        everywhere = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (count // 2,), generator=generator).to(whole).view(dtype)
        dense = (torch.rand(count // 2, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)
        operands.append(torch.cat([everywhere, dense]))
    return operands


# Measuring


def compiled(fn: Callable[..., torch.Tensor], options: Options | None = None) -> Callable[..., torch.Tensor]:
    """`fn` by deplo, without a call to ATen; raises deplo's own errors."""
    checked = (options or read_options()).replace(strict=True)
    torch._dynamo.reset()  # past its limit of compilations, Dynamo would run eager mode; as one full graph it raises
    by_dynamo: Any = torch.compile(lambda *xs: fn(*xs), backend=lambda gm, inputs: compile_with(checked, gm, inputs), dynamic=False, fullgraph=True)

    def call(*operands: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), unwrapped_errors():
            result: torch.Tensor = by_dynamo(*operands)
            return result

    return call


def within(fn: Function, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`call`, one of the forms of `fn`, with NaN outside of its domain."""
    if fn.domain is None:
        return call
    low, high = fn.domain

    def limited(x: torch.Tensor) -> torch.Tensor:
        inside = (x >= low) & (x <= high)
        return torch.where(inside, call(torch.where(inside, x, (low + high) / 2)), math.nan)  # a pole would be as slow

    return limited


def measure(fn: Function, dtype: torch.dtype, every: bool = False, count: int = 3000) -> dict[str, Worst]:
    """The largest errors of deplo and eager, by name: deplo's is missing where it leaves the operator to ATen, both where eager refuses the dtype."""
    try:
        fn.torch(*[torch.ones(1, dtype=dtype)] * fn.arity)
    except NotImplementedError:
        return {}
    engines: dict[str, Callable[..., torch.Tensor]] = {"eager": within(fn, fn.torch), "deplo": compiled(fn.torch)}
    if dtype == torch.float64:
        return _measure_double(fn, engines, count)
    worst = {name: Worst(-1.0) for name in engines}
    batches = ((x,) for x in unary_inputs(dtype, every)) if fn.arity == 1 else iter([tuple(binary_inputs(dtype, fn))])
    for operands in batches:
        exact = within(fn, fn.wide or fn.torch)(*(x.double() for x in operands))
        unit = spacing(exact, dtype)
        for name in list(engines):
            try:
                got = engines[name](*operands)
            except Error:
                del engines[name], worst[name]
                continue
            found = errors(got, exact, unit)
            k = int(found.argmax())
            worst[name] = worst[name].or_worse(Worst(float(found[k]), tuple(float(x[k]) for x in operands)))
    return worst


def _measure_double(fn: Function, engines: dict[str, Callable[..., torch.Tensor]], count: int) -> dict[str, Worst]:
    operands = double_inputs(fn, count)
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*operands, strict=True)]
    results: dict[str, Sequence[float]] = {}
    for name, engine in engines.items():
        try:
            results[name] = engine(*columns).tolist()
        except Error:
            continue
    worst = {name: Worst(-1.0) for name in results}
    for k, row in enumerate(operands):
        exact = exact_value(fn, row)
        if exact is None:
            continue
        for name, values in results.items():
            worst[name] = worst[name].or_worse(Worst(error_of_double(values[k], exact), row))
    return worst


def exact_value(fn: Function, operands: Sequence[float], slope: bool = False) -> Any:
    """mpmath's value, or derivative; None where it is not a real number (poles, outside of the domain, beyond what mpmath can hold)."""
    mp = _mp()
    if not all(math.isfinite(x) for x in operands):
        return None
    try:
        numbers = [mp.mpf(x) for x in operands]
        value = mp.diff(fn.exact, *numbers) if slope else fn.exact(*numbers)
    except (ValueError, ZeroDivisionError, OverflowError, mp.NoConvergence):
        return None
    return value if isinstance(value, (int, mp.mpf)) and mp.isfinite(value) else None


# Reductions


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction over the last dimension; `exact` is its meaning in NumPy's long double."""

    name: str
    torch: Callable[[torch.Tensor], torch.Tensor]
    exact: Callable[[Any], Any]


def reductions() -> list[Reduction]:
    import numpy as np

    def shifted(x: Any) -> tuple[Any, Any]:
        top = x.max(-1, keepdims=True)
        return x - top, top

    def log_sum_exp(x: Any) -> Any:
        rest, top = shifted(x)
        return np.log(np.exp(rest).sum(-1)) + top[..., 0]

    def softmax(x: Any) -> Any:
        e = np.exp(shifted(x)[0])
        return e / e.sum(-1, keepdims=True)

    def log_softmax(x: Any) -> Any:
        rest, _ = shifted(x)
        return rest - np.log(np.exp(rest).sum(-1, keepdims=True))

    def layer_norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + x.dtype.type(1e-5))

    return [
        Reduction("sum", lambda x: x.sum(-1), lambda x: x.sum(-1)),
        Reduction("mean", lambda x: x.mean(-1), lambda x: x.mean(-1)),
        Reduction("prod", lambda x: x.prod(-1), lambda x: x.prod(-1)),
        Reduction("var", lambda x: x.var(-1), lambda x: x.var(-1, ddof=1)),
        Reduction("std", lambda x: x.std(-1), lambda x: x.std(-1, ddof=1)),
        Reduction("norm", lambda x: x.norm(dim=-1), lambda x: np.sqrt((x * x).sum(-1))),
        Reduction("logsumexp", lambda x: x.logsumexp(-1), log_sum_exp),
        Reduction("softmax", lambda x: x.softmax(-1), softmax),
        Reduction("log_softmax", lambda x: x.log_softmax(-1), log_softmax),
        Reduction("layer_norm", lambda x: F.layer_norm(x, x.shape[-1:]), layer_norm),
        Reduction("cumsum", lambda x: x.cumsum(-1), lambda x: x.cumsum(-1)),
        Reduction("cumprod", lambda x: x.cumprod(-1), lambda x: x.cumprod(-1)),
        Reduction("logcumsumexp", lambda x: x.logcumsumexp(-1), lambda x: np.logaddexp.accumulate(x, -1)),
    ]


def reduction_inputs(name: str, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Values without cancellation, by name; those of products stay near 1, so that the product neither vanishes nor overflows."""
    generator = torch.Generator().manual_seed(7)
    for shape in ((64, 1000), (3, 100_003)):
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        text = "x".join(str(size) for size in shape)
        if name in ("prod", "cumprod"):
            yield f"near 1, {text}", (1 + (uniform - 0.5) * (8 / shape[1])).to(dtype)
            continue
        yield f"uniform, {text}", uniform.to(dtype)
        if name not in ("sum", "mean", "cumsum", "logcumsumexp"):
            yield f"normal, {text}", torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def report(names: Sequence[str], dtypes: Sequence[torch.dtype], every: bool, show: Callable[[tuple[str, ...]], None]) -> bool:
    """Shows a row for each function or reduction and dtype; whether all are within their bounds."""
    known = {fn.name: fn for fn in functions()}
    sums = {reduction.name: reduction for reduction in reductions()}
    for name in names:
        if name not in known and name not in sums:
            raise UserError(f"{name} is no function or reduction; known: {', '.join([*known, *sums])}")
    show(("function", "dtype", "deplo ulp", "at", "eager ulp", "at", ""))
    fine = True
    for name, fn in known.items():
        for dtype in dtypes if not names or name in names else ():
            found = measure(fn, dtype, every)
            if not found:
                continue
            good = "deplo" not in found or found["deplo"].ulp <= bound(fn, dtype, found["eager"].ulp)
            fine = fine and good
            cells = [cell for engine in ("deplo", "eager") for cell in _cells(found.get(engine))]
            show((name, str(dtype).removeprefix("torch."), *cells, "" if good else "beyond its bound"))
    for name, reduction in sums.items():
        for dtype in dtypes if not names or name in names else ():
            errors_found = measure_reduction(reduction, dtype)
            cells = [cell for engine in ("deplo", "eager") for cell in (f"{errors_found[engine][0]:.4g}", errors_found[engine][1])]
            show((name, str(dtype).removeprefix("torch."), *cells, ""))
    return fine


def _cells(worst: Worst | None) -> tuple[str, str]:
    return (f"{worst.ulp:.4g}", ", ".join(repr(x) for x in worst.operands)) if worst else ("in ATen", "")


def measure_reduction(reduction: Reduction, dtype: torch.dtype) -> dict[str, tuple[float, str]]:
    """The largest errors of deplo and eager with the inputs that gave them, by name."""
    import numpy as np

    worst: dict[str, tuple[float, str]] = {}
    engines = {"eager": reduction.torch, "deplo": compiled(reduction.torch)}
    for text, x in reduction_inputs(reduction.name, dtype):
        exact = reduction.exact(x.double().numpy().astype(np.longdouble))
        for name in list(engines):
            try:
                got = engines[name](x)
            except Error:
                del engines[name]
                continue
            if dtype == torch.float64:
                found = float(np.max(np.abs(got.numpy() - exact) / np.spacing(np.abs(exact).astype(np.float64))))
            else:
                found = float(errors(got, torch.from_numpy(exact.astype(np.float64))).max())
            worst[name] = max(worst.get(name, (-1.0, "")), (found, text))
    return worst
