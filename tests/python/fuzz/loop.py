"""Random Loop IR: nests with guards, reductions, scans, local buffers, combining stores, indices of data and several kernels, judged like Tensor IR.

Accesses are in range by construction, for every size that a symbol may have; outputs are stored as a whole before anything reads them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from fuzz.ir import IrProgram, drawn_passes, drawn_symbol, size_of, where

Size = int | str
EXTENTS: tuple[Size, ...] = (3, 2, "s0", 4, 1, 5, 8, "s0", 7, 16, 17, 33)
MOST_POINTS = 3000
SMOOTH = ("tanh", "sin", "cos", "neg", "abs", "exp")
BINARY = ("add", "sub", "mul", "max", "min")


@dataclasses.dataclass(frozen=True)
class Place:
    """A buffer that a kernel may read: its parameter's name is its own."""

    name: str
    shape: tuple[Size, ...]
    dtype: str = "f32"
    index_into: int = 0  # of i64: values are below it


@dataclasses.dataclass
class Block:
    """Statements at one depth, the axes around them and what is defined there."""

    lines: list[str]
    indent: str
    axes: list[tuple[str, Size]]
    values: list[str]  # f32 values
    exact: list[str]  # f32 values that are the same in every precision: comparisons of them have one answer
    indices: list[tuple[str, int]]  # i64 values in 0..n
    locals: list[Place]

    def inside(self, axes: list[tuple[str, Size]]) -> Block:
        return Block(self.lines, self.indent + "  ", [*self.axes, *axes], list(self.values), list(self.exact), list(self.indices), list(self.locals))

    def put(self, text: str) -> None:
        self.lines.append(self.indent + text)


