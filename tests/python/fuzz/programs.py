"""Random PyTorch programs as Python source over a few inputs, drawn by Hypothesis so that they shrink.

A program is grown line by line and run in eager mode as it grows: a line that PyTorch refuses, or whose values would say nothing, is left out.
Sizes are written as `v.shape[k]`, so that a program also runs on inputs of other sizes.

Values are followed as exact or not. Exact ones are integers, or floats that hold small integers, so that every order of evaluation gives
the same bits: only on them stand operations that jump (comparisons, rounding, argmax, casts to integers), and results that are exact are
compared bit by bit.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st

SIZES = (3, 4, 2, 1, 5, 7, 8, 9, 12, 16, 17, 31, 33, 64, 65, 130)
FLOATS = ("f32", "f32", "f32", "f64", "bf16", "f16")
INTS = ("i64", "i32", "u8", "i8", "i16")
NUMBERS = (-3, -2, -1, -5, -8)  # of the integer argument s that a dynamic program may have
DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64, "i32": torch.int32,
    "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b": torch.bool,
}  # fmt: skip
# The largest integers that count as exact: sums of a few thousand of them are exact in float32, where low precision accumulates too.
EXACT_LIMIT = {torch.float32: 2048, torch.float64: 1 << 20, torch.bfloat16: 128, torch.float16: 512}
MOST_ELEMENTS = 6000
MOST_LINES = 14


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor input; `dims` are names of size variables or numbers, `layout` how it lies in its storage, `fill` what it holds."""

    name: str
    dims: tuple[str | int, ...]
    dtype: str
    layout: str
    fill: str  # ints, floats, special

    def shape(self, sizes: dict[str, int]) -> list[int]:
        return [sizes[d] if isinstance(d, str) else d for d in self.dims]

    def make(self, sizes: dict[str, int], seed: int) -> torch.Tensor:
        shape = self.shape(sizes)
        generator = torch.Generator().manual_seed(seed)
        dtype = DTYPES[self.dtype]
        if self.layout == "expanded":
            shape[0] = 1
        if self.layout == "sliced":
            shape[-1] += 3
        if self.layout == "strided":
            shape[-1] *= 2
        if self.layout == "transposed":
            shape.reverse()
        base = self._values(shape, dtype, generator)
        if self.layout == "expanded":
            return base.expand(self.shape(sizes))
        if self.layout == "sliced":
            return base[..., 2:-1]
        if self.layout == "strided":
            return base[..., ::2]
        return base.permute(*reversed(range(base.dim()))) if self.layout == "transposed" else base

    def _values(self, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        if not dtype.is_floating_point:
            low, high = {torch.bool: (0, 2), torch.uint8: (0, 9)}.get(dtype, (-4, 5))
            return torch.randint(low, high, shape, generator=generator).to(dtype)
        if self.fill == "ints":
            return torch.randint(-4, 5, shape, generator=generator).to(dtype)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if self.fill == "special":
            odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, 1e30, -1e30, 60000.0], dtype=torch.float64)
            picks = odd[torch.randint(0, len(odd), shape, generator=generator)]
            values = torch.where(torch.rand(shape, generator=generator, dtype=torch.float64) < 0.3, picks, values)
        return values.to(dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """`def f(x0, ...)` over inputs, or `def f(x0, ..., s)` where `sizes` has s; `exact` says of each result whether its bits are determined."""

    inputs: tuple[Input, ...]
    sizes: dict[str, int]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    exact: tuple[bool, ...]
    exact_inputs: tuple[bool, ...]  # as the program leaves them
    backward: bool = False
    dynamic: bool = False
    other_sizes: tuple[dict[str, int], ...] = ()

    @property
    def numbers(self) -> list[str]:
        """The sizes that are arguments."""
        return [name for name in self.sizes if name == "s"]

    @property
    def source(self) -> str:
        head = f"def f({', '.join([*(i.name for i in self.inputs), *self.numbers])}):"
        return "\n".join([head, *[f"    {line}" for line in self.lines], f"    return [{', '.join(self.outputs)}]"]) + "\n"

    def function(self, floats: torch.dtype | None = None, steady: bool = False) -> Callable[..., list[torch.Tensor]]:
        """The program as a function; with `floats` in place of all float dtypes; `steady`: what jumps sees integers where the inputs were moved."""
        scope = namespace(floats, steady)
        exec(compile(self.source, "<fuzz>", "exec"), scope)
        made: Callable[..., list[torch.Tensor]] = scope["f"]
        return made

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v}" for k, v in self.sizes.items())
        flags = "".join(f", {name}" for name in ("backward", "dynamic") if getattr(self, name))
        inputs = [f"    {i.name}: {i.dtype}[{', '.join(map(str, i.dims))}] {i.layout} {i.fill}" for i in self.inputs]
        also = [f"then {other}" for other in self.other_sizes] if self.dynamic else []
        return "\n".join([f"sizes {sizes}{flags}", *also, *inputs, self.source])


