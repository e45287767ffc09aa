"""`deplo.jit(..., guards="inputs")`: calls that look at what their arguments are, and go to a compiled graph without Dynamo.

The first call of a kind goes through Dynamo, whose guards judge it; what came of it is kept under a key that tells such calls from others
(csrc/bindings/call_key.h).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from .captured import Captured, Input, capturing, is_of_code, keep_guards, recorded, root_of
from .core import core
from .errors import Error, UserError
from .options import Options

_MOST_ENTRIES = 1024
_MOST_CHANGES = 64  # of modules and globals, after which nobody looks at them any more
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


# Dynamo's guards fail now and then where several threads look at them at once (torch 2.13), and it compiles again.
_dynamo_lock = threading.RLock()


class PlainPath(Exception):
    """Calls cannot leave Dynamo out, for the reason in the text."""


@dataclasses.dataclass
class CallReport:
    """What `deplo.call_report` returns: how calls of a function compiled with `guards="inputs"` went so far."""

    direct: int  # calls that went to a compiled graph by their arguments alone
    through_dynamo: int  # all others
    kinds: int  # of calls that are known
    bare: int  # of these, those that run a program without AOTAutograd's code around it
    reason: str  # why all calls go through Dynamo now; empty: they do not
    refused: dict[str, int]  # why single calls did, and how many
    unchecked: list[str]  # values that Dynamo's guards look at and direct calls do not

    def __str__(self) -> str:
        lines = [f"{self.direct} direct calls, {self.through_dynamo} through Dynamo, {self.kinds} kinds of calls known ({self.bare} bare)"]
        lines += [f"all calls go through Dynamo: {self.reason}"] if self.reason else []
        lines += [f"{count} calls went through Dynamo: {why}" for why, count in self.refused.items()]
        lines += ["direct calls do not check: " + ", ".join(self.unchecked)] if self.unchecked else []
        return "\n".join(lines)


class Dispatch:
    """The calls of one function or module."""

    def __init__(self, fn: Callable[..., Any], compile: Callable[..., Any], options: Options, fullgraph: bool) -> None:
        """`compile(fn, backend, fullgraph, options)` is torch.compile with what the user gave."""
        from .backend import compile_with

        backend = capturing(lambda gm, inputs, tell: compile_with(options, gm, inputs, tell=tell))
        self.fn = fn
        self.fullgraph = fullgraph
        self.reason = ""
        self.refused: dict[str, int] = {}
        self.unchecked: dict[str, None] = {}
        self._bare = 0
        self._limited = False
        self._changes = 0
        self._roots: dict[tuple[int, ...], Roots] = {}
        self._root = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
        self.whole = compile(fn, backend, True, {"guard_filter_fn": keep_guards})
        self._plain = compile(fn, backend, fullgraph, {})
        self.dispatcher = core().Dispatcher(self._missed)

    def report(self) -> CallReport:
        """How calls went so far."""
        hits, misses, entries = core().dispatch_counts(self.dispatcher)
        return CallReport(hits, misses, entries, self._bare, self.reason, dict(self.refused), list(self.unchecked))

    def _missed(self, key: bytes | None, why: str, leaves: list[Any], named: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stance = torch._dynamo.eval_frame._stance.stance
        if not why and stance != "default":
            why = f"the stance of torch.compile is {stance}"
        if not why and torch._C._functorch.peek_interpreter_stack() is not None:
            why = "inside a transform of torch.func"
        if key is None or why or self.reason:
            if why:
                self._refuse(why)
            return self._plain(*args, **kwargs)
        with _dynamo_lock, recorded() as calls:
            result, is_whole = self._by_dynamo(args, kwargs)
        # Counted here: how many references a call holds of its arguments depends on how the interpreter specialised it.
        shared = type(result) in (list, dict) and sys.getrefcount(result) > _REFERENCES_OF_RESULT
        if is_whole:
            try:
                if shared or not _is_fresh(result):
                    raise PlainPath("it returns a list or dict that others have, too")
                self._learn(key, leaves, named, calls, result)
            except PlainPath as reason:
                self._go_plainly(str(reason))
        return result

    def _by_dynamo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """A call through Dynamo: as one graph, or, where Dynamo makes no single graph of it, as it can; and whether it was one."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        if self.fullgraph:
            return self.whole(*args, **kwargs), True
        if self._limited:
            return self._at_limit(args, kwargs)
        versions = _versions(args, kwargs)
        try:
            return self.whole(*args, **kwargs), True
        except Error:
            raise
        except FailOnRecompileLimitHit:
            self._limited = True
            return self._at_limit(args, kwargs)
        except RuntimeError as error:
            in_eager = str(error).startswith(_RAN_IN_EAGER) and versions == _versions(args, kwargs)
            if not isinstance(error, TorchDynamoException) and not in_eager:  # Dynamo's come before anything of the function ran
                raise
            text = str(error).strip().splitlines()
        result = self._plain(*args, **kwargs)
        self._go_plainly(f"Dynamo makes no single graph of it: {text[0] if text else 'it does not say why'}")
        return result, False

    def _at_limit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Dynamo compiles no more: kinds of calls that are known stay direct, for others it has eager mode, or an older graph."""
        self._refuse("Dynamo's limit of recompilations is reached (torch._dynamo.config.recompile_limit)")
        return self._plain(*args, **kwargs), False

    def _refuse(self, why: str) -> None:
        self.refused[why] = self.refused.get(why, 0) + 1

    def _go_plainly(self, reason: str) -> None:
        self.reason = self.reason or reason
        core().call_plainly(self.dispatcher, self._plain)

    def _learn(self, key: bytes, leaves: list[Any], named: list[Any], calls: list[tuple[Captured, tuple[Any, ...], Any]], result: Any) -> None:
        """Keeps what became of a call under its key."""
        if len(calls) != 1:
            raise PlainPath(f"a call runs {len(calls)} graphs of Dynamo")
        captured, inputs, outputs = calls[0]
        if why := captured.why_not():
            raise PlainPath(why)
        if captured.graph is not None and captured.graph.is_compiling():  # what is kept is the program
            self._refuse("its graph compiles in the background")
            return
        roots = self._roots_of(captured, leaves)
        given = [_given(value, at, leaves, roots) for value, at in zip(inputs, captured.inputs, strict=True)]
        tree = _tree(result, list(outputs), leaves, roots)
        program = captured.graph.bare_program() if captured.graph is not None else None
        self._bare += program is not None
        fixed = list({id(x): x for _, x in given if isinstance(x, torch.Tensor)}.values())
        function = None if program is not None else captured.call
        entry = core().Entry(
            given, program, function, tree, named, torch._C._dynamo.guards.GlobalStateGuard().check, roots.states, roots.cells, fixed
        )
        if core().add_entry(self.dispatcher, key, entry, _MOST_ENTRIES):  # in the place of one that does not hold any more
            self._changes += 1
        hits = core().dispatch_counts(self.dispatcher)[0]
        if self._changes > _MOST_CHANGES + hits:
            raise PlainPath("attributes of its modules, or globals, change from call to call")

    def _roots_of(self, captured: Captured, leaves: list[Any]) -> Roots:
        """What the graph depends on besides the arguments, found once for each graph and its modules."""
        key = (id(captured), *(id(leaf) for leaf in leaves if isinstance(leaf, torch.nn.Module)))
        roots = self._roots.get(key)
        if roots is None or not roots.hold():
            roots = self._roots[key] = Roots(self.fn, self._root, captured, leaves)
            self.unchecked.update(dict.fromkeys(roots.unchecked))
        return roots


# What torch.compile(fullgraph=True) raises after a function that Dynamo does not look at, which has run in eager mode.
_RAN_IN_EAGER = "torch.compile with fullgraph=True found no compiled frames"


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Of the tensors among arguments: whether one was written."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


class Roots:
    """Where a graph's inputs and guards come from, besides the arguments: modules, globals, variables of closures; what of it is checked, and how."""

    def __init__(self, fn: Callable[..., Any], root: Any, captured: Captured, leaves: list[Any]) -> None:
        self.captured = captured  # kept, as its id stands for it
        self.cells: list[tuple[Any, Any]] = []
        self.unchecked: list[str] = []
        self._globals: dict[str, Any] = {}
        self._modules: list[torch.nn.Module] = []
        self._dicts: list[tuple[dict[str, Any], tuple[str, ...] | None]] = []
        self._tensors: dict[int, torch.Tensor] = {}
        function = getattr(fn, "__func__", fn)
        self._variables = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)) if hasattr(function, "__code__") else {}
        self._scope = getattr(function, "__globals__", {})
        self._named_tuples = {guard.name for guard in captured.guards if issubclass(guard.type, tuple) and hasattr(guard.type, "_fields")}
        for module in [root, *leaves]:
            if isinstance(module, torch.nn.Module):
                self._add_module(module)
        for source in [guard.source for guard in captured.guards] + [given.source for given in captured.inputs]:
            self._add_root(source)
        for guard in captured.guards:
            if guard.source is not None and not self.checks(guard.source) and not is_of_code(guard):
                self.unchecked.append(guard.name)
        functions = sum(is_of_code(guard) for guard in captured.guards)
        self.unchecked = list(dict.fromkeys(self.unchecked)) + (["functions, classes and modules of Python"] if functions else [])
        dicts = [*self._dicts, (self._scope, tuple(self._globals))] if self._globals else self._dicts
        self.states = [core().DictState(dicts)] if dicts else []

    def hold(self) -> bool:
        """Whether all is as it was."""
        return all(state.holds() for state in self.states) and all(cell.cell_contents is value for cell, value in self.cells)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is a tensor that these checks keep in its place."""
        return id(tensor) in self._tensors

    def _add_root(self, source: Any) -> None:
        if source is None:
            return
        root, _ = root_of(source)
        kind = type(root).__name__
        value: Any
        if kind == "GlobalSource" and root.global_name in self._scope and not root.global_name.startswith("__"):
            value = self._scope[root.global_name]
            self._globals[root.global_name] = value
        elif kind == "LocalSource" and root.local_name in self._variables:
            cell = self._variables[root.local_name]
            value = cell.cell_contents
            if not any(known is cell for known, _ in self.cells):
                self.cells.append((cell, value))
        else:
            return
        if isinstance(value, torch.nn.Module):
            self._add_module(value)
        elif isinstance(value, torch.Tensor):
            self._tensors[id(value)] = value

    def _add_module(self, module: torch.nn.Module) -> None:
        if any(module is other for other in self._modules):
            return
        for part in module.modules():
            if any(part is other for other in self._modules):
                continue
            self._modules.append(part)
            attributes = part.__dict__
            self._dicts += [(table, None) for table in (attributes, attributes["_modules"], attributes["_parameters"], attributes["_buffers"])]
            tables = (attributes["_parameters"], attributes["_buffers"], attributes)
            self._tensors.update({id(x): x for table in tables for x in table.values() if isinstance(x, torch.Tensor)})

    def checks(self, source: Any) -> bool:
        """Whether direct calls see what Dynamo's guards on this source see. Raises PlainPath for what an argument has besides what its key holds."""
        root, chain = root_of(source)
        name = type(root).__name__
        value: Any = None
        if name == "GlobalSource":
            if root.global_name not in self._globals:
                return str(root.global_name).startswith("__builtins_dict__")
            value = self._globals[root.global_name]
        elif name != "LocalSource":
            return name in ("GlobalStateSource", "ShapeEnvSource")
        elif root.local_name in self._variables:
            value = self._variables[root.local_name].cell_contents
        elif _is_of_module(chain):
            return _stays_in_modules(chain)
        else:
            self._check_argument(chain)
            return True
        return all(_is_step(part) for part in chain) or (isinstance(value, torch.nn.Module) and _stays_in_modules(chain))

    def _check_argument(self, chain: list[Any]) -> None:
        for part in chain:
            if type(part).__name__ in _OF_ARGUMENTS or (type(part).__name__ == "AttrSource" and _name_of(part.base) in self._named_tuples):
                continue
            raise PlainPath(f"it reads {_name_of(part)} of an argument")


