"""Attention that PyTorch chose a library kernel of a GPU for, as the operator that says what it computes: deplo fuses it with what is around it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

_KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default: None,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: "attn_bias",
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: "attn_bias",
}
_FLASH_GRADIENT = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_NARROW = (torch.bfloat16, torch.float16)  # many rows of float32 the library multiplies in three parts on matrix units, faster than FFMA
_MOST_WIDTH = 256
_LEAST_ROWS = 8  # fewer leave matrix units idle: the library splits their keys
_MOST_FEW_ROWS, _LONG_KEYS = 16, 128  # of float32, whose keys the library does not split


def name_attention(gm: torch.fx.GraphModule) -> None:
    """Replaces such calls, in place, where only the result is used (no gradient will be computed from the rest) and deplo has a kernel that is as
    fast: at most 256 wide, without dropout, of 16-bit floats and 8 rows of queries or more, or of float32 and up to 16 rows over 128 keys or more."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _KERNELS and (users := _users(node)):
            changed = _replace(gm, node, users) or changed
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _users(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What takes the result, if nothing takes more."""
    alone = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    return list(node.users) if alone else []


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def _has_kernel(query: Any, value: Any) -> bool:
    if query is None or value is None:
        return False
    if any(not isinstance(size, int) or size > _MOST_WIDTH for size in (query.shape[-1], value.shape[-1])):
        return False
    rows, keys = query.shape[-2], value.shape[-2]
    if query.dtype == torch.float32:
        return isinstance(rows, int) and rows <= _MOST_FEW_ROWS and (not isinstance(keys, int) or keys >= _LONG_KEYS)
    return query.dtype in _NARROW and (not isinstance(rows, int) or rows >= _LEAST_ROWS)


def call_of(node: torch.fx.Node) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """The operator that a node is a call of, and its arguments; of a gradient of the flash kernel, which follows from the result and logarithms of
    sums alone, whoever made those, that of the CPU, whose formula deplo has. The graph keeps the node: eager mode runs it."""
    as_it_is = (node.target, node.args, node.kwargs)
    if node.target is not _FLASH_GRADIENT:
        return as_it_is
    of = _arguments(node)
    query, key, value = (of[name].meta.get("val") for name in ("query", "key", "value"))
    if of["dropout_p"] or of["cum_seq_q"] is not None or not _has_kernel(query, value):
        return as_it_is
    # The library's mask lies at the other corner where there are more keys than queries.
    if of["is_causal"] and str(query.shape[-2]) != str(key.shape[-2]):
        return as_it_is
    arguments = [of[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
    scale = {"scale": of["scale"]} if of["scale"] is not None else {}
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default, [*arguments, 0.0, bool(of["is_causal"])], scale


def _replace(gm: torch.fx.GraphModule, node: torch.fx.Node, users: list[torch.fx.Node]) -> bool:
    of = _arguments(node)
    query, value = (of[name].meta.get("val") for name in ("query", "value"))
    if of["dropout_p"] or of.get("return_debug_mask") or not _has_kernel(query, value):
        return False
    bias = of.get(_KERNELS[node.target] or "")  # type: ignore[index]
    with gm.graph.inserting_before(node):
        made = gm.graph.call_function(
            torch.ops.aten.scaled_dot_product_attention.default,
            (of["query"], of["key"], of["value"], bias, 0.0, bool(of["is_causal"])),
            {"scale": of["scale"]} if of["scale"] is not None else {},
        )
    made.meta = dict(users[0].meta)
    for user in users:
        user.replace_all_uses_with(made)
        gm.graph.erase_node(user)
    return True
