"""Random Tensor IR: lowered with all passes, with some left out, and under random schedules, by the interpreters and by compiled code.

The interpreter of the level at which a program is written is the reference. In exact mode it and those of the levels below compute in
float64, so that only the order of sums may differ; compiled programs are judged by the rounding of their dtype.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from opinfo.units import moved

from deplo import _C
from deplo.errors import InternalError, UnsupportedError
from fuzz.schedules import random_schedules

EXTENTS = (3, 2, 4, 1, 5, 8, 7, 16, 17, 33, 40)
MOST_POINTS = 4000
MOST_OPS = 9
SCHEDULES = 2  # random ones of each program
MOVE = 2.0**-40
MOST_AMPLIFICATION = 1e5  # of which float64 keeps 1e-16 * 1e5 and float32 some 1e-7 * 1e5
UNARY = ("neg", "abs", "tanh", "sin", "cos", "exp")
BINARY = ("add", "sub", "mul", "max", "min")
VIEWS = ("permute", "slice", "pad", "broadcast", "flip", "stride", "merge", "split", "concat", "divide")
# Of the symbol t, and values of it: what divides and steps by it is right for either sign, where its range says it and where not.
RANGES = {"-9..-1": (-3, -1, -2, -4, -9), "..-1": (-2, -7, -17), "-40..-2": (-5, -40), "-9..9": (-3, -9, 2, 9), "..": (-2, 3)}

Given = torch.Tensor | int


@dataclasses.dataclass(frozen=True)
class IrProgram:
    """IR text over the symbols s0, a size, and maybe t, an input of its own; passes to leave out and a seed for schedules."""

    text: str
    shapes: tuple[tuple[int | str, ...], ...]  # sizes may be expressions
    s0: int
    disabled: tuple[str, ...]
    schedule_seed: int
    dtypes: tuple[str, ...] = ()  # of the inputs, f32 unless said; i64<n is an index below n
    t: int | None = None

    def inputs(self) -> list[Given]:
        generator = torch.Generator().manual_seed(0)
        sizes = [[size_of(d, self.s0, self.t) for d in shape] for shape in self.shapes]
        made = [torch.rand(size, generator=generator, dtype=torch.float64).mul(2).sub(1) for size in sizes]
        tensors = [_as(t, dtype) for t, dtype in zip(made, self.dtypes or ("f32",) * len(made), strict=True)]
        return tensors if self.t is None else [self.t, *tensors]

    def __repr__(self) -> str:
        return f"s0={self.s0}, t={self.t}, without {', '.join(self.disabled) or 'nothing'}, schedules {self.schedule_seed}\n{self.text}"


def size_of(d: int | str, s0: int, t: int | None) -> int:
    return d if isinstance(d, int) else int(eval(d, {"s0": s0, "t": t}))


def where(text: str, t_range: str) -> str:
    """The ranges of the symbols that a text names."""
    ranges = {"s0": "1..64", "t": t_range}
    named = [f"{name} in {ranges[name]}" for name in ranges if re.search(rf"\b{name}\b", text)]
    return f" where {', '.join(named)}" if named else ""


def _as(t: torch.Tensor, dtype: str) -> torch.Tensor:
    name, _, bound = dtype.partition("<")
    if bound:
        return ((t + 1) / 2 * int(bound)).long().clamp(0, int(bound) - 1)
    return t.to({"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}[name])


class Grower:
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.s0 = self.pick(EXTENTS)
        self.t_range, self.t = drawn_symbol(self.pick, self.integer)
        self.lines: list[str] = []
        self.values: list[tuple[str, tuple[int | str, ...]]] = []
        self.shapes: list[tuple[int | str, ...]] = []

    def pick(self, items: Any) -> Any:
        return self.draw(st.sampled_from(list(items)))

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def size(self, d: int | str) -> int:
        return size_of(d, self.s0, self.t)

    def negative(self) -> list[str]:
        """Sizes that are the opposite of t, where it is below 0 by its range."""
        return ["(0 - t)"] if self.t_range.endswith(("-1", "-2")) else []

    def points(self, shape: tuple[int | str, ...]) -> int:
        return math.prod(self.size(d) for d in shape)

    def value(self) -> tuple[str, tuple[int | str, ...]]:
        found: tuple[str, tuple[int | str, ...]] = self.pick(self.values[::-1])
        return found

    def add_input(self) -> None:
        shape = tuple(self.pick(["s0", *EXTENTS[:8], *self.negative()]) for _ in range(self.pick([2, 1, 3])))
        if self.points(shape) > MOST_POINTS:
            shape = shape[:1]
        self.shapes.append(shape)
        self.values.append((f"%x{len(self.shapes) - 1}", shape))

    def add(self, shape: tuple[int | str, ...], text: str) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"  {name}: f32[{', '.join(map(str, shape))}] = {text}")
        self.values.append((name, shape))
        return name

    def map(self, shape: tuple[int | str, ...], index: list[str], source: str, tail: str = "") -> str:
        axes = ", ".join(f"i{k}" for k in range(len(shape)))
        return self.add(shape, f"map ({axes}) -> {source}[{', '.join(index)}]{tail}")

    def grow(self) -> None:
        ops = [self.unary, self.binary, self.binary, self.reduce, self.reduce, self.view, self.view, self.contract, self.contract, self.scan]
        self.pick(ops if self.t is None else [*ops, *[self.view_by_symbol] * 5])()

    def unary(self) -> None:
        v, shape = self.value()
        self.add(shape, f"{self.pick(UNARY)}({v})")

    def binary(self) -> None:
        v, shape = self.value()
        others = [w for w, other in self.values if other == shape]
        self.add(shape, f"{self.pick(BINARY)}({v}, {self.pick(others)})")

    def reduce(self) -> None:
        v, shape = self.value()
        if not shape:
            return
        axes = sorted({self.integer(0, len(shape) - 1) for _ in range(self.pick([1, 2]))})
        kept = tuple(d for k, d in enumerate(shape) if k not in axes)
        made = self.add(kept, f"reduce {self.pick(['sum', 'max', 'min'])}({v}) axes=[{', '.join(map(str, axes))}]")
        if self.integer(0, 1):  # and back, as in a softmax
            self.map(shape, [f"i{k}" for k in range(len(shape)) if k not in axes], made)

    def scan(self) -> None:
        v, shape = self.value()
        if shape and self.integer(0, 2) == 2:
            self.add(shape, f"scan sum({v}) axis={self.integer(0, len(shape) - 1)}")

    def contract(self) -> None:
        v, shape = self.value()
        if len(shape) != 2:
            return
        partners = [(w, other) for w, other in self.values if len(other) == 2 and other[-1] == shape[-1]]
        if self.integer(0, 1):
            self.shapes.append((self.pick(["s0", 17, 33, 16, 40]), shape[-1]))
            partners = [(f"%x{len(self.shapes) - 1}", self.shapes[-1])]
        w, other = self.pick(partners)
        full = (shape[0], other[0], shape[1])
        if self.points(full) > 4 * MOST_POINTS:
            return
        a = self.map(full, ["i0", "i2"], v)
        b = self.map(full, ["i1", "i2"], w)
        self.add(full, f"mul({a}, {b})")
        self.add(full[:2], f"reduce sum(%v{len(self.lines) - 1}) axes=[2]")
        self.values = [x for x in self.values if len(x[1]) < 3 or self.points(x[1]) <= MOST_POINTS]

    def view_by_symbol(self) -> None:
        self.view(["divide", *["down", "shift", "broadcast"] * len(self.negative())])

    def view(self, kinds: Sequence[str] = VIEWS) -> None:
        v, shape = self.value()
        rank = len(shape)
        index = [f"i{k}" for k in range(rank)]
        kind = self.pick(kinds)
        at = self.integer(0, rank - 1) if rank else 0
        extent = shape[at] if rank else 0
        if kind == "broadcast" and rank < 4:
            grown = (*shape[:at], self.pick([*EXTENTS[:5], *self.negative()]), *shape[at:])
            if self.points(grown) <= MOST_POINTS:
                self.map(grown, [f"i{k + (k >= at)}" for k in range(rank)], v)
        if not rank:
            return
        if kind == "permute":
            order = list(self.draw(st.permutations(range(rank))))
            self.map(tuple(shape[k] for k in order), [f"i{order.index(k)}" for k in range(rank)], v)
        elif kind == "flip":
            index[at] = f"{extent} - 1 - i{at}"
            self.map(shape, index, v)
        elif kind == "pad":
            before, after = self.integer(0, 2), self.integer(0, 2)
            padded = (*shape[:at], extent + before + after if isinstance(extent, int) else f"{extent} + {before + after}", *shape[at + 1 :])
            if not isinstance(extent, int):
                return
            index[at] = f"i{at} - {before}"
            self.map(padded, index, v, f" if i{at} - {before} >= 0 and {before + extent} - 1 - i{at} >= 0 else 0.5")
        elif kind == "divide":  # by what is or may be below 0
            divisors = ["-2", "-3", "-7", *(["(s0 - 70)", "(0 - s0)"] if any("s0" in x for x in self.shapes) else [])]
            dividends = [f"(i{at} - {self.integer(0, 5)})"]
            if self.t is not None:
                divisors += ["t", "t", "(t*2 - 1)"]
                dividends += [f"(i{at} + t)", "t", f"(t*3 - i{at})"]
            value = f"{self.pick(dividends)} {self.pick(['//', '%'])} {self.pick(divisors)}"
            index[at] = f"max(min({self.pick(['0 - ', '3 + '])}({value}), {extent} - 1), 0)"
            self.map(shape, index, v)
        elif kind == "down":  # from the end, in steps of t
            index[at] = f"{extent} - 1 + i{at}*t"
            self.map((*shape[:at], f"(0 - {extent} // t)", *shape[at + 1 :]), index, v)
        elif kind == "shift":
            moved = (*shape[:at], f"({extent} - t)", *shape[at + 1 :])
            index[at] = f"i{at} + t"
            if self.points(moved) <= MOST_POINTS:
                self.map(moved, index, v, f" if i{at} + t >= 0 else 0.5")
        elif isinstance(extent, int) and kind == "slice" and extent > 1:
            start = self.integer(0, extent - 1)
            index[at] = f"i{at} + {start}"
            self.map((*shape[:at], extent - start, *shape[at + 1 :]), index, v)
        elif isinstance(extent, int) and kind == "stride" and extent > 1:
            index[at] = f"i{at}*2"
            self.map((*shape[:at], (extent + 1) // 2, *shape[at + 1 :]), index, v)
        elif isinstance(extent, int) and kind == "split" and extent % 2 == 0:
            inner = [f"i{k + (k > at)}" for k in range(rank)]
            inner[at] = f"i{at}*2 + i{at + 1}"
            self.map((*shape[:at], extent // 2, 2, *shape[at + 1 :]), inner, v)
        elif kind == "merge" and at + 1 < rank and isinstance(shape[at + 1], int):
            inner_extent = shape[at + 1]
            merged = extent * inner_extent if isinstance(extent, int) else f"{extent}*{inner_extent}"
            if not isinstance(merged, int):
                return
            index = [f"i{k - (k > at)}" for k in range(rank)]
            index[at], index[at + 1] = f"i{at} // {inner_extent}", f"i{at} % {inner_extent}"
            self.map((*shape[:at], merged, *shape[at + 2 :]), index, v)
        elif kind == "concat" and isinstance(extent, int):
            twice = (*shape[:at], 2 * extent, *shape[at + 1 :])
            others = [w for w, other in self.values if other == shape]
            if self.points(twice) <= MOST_POINTS:
                back = list(index)
                back[at] = f"i{at} - {extent}"
                tail = f" if {extent} - 1 - i{at} >= 0 | {self.pick(others)}[{', '.join(back)}] if i{at} - {extent} >= 0 else 0.0"
                self.map(twice, index, v, tail)


PASSES = [row["name"] for row in _C.passes() if row["level"] in ("tensor", "loop") and row["name"] not in ("name_kernels",)]


def drawn_symbol(pick: Callable[[Any], Any], integer: Callable[[int, int], int]) -> tuple[str, int | None]:
    """The range of t and its value; or none."""
    if not integer(0, 1):
        return "", None
    t_range = pick(RANGES)
    return t_range, pick(RANGES[t_range])


def drawn_passes(pick: Callable[[Any], Any], integer: Callable[[int, int], int]) -> tuple[str, ...]:
    """Passes to leave out."""
    return tuple(sorted({pick(PASSES) for _ in range(integer(0, 4))}))


@st.composite
def ir_programs(draw: Callable[[Any], Any]) -> IrProgram:
    g = Grower(draw)
    for _ in range(g.integer(1, 3)):
        g.add_input()
    while len(g.lines) < MOST_OPS and (not g.lines or g.integer(0, 11) > 0):
        before = len(g.lines)
        g.grow()
        if len(g.lines) == before and not g.lines:
            g.unary()
    results = [g.values[-1]] + [v for v in g.values[:-1] if v[0].startswith("%v") and g.integer(0, 3) == 3]
    inputs = [f"%x{k}: f32[{', '.join(map(str, shape))}] user" for k, shape in enumerate(g.shapes)]
    signature = ", ".join(inputs if g.t is None else ["t: sym", *inputs])
    outputs = ", ".join(f"{name} strides [{', '.join(_strides(shape))}]" for name, shape in results)
    text = "\n".join([f"tensor @fuzz({signature}){where(signature, g.t_range)}", *g.lines, f"  return {outputs}"]) + "\n"
    return IrProgram(text, tuple(g.shapes), g.s0, drawn_passes(g.pick, g.integer), g.integer(0, 1 << 16), t=g.t)


def _strides(shape: tuple[int | str, ...]) -> list[str]:
    return ["*".join(map(str, shape[k + 1 :])) or "1" for k in range(len(shape))]


class IrWrong(AssertionError):
    """Two levels, two pipelines or two schedules give other numbers; `text` is the IR that does."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