def namespace(floats: torch.dtype | None = None, steady: bool = False) -> dict[str, Any]:
    """What the source names. `R` stands around operands of operations that jump: they hold integers, or what is left of one that was moved."""
    types = {k: floats if floats and v.is_floating_point else v for k, v in DTYPES.items()}
    return {"torch": torch, "F": F, "math": math, "R": torch.round if steady else lambda t: t, **types}


@dataclasses.dataclass
class Value:
    name: str
    tensor: torch.Tensor
    exact: bool
    written: bool = False  # whether writing to it in place is legal

    @property
    def rank(self) -> int:
        return self.tensor.dim()

    @property
    def is_float(self) -> bool:
        return self.tensor.is_floating_point()

    @property
    def held(self) -> str:
        """Its name as the operand of an operation that jumps."""
        return f"R({self.name})" if self.is_float else self.name

    @property
    def is_bool(self) -> bool:
        return self.tensor.dtype == torch.bool


Line = tuple[str, bool]  # an expression, and whether it is exact where its operands are


class Grower:
    """Draws one program."""

    def __init__(self, draw: Callable[[Any], Any], backward: bool, dynamic: bool) -> None:
        self.draw = draw
        self.backward = backward
        self.dynamic = dynamic
        self.values: list[Value] = []
        self.inputs: list[Input] = []
        self.lines: list[str] = []
        self.scope = namespace()
        count = self.integer(1, 3)
        pool = [n for n in SIZES if n > 1] if dynamic else SIZES
        self.sizes = {f"n{k}": self.pick(pool) for k in range(count)}
        self.number = self.pick(NUMBERS) if dynamic and self.integer(0, 1) else None
        self.scope["s"] = self.number

    # Draws

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def pick(self, items: Any) -> Any:
        return self.draw(st.sampled_from(list(items)))

    def chance(self, one_in: int) -> bool:
        """Rare, and False where Hypothesis shrinks to."""
        return self.integer(0, one_in - 1) == one_in - 1

    def dim(self, v: Value) -> int:
        return self.integer(-v.rank, v.rank - 1) if v.rank else 0

    # Values

    def add_input(self, dims: tuple[str | int, ...] | None = None, dtype: str | None = None) -> Value | None:
        if dims is None:
            dims = tuple(self.pick([*self.sizes, *self.sizes, 1, 4]) for _ in range(self.pick([2, 2, 3, 1, 4, 0])))
        if len(self.inputs) == 5:
            return None
        if math.prod(self.sizes[d] if isinstance(d, str) else d for d in dims) > MOST_ELEMENTS:
            dims = dims[:1]
        dtype = dtype or self.pick([*FLOATS, *FLOATS, *INTS, "b"])
        layouts = ["contiguous"] * 3 + (["transposed"] if len(dims) > 1 else []) + (["sliced", "strided", "expanded"] if dims else [])
        fill = "special" if self.chance(16) and not self.backward else self.pick(["ints", "floats"])
        layout = self.pick(layouts)
        given = Input(f"x{len(self.inputs)}", dims, dtype, layout, fill if DTYPES[dtype].is_floating_point else "ints")
        self.inputs.append(given)
        value = Value(given.name, given.make(self.sizes, len(self.inputs)), given.fill == "ints", layout != "expanded" and not self.backward)
        self.values.append(value)
        self.scope[given.name] = value.tensor
        return value

    def value(self, accept: Callable[[Value], bool] = lambda v: True) -> Value | None:
        """A value, the latest ones more often."""
        fitting = [v for v in reversed(self.values) if accept(v)]
        return self.pick(fitting) if fitting else None

    def float_value(self, accept: Callable[[Value], bool] = lambda v: True) -> Value | None:
        return self.value(lambda v: v.is_float and accept(v))

    def partner(self, v: Value, accept: Callable[[Value], bool] = lambda v: True) -> str | None:
        """Another operand for v: a value that broadcasts with it, a new input, a number or a piece of v itself."""
        kind = self.integer(0, 5)
        if kind == 0:
            return str(self.pick([2, -1, 3, 0])) if not v.is_bool else str(self.pick([True, False]))
        if kind == 1 and v.rank:
            d = self.integer(0, v.rank - 1)
            return f"{v.name}.select({d}, {self.integer(0, 1) if v.tensor.shape[d] > 1 else 0}).unsqueeze({d})" if v.tensor.shape[d] else None
        if kind == 2 and (made := self.input_like(v)) is not None:
            return made.name
        other = self.value(lambda w: broadcasts(v.tensor.shape, w.tensor.shape) and accept(w))
        return other.name if other is not None else None

    def input_like(self, v: Value) -> Value | None:
        """An input that broadcasts with an input-shaped value."""
        known = next((i for i in self.inputs if tuple(i.shape(self.sizes)) == tuple(v.tensor.shape)), None)
        if known is None:
            return None
        dims = tuple(1 if self.chance(3) else d for d in known.dims)[self.integer(0, min(1, len(known.dims))) :]
        return self.add_input(dims)

    def exact_operands(self, text: str) -> bool:
        names = set(re.findall(r"\b[vx]\d+\b", text))
        return all(v.exact for v in self.values if v.name in names)

    # Lines

    def grow(self) -> None:
        family = self.pick(FAMILIES if self.number is None else [*FAMILIES, *[by_number] * 8])
        made = family(self)
        if made is None:
            return
        text, stays_exact = made
        self.add(text, stays_exact and self.exact_operands(text))

    def add(self, text: str, exact: bool) -> Value | None:
        """A line that computes `text`, if eager mode takes it and what comes out is of use."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = eval(text, self.scope)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return None
        if not isinstance(result, torch.Tensor) or result.numel() > MOST_ELEMENTS or result.dim() > 5:
            return None
        if result.is_floating_point() and result.numel():
            if not exact and useless(result):
                return None
            exact = exact and is_exact(result)
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        base = next((v for v in self.values if v.tensor._base is not None and v.tensor._base is result._base), None)
        value = Value(name, result, exact, not self.backward and overlaps_nothing(result) and (base is None or base.written))
        self.values.append(value)
        self.scope[name] = result
        return value

    def mutate(self) -> None:
        """An in-place operation on a value or a view of it. What shares its memory is then exact only if all of it is."""
        v = self.value(lambda v: v.written and not v.is_bool and v.tensor.numel() > 0)
        if v is None:
            return
        view = self.pick(["", "", "[0]", "[..., 1:]", "[1:]", "[..., 0]", "[::2]"]) if v.rank else ""
        other = self.value(lambda w: w.tensor.dtype == v.tensor.dtype or not w.is_float and v.is_float)
        operand = self.pick(["2", "-1"] + ([f"{other.name}", f"{other.name}{view}"] if other else []))
        op = self.pick(["add_", "mul_", "copy_", "sub_", "clamp_", "fill_", "zero_", "masked_fill_"])
        call = {"zero_": "zero_()", "clamp_": "clamp_(-2, 3)", "fill_": "fill_(3)"}.get(op, f"{op}({operand})")
        if op == "copy_" and not operand.startswith(("v", "x")):
            call = "fill_(2)"
        if op == "masked_fill_":
            mask = self.value(lambda w: w.is_bool and broadcasts(v.tensor.shape, w.tensor.shape))
            if mask is None:
                return
            call, view = f"masked_fill_({mask.name}, 1)", ""
        text = f"{v.name}{view}.{call}"
        kept = [w.tensor.clone() for w in self.values]
        try:
            eval(text, self.scope)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return
        shared = [w for w in self.values if w.tensor.untyped_storage().data_ptr() == v.tensor.untyped_storage().data_ptr()]
        if any(w.is_float and w.tensor.numel() and useless(w.tensor) and not w.exact for w in shared):
            for w, old in zip(self.values, kept, strict=True):
                if w.written:
                    w.tensor.copy_(old)
            return
        exact = self.exact_operands(text) and all(w.exact and (not w.is_float or is_exact(w.tensor)) for w in shared)
        for w in shared:
            w.exact = exact
        self.lines.append(text)


def broadcasts(a: torch.Size, b: torch.Size) -> bool:
    try:
        return math.prod(torch.broadcast_shapes(a, b)) <= MOST_ELEMENTS
    except RuntimeError:
        return False


def overlaps_nothing(t: torch.Tensor) -> bool:
    """Whether no two elements share memory, as far as sorted strides tell."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1):
        if stride < reach:
            return False
        reach = stride * size
    return True


