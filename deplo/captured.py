"""What Dynamo tells of a function that it compiles: its graph, its code, its guards, and what depends on more than the call's arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .compiled_graph import CompiledGraph

_MATCHES_OF_CODE = {"BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH", "MODULE_MATCH", "NAME_MATCH"}
# Operations of Python that build a result from what is there already, and change nothing that others see.
_PURE = {
    *(
        "RESUME",
        "NOP",
        "CACHE",
        "PUSH_NULL",
        "POP_TOP",
        "COPY",
        "SWAP",
        "RETURN_VALUE",
        "RETURN_CONST",
        "COPY_FREE_VARS",
        "MAKE_CELL",
        "PRECALL",
        "CALL",
    ),
    *(
        "LOAD_FAST",
        "LOAD_FAST_CHECK",
        "LOAD_FAST_AND_CLEAR",
        "LOAD_FAST_LOAD_FAST",
        "LOAD_CONST",
        "LOAD_DEREF",
        "LOAD_CLOSURE",
        "LOAD_ATTR",
        "LOAD_GLOBAL",
    ),
    *("STORE_FAST", "STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST", "DELETE_FAST", "UNPACK_SEQUENCE", "BINARY_SUBSCR", "EXTENDED_ARG", "KW_NAMES"),
    *("BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "LIST_EXTEND", "LIST_TO_TUPLE", "DICT_UPDATE", "MAP_ADD", "LIST_APPEND"),
}


@dataclasses.dataclass
class Guard:
    """One guard of Dynamo: what it looks at, and how."""

    source: Any  # torch._dynamo.source.Source
    name: str  # that of the source, as L['x'].shape
    kind: str  # TENSOR_MATCH, ...
    type: type  # of what it saw


@dataclasses.dataclass
class Input:
    """One input of a graph."""

    source: Any  # torch._dynamo.source.Source; nothing for what Dynamo does not tell of
    wrapped: bool  # a number of Python that the graph takes as a tensor


@dataclasses.dataclass
class Captured:
    """One graph that Dynamo compiled, callable like it; `recorded()` learns of the calls."""

    call: Callable[..., Any]
    inputs: list[Input]
    graph: CompiledGraph | None = None  # as AOTAutograd runs it: of a forward or an inference graph
    code: types.CodeType | None = None  # what Dynamo runs in the function's place
    guards: list[Guard] = dataclasses.field(default_factory=list)
    counts: bool = False  # it returns numbers that depend on values of tensors

    def __call__(self, *inputs: Any) -> Any:
        outputs = self.call(*inputs)
        calls = _thread.calls
        if calls is not None:
            calls.append((self, inputs, outputs))
        return outputs

    def why_not(self) -> str:
        """Why its calls cannot leave Dynamo's code out; empty: they can."""
        if self.code is None:
            return "Dynamo did not show its code"
        if self.counts:
            return "it returns numbers that depend on values of tensors"
        find_effects = getattr(torch._dynamo.convert_frame, "get_compiled_code_side_effects", None)
        if find_effects is None:
            return "this PyTorch does not tell what side effects its code has"
        effects = list(find_effects(self.code) or ())
        instructions = list(dis.get_instructions(self.code))
        emptying = _empties_modes(instructions)
        if emptying is not None and _OF_MODES in effects:
            effects.remove(_OF_MODES)
        if effects:
            return f"it has side effects in Python ({', '.join(map(str, effects))})"
        return _why_not_code(instructions, emptying)


class _Thread(threading.local):
    """What this thread compiles and calls."""

    calls: list[tuple[Captured, tuple[Any, ...], Any]] | None = None
    latest: Captured | None = None


_thread = _Thread()


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Captured, tuple[Any, ...], Any]]]:
    """The calls of captured graphs inside the block, in this thread: graph, inputs, outputs."""
    before = _thread.calls
    calls: list[tuple[Captured, tuple[Any, ...], Any]] = []
    _thread.calls = calls
    try:
        yield calls
    finally:
        _thread.calls = before


