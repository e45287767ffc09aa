"""Inputs that share memory, with each other or with outputs.

AOTAutograd's graphs read all inputs before they write one, so that calls whose inputs share memory with one that is written run op by op, unless
the graph was made for just that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable

from .core import core
from .errors import FallbackWarning, UnsupportedError
from .fx_nodes import storage_of
from .graph_code import EagerGraph
from .inputs import readable_name


class Places:
    """Which inputs of Dynamo's graph share storages when it is compiled, and where they lie in them."""

    def __init__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.names = [readable_name(str(node.target)) for node in placeholders]
        storages = [storage_of(x) if isinstance(x, torch.Tensor) and torch._C._has_storage(x) else None for x in example_inputs]
        shared = [storage for storage in dict.fromkeys(storages) if storage is not None and storages.count(storage) > 1]
        self.groups = [1 + shared.index(storage) if storage in shared else 0 for storage in storages]  # 0: alone
        self.offsets = []
        for i, (node, x) in enumerate(zip(placeholders, example_inputs, strict=False)):
            fake = node.meta.get("example_value")
            if self.groups[i]:
                offset = fake.storage_offset() if isinstance(fake, torch.Tensor) else x.storage_offset()
                if not isinstance(offset, torch.SymInt):  # a symbol is passed at each call
                    self.offsets.append((i, offset))


@dataclasses.dataclass
class Checks:
    """What a call of a graph that writes its inputs is checked for."""

    places: Places
    written: set[int]
    has_bases: bool
    training: bool
    strict: bool


class CheckedCall(SerializableCallable):
    """A compiled graph for calls whose inputs share no memory with those that it writes, else Dynamo's graph op by op.

    With `has_bases`, inputs of one storage have become views of one base. AOTAutograd writes their storage offsets into the graph, and Dynamo
    does not guard them: they must lie as they did. Views of one storage share its version, so that in `training` a write to one would make
    another stale that is kept for the gradient, though they have no element in common.
    """

    def __init__(self, compiled: Callable[..., Any], eager: EagerGraph, checks: Checks) -> None:
        self.compiled = compiled
        self.eager = eager
        self.checks = checks
        places, count = checks.places, len(checks.places.groups)
        self._fixed = places.offsets if checks.has_bases else []
        groups = places.groups if checks.has_bases else [0] * count
        self._find = core().AliasCheck([i in checks.written for i in range(count)], groups, checks.training)
        self._told: set[str] = set()

    def __call__(self, *args: Any) -> Any:
        if not (why := self._why_not(args)):
            return self.compiled(*args)
        if self.checks.strict:
            raise UnsupportedError(f"a call of a graph: {why}")
        if why not in self._told:
            self._told.add(why)
            warnings.warn(f"a call of a graph runs in eager mode: {why}", FallbackWarning, stacklevel=2)
        return self.eager(list(args))

    def _why_not(self, args: Sequence[Any]) -> str:
        names = self.checks.places.names
        for i, offset in self._fixed:
            if args[i].storage_offset() != offset:
                return f"inputs share memory, and input {names[i]} lies elsewhere in it than when the graph was compiled"
        if (pair := self._find(args)) is not None:
            return f"input {names[pair[0]]}, which it writes, shares memory with input {names[pair[1]]}"
        return ""

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        """For packages of aot_compile."""
        compiled = BundledAOTAutogradSerializableCallable(fn.compiled)
        return pickle.dumps((BundledAOTAutogradSerializableCallable.serialize_compile_artifacts(compiled), fn.eager.code(), fn.checks))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Any:
        compiled, code, checks = pickle.loads(data)
        return cls(BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(compiled), EagerGraph(code), checks)


def view_written_inputs(gm: torch.fx.GraphModule) -> None:
    """Makes outputs that the user sees as views of a written input such views, where the graph has views of what is written to it.

    AOTAutograd views the input anew by the sizes, strides and storage offset of what a graph returns (gen_alias_from_base in
    torch/_functorch/_aot_autograd/functional_utils.py), unless no size is symbolic. Of another tensor these would be others.
    """
    metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    if metadata is None:
        return
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    (output,) = gm.graph.find_nodes(op="output")
    returned = list(output.args[0])
    tokens = len(metadata.tokens)
    updates = dict(zip(metadata.mutated_inp_runtime_indices, returned[tokens:], strict=False))  # inputs that AOTAutograd writes itself
    updates = {placeholders[tokens + at]: value for at, value in updates.items()}
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    updates |= {node.args[0]: node.args[1] for node in copies}
    first = tokens + len(metadata.mutated_inp_runtime_indices)
    for at, info in enumerate(metadata.output_info, first):
        if info.output_type.name != "alias_of_input":
            continue
        shown = placeholders[tokens + info.base_idx]
        with gm.graph.inserting_before(output):
            view = _viewed(returned[at], updates.get(shown), shown)
        if view is not None:
            returned[at] = view
    output.args = (type(output.args[0])(returned), *output.args[1:])
    gm.recompile()


def writes_windows_with_gaps(user_graph: torch.fx.GraphModule, traced: torch.fx.GraphModule) -> bool:
    """Whether the user's graph may write to windows (`x.unfold(...)`) that do not cover x once each, by the graph that AOTAutograd made of it.

    AOTAutograd writes windows back by the gradient of `unfold` (unfold_inverse in aten/src/ATen/FunctionalInverses.cpp), which is 0 between
    windows and a sum where they overlap; eager mode leaves what is between them, and refuses the others.
    """

    def covers(size: Any, dim: int, width: int, step: int) -> bool:
        return bool(size) and isinstance(size[dim], int) and width == step and size[dim] % step == 0

    backward = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.unfold_backward.default)
    called = {getattr(node.target, "__name__", str(node.target)) for node in user_graph.graph.nodes}
    return any(name.partition(".")[0] == "unfold" for name in called) and not all(covers(*node.args[1:5]) for node in backward)


def _viewed(node: Any, update: torch.fx.Node | None, shown: torch.fx.Node) -> torch.fx.Node | None:
    """`node`, a view of `update`, as the same view of the input `shown`; None if it is none."""
    chain: list[torch.fx.Node] = []
    while node is not update:
        if not isinstance(node, torch.fx.Node) or node.op != "call_function" or not node.args:
            return None
        chain.append(node)
        node = node.args[0]
    if update is None or (chain and not _shares_storage(chain[0], update)):
        return None
    result = shown
    for call in reversed(chain):
        made = call.graph.create_node("call_function", call.target, (result, *call.args[1:]), dict(call.kwargs))
        made.meta.update({key: value for key, value in call.meta.items() if key != "val"})
        args, kwargs = torch.fx.node.map_arg((made.args, made.kwargs), lambda arg: arg.meta["val"])
        mode = torch._guards.detect_fake_mode(args)
        try:
            with mode if mode is not None else contextlib.nullcontext():
                made.meta["val"] = call.target(*args, **kwargs)  # type: ignore[operator]
        except RuntimeError:  # PyTorch traced a view where the input's strides allow none
            return None
        result = made
    return result if result.meta["val"].dtype == shown.meta["val"].dtype else None


def _shares_storage(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and storage_of(x) == storage_of(y)