def is_exact(t: torch.Tensor) -> bool:
    limit = EXACT_LIMIT[t.dtype]
    return not t.numel() or bool(t.isfinite().all() and (t == t.round()).all() and t.abs().max() <= limit)


def useless(t: torch.Tensor) -> bool:
    """So large that what follows overflows."""
    valid = t[t.isfinite()]
    return bool(valid.numel() and valid.abs().max() > (1e3 if t.dtype == torch.float16 else 1e31))


# Families of lines


def unary(g: Grower) -> Line | None:
    v = g.value()
    if v is None:
        return None
    if v.is_bool:
        return g.pick([f"~{v.name}", f"{v.name}.logical_not()"]), True
    exact = ["-{}", "{}.abs()", "{}.relu()", "{}.square()", "{}.clamp(-2, 3)", "{}.clamp(min=0)", "{} * 1", "1 - {}"]
    if v.is_float and v.exact:
        exact += [
            "(R({}) / 2).floor()",
            "(R({}) / 4).round()",
            "(R({}) / 2).ceil()",
            "(R({}) / 2).trunc()",
            "R({}).frac()",
            "R({}).sign()",
            "R({}) % 3",
            "R({}) // 2",
        ]
    if not v.is_float:
        exact += ["~{}", "{} << 1", "{} >> 1", "{} & 3", "{} | 5", "{} ^ 1", "{} // 3", "{} % 3", "{} // -2"]
    smooth = [
        "{}.tanh()", "{}.sigmoid()", "{}.sin()", "{}.cos()", "{}.exp()", "{}.erf()", "({}.abs() + 1).log()", "{}.abs().sqrt()",
        "({}.abs() + 0.5).rsqrt()",
        "F.gelu({})", "F.gelu({}, approximate='tanh')", "F.silu({})", "F.softplus({})", "F.mish({})", "F.elu({})", "F.leaky_relu({}, 0.1)",
        "{}.atan()", "{}.sinh()", "{}.expm1()", "{}.abs().log1p()", "{} / 3", "({}.abs() + 1).reciprocal()", "{}.pow(3)", "F.hardswish({})",
        "F.logsigmoid({})", "{}.clamp(-1, 1).asin()", "{}.asinh()", "{}.abs().pow(1.5)", "{}.exp2()", "{} * 0.37",
    ]  # fmt: skip
    if v.tensor.dtype != torch.float64:
        smooth.append("F.hardsigmoid({})")  # eager's gradient multiplies by 1 / 6 as float32 has it, deplo's as float64 does
    jumps = set(smooth)
    template = g.pick([*exact, *(smooth if v.is_float or not g.backward else [])])
    return template.format(v.name), template not in jumps