class Grower:
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.s0 = int(self.pick((3, 2, 4, 1, 5, 8, 7, 16, 17)))
        self.t_range, self.t = drawn_symbol(self.pick, self.integer)
        self.extents = (*EXTENTS, *["(0 - t)"] * 3) if self.t_range.endswith(("-1", "-2")) else EXTENTS
        self.count = 0
        self.places: list[Place] = []
        self.budget = MOST_POINTS

    def pick(self, items: Any) -> Any:
        return self.draw(st.sampled_from(list(items)))

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def fresh(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def size(self, d: Size) -> int:
        return size_of(d, self.s0, self.t)

    def points(self, sizes: list[Size]) -> int:
        product = 1
        for d in sizes:
            product *= self.size(d)
        return product

    def new_axes(self, most: int, around: list[tuple[str, Size]]) -> list[tuple[str, Size]]:
        found = []
        for _ in range(self.integer(1, most)):
            extent = self.pick(self.extents)
            if self.points([e for _, e in [*around, *found]] + [extent]) <= self.budget:
                found.append((self.fresh("i"), extent))
        return found or [(self.fresh("i"), 2)]

    # Expressions that lie in 0..extent, and what must hold for that.

    def coordinate(self, b: Block, extent: Size) -> tuple[str, str]:
        at: list[tuple[str, str]] = [("0", "")]
        for name, n in b.axes:
            by = self.pick([-2, -3, "(s0 - 70)", "(0 - s0)", *(["t", "t", "(t*2 - 1)"] if self.t is not None else [])])
            value = self.pick([f"{name} - {self.integer(0, 4)}", *([f"{name} + t", f"t*2 - {name}"] if self.t is not None else [])])
            at.append((f"max(min({self.pick(['0 - ', '2 + '])}(({value}) {self.pick(['//', '%'])} {by}), {extent} - 1), 0)", ""))
            if n == extent:
                at += [(name, "")] * 4 + [(f"{extent} - 1 - {name}", "")]
                at += [(f"{name} - 1", f"{name} - 1 >= 0"), (f"{name} + 2", f"{extent} - 3 - {name} >= 0")]
                if isinstance(extent, int) and extent > 1:
                    at.append((f"({name} + {self.integer(1, extent)}) % {extent}", ""))
            elif isinstance(extent, int):
                at.append((f"{name} % {extent}", ""))
                at.append((f"min({name}, {extent - 1})", ""))
                if isinstance(n, int):
                    if n < extent:
                        at += [(f"{name} + {self.integer(0, extent - n)}", ""), (f"{extent - 1} - {name}", "")]
                    if 2 * n - 1 <= extent:
                        at.append((f"{name}*2", ""))
                    if n <= 2 * extent:
                        at.append((f"{name} // 2", ""))
                    at += [(f"{inner}*{n} + {name}", "") for inner, m in b.axes if isinstance(m, int) and m * n <= extent and inner != name]
            elif isinstance(n, int):
                at.append((name, f"{extent} - 1 - {name} >= 0"))
        at += [(name, f"{name} >= 0 and {extent - 1} - {name} >= 0") for name, n in b.indices if isinstance(extent, int) and n <= extent]
        chosen: tuple[str, str] = self.pick(at[::-1])
        return chosen

    def load(self, b: Block) -> str:
        place = self.pick([p for p in [*self.places, *b.locals, *b.locals] if p.dtype != "i64"])
        pairs = [self.coordinate(b, d) for d in place.shape]
        guard = " and ".join(g for _, g in pairs if g)
        name = self.fresh("v")
        tail = f" if {guard} else {self.pick(['0.0', '0.5', '-2.0'])}" if guard else ""
        b.put(f"{name} = load {place.name}[{', '.join(i for i, _ in pairs)}]{tail}")
        if place.dtype != "f32":
            wide = self.fresh("v")
            b.put(f"{wide}: f32 = cast({name})")
            name = wide
        b.values.append(name)
        if place.name.startswith("x"):
            b.exact.append(name)
        return name

    def gather(self, b: Block) -> None:
        tables = [p for p in self.places if p.dtype == "i64"]
        if not tables:
            return
        place = self.pick(tables)
        pairs = [self.coordinate(b, d) for d in place.shape]
        guard = " and ".join(g for _, g in pairs if g)
        name = self.fresh("n")
        b.put(f"{name} = load {place.name}[{', '.join(i for i, _ in pairs)}]" + (f" if {guard} else 0" if guard else ""))
        b.put(f"check {name} >= 0 else index_out_of_range")
        b.put(f"check {place.index_into - 1} - {name} >= 0 else index_out_of_range")
        b.indices.append((name, place.index_into))

    def compute(self, b: Block) -> str:
        kind = self.pick(["load", "load", "unary", "binary", "binary", "select", "constant", "index"])
        if kind == "load" or not b.values:
            return self.load(b)
        name = self.fresh("v")
        if kind == "unary":
            b.put(f"{name} = {self.pick(SMOOTH)}({self.pick(b.values)})")
        elif kind == "binary":
            b.put(f"{name} = {self.pick(BINARY)}({self.pick(b.values)}, {self.pick(b.values)})")
        elif kind == "constant":
            b.put(f"{name}: f32 = constant {self.pick(['2.0', '0.5', '-1.0'])}")
            b.exact.append(name)
        elif kind == "index":
            whole = self.fresh("n")
            b.put(f"{whole}: i32 = index {self.coordinate(b, 64)[0]}" if b.axes else f"{whole}: i32 = constant 3")
            b.put(f"{name}: f32 = cast({whole})")
            b.exact.append(name)
        elif len(b.exact) < 2:
            return self.load(b)
        else:
            test = self.fresh("c")
            b.put(f"{test} = {self.pick(['lt', 'ge', 'eq'])}({self.pick(b.exact)}, {self.pick(b.exact)})")
            b.put(f"{name} = where({test}, {self.pick(b.values)}, {self.pick(b.values)})")
        b.values.append(name)
        return name

    def statements(self, b: Block, depth: int) -> None:
        for _ in range(self.integer(1, 3)):
            kind = self.pick(["compute", "compute", "compute", "reduce", "reduce", "local", "gather"])
            if kind == "gather":
                self.gather(b)
            elif kind == "reduce":
                self.reduce(b, depth)
            elif kind == "local" and depth:
                self.local(b)
            else:
                self.compute(b)

    def reduce(self, b: Block, depth: int) -> None:
        axes = self.new_axes(2, b.axes)
        results = [self.fresh("r"), self.fresh("r")]
        lines = b.lines
        inner = b.inside(axes)
        inner.lines = []
        for _ in range(self.integer(1, 2)):
            self.compute(inner)
        if depth > 1 and self.integer(0, 4) == 4:
            self.reduce(inner, depth - 1)
        operand = self.pick(inner.values[-2:][::-1])
        kind = self.pick(["sum", "sum", "max", "min", "argmax", "welford"])
        if kind == "argmax":
            operand = self.load(inner)
            if operand not in inner.exact:
                kind = "max"
        flat = self.fresh("n")
        if kind == "argmax":
            place = ""
            for name, extent in axes:
                place = f"({place})*{extent} + {name}" if place else name
            inner.put(f"{flat}: i64 = index {place}")
            head = f"{results[0]}: f32, {results[1]}: i64 = argmax({operand}, {flat})"
        elif kind == "welford":
            head = f"{results[0]}: f32, {results[1]}: f32 = welford({operand})"
        else:
            head = f"{results[0]}: f32 = {kind}({operand})"
        lines.append(f"{b.indent}reduce {head} over {', '.join(f'{name} in {extent}' for name, extent in axes)}:")
        lines += inner.lines
        b.values.append(results[0])
        if kind == "argmax":
            b.exact.append(results[0])
            extents = [extent for _, extent in axes]
            if all(isinstance(e, int) for e in extents):
                b.indices.append((results[1], self.points(extents)))
        if kind == "welford":
            b.values.append(results[1])

    def local(self, b: Block) -> None:
        axes = [(self.fresh("i"), self.pick([4, 3, 8, 5, 17])) for _ in range(self.pick([1, 1, 2]))]
        if self.points([e for _, e in [*b.axes, *axes]]) > self.budget:
            return
        place = Place(self.fresh("t"), tuple(extent for _, extent in axes))
        b.put(f"local {place.name}: f32[{', '.join(str(d) for d in place.shape)}]")
        self.nest(b, axes, lambda inner: inner.put(f"store {place.name}[{', '.join(name for name, _ in axes)}] = {self.computed(inner)}"))
        b.locals.append(place)

    def computed(self, b: Block) -> str:
        for _ in range(self.integer(1, 3)):
            last = self.compute(b)
        return last

    def nest(self, b: Block, axes: list[tuple[str, Size]], body: Callable[[Block], None]) -> None:
        at = b
        for name, extent in axes:
            at.put(f"for {name} in {extent}:")
            inner = at.inside([(name, extent)])
            inner.lines = b.lines
            at = inner
        body(at)

    # Kernels.

    def kernel(self, number: int, is_output: bool) -> tuple[str, Place, str]:
        shape = tuple(extent for _, extent in self.new_axes(3, []))
        out = Place(f"{'y' if is_output else 't'}{number}b", shape)
        b = Block([], "  ", [], [], [], [], [])
        kind = self.pick(["points", "points", "points", "halves", "scatter", "scan"])
        axes = [(self.fresh("i"), extent) for extent in shape]
        index = ", ".join(f"{name}" if self.integer(0, 5) else f"{extent} - 1 - {name}" for name, extent in axes)
        order = list(self.draw(st.permutations(axes)))
        if kind == "scan":
            self.scan(b, out, axes)
        elif kind == "scatter":
            self.nest(b, order, lambda inner: inner.put(f"store {out.name}[{index}] = {self.computed(inner)}"))
            self.scatter(b, out)
        else:
            inner_count = self.integer(0, 1) if len(order) > 1 else 0  # statements between loops
            outer, rest = order[: len(order) - inner_count], order[len(order) - inner_count :]

            def store(inner: Block) -> None:
                value = self.computed(inner)
                if kind == "halves":
                    name = axes[0][0]
                    inner.put(f"store {out.name}[{index}] = {value} if {name} - 1 >= 0")
                    inner.put(f"store {out.name}[{index}] = {self.computed(inner)} if 0 - {name} >= 0")
                else:
                    inner.put(f"store {out.name}[{index}] = {value}")

            def middle(inner: Block) -> None:
                self.statements(inner, 2)
                self.nest(inner, rest, store) if rest else store(inner)

            self.nest(b, outer, middle)
        used = [p for p in self.places if re.search(rf"\b{p.name}\[", "\n".join(b.lines))]
        params = [f"{p.name}: {p.dtype}[{', '.join(map(str, p.shape))}]" for p in used]
        params.append(f"out {out.name}: f32[{', '.join(map(str, shape))}]")
        symbols = where("\n".join([*params, *b.lines]), self.t_range)
        text = "\n".join([f"loop @k{number}({', '.join(params)}){symbols}", *b.lines]) + "\n"
        return text, out, f"  call @k{number}({', '.join([*(p.name for p in used), out.name])})"

    def scan(self, b: Block, out: Place, axes: list[tuple[str, Size]]) -> None:
        along = axes[self.integer(0, len(axes) - 1)]

        def body(inner: Block) -> None:
            result = self.fresh("r")
            lines = inner.lines
            deep = inner.inside([along])
            deep.lines = []
            value = self.computed(deep)
            lines.append(f"{inner.indent}scan {result}: f32 = {self.pick(['sum', 'max', 'min'])}({value}) over {along[0]} in {along[1]}:")
            lines += deep.lines
            lines.append(f"{inner.indent}then:")
            after = inner.inside([along])
            after.lines = lines
            after.put(f"store {out.name}[{', '.join(name for name, _ in axes)}] = {result}")

        self.nest(b, [axis for axis in axes if axis is not along], body)

    def scatter(self, b: Block, out: Place) -> None:
        """Combines colliding stores into what was stored before."""
        axes = self.new_axes(2, [])
        combiner = self.pick(["sum", "max", "min"])

        def body(inner: Block) -> None:
            value = self.computed(inner)
            self.gather(inner)
            pairs = [self.coordinate(inner, d) for d in out.shape]
            guard = " and ".join(g for _, g in pairs if g)
            inner.put(f"store {combiner} {out.name}[{', '.join(i for i, _ in pairs)}] = {value}" + (f" if {guard}" if guard else ""))

        self.nest(b, axes, body)


@st.composite
def loop_programs(draw: Callable[[Any], Any]) -> IrProgram:
    g = Grower(draw)
    for k in range(g.integer(1, 3)):
        shape = tuple(extent for _, extent in g.new_axes(3, []))
        g.places.append(Place(f"x{k}b", shape, g.pick(["f32", "f32", "f32", "f64", "bf16"])))
    if g.integer(0, 2) == 2:
        g.places.append(Place("d0b", (g.pick(g.extents),), "i64", g.pick([5, 2, 8])))
    inputs = list(g.places)
    kernels, calls, made = [], [], []
    for k in range(g.integer(1, 3)):
        text, out, call = g.kernel(k, False)
        kernels.append(text)
        calls.append(call)
        made.append(out)
        g.places.append(out)
    returned = [made[-1], *[p for p in made[:-1] if g.integer(0, 2) == 2]]

    def typed(p: Place) -> str:
        return f"{p.name}: {p.dtype}[{', '.join(map(str, p.shape))}]"

    if "s0" in "\n".join(kernels) and not any("s0" in p.shape for p in inputs):
        inputs.append(Place("x9b", ("s0",)))
    signature = ", ".join([*(["t: sym"] if g.t is not None else []), *(f"{typed(p)} user" for p in inputs)])
    lines = [f"program @fuzz({signature}){where(signature, g.t_range)}"]
    lines += [f"  buffer {typed(p)}{' output' if p in returned else ''}" for p in made]
    lines += [*calls, f"  return {', '.join(p.name for p in returned)}", ""]
    text = "\n".join(lines) + "\n" + "\n".join(kernels)
    dtypes = tuple(f"i64<{p.index_into}" if p.dtype == "i64" else p.dtype for p in inputs)
    return IrProgram(text, tuple(p.shape for p in inputs), g.s0, drawn_passes(g.pick, g.integer), g.integer(0, 1 << 16), dtypes, g.t)
