"""Which products of float32 may round their operands to tf32, as PyTorch's switches say: a part of a graph's text, and what its calls choose by.

`torch.backends.cuda.matmul` (fp32_precision, allow_tf32, `torch.set_float32_matmul_precision`) speaks for products of matrices, and
`torch.backends.cudnn` for convolutions. Torch IR says it of each call that could (`tf32=true`, `tf32=false`), so equal texts mean the same. Dynamo's
guards know the first switch alone: a call compares both with those that its program was made with.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from .targets import Target

# Operators that cuBLAS multiplies on matrix units, with the operands whose last dimensions are rows and columns; cuDNN's. Products of vectors and
# matrices are none: what they read counts, not how they multiply.
_PRODUCTS = {
    torch.ops.aten.mm.default: ("self", "mat2"),
    torch.ops.aten.bmm.default: ("self", "mat2"),
    torch.ops.aten.addmm.default: ("mat1", "mat2"),
    torch.ops.aten.baddbmm.default: ("batch1", "batch2"),
    torch.ops.aten.addbmm.default: ("batch1", "batch2"),
    torch.ops.aten.matmul.default: ("self", "other"),
    torch.ops.aten.linear.default: ("input", "weight"),
}
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default, torch.ops.aten.convolution_backward.default)
_SOFTMAX = ("aten._softmax.", "aten._safe_softmax.", "aten._softmax_backward_data.", "aten.softmax.")
_STEPS_TO_SOFTMAX = 8  # scales, masks, casts, dropout and views
_SWITCHED = re.compile(r"= aten\.(?:(\w*convolution\w*)|\w+)\.default\(.*?\btf32=(true|false)\)")
_LEAST_CAPABILITY = 8  # whose matrix units know tf32

State = tuple[bool, bool]  # of products and of convolutions


def state() -> State:
    """What PyTorch allows now."""
    products = torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    if not torch.backends.cudnn.enabled:
        return products, products
    return products, torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"


def serves(target: Target, device: torch.device) -> bool:
    """Whether the switches are about products of this target, whose tensors may be on `device`."""
    if not target.has_tf32:
        return False
    if device.type != target.tensors:
        return True
    module = torch.get_device_module(device)
    return not module.is_available() or module.get_device_capability(device)[0] >= _LEAST_CAPABILITY


def argument(node: torch.fx.Node, target: Any, given: dict[str, Any], now: State) -> str:
    """ "true" or "false" for a call of `node` whose product the switches decide, by schema names of its arguments; empty for all others."""
    if target in _PRODUCTS:
        if _is_of_attention(node):
            return ""
        left, right = (_value(given.get(name)) for name in _PRODUCTS[target])
        return _word(now[0]) if _multiplies(left, right, right_is_turned=target is torch.ops.aten.linear.default) else ""
    if target in _CONVOLUTIONS:
        image, weight = _value(given.get("input")), _value(given.get("weight"))
        if image is None or weight is None or any(x.dtype != torch.float32 for x in (image, weight)):
            return ""
        # One channel a group is no product of matrices.
        is_depthwise = _is_one(weight.shape[1]) or _is_one(weight.shape[0] // given.get("groups", 1))
        return "" if is_depthwise or not given.get("allow_tf32", True) else _word(now[1])
    return ""


def _is_of_attention(product: torch.fx.Node) -> bool:
    """Whether a softmax is a few steps away with no product between: scores and weighted values stay in one kernel, which multiplies exactly."""
    for step in (lambda node: list(node.users), lambda node: node.all_input_nodes):
        reached, seen = [product], {product}
        for _ in range(_STEPS_TO_SOFTMAX):
            nearby = dict.fromkeys(other for node in reached for other in step(node))
            reached = [other for other in nearby if other not in seen and other.target not in _PRODUCTS and other.target not in _CONVOLUTIONS]
            seen.update(reached)
            if any(str(node.target).startswith(_SOFTMAX) for node in reached):
                return True
    return False


def _value(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _multiplies(left: Any, right: Any, right_is_turned: bool) -> bool:
    if left is None or right is None or min(left.dim(), right.dim()) < 2 or any(x.dtype != torch.float32 for x in (left, right)):
        return False
    rows = left.shape[:-1] if right_is_turned else left.shape[-2:-1]
    columns = right.shape[-2 if right_is_turned else -1]
    return any(not _is_one(size) for size in rows) and not _is_one(columns)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _word(allowed: bool) -> str:
    return "true" if allowed else "false"


def switches(text: str) -> tuple[bool, bool]:
    """Whether a graph's text depends on what PyTorch allows for products, and for convolutions."""
    found = [match[1] is not None for line in text.splitlines() if "tf32=" in line and (match := _SWITCHED.search(line))]
    return False in found, True in found


def switched(text: str, to: State) -> str:
    """The graph's text where PyTorch allows `to`."""

    def switch(match: re.Match[str]) -> str:
        return match[0][: match.start(2) - match.start()] + _word(to[match[1] is not None]) + ")"

    return "\n".join(_SWITCHED.sub(switch, line) if "tf32=" in line else line for line in text.split("\n"))
