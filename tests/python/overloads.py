"""One ATen overload as Torch IR: also those that AOTAutograd breaks up before a backend sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from deplo.fx_import import import_graph
from deplo.imported import Imported


def overload_of(name: str) -> Any:
    """torch.ops.aten.<packet>.<overload> of "aten.packet.overload"."""
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def import_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], fake_results: Any) -> Imported:
    """A graph of one call whose tensor arguments are its inputs, in order; results as eager's, or fake ones, say."""
    overload = overload_of(name)
    graph = torch.fx.Graph()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    count = 0

    def place(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"arg{count}")
        node.meta["val"] = mode.from_tensor(value, static_shapes=True)
        count += 1
        return node

    placed_args, placed_kwargs = tree_map(place, args), tree_map(place, kwargs)
    call = graph.call_function(overload, placed_args, placed_kwargs)
    results = tree_map(
        lambda t: mode.from_tensor(t, static_shapes=True) if isinstance(t, torch.Tensor) else t,
        fake_results,
    )
    call.meta["val"] = results
    if isinstance(results, torch.Tensor):
        graph.output((call,))
    else:
        outputs = []
        for k, result in enumerate(results):
            item = graph.call_function(__import__("operator").getitem, (call, k))
            item.meta["val"] = result
            outputs.append(item)
        graph.output(tuple(outputs))
    return import_graph(torch.fx.GraphModule({}, graph), "call")