def check_ir(program: IrProgram) -> bool:
    """Raises IrWrong where a lowering, a pass or a schedule changes a number. Returns whether the program has numbers to be judged by."""
    inputs = program.inputs()
    wanted = _C.interpret(program.text, inputs, "exact")
    if not _has_digits(program.text, inputs, wanted):
        return False
    for disabled in {(), program.disabled}:
        options = json.dumps({"disable": list(disabled), "verify": True, "cache_dir": ""})
        for level in ("loop", "tile", "kernel"):
            # Kernel IR before expand_math: its exact mode knows no polynomials.
            there = json.dumps({"disable": sorted({*disabled, "expand_math"}), "verify": True, "cache_dir": ""})
            lowered = _lowered(program.text, level, there)
            what = f"{level} IR without {', '.join(disabled) or 'nothing'}"
            _compare(_interpreted(lowered, inputs, what, program.text), wanted, 1e-9, what, program.text)
        _run(program.text, inputs, wanted, options, f"compiled without {', '.join(disabled) or 'nothing'}")
    rng = random.Random(program.schedule_seed)
    loop, tile = (_lowered(program.text, level, '{"cache_dir": ""}') for level in ("loop", "tile"))
    for _ in range(SCHEDULES):
        schedules = random_schedules(loop, tile, lambda given: str(_C.lower(program.text, "tile", _under(given))), rng)
        what = f"under schedules {schedules}"
        for level in ("tile", "kernel"):
            there = _lowered(program.text, level, _under(schedules, ["expand_math"]))
            _compare(_interpreted(there, inputs, f"{level} IR {what}", program.text), wanted, 1e-9, f"{level} IR {what}", program.text)
        _run(program.text, inputs, wanted, _under(schedules), f"compiled {what}")
    return True


