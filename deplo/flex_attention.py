"""PyTorch's flex_attention and its gradient as plain operators: scores, what the caller's functions make of them, softmax, and two products.

AOTAutograd hands over one call of a higher-order operator, with the caller's score_mod and mask_mod as graphs of single numbers. Written out over all
numbers they are formulas like any other: attention is found in them as in one that was written by hand, with the same keys left out. As in eager mode
mask_mod alone decides; the list of blocks that a BlockMask holds is not read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .decompositions import decompositions
from .eager_calls import calls_as_in_eager_mode
from .subgraphs import copy_before

_LOG2 = math.log(2)  # the operator's logarithms have base 2


class _Call(NamedTuple):
    """What makes scores of queries and keys, in both operators."""

    score: Any
    mask: Any
    scale: float
    score_buffers: Sequence[Any]
    mask_buffers: Sequence[Any]


def write_out_attention(gm: torch.fx.GraphModule, training: bool) -> None:
    """Replaces such calls in place. One that PyTorch cannot trace so (sizes that depend on data, say) stays a call; the importer says so."""
    forward, backward = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in (forward, backward)]
    if not calls:
        return
    with calls_as_in_eager_mode():
        for call in calls:
            _write_out(gm, call, _attention if call.target is forward else _gradient, training)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _write_out(gm: torch.fx.GraphModule, call: torch.fx.Node, formula: Callable[..., Any], training: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    if any(user.target is not operator.getitem for user in call.users):
        return
    modules = {node: getattr(gm, str(node.target)) for node in call.all_input_nodes if node.op == "get_attr" and _is_graph(gm, node)}
    nodes = [node for node in call.all_input_nodes if node not in modules]
    values = [node.meta.get("val") for node in nodes]
    mode = torch._guards.detect_fake_mode(values)
    if mode is None:
        return

    def run(*given: Any) -> Any:
        here = dict(zip(nodes, given, strict=True)) | modules
        return formula(*torch.fx.node.map_arg(call.args, here.__getitem__))

    try:
        with mode:
            traced = make_fx(run, decomposition_table=decompositions(training), _allow_non_fake_inputs=True)(*values)
    except RuntimeError:  # what depends on data, say
        return
    results = copy_before(call, traced, nodes, [], lambda copy: None)
    for user in list(call.users):
        _replace(gm, user, results[user.args[1]])
    gm.graph.erase_node(call)


def _is_graph(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    return isinstance(getattr(gm, str(node.target), None), torch.fx.GraphModule)


def _replace(gm: torch.fx.GraphModule, user: torch.fx.Node, result: Any) -> None:
    """`user` takes one result: a node, or a tuple of gradients of which it is asked for some."""
    if not isinstance(result, (tuple, list)):
        user.replace_all_uses_with(result)
    else:
        for inner in list(user.users):
            _replace(gm, inner, result[inner.args[1]])  # type: ignore[index]
    gm.graph.erase_node(user)


def _attention(
    query: Any, key: Any, value: Any, score: Any, mask: Sequence[Any], scale: float, options: Any, score_buffers: Any = (), mask_buffers: Any = ()
) -> tuple[Any, Any, Any]:
    """The result, and the logarithm to base 2 of the sum and the largest of each row's scores, as math_attention of PyTorch gives them.

    query (B, H, M, D), key (B or 1, H / G, N, D), value (B or 1, H / G, N, E) -> (B, H, M, E), (B, H, M), (B, H, M). Scores and weights are float32,
    or float64 where the query is.
    """
    call = _Call(score, mask[-1], scale, score_buffers, mask_buffers)
    _, scores, _ = _scores(query, _of_each_head(query, key), call)
    most = scores.amax(-1, keepdim=True)
    none = most == -math.inf
    weights = torch.exp(scores - most)
    total = weights.sum(-1, keepdim=True)
    # Sums are divided, not each weight: fewer divisions and roundings.
    sums = weights @ _of_each_head(query, value).to(weights.dtype)
    result = torch.where(none, 0.0, sums / total).to(query.dtype)
    logarithm = torch.where(none, -math.inf, most + torch.log(total))
    return _laid_out_as(result, query), logarithm.squeeze(-1) / _LOG2, most.squeeze(-1) / _LOG2


def _gradient(
    query: Any,
    key: Any,
    value: Any,
    result: Any,
    sums: Any,
    grad: Any,
    grad_sums: Any,
    score: Any,
    joint: Any,
    mask: Sequence[Any],
    scale: float,
    options: Any,
    score_buffers: Any = (),
    mask_buffers: Any = (),
) -> tuple[Any, Any, Any, Any]:
    """Gradients of query, key, value and of what score_mod captured (None where none is asked for).

    Of weights p = exp(s - log(sum)) and dp = grad @ value^T: ds = p (dp - sum(result grad) + grad_sums), then through score_mod, as `joint` says.
    """
    call = _Call(score, mask[-1], scale, score_buffers, mask_buffers)
    keys, values = _of_each_head(query, key), _of_each_head(query, value)
    grad = torch.zeros_like(result) if grad is None else grad
    plain, scores, allowed = _scores(query, keys, call)
    sums = (sums * _LOG2).unsqueeze(-1)
    weights = torch.where(sums == -math.inf, 0.0, torch.exp(scores - sums))
    wide = weights.dtype
    of_weights = grad.to(wide) @ values.to(wide).transpose(-2, -1)
    inner = of_weights - (result.to(wide) * grad.to(wide)).sum(-1, keepdim=True)
    if grad_sums is not None:
        inner = inner + (grad_sums / _LOG2).unsqueeze(-1)
    rest = (None,) * len(score_buffers)
    over = _over_numbers(lambda *numbers: tuple(joint(*numbers)), 1, (1, *rest), (0, None, None, None, None, *rest))
    of_scores, _, _, _, _, *captured = over(plain, *_indices(plain), weights * inner, *score_buffers)
    of_scores = torch.where(allowed, (of_scores * scale).to(query.dtype), 0.0)
    return (
        _laid_out_as(of_scores @ keys, query),
        _laid_out_as(_of_own_head(of_scores.transpose(-2, -1) @ query, key), key),
        _laid_out_as(_of_own_head(weights.to(query.dtype).transpose(-2, -1) @ grad, value), value),
        tuple(captured),
    )


def _scores(query: Any, keys: Any, call: _Call) -> tuple[Any, Any, Any]:
    """Scores before and after score_mod and mask_mod, and what mask_mod allows."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    plain = (query.to(wide) @ keys.to(wide).transpose(-2, -1)) * call.scale
    at = _indices(plain)
    allowed = _over_numbers(call.mask, 0, (None,) * len(call.mask_buffers))(*at, *call.mask_buffers)
    changed = _over_numbers(call.score, 1, (None,) * len(call.score_buffers))(plain, *at, *call.score_buffers)
    return plain, torch.where(allowed, changed, -math.inf), allowed


