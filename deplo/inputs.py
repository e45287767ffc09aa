"""What each input of a graph is: a parameter, a buffer or the user's; and whether its storage stays the same between calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch


@dataclasses.dataclass
class InputInfo:
    """One input of the graph that Dynamo captured."""

    name: str
    kind: str = "user"  # user, parameter, buffer
    is_static: bool = False


def readable_name(name: str) -> str:
    """Dynamo's `l_self_modules_fc_parameters_weight_` as `fc_weight`, `l_x_` as `x`."""
    name = re.sub(r"\W", "_", name).strip("_")
    name = re.sub(r"^[lLgG]_+", "", name)
    if match := re.search(r"(?:^|_)(?:modules|parameters|buffers)_+(.*)", name):
        name = match[1]
        name = re.sub(r"_+(?:modules|parameters|buffers)_+", "_", name)
    return name.strip("_") or "x"


def describe_inputs(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> list[InputInfo]:
    """Kinds of the inputs of Dynamo's graph, in order. Fake parameters are still instances of Parameter; Dynamo marks buffers as static."""
    infos = []
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs, strict=False):
        info = InputInfo(readable_name(str(node.target)))
        tensor_dict = node.meta.get("tensor_dict") or {}
        if isinstance(example, torch.nn.Parameter):
            info.kind, info.is_static = "parameter", True
        elif isinstance(example, torch.Tensor) and "_dynamo_static_input_type" in tensor_dict:
            info.kind, info.is_static = "buffer", True
        infos.append(info)
    return infos


def outer_index(node: torch.fx.Node) -> int | None:
    """Which input of Dynamo's graph a placeholder of AOTAutograd's graph is; nothing for tangents, saved values, synthetic bases."""
    desc = node.meta.get("desc")
    if desc is not None:
        return desc.idx if type(desc).__name__ == "PlainAOTInput" else None
    if match := re.fullmatch(r"primals_(\d+)", str(node.target)):
        return int(match[1]) - 1
    if match := re.fullmatch(r"arg(\d+)_1", str(node.target)):
        return int(match[1])
    return None


def lifted_parameter(node: torch.fx.Node) -> InputInfo | None:
    """A parameter or buffer that AOTAutograd itself lifted out of a module (a graph that did not come from Dynamo)."""
    desc = node.meta.get("desc")
    kind = {"ParamAOTInput": "parameter", "BufferAOTInput": "buffer"}.get(type(desc).__name__)
    return InputInfo(re.sub(r"\W", "_", desc.target), kind, True) if kind and desc is not None else None


def takes_bases(gm: torch.fx.GraphModule) -> bool:
    """Whether AOTAutograd has put one base in the place of inputs that share memory, of which one is written."""
    kinds = {type(node.meta.get("desc")).__name__ for node in gm.graph.nodes if node.op == "placeholder"}
    return bool(kinds & {"ViewBaseAOTInput", "SyntheticBaseAOTInput"})


def written_inputs(gm: torch.fx.GraphModule) -> set[int]:
    """Which inputs of Dynamo's graph a forward or inference graph writes, itself or by AOTAutograd's code around it; bases left out."""
    metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder" and "Token" not in type(node.meta.get("desc")).__name__]
    infos = getattr(metadata, "input_info", ())
    return {index for node, info in zip(nodes, infos, strict=False) if info.mutates_data and (index := outer_index(node)) is not None}


def is_bare(gm: torch.fx.GraphModule) -> bool:
    """Whether AOTAutograd's code around an inference graph gives it all inputs of Dynamo's graph in order, and its outputs to the caller."""
    metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    if metadata is None:
        return False
    places = [outer_index(node) for node in gm.graph.nodes if node.op == "placeholder"]
    kept = places == list(range(len(metadata.input_info))) and not any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)
    fresh = all(info.output_type.name == "non_alias" for info in metadata.output_info)
    plain = all(type(meta).__name__ == "PlainTensorMeta" for meta in (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta))
    unmarked = metadata.grad_enabled_mutation is None and not metadata.is_rng_op_functionalized
    return kept and fresh and plain and unmarked and not metadata.tokens and not metadata.num_intermediate_bases


def count_returned(results: Sequence[Any]) -> int:
    """How many of the results of the forward graph under way are the caller's; those after them are kept for the backward graph."""
    metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    return len(results) if metadata is None else int(metadata.num_forward)


def static_names(gm: torch.fx.GraphModule) -> set[str] | None:
    """Names of the placeholders whose storage AOTAutograd knows to stay; for forward and inference graphs only."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    indices = getattr(metadata, "static_input_indices", None)
    if indices is None:
        return None
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    return {names[i] for i in indices if i < len(names)}


def placeholder_info(node: torch.fx.Node, outer: Sequence[InputInfo], static: set[str] | None) -> InputInfo:
    """Kind, readable name and staticness of one placeholder; mutated inputs lose `is_static` later, where the writes are known."""
    index = outer_index(node)
    if index is not None and index < len(outer):
        info = dataclasses.replace(outer[index])
    else:
        info = lifted_parameter(node) or InputInfo(re.sub(r"\W", "_", str(node.target)))
    if static is not None:
        info.is_static = node.name in static
    return info
