"""FX graphs of ATen overloads, as AOTAutograd makes them, to Torch IR text.

Every argument is kept under its schema name; sizes and strides stay symbolic; `copy_` to an input becomes a `write`;
results of multi-output ops are named in place of `getitem`; nodes that compute symbolic integers become expressions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from . import sizes, tf32
from .attention_calls import call_of, name_attention
from .errors import UnsupportedError
from .fx_nodes import function_of, packet_name, provenance, storage_of, where
from .fx_strides import strides_of
from .imported import Imported, Output, Smaller, ViewStep
from .inputs import InputInfo, placeholder_info, takes_bases
from .targets import Target, find_target, target_of_tensors

DTYPES = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3",
}

# Checks of metadata that is constant in a traced graph; they return nothing.
_METADATA_CHECKS = {"aten._assert_tensor_metadata.default"}

# What Python divides numbers by; a divisor of 0 raises ZeroDivisionError.
_DIVISIONS = (operator.floordiv, operator.mod, operator.truediv)

# Up to which sizes a graph that gets all has programs of their own, and what those are scheduled for: a row (of a matrix, a token) or two, a few,
# many.
_SMALLER = ((2, 2), (32, 3))
_LARGE = 128

# Packets that address the storage of their argument, not its elements.
BY_STORAGE = ("as_strided", "as_strided_copy", "as_strided_scatter")


def import_graph(
    gm: torch.fx.GraphModule, name: str, inputs: Sequence[InputInfo] = (), static: set[str] | None = None, target: str = "", splits: bool = True
) -> Imported:
    """Torch IR of `gm`, whose nodes carry fake tensors in `meta["val"]`.

    `inputs` says what the inputs of Dynamo's graph are, `static` which placeholders keep their storage; an empty `target` follows from where the
    graph's tensors are (home_of). With `splits`, calls of few rows may get programs of their own (Imported.smaller). Raises UnsupportedError for what
    Torch IR cannot say (complex and quantised dtypes, sparse layouts, tensors on several devices, higher-order ops, sizes that depend on data).
    """
    name_attention(gm)
    return _Importer(gm, name, inputs, static, target).run(splits)


def refusals(gm: torch.fx.GraphModule, target: str = "") -> dict[torch.fx.Node, str]:
    """The nodes that Torch IR cannot say, with the reason for each. A node fails too if it reads a tensor that cannot be typed."""
    name_attention(gm)
    importer = _Importer(gm, "part", (), None, target)
    refused: dict[torch.fx.Node, str] = {}
    for position, node in enumerate(gm.graph.nodes):
        try:
            if node.op == "placeholder":
                importer._placeholder(node, position, False)
            elif node.op == "get_attr":
                importer._constant(node)
            elif node.op == "call_function" and node not in importer.names:
                importer._call(node)
        except UnsupportedError as error:
            refused[node] = str(error)
            importer._name_if_typed(node)
    return refused


def home_of(gm: torch.fx.GraphModule) -> torch.device:
    """The device whose target compiles the graph: the first one that is not the CPU, if a tensor is on one. Numbers may be on the CPU."""
    for node in gm.graph.nodes:
        for value in [*_tensors(node.meta.get("val")), *_tensors(node.meta.get("example_value"))]:
            if value.device.type not in ("cpu", "meta"):
                return _place(value)
    return torch.device("cpu")


def _place(tensor: torch.Tensor) -> torch.device:
    """Its device, with the number that is left out where it is 0."""
    device = tensor.device  # a fake tensor takes its time to say
    return device if device.type == "cpu" else torch.device(device.type, device.index or 0)


def _target_for(home: torch.device, name: str) -> Target:
    """The target named, or that of the graph's device."""
    found = None if name or home.type == "cpu" else target_of_tensors(home.type)
    target = found or find_target(name)
    if home.type not in ("cpu", target.tensors):
        raise UnsupportedError(f"its tensors are on {home}, the target is {target.name}")
    return target