def capturing(compile: Callable[[torch.fx.GraphModule, Sequence[Any], Callable[[CompiledGraph], None]], Callable[..., Any]]) -> Callable[..., Any]:
    """A backend for torch.compile that compiles by `compile`, which tells the graph that AOTAutograd runs, and gives Captured ones."""
    _watch_code()

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Captured:
        graphs: list[CompiledGraph] = []
        inputs = [_input(node) for node in gm.graph.find_nodes(op="placeholder")]  # which Dynamo's tracing context tells
        call = compile(gm, example_inputs, graphs.append)
        (output,) = gm.graph.find_nodes(op="output")
        counts = any(free_unbacked_symbols(node.meta.get("example_value")) for node in output.all_input_nodes if _is_number(node))
        captured = Captured(call, inputs, graphs[0] if len(graphs) == 1 else None, counts=counts)
        _thread.latest = captured
        return captured

    return backend


def _input(node: torch.fx.Node) -> Input:
    return Input(getattr(node, "_dynamo_source", None), bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)))


def _is_number(node: torch.fx.Node) -> bool:
    return not isinstance(node.meta.get("example_value"), torch.Tensor)


def keep_guards(guards: Sequence[Any]) -> list[bool]:
    """torch.compile's `guard_filter_fn`, which keeps all guards, and tells the graph that was captured last of them."""
    captured = _thread.latest
    if captured is not None:
        captured.guards = [Guard(guard.orig_guard.originating_source, guard.orig_guard.name, guard.guard_type, type(guard.value)) for guard in guards]
        _thread.latest = None
    return [True] * len(guards)


@functools.cache
def _watch_code() -> None:
    def hook(code: types.CodeType, new_code: types.CodeType) -> None:
        captured = _thread.latest
        if captured is not None and captured.code is None:
            captured.code = new_code

    torch._dynamo.convert_frame.register_bytecode_hook(hook)


_OF_MODES = "<unknown source>"  # how Dynamo names the stack of modes of __torch_function__ among side effects: the only thing without a source


def _empties_modes(instructions: list[dis.Instruction]) -> int | None:
    """Where the code calls set_torch_function_mode_stack([]); None if it does not. Functions that enter such a mode and leave it do so at their end.

    Direct calls are made without modes (those with go through Dynamo), so that nothing is to be done then.
    """
    for at, instruction in enumerate(instructions):
        if instruction.argval == "set_torch_function_mode_stack":
            rest = [i for i in instructions[at + 1 : at + 8] if i.opname not in ("COPY", "STORE_FAST", "PRECALL", "CACHE", "PUSH_NULL", "SWAP")]
            if [i.opname for i in rest[:2]] == ["BUILD_LIST", "CALL"] and rest[0].arg == 0:
                return instructions.index(rest[1])
    return None


def _why_not_code(instructions: list[dis.Instruction], emptying: int | None) -> str:
    """Dynamo's code reads the graph's inputs, calls the graph, and builds the result. What does more is not left out, but the call at `emptying`."""
    loaded = [str(i.argval) for i in instructions if i.opname == "LOAD_GLOBAL"]
    if any(name.startswith("__resume") for name in loaded):
        return "it has graph breaks"
    if (graphs := sum(name.startswith("__compiled_fn") for name in loaded)) != 1:
        return f"it runs {graphs} graphs"
    stored = [at for at, i in enumerate(instructions) if i.opname.startswith("STORE_FAST") and "graph_out" in str(i.argval)]
    if len(stored) != 1:
        return "the code around its graph is of an unknown form"
    for at, instruction in enumerate(instructions):
        if instruction.opname not in _PURE:
            return f"the code around its graph does more than to build a result ({instruction.opname})"
        if at > stored[0] and instruction.opname == "CALL" and at != emptying:
            return "its result is built by calls of Python"
    return ""


def root_of(source: Any) -> tuple[Any, list[Any]]:
    """The first source of a chain, and those after it in order."""
    chain = [source]
    while (base := getattr(chain[-1], "base", None)) is not None:
        chain.append(base)
    return chain[-1], chain[-2::-1]


def is_of_code(guard: Guard) -> bool:
    """Whether it compares functions, classes or modules of Python."""
    return guard.kind in _MATCHES_OF_CODE
