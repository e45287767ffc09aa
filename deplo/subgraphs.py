"""Regions that torch.compiler.nested_compile_region marks: AOTAutograd hands each over as one graph, and as a call of it for every time it runs.

They become part of the graph that calls them: equal kernels compile once in any case, each weight is packed for its own place, and nothing ends at
the region's edge.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .eager_calls import calls_as_in_eager_mode
from .fx_import import BY_STORAGE
from .fx_nodes import packet_name, storage_of


def inline_regions(gm: torch.fx.GraphModule) -> None:
    """Replaces calls of regions by what these do, unless PyTorch cannot say again what their results look like: then they stay calls."""
    while calls := gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        with calls_as_in_eager_mode():
            inlined = [_inline(gm, call) for call in calls]
        for node in gm.graph.find_nodes(op="get_attr"):
            if not node.users:
                gm.graph.erase_node(node)
        gm.recompile()
        if not any(inlined):
            return


def _inline(gm: torch.fx.GraphModule, call: torch.fx.Node) -> bool:
    region = getattr(gm, str(call.args[0].target), None) if isinstance(call.args[0], torch.fx.Node) else None
    if not isinstance(region, torch.fx.GraphModule) or any(user.target is not operator.getitem for user in call.users):
        return False
    made: list[torch.fx.Node] = []
    placeholders = region.graph.find_nodes(op="placeholder")
    as_traced = all(_is_alike(node.meta.get("val"), given) for node, given in zip(placeholders, call.args[2:], strict=True))
    try:
        results = copy_before(call, region, call.args[2:], made, _ValuesAlike(region) if as_traced else with_own_values)
    except RuntimeError:  # sizes that depend on data, say
        for node in reversed(made):
            gm.graph.erase_node(node)
        return False
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)
    return True


def copy_before(
    place: torch.fx.Node, source: torch.fx.GraphModule, operands: Iterable[Any], made: list[torch.fx.Node], then: Callable[[torch.fx.Node], None]
) -> Any:
    """Copies the nodes of `source` in front of `place`, with `operands` for its placeholders, and returns what stands for its results.

    `made` gets the copies, of which `then` is told one by one. What `source` holds as attributes becomes the other module's under new names.
    """
    gm: Any = place.graph.owning_module
    given = iter(operands)
    copies: dict[torch.fx.Node, Any] = {}
    results: Any = ()
    with place.graph.inserting_before(place):
        for node in source.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(given)
            elif node.op == "output":
                results = torch.fx.node.map_arg(node.args[0], copies.__getitem__)
            else:
                copy = copies[node] = place.graph.node_copy(node, copies.__getitem__)
                made.append(copy)
                if node.op == "get_attr":
                    copy.target = copy.name + "_of_region"
                    setattr(gm, copy.target, getattr(source, str(node.target)))
                then(copy)
    return results


def _is_alike(val: Any, given: Any) -> bool:
    """Whether what a region is given looks as what it was traced with."""
    other = given.meta.get("val") if isinstance(given, torch.fx.Node) else given
    if not isinstance(val, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(val) is type(other) and str(val) == str(other)
    if val.dtype != other.dtype or val.device != other.device or val.ndim != other.ndim:
        return False
    return [str(n) for n in (*val.shape, *val.stride())] == [str(n) for n in (*other.shape, *other.stride())]


class _ValuesAlike:
    """As with_own_values, for a region's call with arguments like those that it was traced with: what is no view looks as it did.

    Who shares a storage with whom is asked of what a graph returns, and of what calls address by storage. In a region without such calls the rest
    keeps the very values of the region.
    """

    def __init__(self, region: torch.fx.GraphModule) -> None:
        (output,) = region.graph.find_nodes(op="output")
        graphs = [part.graph for part in region.modules() if isinstance(part, torch.fx.GraphModule)]  # of regions that it calls, too
        everything = any(packet_name(node) in BY_STORAGE for graph in graphs for node in graph.nodes)
        self.seen = None if everything else {storage for node in output.all_input_nodes for storage in _storages(node.meta.get("val"))}

    def __call__(self, copy: torch.fx.Node) -> None:
        val = copy.meta.get("val")
        is_higher = isinstance(copy.target, torch._ops.HigherOrderOperator)
        if self.seen is not None and not is_higher and isinstance(val, FakeTensor) and self.seen.isdisjoint(_storages(val)):
            return
        if not isinstance(val, FakeTensor) or is_higher or copy.op != "call_function":
            with_own_values(copy)
        elif isinstance(copy.target, torch._ops.OpOverload) and not any(r.alias_info for r in copy.target._schema.returns):
            with val.fake_mode:
                copy.meta["val"] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
        else:
            with_own_values(copy)


def _storages(value: Any) -> list[int]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [storage_of(x) for x in values if isinstance(x, torch.Tensor) and torch._C._has_storage(x)]


def with_own_values(copy: torch.fx.Node) -> None:
    """Gives a copy fake tensors of its own: who shares a storage with whom is read from them."""
    args, kwargs = torch.fx.node.map_arg((copy.args, copy.kwargs), lambda arg: arg.meta.get("val"))
    mode = torch._guards.detect_fake_mode([args, kwargs, copy.meta.get("val")])
    is_call = copy.op == "call_function" and not isinstance(copy.target, torch._ops.HigherOrderOperator)
    if is_call and "val" in copy.meta:
        with mode if mode is not None else contextlib.nullcontext():
            copy.meta["val"] = copy.target(*args, **kwargs)  # type: ignore[operator]
