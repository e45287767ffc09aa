"""What an FX node says of itself: its operator, its storage, and where the user called it."""

from __future__ import annotations

import functools
import operator
import os
import re

import torch


def packet_name(node: torch.fx.Node) -> str:
    """`add` of aten.add.Tensor."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", ""))


def storage_of(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def where(node: torch.fx.Node) -> str:
    source, module = provenance(node)
    return (f" at {source}" if source else "") + (f" in {module}" if module else "")


def function_of(node: torch.fx.Node) -> str:
    """What the user called that this node is a part of, as `linear` of aten.addmm, `linear_backward` of its gradient; empty where unknown.

    Dynamo keeps the calls of its graph: their node's name, and the function, the method's name, or the class of the module around them.
    """
    forward, backward = node.meta.get("source_fn_stack"), node.meta.get("fwd_source_fn_stack")
    if not (stack := forward or backward):
        return ""
    name, called = stack[-1]
    if isinstance(called, type):
        called = re.sub(r"_\d+$", "", name)  # of layers that are called by a module, its name for the call: linear_3
    elif isinstance(called, torch._ops.OpOverload):
        called = called.overloadpacket.__name__
    word = str(called if isinstance(called, str) else getattr(called, "__name__", "")).strip("_")
    if called is getattr(operator, word, None) and word.startswith("i") and hasattr(operator, word[1:]):
        word = word[1:]  # x += y is an iadd
    return word + "_backward" if word and not forward else word


def provenance(node: torch.fx.Node) -> tuple[str, str]:
    """The user's source line (`net.py:12`) and module path (`layers.0.attn`) of a node; empty where unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return _source(node.meta.get("stack_trace") or ""), _module(str(next(reversed(stack.values()))[0]) if stack else "")


@functools.lru_cache(maxsize=1 << 8)
def _source(trace: str) -> str:
    """Of a traceback, which nodes of one call share, the last line outside of torch."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    inside = os.path.dirname(torch.__file__) + os.sep
    outside = [frame for frame in frames if not frame[0].startswith(inside)]
    return f"{os.path.basename(outside[-1][0])}:{outside[-1][1]}" if outside else ""


@functools.lru_cache(maxsize=1 << 12)
def _module(path: str) -> str:
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", re.sub(r"^[LG]\[['\"]\w+['\"]\]\.?", "", path))
    return re.sub(r"(?:^|\.)_modules(?=\.)", "", path).strip(".")