def _has_digits(text: str, inputs: list[Given], wanted: list[torch.Tensor]) -> bool:
    """Whether float64 keeps nine digits of the results in any order of sums, and float32 its range.

    Not so for sin(exp(a sum of 72 terms)): the program itself says so, without a look at what deplo makes of it. Inputs that move by a share
    MOVE of themselves move no result by more than MOST_AMPLIFICATION times that share of its scale; the interpreter of the level
    at which it is written, rounding as the dtypes say, stays finite.
    """
    if any(not t.isfinite().all() or (t.numel() and t.abs().max() > 1e6) for t in wanted):
        return False
    if any(not t.isfinite().all() for t in _C.interpret(text, inputs, "typed")):
        return False
    generator = torch.Generator().manual_seed(1)

    def nearby(t: Given) -> Given:
        if isinstance(t, int) or not t.is_floating_point():
            return t
        return t.double() * (1 + MOVE * (2 * torch.rand(t.shape, generator=generator).double() - 1))

    there = [nearby(t) for t in inputs]
    moved_results = _C.interpret(re.sub(r"\b(f32|bf16)\b", "f64", text), there, "exact")
    return all(
        not b.numel() or bool((a - b).abs().max() <= MOST_AMPLIFICATION * MOVE * max(1.0, float(b.abs().max())))
        for a, b in zip(moved_results, wanted, strict=True)
    )