def _is_step(source: Any) -> bool:
    """Whether it shows its base in another form."""
    return type(source).__name__ in ("FloatTensorSource", "ConvertIntSource", "TypeSource")


# Sources of what a key holds: parts of tuples, lists and dicts, and what a tensor's layout gives.
_OF_ARGUMENTS = {"GetItemSource", "DictGetItemSource", "ListGetItemSource", "ConstDictKeySource", "TensorPropertySource"}
_OF_ARGUMENTS |= {"ConvertIntSource", "FloatTensorSource", "TypeSource"}


def _is_of_module(chain: list[Any]) -> bool:
    return any("NNModule" in type(source).__name__ or "ParamBuffer" in type(source).__name__ for source in chain)


def _stays_in_modules(chain: list[Any]) -> bool:
    """Whether a chain of sources from a module goes through its tables of parts and tensors to one attribute at most."""
    words = [getattr(source, "member", getattr(source, "index", None)) for source in chain]
    tables = {"_modules", "_parameters", "_buffers", "__dict__"}
    at = 0
    while at < len(words):
        if words[at] == "_modules" and at + 1 < len(words):
            at += 2
        elif words[at] == "__dict__":
            at += 1
        elif words[at] in tables:
            return at + 2 >= len(words) or len(words) - at <= 2
        elif words[at] is None:
            at += 1
        else:
            return at + 1 >= len(words)
    return True