class _Importer:
    def __init__(self, gm: torch.fx.GraphModule, name: str, inputs: Sequence[InputInfo], static: set[str] | None, target: str) -> None:
        self.gm = gm
        self.name = name
        self.outer = inputs
        self.static = static
        self.home = home_of(gm)
        self.target = _target_for(self.home, target)
        self.tf32 = tf32.state() if tf32.serves(self.target, self.home) else None
        self.names: dict[torch.fx.Node, str] = {}
        self.taken: set[str] = set()
        self.used_symbols: dict[str, Any] = {}
        self.shape_env: Any = None
        self.inputs: list[str] = []
        self.arguments: list[int] = []
        self.positions: dict[torch.fx.Node, int] = {}
        self.constants: list[torch.Tensor] = []
        self.constant_inputs: list[str] = []
        self.lines: list[str] = []
        self.writes: list[str] = []
        self.symbols: dict[str, tuple[int, int | None]] = {}
        self.input_exprs: list[Any] = []
        self.owner: dict[int, torch.fx.Node] = {}  # storage of a fake tensor -> the node that made it
        self.opened: set[torch.fx.Node] = set()  # tuples whose parts have names
        self.result_types: dict[tuple[Any, ...], tuple[str, list[Any]]] = {}
        self.floats: dict[Any, str] = {}  # symbolic floats -> the 0-d values that hold them
        self.offsets: dict[int, Any] = {}
        self.nonnegative: list[Any] = []
        self.divisors: list[Any] = []  # of divisions of numbers, that may be 0

    def run(self, splits: bool) -> Imported:
        nodes = list(self.gm.graph.nodes)
        mutated = {node.args[0] for node in nodes if node.op == "call_function" and node.target is torch.ops.aten.copy_.default}
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for position, node in enumerate(placeholders):
            self._placeholder(node, position, node in mutated)
        outputs: list[Output] = []
        returned: list[str] = []
        for node in nodes:
            if node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                outputs, returned = self._outputs(node)
            elif node.op != "placeholder":
                raise UnsupportedError(f"the graph has a {node.op} node ({node.target})")
        derived = self._derived_inputs(len(placeholders))
        split = self._split_size(placeholders) if splits else ""
        smaller: list[Smaller] = []
        least: int | None = None
        for most, scheduled_for in _SMALLER if split else ():
            smaller.append(Smaller(most, scheduled_for, self._text(returned, {split: (least, most)})))
            least = most + 1
        text = self._text(returned, {split: (least, None)})
        self._check_symbols(outputs)
        hints = {name: hint for name, symbol in self.used_symbols.items() if (hint := sizes.hint_of(symbol, self.shape_env)) is not None}
        if split:  # the first call may be a small one
            hints[split] = max(hints.get(split, 0), _LARGE)
        return Imported(
            text,
            len(placeholders),
            self.arguments,
            self.constants,
            outputs,
            self.symbols,
            hints,
            bool(self.writes),
            list(self.offsets.items()),
            takes_bases(self.gm),
            self.nonnegative,
            self.target.name,
            -1 if self.home.type == "cpu" else self.home.index or 0,
            derived=derived,
            split_size=split,
            smaller=smaller,
            precision=self.tf32,
        )

    def _split_size(self, placeholders: list[torch.fx.Node]) -> str:
        """The one size of inputs that may be 0 or 1 and more; empty where there is none or several, which one program serves."""
        shapes = [value.shape for node in placeholders if isinstance(value := node.meta.get("val"), torch.Tensor)]
        of_inputs = {str(size) for shape in shapes for size in shape if isinstance(size, torch.SymInt)}
        small = [name for name, symbol in self.used_symbols.items() if sizes.may_be_small(symbol, self.shape_env, _SMALLER[-1][0])]
        found = [name for name in small if name in of_inputs]
        return found[0] if len(found) == 1 and found[0] in self.symbols else ""

    def _derived_inputs(self, count: int) -> list[str]:
        """The derived sizes that no input has; they come after the `count` inputs of the graph."""
        names = [name for name in sorted(self.used_symbols) if sizes.is_derived(name) and name not in self.symbols]
        for name in names:
            missing = sorted(str(symbol.name) for symbol in sizes.sources(name) if str(symbol.name) not in self.symbols)
            if missing:
                raise UnsupportedError(f"a size is a rounded float of {', '.join(missing)}, which no input has as a size")
        for at, name in enumerate(names):
            self.symbols[name] = (count + at, None)
            self.inputs.append(f"{name}: sym")
            self.arguments.append(count + at)
        return names

    def _text(self, returned: list[str], narrowed: dict[str, tuple[int | None, int | None]]) -> str:
        """The graph as text, for calls whose sizes lie in the part of their range that `narrowed` gives."""
        ranges = []
        for name, symbol in sorted(self.used_symbols.items()):
            ranges.append(f"{name} in {sizes.range_text(symbol, self.shape_env, *narrowed.get(name, (None, None)))}")
        ranges += sizes.facts(self.shape_env, self.used_symbols) + [f"{sizes.outer_text(expr)} >= 0" for expr in self.nonnegative]
        head = f"torch @{self.name}({', '.join(self.inputs + self.constant_inputs)})"
        head += f" where {', '.join(ranges)}" if ranges else ""
        # Symbols that nothing else uses stand for data.
        divisors = [expr for expr in self.divisors if {str(symbol.name) for symbol in expr.free_symbols} <= set(self.used_symbols)]
        checks = [f'  check {sizes.outer_text(expr)} != 0 else "integer division or modulo by zero"' for expr in divisors]
        tail = "  return " + ", ".join(returned) if returned else "  return"
        return "\n".join([head, *checks, *self.lines, *self.writes, tail]) + "\n"

    def _check_symbols(self, outputs: list[Output]) -> None:
        """Refuses a size that no input gives: one that depends on data, or one that no single size determines."""
        unknown = sizes.unbound(self.used_symbols.values(), set(self.symbols), self.input_exprs)
        if unknown:
            raise UnsupportedError(f"the size {', '.join(unknown)} depends on the values of a tensor, not on the sizes of the inputs")
        for expr in (*self.offsets.values(), *self.nonnegative):
            if any(str(symbol.name) not in self.symbols for symbol in expr.free_symbols):
                raise UnsupportedError(f"a view by strides depends on {expr}, of symbols that no input has as a size")
        for output in outputs:
            for expr in output.layout_exprs():
                if any(str(symbol.name) not in self.symbols for symbol in expr.free_symbols):
                    raise UnsupportedError(f"an output that is a view has the layout {expr}, of symbols that no input has as a size")

    # Names

    def _fresh(self, wanted: str) -> str:
        wanted = re.sub(r"\W", "_", wanted)
        if re.fullmatch(r"[suz][a-z]*\d+", wanted):
            wanted += "_value"  # below Torch IR a buffer named like a symbol would be taken for it
        name, count = wanted, 1
        while name in self.taken:
            name, count = f"{wanted}_{count}", count + 1
        self.taken.add(name)
        return "%" + name

    def _name_if_typed(self, node: torch.fx.Node) -> None:
        """Lets later nodes read the result of a refused one where it is a plain tensor."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        with contextlib.suppress(UnsupportedError):
            self._type(value, node.name)
            self.names[node] = self._fresh(node.name)

    # Sizes and types

    def _expr(self, size: int | torch.SymInt) -> str:
        if not isinstance(size, torch.SymInt):
            return sizes.number_text(int(size))
        self.shape_env = self.shape_env or size.node.shape_env
        return self._sympy(sizes.expr_of(size))

    def _sympy(self, expr: Any) -> str:
        for symbol in expr.free_symbols:
            self.used_symbols.setdefault(str(symbol.name), symbol)
        return sizes.outer_text(expr)

    def _type(self, value: torch.Tensor, what: str, strides: Sequence[Any] | None = None) -> str:
        if value.layout != torch.strided or value.is_nested:
            raise UnsupportedError(f"{what} has the layout {value.layout}")
        if value.dtype not in DTYPES:
            raise UnsupportedError(f"{what} has the dtype {value.dtype}")
        if (place := _place(value)) != self.home and not (place.type == "cpu" and value.dim() == 0):
            raise UnsupportedError(f"{what} is on {value.device}, other tensors of the graph on {self.home}")
        if value.is_neg() or value.is_conj():
            raise UnsupportedError(f"{what} is a lazily negated or conjugated view")
        shape = [self._expr(size) for size in value.shape]
        steps = [self._expr(stride) for stride in (value.stride() if strides is None else strides)]
        return f"{DTYPES[value.dtype]}[{', '.join(shape)}] strides [{', '.join(steps)}]"

    def _result_type(self, node: torch.fx.Node, value: torch.Tensor) -> str:
        """The type of the one result of a call. Equal layers share their values (subgraphs): what follows from these alone is said once."""
        values = [value, *(source.meta.get("val") for source in node.all_input_nodes)]
        key = (node.target, *map(id, values))
        if (known := self.result_types.get(key)) is None:
            # The values are kept, so that their ids stay theirs.
            self.result_types[key] = known = (self._type(value, str(node.target), strides_of(node, value)), values)
        return known[0]

    def _own(self, node: torch.fx.Node, value: torch.Tensor) -> None:
        self.owner.setdefault(storage_of(value), node)

    # Inputs

    def _placeholder(self, node: torch.fx.Node, position: int, mutated: bool) -> None:
        self.positions[node] = position
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._symbol_input(value, position)
        elif isinstance(value, torch.Tensor) and not _is_token(node):
            info = placeholder_info(node, self.outer, self.static)
            shown = self._type(value, f"input {info.name}")
            self.names[node] = name = self._fresh(info.name)
            self._own(node, value)
            static = " static" if info.is_static and not mutated else ""
            self.inputs.append(f"{name}: {shown} {info.kind}{static}")
            self.arguments.append(position)
            self.input_exprs += [sizes.expr_of(size) for size in (*value.shape, *value.stride()) if isinstance(size, torch.SymInt)]
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and (expr := sizes.expr_of(size)).is_Symbol:
                    self.symbols.setdefault(str(expr.name), (position, dim))
        # None, tokens, numbers and script objects: no argument of the program; a use of one is refused where it occurs.

    def _symbol_input(self, value: torch.SymInt, position: int) -> None:
        expr = sizes.expr_of(value)
        if not expr.is_Symbol or not sizes.is_integer_symbol(expr, value.node.shape_env):
            return
        if self.symbols.get(str(expr.name), (0, 0))[1] is None:
            return
        name = self._expr(value)
        self.taken.add(name)
        self.symbols[name] = (position, None)
        self.inputs.append(f"{name}: sym")
        self.arguments.append(position)

    def _constant(self, node: torch.fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(self.gm)
        if not isinstance(value, torch.Tensor):
            return  # a submodule of a higher-order op, which is refused itself
        fake = node.meta.get("val")
        shown = fake if isinstance(fake, torch.Tensor) else value
        text = self._type(shown, f"constant {node.target}")
        self.names[node] = name = self._fresh(str(node.target))
        self.constant_inputs.append(f"{name}: {text} constant static")
        self.constants.append(value)
        self._own(node, shown)

    # Nodes

    def _call(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        if node in self.names or node in self.opened:
            return
        if isinstance(value, (int, torch.SymInt, torch.SymBool, torch.SymFloat, float, bool)):
            self._divisor(node)
            return  # an expression at its uses
        if node.target is torch.ops.aten.copy_.default:
            self._write(node)
            return
        if node.target is torch.ops.higher_order.run_and_save_rng_state:
            self._save_generator(node)
        elif node.target is torch.ops.higher_order.run_with_rng_state:
            state, target, *args = node.args
            self._line(node, target, args, node.kwargs, node, self._argument(state, "Tensor", node))
        elif node.target is torch.ops.higher_order.with_effects:
            self._pass_token(node)
            self._line(node, node.args[1], node.args[2:], node.kwargs, node)
        else:
            self._line(node, *call_of(node), node)

    def _divisor(self, node: torch.fx.Node) -> None:
        """Remembers what a node divides a number by: sympy may cancel the division from the expressions in which the node is used."""
        by = node.args[1] if node.target in _DIVISIONS else None
        value = by.meta.get("val") if isinstance(by, torch.fx.Node) else None
        if isinstance(value, torch.SymInt) and sizes.may_be_zero(expr := sizes.expr_of(value), value.node.shape_env) and expr not in self.divisors:
            self.divisors.append(expr)

    def _save_generator(self, node: torch.fx.Node) -> None:
        """A call that draws, and the state of the generator before: a checkpointed region draws from that state again."""
        target, *args = node.args
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if 0 in parts:
            self.names[parts[0]] = name = self._fresh(parts[0].name)
            self._own(parts[0], parts[0].meta["val"])
            # PyTorch gives its size a symbol, which no input has.
            self.lines.append(f"  {name}: u8[{torch.get_rng_state().numel()}] strides [1] = deplo.generator_state.default()")
        if 1 not in parts:
            raise UnsupportedError(f"{target} draws numbers that nothing reads{where(node)}")
        self.opened.add(parts[1])
        self._line(node, target, args, node.kwargs, parts[1])

    def _pass_token(self, node: torch.fx.Node) -> None:
        """A call with an effect takes a token and gives one, so that PyTorch keeps such calls in order; programs keep their ATen calls in order.

        A token is no value: callers give None for it.
        """
        token = node.args[0]
        if not isinstance(token, torch.fx.Node) or token not in self.positions:
            raise UnsupportedError(f"{node.args[1]} takes a token that is no input of the graph{where(node)}")
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == 0:
                self.opened.add(user)
                self.positions[user] = self.positions[token]

    def _line(self, node: torch.fx.Node, target: Any, args: Sequence[Any], kwargs: dict[str, Any], shown: torch.fx.Node, generator: str = "") -> None:
        """The call of `target` that `node` makes, with the results of `shown`; from a generator in the state `generator`, if given."""
        if not isinstance(target, torch._ops.OpOverload):
            raise UnsupportedError(f"{_describe(target, args)}{where(node)}")
        op = str(target)
        if op in _METADATA_CHECKS:
            return
        if target._schema.is_mutable:
            raise UnsupportedError(f"{op} mutates its arguments{where(node)}")
        arguments = [f"{key}={text}" for key, text in self._arguments(node, target, args, kwargs)]
        if self.tf32 is not None and (word := tf32.argument(node, target, _given(target, args, kwargs), self.tf32)):
            arguments.append(f"tf32={word}")
        if generator:
            op = _with_generator(target)
            arguments.append(f"generator={generator}")
        value = shown.meta.get("val")
        if value is None and generator:
            value = _inferred(node, target, args, kwargs)  # PyTorch's partitioner leaves it out
        if any(_place(x) != self.home and not self._is_number(node) for x in _tensors(value)):
            raise UnsupportedError(f"{op} gives a tensor on another device than {self.home}{where(node)}")
        first = int(node.target is torch.ops.higher_order.with_effects)
        if first:
            value = tuple(value or ())[1:] if target._schema.returns else None
        results = self._results(shown, value, first)
        source, module = provenance(node)
        function = function_of(node)
        called = f":{function}" if function not in ("", packet_name(node).lstrip("_")) else ""
        line = "  " + (", ".join(results) + " = " if results else "") + f"{op}({', '.join(arguments)})"
        line += f" at {_quote(source)}" if source else ""
        line += f" in {_quote(module + called)}" if module + called else ""
        self.lines.append(line)

    def _results(self, node: torch.fx.Node, value: Any, first: int = 0) -> list[str]:
        """The results of `node`, typed. Of several, the getitem of the first one asks for `first`."""
        if value is None:
            return []
        if isinstance(value, torch.Tensor):
            shown = self._result_type(node, value)
            self.names[node] = name = self._fresh(node.name)
            self._own(node, value)
            return [f"{name}: {shown}"]
        if not isinstance(value, (tuple, list)):
            raise UnsupportedError(f"{node.target} returns a {type(value).__name__}{where(node)}")
        getitems = {user.args[1]: user for user in reversed(list(node.users)) if user.target is operator.getitem}
        results = []
        for index, item in enumerate(value, first):
            user = getitems.get(index)
            name = self._fresh(user.name if user is not None else f"{node.name}_{index}")
            if isinstance(item, torch.Tensor):
                results.append(f"{name}: {self._type(item, str(node.target), strides_of(node, item))}")
            elif item is None:
                results.append(f"{name}: none")
            else:
                raise UnsupportedError(f"result {index} of {node.target} is a {type(item).__name__}{where(node)}")
            for other in node.users:
                if other.target is operator.getitem and other.args[1] == index:
                    self.names[other] = name
                    if isinstance(item, torch.Tensor):
                        self._own(other, item)
        return results

    def _write(self, node: torch.fx.Node) -> None:
        target, source = node.args[0], node.args[1]
        if not isinstance(target, torch.fx.Node) or target.op != "placeholder" or not isinstance(source, torch.fx.Node):
            raise UnsupportedError(f"copy_ to something that is not an input{where(node)}")
        if target not in self.names or source not in self.names:
            raise UnsupportedError(f"copy_ to or from something that Torch IR cannot say{where(node)}")
        to, value = target.meta["val"], source.meta["val"]
        if value.dtype != to.dtype or [self._expr(s) for s in value.shape] != [self._expr(s) for s in to.shape]:
            raise UnsupportedError(f"copy_ converts {value.dtype}{tuple(value.shape)} to {to.dtype}{tuple(to.shape)}{where(node)}")
        self.writes.append(f"  write {self.names[source]} to {self.names[target]}")
        self.names[node] = self.names[target]
        self.positions[node] = self.positions[target]

    # Arguments

    def _arguments(
        self, node: torch.fx.Node, target: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterable[tuple[str, str]]:
        schema = _parameters(target)
        given = _given(target, args, kwargs)
        if packet_name(node) in BY_STORAGE:
            given["self"], given["storage_offset"] = self._memory(given, node)
        for name, kind in schema:
            if name in given:
                yield name, self._argument(given[name], kind, node)

    def _memory(self, given: dict[str, Any], node: torch.fx.Node) -> tuple[torch.fx.Node, Any]:
        """What to give as_strided for `self`: the value that made the storage, and the offset from its first element.

        Its elements must fill one block of memory, and the view must lie in it: that is checked here, or at each call where a symbol decides.
        """
        base = given["self"]
        value = base.meta["val"]
        owner = base if packet_name(node) == "as_strided_scatter" else self.owner.get(storage_of(value), base)
        made = owner.meta["val"]
        if owner not in self.names or made.dtype != value.dtype:
            raise UnsupportedError(f"{node.target} of memory of another dtype{where(node)}")
        shape, strides = ([sizes.expr_of(x) for x in xs] for xs in (made.shape, made.stride()))
        if not sizes.is_dense(shape, strides):
            raise UnsupportedError(f"{node.target} of a tensor with gaps between its elements{where(node)}")
        start, offset = _start(owner), given.get("storage_offset")
        first = sympy.expand(_size(value.storage_offset() if offset is None else offset) - start)
        extents = [_size(size) for size in (given["src"].meta["val"].shape if "src" in given else given["size"])]
        last = first + sum((n - 1) * stride for n, stride in zip(extents, map(_size, given["stride"]), strict=True))
        if 0 not in extents:
            for expr in (first, sympy.expand(sympy.prod(shape) - 1 - last)):
                self._require(expr, node)
        if owner in self.positions:
            self.offsets[self.positions[owner]] = start  # Dynamo does not guard it
        return owner, first

    def _require(self, expr: Any, node: torch.fx.Node) -> None:
        """Makes `expr >= 0` a fact of this graph, checked at each call."""
        if expr.is_Integer and expr < 0:
            raise UnsupportedError(f"{node.target} of memory that its source does not show{where(node)}")
        if not expr.is_Integer and expr not in self.nonnegative:
            self.nonnegative.append(expr)

    def _argument(self, value: Any, kind: str, node: torch.fx.Node) -> str:
        if isinstance(value, torch.fx.Node):
            if value in self.names:
                return self.names[value]
            value = value.meta.get("val")
            if isinstance(value, torch.Tensor):
                what = "that is not a value of the graph" if value.dtype in DTYPES else f"of {str(value.dtype).removeprefix('torch.')}"
                raise UnsupportedError(f"{node.target} uses a tensor {what}{where(node)}")
        if isinstance(value, sympy.Expr):
            return self._sympy(value)
        if isinstance(value, torch.SymFloat):
            return self._float(value.node.expr)
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self._argument(item, kind, node) for item in value) + "]"
        if value is None:
            return "none"
        if kind == "bool" and isinstance(value, int):
            value = bool(value)
        if isinstance(value, bool) and "int" in kind:
            value = int(value)
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float) or (isinstance(value, int) and "float" in kind and "Scalar" not in kind):
            return _float_text(float(value))
        if isinstance(value, (int, torch.SymInt)):
            return self._expr(value)
        if isinstance(value, str):
            return _quote(value)
        if isinstance(value, torch.dtype) and value in DTYPES:
            return DTYPES[value]
        if isinstance(value, (torch.memory_format, torch.layout)):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.device) and self.home.type != "cpu":
            return "cpu"  # the program's own device: what gives a tensor on another one was refused
        if isinstance(value, torch.device):
            return value.type if value.index is None else _quote(str(value))
        if isinstance(value, torch.SymBool):
            raise UnsupportedError(f"{node.target} checks {value.node.expr}, which depends on the values of a tensor{where(node)}")
        raise UnsupportedError(f"{node.target} has the argument {value!r} of type {type(value).__name__}{where(node)}")

    # Symbolic floats

    def _float(self, expr: Any) -> str:
        """A 0-d float64 value of a float that follows from sizes, by the operations that PyTorch traced."""
        if expr not in self.floats:
            call = self._float_call(expr)
            self.floats[expr] = name = self._fresh("number")
            self.lines.append(f"  {name}: f64[] strides [] = {call}")
        return self.floats[expr]

    def _float_call(self, expr: Any) -> str:
        kind = type(expr).__name__
        if expr.is_Float or expr.is_Integer or expr.is_Rational:
            return f"aten.full.default(size=[], fill_value={_float_text(float(expr))}, dtype=f64)"
        if kind == "ToFloat" or expr.is_integer:
            return f"aten.full.default(size=[], fill_value={self._sympy(expr.args[0] if kind == 'ToFloat' else expr)}, dtype=f64)"
        if expr.is_Add or expr.is_Mul:
            first, *rest = expr.args
            return self._float_pair("add" if expr.is_Add else "mul", first, expr.func(*rest))
        if kind in ("FloatTrueDiv", "IntTrueDiv"):
            return self._float_pair("div", *expr.args)
        if kind == "FloatPow" and expr.args[1].is_number:
            return f"aten.pow.Tensor_Scalar(self={self._float(expr.args[0])}, exponent={_float_text(float(expr.args[1]))})"
        if kind == "OpaqueUnaryFn_sqrt":
            return f"aten.sqrt.default(self={self._float(expr.args[0])})"
        raise UnsupportedError(f"the symbolic number {expr} uses {kind}, for which Torch IR has no call")

    def _float_pair(self, name: str, a: Any, b: Any) -> str:
        return f"aten.{name}.Tensor(self={self._float(a)}, other={self._float(b)})"

    # Outputs

    def _outputs(self, node: torch.fx.Node) -> tuple[list[Output], list[str]]:
        returned: list[str] = []
        items: Any = node.args[0]
        items = list(items) if isinstance(items, (tuple, list)) else [items]
        roots = [self._root(item) for item in items]
        shared = {root for root in roots if root is not None and roots.count(root) > 1}
        return [self._output(item, root, shared, returned) for item, root in zip(items, roots, strict=True)], returned

    def _root(self, item: Any) -> torch.fx.Node | None:
        value = item.meta.get("val") if isinstance(item, torch.fx.Node) else None
        root = self.owner.get(storage_of(value)) if isinstance(value, torch.Tensor) else None
        node: Any = item
        while root is not None and node is not root:
            if not _shows_its_input(node):
                return None  # fake tensors share memory there, kernels do not (native_dropout that drops nothing)
            node = node.args[0]
        return root

    def _output(self, item: Any, root: torch.fx.Node | None, shared: set[torch.fx.Node], returned: list[str]) -> Output:
        if not isinstance(item, torch.fx.Node):
            if item is not None and not isinstance(item, (int, float, bool)):
                raise UnsupportedError(f"the graph returns a {type(item).__name__}")
            return Output("constant", value=item)
        value = item.meta.get("val")
        if item in self.positions:
            return Output("input", self.positions[item])
        if isinstance(value, torch.SymInt):
            return self._result(returned, self._expr(value))
        if value is None or isinstance(value, (int, float, bool)):
            return Output("constant", value=value)
        if not isinstance(value, torch.Tensor) or item not in self.names:
            raise UnsupportedError(f"the graph returns a {type(value).__name__}")
        base = root.meta.get("val") if root is not None else None
        is_view = root is not None and root is not item and (root in self.positions or root in shared)
        if is_view and isinstance(base, torch.Tensor) and base.dtype == value.dtype:
            assert root is not None
            result = Output("view", self.positions[root], True) if root in self.positions else self._result(returned, self.names[root])
            layout = self._layout(value, base, strides_of(item, value))
            return dataclasses.replace(result, kind="view", layout=layout, detached=self._detached(item, root), steps=self._steps(item, root))
        return self._result(returned, self.names[item])

    def _is_number(self, node: torch.fx.Node) -> bool:
        """Whether a tensor of the CPU may be one of the graph's device: made of numbers, and read by what gives tensors of that device alone."""
        if any(x.dim() > 0 for x in _tensors(node.meta.get("val"))):
            return False
        if any(_place(x) == self.home != torch.device("cpu") for source in node.all_input_nodes for x in _tensors(source.meta.get("val"))):
            return False
        return all(
            user.op == "call_function" and (all(_place(x) == self.home for x in _tensors(user.meta.get("val"))) or self._is_number(user))
            for user in node.users
        )

    def _result(self, returned: list[str], name: str) -> Output:
        if name not in returned:
            returned.append(name)
        return Output("result", returned.index(name))

    def _detached(self, item: torch.fx.Node, root: torch.fx.Node) -> str:
        """Where a chain of views from `root` to `item` detaches: at its end, before, or (empty) nowhere. With a gradient, detach is alias."""
        ops = (torch.ops.aten.detach.default, torch.ops.aten.alias.default) if self.name == "forward" else (torch.ops.aten.detach.default,)
        node: Any = item
        while isinstance(node, torch.fx.Node) and node is not root and node.args:
            if node.target in ops:
                return "itself" if node is item else "base"
            node = node.args[0]
        return ""

    def _steps(self, item: torch.fx.Node, root: torch.fx.Node) -> list[ViewStep] | None:
        """The views from an input to `item` where the input's elements may overlap: autograd divides the gradient of as_strided among such."""
        base = root.meta["val"]
        if root not in self.positions or sizes.is_dense(*([sizes.expr_of(x) for x in xs] for xs in (base.shape, base.stride()))):
            return None
        steps: list[ViewStep] = []
        node: Any = item
        while node is not root:
            step = self._step(node) if isinstance(node, torch.fx.Node) else None
            if step is None:
                return None
            steps.insert(0, step)
            node = node.args[0]
        return steps

    def _step(self, node: torch.fx.Node) -> ViewStep | None:
        if not _shows_its_input(node):
            return None
        given = torch.utils._pytree.tree_map(_plain, [list(node.args[1:]), dict(node.kwargs)])
        symbols = {symbol for leaf in torch.utils._pytree.tree_leaves(given) if isinstance(leaf, sympy.Expr) for symbol in leaf.free_symbols}
        return ViewStep(node.target, *given) if all(str(symbol.name) in self.symbols for symbol in symbols) else None

    def _layout(self, value: torch.Tensor, base: torch.Tensor, strides: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
        offset = sizes.expr_of(value.storage_offset()) - sizes.expr_of(base.storage_offset())
        layout = [sizes.expr_of(s) for s in value.shape], [sizes.expr_of(s) for s in strides], offset
        for expr in [*layout[0], *layout[1], offset]:
            self._sympy(expr)
        return layout


@functools.lru_cache(maxsize=1 << 10)
def _parameters(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Names and types of an operator's arguments."""
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def _given(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {name: value for (name, _), value in zip(_parameters(target), args, strict=False)} | kwargs


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, torch.Tensor)]


def _is_token(node: torch.fx.Node) -> bool:
    """Whether a placeholder is what puts calls with effects in order, for which callers give None."""
    return any(user.target is torch.ops.higher_order.with_effects and user.args[0] is node for user in node.users)


def _size(value: Any) -> Any:
    """The sympy expression of a size that may be a node."""
    return sizes.expr_of(value.meta["val"] if isinstance(value, torch.fx.Node) else value)


def _shows_its_input(node: Any) -> bool:
    """Whether a call gives the memory of its first argument, or one of several such results."""
    if not isinstance(node, torch.fx.Node) or not node.args:
        return False
    if node.target in (operator.getitem, torch.ops.aten._unsafe_view.default):
        return True
    schema = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else []
    return bool(schema) and schema[0].alias_info is not None and not schema[0].alias_info.is_write


def _plain(value: Any) -> Any:
    """An argument without FX nodes and symbols of a ShapeEnv."""
    value = value.meta["val"] if isinstance(value, torch.fx.Node) else value
    return sizes.expr_of(value) if isinstance(value, torch.SymInt) else value


def _start(node: torch.fx.Node) -> Any:
    """Where a tensor starts in its storage. A scatter by strides keeps the storage of its base, which its fake tensor does not show."""
    while packet_name(node) == "as_strided_scatter":
        base = node.args[0]
        assert isinstance(base, torch.fx.Node)
        node = base
    return sizes.expr_of(node.meta["val"].storage_offset())


def _inferred(node: torch.fx.Node, target: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a call returns, as fake tensors."""
    values = torch.fx.node.map_arg((tuple(args), kwargs), lambda arg: arg.meta["val"])
    mode = torch._guards.detect_fake_mode(values)
    if mode is None:
        raise UnsupportedError(f"{target} whose result has no type{where(node)}")
    with mode:
        return target(*values[0], **values[1])


def _with_generator(target: torch._ops.OpOverload) -> str:
    """The overload of a random operator that takes a generator. native_dropout's rule takes one, too."""
    if target is torch.ops.aten.native_dropout.default or any(arg.name == "generator" for arg in target._schema.arguments):
        return str(target)
    other = getattr(target.overloadpacket, "generator", None)
    if other is None or target._overloadname != "default":
        raise UnsupportedError(f"{target} takes no generator")
    return str(other)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _float_text(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)


def _describe(target: Any, args: Sequence[Any]) -> str:
    """Why a call of `target` cannot be imported."""
    name = str(getattr(target, "__name__", target))
    if name.startswith("auto_functionalized"):
        return f"{args[0]} is not an ATen overload but a custom operator that writes to its arguments"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"{name} is not an ATen overload: it calls graphs of its own, which run in eager mode"
    return f"{name} is not an ATen overload"