def _under(schedules: dict[str, str], disabled: Sequence[str] = ()) -> str:
    return json.dumps({"schedule": schedules, "disable": list(disabled), "verify": True, "cache_dir": ""})


def _interpreted(lowered: str, inputs: list[Given], what: str, text: str) -> list[torch.Tensor]:
    try:
        results: list[torch.Tensor] = _C.interpret(lowered, inputs, "exact")
    except InternalError as error:  # an access outside of a buffer
        raise IrWrong(f"{what}: {error}", text) from error
    return results


def _lowered(text: str, level: str, options: str) -> str:
    try:
        return str(_C.lower(text, level, options))
    except UnsupportedError:
        raise
    except Exception as error:
        raise IrWrong(f"lowering to {level}: {type(error).__name__}: {error}", text) from error


def _run(text: str, inputs: list[Given], wanted: list[torch.Tensor], options: str, what: str) -> None:
    try:
        got = _C.compile(text, options).run(inputs)
    except Exception as error:
        raise IrWrong(f"{what}: {type(error).__name__}: {error}", text) from error
    # Chains of nine operations on sums of up to a few thousand terms; a wrong index is off by far more.
    _compare([t.double() for t in got], wanted, 1e-4, what, text, lambda: _rounding(text, inputs, wanted))


def _rounding(text: str, inputs: list[Given], wanted: list[torch.Tensor]) -> list[float]:
    """How far rounding alone brings each result from `wanted`: that of every operation to its dtype, of inputs that are moved by an ulp, too."""
    farthest = [0.0] * len(wanted)
    for turn in range(4):
        generator = torch.Generator().manual_seed(turn)
        there = [t if isinstance(t, int) else moved(t, generator) for t in inputs] if turn else inputs
        for k, (t, exact) in enumerate(zip(_C.interpret(text, there, "typed"), wanted, strict=True)):
            if t.numel():
                farthest[k] = max(farthest[k], float((t.double() - exact).abs().nan_to_num(0.0, 0.0, 0.0).max()))
    return farthest


def _compare(
    got: list[torch.Tensor],
    wanted: list[torch.Tensor],
    tolerance: float,
    what: str,
    text: str,
    rounding: Callable[[], list[float]] | None = None,
) -> None:
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if a.shape != b.shape:
            raise IrWrong(f"{what}: result {k} has the shape {tuple(a.shape)}, not {tuple(b.shape)}", text)
        scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        if b.numel() and not (a - b).abs().max() <= tolerance * scale:
            if rounding is not None and (a - b).abs().max() <= tolerance * scale + 4 * rounding()[k]:
                continue  # sin of a large sum
            at = tuple(torch.argmax((a - b).abs().nan_to_num(math.inf)).unsqueeze(0).tolist())
            raise IrWrong(f"{what}: result {k} is {a.flatten()[at[0]]:.9g} for {b.flatten()[at[0]]:.9g} at element {at[0]}", text)