def binary(g: Grower) -> Line | None:
    v = g.value()
    w = g.partner(v) if v is not None else None
    if v is None or w is None:
        return None
    if v.is_bool:
        return g.pick(["{} & {}", "{} | {}", "{} ^ {}", "torch.logical_or({}, {})"]).format(v.name, w), True
    exact = ["{} + {}", "{} - {}", "{} * {}", "torch.add({}, {}, alpha=2)", "torch.rsub({}, {})"]
    other = next((u for u in g.values if u.name == w), None)
    if other is not None and other.tensor.dtype != torch.bool:
        exact += ["torch.maximum({}, {})", "torch.minimum({}, {})"]
    smooth = (
        ["{} / ({}.abs() + 1)", "torch.atan2({}, {}.abs() + 1)", "torch.hypot({}, {})", "torch.logaddexp({}, {})"]
        if other is not None and v.is_float
        else []
    )
    template = g.pick([*exact, *exact, *smooth])
    return template.format(v.name, w), template not in smooth


def comparison(g: Grower) -> Line | None:
    v = g.value(lambda v: v.exact)
    w = g.partner(v, lambda w: w.exact) if v is not None else None
    if v is None or w is None or not g.exact_operands(w):
        return None
    operator = g.pick(["<", "<=", ">", ">=", "==", "!="])
    return f"{v.held} {operator} {w}" if re.fullmatch(r"-?\d+|True|False", w) or not v.is_float else f"{v.held} {operator} R({w} * 1.0)", True


def choice(g: Grower) -> Line | None:
    mask = g.value(lambda v: v.is_bool)
    if mask is None:
        made = comparison(g)
        if made is None or (mask := g.add(made[0], g.exact_operands(made[0]))) is None or not mask.is_bool:
            return None
    v = g.value(lambda w: broadcasts(mask.tensor.shape, w.tensor.shape))
    w = g.partner(v) if v is not None else None
    if v is None or w is None:
        return None
    return g.pick(["torch.where({0}, {1}, {2})", "{1}.masked_fill({0}, 2)"]).format(mask.name, v.name, w), True


