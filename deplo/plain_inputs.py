"""Quantised weights, and other tensors that are made of tensors, among the operands of regions (`subgraphs`).

AOTAutograd takes such inputs of a graph apart, but has no rule for regions that they are given to. Here Dynamo's graph takes the tensors that they
are made of, and each region puts its own together again before it reads them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.source import AttrSource
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclasses.dataclass(eq=False)
class _Whole:
    """How a tensor that is made of tensors is put together; called with these it gives it. Its name is that of the call in FX graphs."""

    kind: Any
    names: list[str]
    context: Any
    sizes: Any
    strides: Any
    __name__ = "put_together"

    def __call__(self, *parts: torch.Tensor) -> Any:
        return self.kind.__tensor_unflatten__(dict(zip(self.names, parts, strict=True)), self.context, self.sizes, self.strides)


def _is_like(a: _Whole | None, b: _Whole | None) -> bool:
    return a is b if a is None or b is None else vars(a) == vars(b)


def _whole(x: Any) -> tuple[_Whole, list[torch.Tensor]] | None:
    """How it is put together, and of what; None for one whose parts are no plain tensors."""
    names, context = x.__tensor_flatten__()
    parts = [getattr(x, name) for name in names]
    sizes = (*x.size(), *x.stride())
    if any(is_traceable_wrapper_subclass(part) for part in parts) or any(isinstance(n, torch.SymInt) for n in sizes):
        return None
    return _Whole(type(x), names, context, x.size(), x.stride()), parts


@dataclasses.dataclass
class PlainInputs:
    """A graph of Dynamo whose inputs are plain tensors and numbers."""

    gm: torch.fx.GraphModule
    inputs: list[Any]
    names: list[list[str]]  # by input of the graph as it was: its parts, if it was taken apart

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph, for the inputs as they were."""
        places = [(i, name) for i, names in enumerate(self.names) for name in names or [""]]

        def call(*inputs: Any) -> Any:
            return compiled(*[getattr(inputs[i], name) if name else inputs[i] for i, name in places])

        return call


def plain_inputs(given: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> PlainInputs | None:
    """A copy of the graph with its inputs taken apart, if a region is given some that need it and AOTAutograd could do nothing with it otherwise.

    None where nothing is to be done, or nothing can be: gradients of such inputs, and regions within regions.
    """
    wholes = [isinstance(x, torch.Tensor) and is_traceable_wrapper_subclass(x) for x in example_inputs]
    if (
        not any(wholes)
        or not _regions(given)
        or (torch.is_grad_enabled() and any(x.requires_grad for x in itertools.compress(example_inputs, wholes)))
    ):
        return None
    gm = _copy(given)  # Dynamo goes on using its own
    placeholders = gm.graph.find_nodes(op="placeholder")
    apart: dict[Any, Any] = {node: _whole(x) for node, x, whole in zip(placeholders, example_inputs, wholes, strict=True) if whole}
    calls = _regions(gm)
    if not any(node in apart for call in calls for node in call.args):
        return None
    if None in apart.values() or any(_regions(getattr(gm, str(call.args[0].target))) for call in calls):
        return None
    made: list[tuple[str, list[_Whole | None], torch.fx.Node]] = []  # of a region's name and the kinds of its operands
    for call in calls:
        place, kinds = str(call.args[0].target), [apart[x][0] if x in apart else None for x in call.args[2:]]
        known = next((node for name, of, node in made if name == place and all(map(_is_like, kinds, of))), None)
        if known is None:
            # Dynamo takes quantised and other weights to one region, if both are taken alike.
            region = _copy(getattr(gm, place))
            own = zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True)
            _take_apart(region, {node: apart[x] for node, x in own if x in apart})
            name = f"{place}_of_parts_{len(made)}"
            setattr(gm, name, region)
            with gm.graph.inserting_before(call):
                known = gm.graph.get_attr(name)
            made.append((place, kinds, known))
        call.args = (known, known.target, *call.args[2:])
    _take_apart(gm, apart, calls)
    for node in gm.graph.find_nodes(op="get_attr"):
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    names = [apart[node][0].names if node in apart else [] for node in placeholders]
    inputs = [part for node, x in zip(placeholders, example_inputs, strict=True) for part in (apart[node][1] if node in apart else [x])]
    return PlainInputs(gm, inputs, names)


def _regions(gm: torch.fx.GraphModule) -> list[Any]:
    """Calls of regions."""
    return list(gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph))


def _copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """With a graph of its own, and what Dynamo says of it."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    result = graph.graph_copy(gm.graph, copies)
    graph.output(result)
    for node, copy in copies.items():
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    made = torch.fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        made._param_name_to_source = gm._param_name_to_source
    return made


def _take_apart(
    gm: torch.fx.GraphModule, wholes: dict[torch.fx.Node, tuple[_Whole, list[torch.Tensor]]], calls: Sequence[torch.fx.Node] = ()
) -> None:
    """Placeholders for the parts in the place of the wholes', which are put together again for all but these calls."""
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    parts: dict[Any, list[torch.fx.Node]] = {
        node: [_placeholder(gm, node, name, x) for name, x in zip(whole.names, values, strict=True)] for node, (whole, values) in wholes.items()
    }
    for call in calls:
        call.args = tuple(part for x in call.args for part in parts.get(x, [x]))
    for node, (whole, _) in wholes.items():
        if node.users:
            with gm.graph.inserting_before(first):
                node.replace_all_uses_with(gm.graph.call_function(whole, tuple(parts[node])))
        gm.graph.erase_node(node)
    gm.recompile()


def _placeholder(gm: torch.fx.GraphModule, whole: torch.fx.Node, name: str, value: torch.Tensor) -> torch.fx.Node:
    with gm.graph.inserting_before(whole):
        made = gm.graph.placeholder(f"{whole.target}_{name}")
    made.meta = {**whole.meta, "example_value": value}
    made.meta.pop("grapharg", None)
    source = getattr(whole, "_dynamo_source", None)
    if source is not None:
        made._dynamo_source = AttrSource(source, name)  # type: ignore[attr-defined]
    return made