def _given(value: Any, given: Input, leaves: list[Any], roots: Roots) -> tuple[int, Any]:
    """Which leaf of the arguments an input of the graph is, or the object itself (with -1)."""
    if isinstance(value, torch.Tensor) and not given.wrapped:
        for i, leaf in enumerate(leaves):
            if leaf is value:
                return i, None
        if roots.has(value):
            return -1, value
        raise PlainPath(f"its graph reads a tensor that is no argument, nor of a module: {_name_of(given.source)}")
    if given.source is not None and roots.checks(given.source):  # a size or a number of known origin
        return -1, value
    raise PlainPath(f"its graph reads {_name_of(given.source)}, which may change")


def _name_of(source: Any) -> str:
    return str(getattr(source, "name", source))


def _tree(value: Any, outputs: list[Any], leaves: list[Any], roots: Roots) -> tuple[Any, ...]:
    """How a result is made of the graph's outputs and the arguments: what OutputTree of the core reads."""
    if isinstance(value, torch.Tensor):
        for k, output in enumerate(outputs):
            if output is value:
                return ("output", k)
        for i, leaf in enumerate(leaves):
            if leaf is value:
                return ("leaf", i)
        if roots.has(value):
            return ("constant", value)
        raise PlainPath("it returns a tensor that its graph does not give")
    if type(value) in (tuple, list):
        return (type(value).__name__, [_tree(item, outputs, leaves, roots) for item in value])
    if type(value) is dict:
        return ("dict", tuple(value), [_tree(item, outputs, leaves, roots) for item in value.values()])
    if isinstance(value, _IMMUTABLE):
        return ("constant", value)
    raise PlainPath(f"it returns a {type(value).__name__}")