def reduction(g: Grower) -> Line | None:
    v = g.value(lambda v: v.tensor.numel() > 0)
    if v is None:
        return None
    keep = g.pick([True, False])
    some = v.rank >= 1 and not g.chance(4)
    dims: Any = g.dim(v) if some else None
    if some and v.rank > 1 and g.chance(3):
        dims = sorted({d % v.rank for d in (g.dim(v), g.dim(v))})
    one = dims if isinstance(dims, int) else None
    where = f"{dims}, keepdim={keep}" if some else ""
    exact = [f"{v.name}.amax({where})", f"{v.name}.amin({where})"]
    smooth: list[str] = []
    if not v.is_bool:
        exact += [f"{v.name}.sum({where})"] * 2
        if one is not None:
            exact += [f"{v.name}.cumsum({one})", f"{v.name}.max({one}, keepdim={keep}).values", f"{v.name}.min({one}).values"]
    if v.exact:
        exact += (
            [f"({v.held} != 0).any({where})", f"({v.held} > 0).all({where})", f"({v.held} == 1).sum({where})"] if one is not None or not some else []
        )
        if one is not None and not v.is_bool:
            exact += [
                f"{v.held}.argmax({one}, keepdim={keep})",
                f"{v.held}.argmin({one})",
                f"{v.held}.max({one}).indices",
                f"{v.name}.cummax({one}).values",
            ]
    if v.is_float:
        smooth += [f"{v.name}.mean({where})", f"{v.name}.logsumexp({dims if some else list(range(v.rank))})"]
        smooth += [f"{v.name}.norm()", f"{v.name}.var({where}{', ' if where else ''}correction=0)"]
        if one is not None:
            smooth += [f"{v.name}.softmax({one})", f"F.log_softmax({v.name}, {one})", f"({v.name} * 0.1).cumsum({one})"]
            smooth += [
                f"F.normalize({v.name}, dim={one})",
                f"{v.name}.norm(dim={one})",
                f"({v.name} * 0.1).cumprod({one})",
                f"{v.name}.tanh().prod({one})",
            ]
            smooth += [f"F.layer_norm({v.name}, {v.name}.shape[-1:])", f"F.rms_norm({v.name}, {v.name}.shape[-1:])"]
    text = g.pick([*exact, *smooth, *smooth])
    return text, text not in smooth


def view(g: Grower) -> Line | None:
    v = g.value(lambda v: v.rank > 0)
    if v is None:
        return None
    n, r = v.name, v.rank
    d, e = g.dim(v), g.dim(v)
    size = v.tensor.shape[d]
    a = g.integer(0, 2)
    shape = [f"{n}.shape[{k}]" for k in range(r)]
    texts = [
        f"{n}.transpose({d}, {e})", f"{n}.reshape(-1)", f"{n}.unsqueeze({d})", f"{n}.squeeze({d})", f"{n}.flip({d})", f"{n}.roll({a}, {d})",
        f"{n}.contiguous()", f"{n}.clone()", f"{n}.movedim({d}, {e})", f"torch.cat([{n}, {n}], {d})", f"torch.stack([{n}, {n}], {d})",
        f"{n}.narrow({d}, {min(a, max(size - 1, 0))}, {n}.shape[{d}] - {min(a, max(size - 1, 0))})", f"F.pad({n}, ({a}, 1))",
        f"F.pad({n}, (-1, {a}))",
        f"{n}.repeat({', '.join(['1'] * (r - 1) + ['2'])})", f"{n}.expand(3, {', '.join(shape)})", f"{n}.repeat_interleave(2, {d})",
        f"{n}.permute({', '.join(map(str, reversed(range(r))))})", f"{n}.reshape({n}.shape[0], -1)", f"{n}.flatten()", f"{n}.diff(dim={d})",
    ]  # fmt: skip
    at = ", ".join([":"] * (d % r))
    prefix = f"{at}, " if at else ""
    texts += [f"{n}[{prefix}{s}]" for s in ("1:", ":-1", "::2", "1::3", "0", "-1", "-3:", "None")]
    if r >= 2:
        texts += [
            f"{n}.tril({a - 1})",
            f"{n}.triu({a - 1})",
            f"{n}.diagonal({a - 1})",
            f"{n}.reshape({shape[0]} * {shape[1]}, {', '.join([*shape[2:], '-1'])})",
        ]
        texts += [f"{n}.flatten(0, 1)", f"{n}.rot90()", f"{n}.T" if r == 2 else f"{n}.mT", f"F.pad({n}, (1, 0, {a}, 2), value=3)"]
        texts += [f"torch.cat([{n}, {n}.flip({d})], {e})"]
    if size and size % 2 == 0:
        texts += [f"{n}.unflatten({d}, (2, -1))", f"{n}.chunk(2, {d})[1]", f"{n}.unflatten({d}, (-1, 2))"]
    if size >= 3:
        texts += [f"{n}.unfold({d}, 3, {a + 1})", f"{n}.unfold({d}, 2, 1)", f"{n}.split(2, {d})[1]"]
    if r in (3, 4) and size > 2:
        texts += [f"F.pad({n}, (1, 1), mode='reflect')", f"F.pad({n}, (1, 0), mode='replicate')", f"F.pad({n}, (1, 1), mode='circular')"]
    other = g.value(lambda w: w.rank == r and w.tensor.dtype == v.tensor.dtype)
    if other is not None:
        texts += [f"torch.cat([{n}, {other.name}], {d})", f"torch.stack([{n}, {other.name}], {d})"] * 2
    return g.pick(texts), True