def _indices(scores: Any) -> list[Any]:
    return [torch.arange(0, size, device=scores.device) for size in scores.shape]


def _over_numbers(function: Any, scores: int, rest: Sequence[int | None], out: Any = 0) -> Callable[..., Any]:
    """A function of single numbers (`scores` of them, then four indices, then `rest`) over (B, H, M, N): one index after the other is a dimension.
    What is not None in `rest` runs over all four dimensions, as scores do."""
    runs = tuple(None if at is None else 0 for at in rest)
    for dimension in range(3, -1, -1):
        index = tuple(0 if at == dimension else None for at in range(4))
        function = torch.vmap(function, in_dims=(0,) * scores + index + runs, out_dims=out)
    return function  # type: ignore[no-any-return]


def _of_each_head(query: Any, keys: Any) -> Any:
    """Keys or values (B or 1, H / G, N, D) for each of the query's heads: (B, H, N, D)."""
    batch, heads, group = query.shape[0], keys.shape[1], query.shape[1] // keys.shape[1]
    keys = keys.expand(batch, *keys.shape[1:])
    if isinstance(group, int) and group == 1:
        return keys
    return keys.unsqueeze(2).expand(batch, heads, group, *keys.shape[2:]).reshape(batch, heads * group, *keys.shape[2:])


def _of_own_head(grad: Any, keys: Any) -> Any:
    """The sum of gradients (B, H, N, D) of all heads, and of all batches, that read one head of `keys`."""
    group = grad.shape[1] // keys.shape[1]
    if not isinstance(group, int) or group != 1:
        grad = grad.unflatten(1, (keys.shape[1], group)).sum(2)
    one = isinstance(keys.shape[0], int) and keys.shape[0] == 1
    return grad.sum(0, keepdim=True) if one else grad


def _laid_out_as(x: Any, other: Any) -> Any:
    """`x` with its dimensions in memory in the order of `other`'s, the last one innermost."""
    strides = [int(stride) if isinstance(stride, int) else stride for stride in other.stride()]
    order = sorted(range(x.dim() - 1), key=lambda at: (-strides[at], at)) + [x.dim() - 1]
    back = [order.index(at) for at in range(x.dim())]
    return x.permute(order).contiguous().permute(back)