def dispatched(fn: Any, compile: Callable[..., Any], options: Options, fullgraph: bool) -> Any:
    """`fn`, a function or a module, with calls that go by their arguments alone."""
    dispatch = Dispatch(fn, compile, options, fullgraph)
    if isinstance(fn, torch.nn.Module):
        return _as_module(fn, dispatch)
    direct = dispatch.dispatcher

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # by an outer torch.compile, which takes the function in
            return fn(*args, **kwargs)
        return direct(*args, **kwargs)

    wrapper: Any = functools.wraps(fn)(call)
    wrapper.deplo_dispatch = dispatch
    return wrapper


_REFERENCES_OF_RESULT = 2  # of the variable of _missed, and the call that counts


def _is_fresh(value: Any) -> bool:
    """Whether nobody but `value` refers to the lists and dicts in it."""
    if type(value) not in (tuple, list, dict):
        return True
    for key in value if type(value) is dict else range(len(value)):
        if type(value[key]) in (list, dict) and sys.getrefcount(value[key]) > 2:
            return False
        if not _is_fresh(value[key]):
            return False
    return True


def _as_module(model: torch.nn.Module, dispatch: Dispatch) -> Any:
    base: Any = type(dispatch.whole)
    module = _module_class(base)(model, dispatch.whole.dynamo_ctx)
    object.__setattr__(module, "deplo_dispatch", dispatch)
    object.__setattr__(module, "deplo_direct", dispatch.dispatcher)
    return module


@functools.cache
def _module_class(base: Any) -> Any:
    class DispatchedModule(base):  # type: ignore[misc]
        """A compiled module whose calls go by their arguments alone; a copy's go through Dynamo."""

        deplo_direct: Any = None

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return self._orig_mod(*args, **kwargs)
            direct = self.deplo_direct
            return super().__call__(*args, **kwargs) if direct is None else direct(*args, **kwargs)

    return DispatchedModule


def call_report(compiled: Any) -> CallReport:
    """How calls of `compiled` went, which `deplo.jit(..., guards="inputs")` made. Raises UserError for anything else."""
    dispatch = getattr(compiled, "__dict__", {}).get("deplo_dispatch")
    if not isinstance(dispatch, Dispatch):
        raise UserError('call_report takes what deplo.jit(..., guards="inputs") returned')
    return dispatch.report()