def overlaps(t: torch.Tensor) -> bool:
    """Whether elements of t share memory."""
    places = torch.arange(t.untyped_storage().nbytes() // t.element_size()).as_strided(t.shape, t.stride(), t.storage_offset())
    return places.unique().numel() < t.numel()


def contraction(g: Grower) -> Line | None:
    v = g.value(lambda v: v.rank >= 2 and not v.is_bool and (v.is_float or v.tensor.dtype == torch.int64))
    if v is None:
        return None
    n = v.name
    same = g.value(lambda w: w.tensor.dtype == v.tensor.dtype and w.rank >= 2)
    inner = g.value(lambda w: w.tensor.dtype == v.tensor.dtype and w.rank >= 1 and w.tensor.shape[-min(w.rank, 2)] == v.tensor.shape[-1])
    texts = [f"{n} @ {n}.mT", f"torch.einsum('...ij,...kj->...ik', {n}, {n})", f"torch.einsum('...ij->...i', {n})"]
    if inner is not None:
        texts += [f"{n} @ {inner.name}"] * 4
    if same is not None:
        texts += [f"{n} @ {same.name}", f"{n}.mT @ {same.name}", f"{n} @ {same.name}.mT", f"torch.matmul({same.name}, {n}.mT)"]
        texts += [f"F.linear({n}, {same.name})"] if same.rank == 2 else []
    smooth: list[str] = []
    if v.is_float and v.rank >= 3:
        # Of windows that overlap in memory eager's kernel leaves some of its result unwritten: they are copied.
        q = f"({n} * 1)" if overlaps(v.tensor) else n
        smooth += [f"F.scaled_dot_product_attention({q}, {q}, {q})", f"F.scaled_dot_product_attention({q}, {q}, {q}, is_causal=True)"]
    if v.is_float and v.rank == 2:
        texts += [f"F.linear({n}, {n}, {n}[:, 0])", f"torch.addmm({n}[:, :1], {n}, {n}.T, beta=2)"]
    if v.is_float and v.rank == 3:
        channels = v.tensor.shape[1]
        texts += [f"F.conv1d({n}, {n}[:1], padding=1)" if v.tensor.shape[2] < 6 else f"F.conv1d({n}, {n}[:2, :, :3], stride=2)"]
        texts += [f"F.max_pool1d({n}, 2)", f"F.conv1d({n}, {n}[0, :, None, :2], groups={channels})"]
        smooth += [f"F.avg_pool1d({n}, 2, 1)"]
    if v.is_float and v.rank == 4:
        texts += [f"F.conv2d({n}, {n}[:2, :, :3, :2], padding=1)", f"F.max_pool2d({n}, 2)", f"F.max_pool2d({n}, 3, 2, 1)"]
        texts += [f"F.interpolate({n}, scale_factor=2)"]
        smooth += [f"F.avg_pool2d({n}, 2, 1, 1)", f"F.adaptive_avg_pool2d({n}, 2)", f"F.interpolate({n}, scale_factor=2, mode='bilinear')"]
    text = g.pick([*texts, *smooth])
    if text in smooth:
        return text, False
    bound = float(v.tensor.abs().max()) if v.tensor.numel() else 0.0
    for w in (same, inner):
        bound = max(bound, float(w.tensor.abs().max()) if w is not None and w.tensor.numel() else 0.0)
    return text, bound * bound * 200 < 1 << 23


def weighted(g: Grower) -> Line | None:
    """A layer with a weight of its own: an input whose sizes fit those of an input."""
    v = g.float_value(lambda v: v.rank in (2, 3, 4) and v.tensor.numel() > 0)
    known = next((i for i in g.inputs if v is not None and tuple(i.shape(g.sizes)) == tuple(v.tensor.shape)), None)
    if v is None or known is None:
        return None
    dtype = next(k for k, t in DTYPES.items() if t == v.tensor.dtype)
    dims, n = known.dims, v.name
    outer = g.pick([4, 3, 8, 17, 32])
    layers = ["linear", "linear", "conv"] if v.rank > 2 and (v.tensor.shape[1]) <= 33 else ["linear"]
    conv = g.pick(layers) == "conv"
    window = [g.pick([3, 1, 2]) for _ in range(v.rank - 2)] if conv else []
    w = g.add_input((outer, dims[1], *window) if conv else (outer, dims[-1]), dtype)
    if w is None:
        return None
    bias = g.add_input((outer,), dtype) if g.chance(2) else None
    b = bias.name if bias is not None else "None"
    bound = max(float(t.tensor.abs().max()) if t.tensor.numel() else 0.0 for t in (v, w))
    stays = bound * bound * 300 < 1 << 23
    if not conv:
        return f"F.linear({n}, {w.name}, {b})", stays
    return f"F.conv{v.rank - 2}d({n}, {w.name}, {b}, stride={g.pick([1, 2])}, padding={g.pick([0, 1, 2])}, dilation={g.pick([1, 2])})", stays


def indexing(g: Grower) -> Line | None:
    v = g.value(lambda v: v.rank > 0 and v.tensor.numel() > 0)
    index = g.value(lambda w: w.tensor.dtype == torch.int64 and 0 < w.rank <= 2 and w.exact)
    if v is None:
        return None
    if index is None:
        made = g.add_input(dtype="i64", dims=tuple(g.pick([*g.sizes]) for _ in range(g.integer(1, 2))))
        if made is None:
            return None
        index = made
    n, d = v.name, g.integer(0, v.rank - 1)
    flat = f"({index.name}.reshape(-1) % {n}.shape[{d}])"
    colons = ":, " * d
    spread = ", ".join("-1" if k == d else "1" for k in range(v.rank))
    texts = [
        f"{n}.index_select({d}, {flat})", f"{n}[{colons}{flat}]", f"{n}[{colons}{index.name} % {n}.shape[{d}]]", f"{n}[..., None][{colons}{flat}]",
        f"torch.index_select({n}, {d}, {flat})", f"{n}.take_along_dim({flat}.reshape({spread}), {d})",
        f"{n}.index_fill({d}, {flat}, 2)", f"{n}.index_add({d}, {flat}, {n}.index_select({d}, {flat}))",
        f"{n}.scatter_add({d}, torch.zeros_like({n}, dtype=i64), {n})", f"{n}.gather({d}, torch.ones_like({n}, dtype=i64) % {n}.shape[{d}])",
        f"torch.zeros_like({n}).index_put(({flat} % {n}.shape[0],), {n}[{flat} % {n}.shape[0]], accumulate=True)",
        f"{n}.select_scatter({n}.select({d}, 0) * 2, {d}, 0)", f"{n}.slice_scatter({n}.narrow({d}, 0, 1) + 1, {d}, 0, 1)",
    ]  # fmt: skip
    if v.rank == 2:
        texts += [f"F.embedding({index.name} % {n}.shape[0], {n})"] * 2
    return g.pick(texts), True


def conversion(g: Grower) -> Line | None:
    v = g.value()
    if v is None:
        return None
    kind = g.pick([*FLOATS] + ([*INTS, "b"] if v.exact or not v.is_float else []))
    # A copy that stays one where all floats are float64: what is written to it later is not written to v.
    target = f"{kind}, copy=True" if DTYPES[kind] != v.tensor.dtype else kind
    if v.is_float and v.exact and not g.backward:
        return f"{v.held}.clamp(-100, 100).to({target})", True
    return f"{v.held if v.exact else v.name}.to({target})", True


def creation(g: Grower) -> Line | None:
    v = g.value()
    if v is None:
        return None
    n = v.name
    texts = [f"torch.zeros_like({n})", f"torch.ones_like({n})", f"torch.full_like({n}, 3)", f"{n}.new_full(({n}.numel() + 1,), 1)"]
    if v.rank:
        texts += [f"torch.arange({n}.shape[{g.dim(v)}])", f"torch.arange({n}.shape[0], dtype=f32)", f"torch.eye({n}.shape[0])"]
    return g.pick(texts), True


def by_sizes(g: Grower) -> Line | None:
    """Sizes in arithmetic, with divisors, steps and dividends of either sign."""
    v = g.value(lambda v: v.rank > 0 and not v.is_bool)
    if v is None:
        return None
    n, size = v.name, f"{v.name}.shape[{g.dim(v)}]"
    divisor = g.pick(["-2", "-3", "3", "-1", f"({size} - 300)", f"(-1 - {size})", f"({size} + 1)"])
    number = f"({g.pick([size, '7', '-7', f'(2 - {size})'])} {g.pick(['//', '%'])} {divisor})"
    step = g.pick([-1, -2, -3])
    texts = [f"{n} + {number}", f"{n}[: max({number}, 1)]", f"{n}.roll({number}, 0)", f"torch.arange({number}, {number} + 5)"]
    texts += [f"torch.arange({size}, {g.integer(-3, 2)}, {step})", f"torch.arange({size}, -{size}, {step}, dtype=f32)", f"{n}.shape[0] % -4 + {n}"]
    return g.pick(texts), True


def by_number(g: Grower) -> Line | None:
    """The argument s, which is below 0, in divisors, dividends, steps, places and lengths."""
    v = g.value(lambda v: v.rank > 0 and not v.is_bool)
    if v is None:
        return None
    n, size = v.name, f"{v.name}.shape[{g.dim(v)}]"
    left = g.pick(["7", "-7", size, "s", f"({size} + s)", f"(s - {size})"])
    right = g.pick(["s", "s", "(s - 3)", "(2 * s - 1)", "-2", f"({size} + 1)"])
    number = f"({left} {g.pick(['//', '%'])} {right})"
    low, step = g.integer(-3, 2), g.pick(["-1", "-2", "s"])
    texts = [
        f"{n} + {number}", f"{n} * s", f"{n}[: max({number}, 1)]", f"{n}[{number} :]", f"{n}[s:]", f"{n}[:s]", f"{n}[-s:]", f"{n}[s // 2]",
        f"torch.arange({size}, {low}, s)", f"torch.arange(20, -{size}, s, dtype=f32)", f"torch.arange(0, s, {step})",
        f"torch.arange({number}, {number} + 5)", f"{n}.roll(s, 0)", f"{n}.roll({number}, -1)", f"F.pad({n}, (s, 3))",
        f"F.pad({n}, (2, -s), value=2)", f"{n}.new_ones(2 - s, {size})", f"{n}.narrow(0, s, 1)", f"{n}.select(-1, s)",
        f"{n}.repeat_interleave(-s, 0)", f"{n}.unfold(0, 2, -s)", f"{n}.tril(s)", f"{n}.diagonal(s + 2)", f"{n}.split(-s)[0]",
        f"{n}.unsqueeze(0).expand(-s, {', '.join(['-1'] * v.rank)})", f"torch.arange({size}) // s", f"torch.arange({size}) % s",
        f"torch.arange({size})[:, None] // s + torch.arange(9) % s",
    ]  # fmt: skip
    if v.exact:
        texts += [f"{v.held} // s", f"{v.held} % s"]
    return g.pick(texts), True


def ternary(g: Grower) -> Line | None:
    v = g.float_value()
    if v is None:
        return None
    w, u = (g.value(lambda w: w.tensor.dtype == v.tensor.dtype and broadcasts(v.tensor.shape, w.tensor.shape)) for _ in range(2))
    if w is None or u is None:
        return None
    template = g.pick(["torch.addcmul({}, {}, {})", "torch.lerp({}, {}, {})", "torch.addcmul({}, {}, {}, value=-2)", "{} * {} + {}", "{} * {} - {}"])
    return template.format(v.name, w.name, u.name), "lerp" not in template


FAMILIES: list[Callable[[Grower], Line | None]] = [
    unary, unary, binary, binary, binary, reduction, reduction, view, view, view, contraction, contraction, weighted, indexing, choice,
    conversion, ternary, comparison, creation, by_sizes,
]  # fmt: skip


@st.composite
def programs(draw: Callable[[Any], Any], backward: bool | None = None, dynamic: bool | None = None) -> Program:
    back = draw(st.integers(0, 4)) == 4 if backward is None else backward
    dyn = draw(st.integers(0, 3)) == 3 if dynamic is None else dynamic
    g = Grower(draw, back, dyn)
    for _ in range(g.integer(1, 2)):
        g.add_input()
    while len(g.lines) < MOST_LINES and (g.integer(0, 15) > 0 or not g.lines):
        if not back and g.chance(6):
            g.mutate()
        else:
            g.grow()
    fresh = [v for v in g.values if v.name.startswith("v")] or g.values
    assume(g.lines)
    outputs = [fresh[-1]] + [v for v in fresh[:-1] if g.chance(3)]
    others = tuple({k: g.pick([n for n in SIZES if n > 1]) for k in g.sizes} for _ in range(2)) if dyn else ()
    sizes = g.sizes
    if g.number is not None:
        sizes = {**sizes, "s": g.number}
        others = tuple({**other, "s": g.pick([*NUMBERS, 2])} for other in others)
    return Program(
        tuple(g.inputs),
        sizes,
        tuple(g.lines),
        tuple(v.name for v in outputs),
        tuple(v.exact for v in outputs),
        tuple(v.exact for v in g.values if v.name.startswith("x")),
        back,
        dyn,
        others,
    )
