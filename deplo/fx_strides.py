"""Strides of FX nodes as eager mode has them, where fake tensors have others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import sizes
from .fx_nodes import packet_name


def strides_of(node: torch.fx.Node, value: torch.Tensor) -> Sequence[Any]:
    """Strides where fake tensors have others along axes of one element. A number that is expanded has 0 along every axis
    (at::inferExpandGeometry); what TensorIterator makes of contiguous operands of one shape is laid out anew (its fast_set_up), as are
    results of kernels that ask for contiguous memory."""
    source = node.args[0].meta.get("val") if packet_name(node) == "expand" and isinstance(node.args[0], torch.fx.Node) else None
    if isinstance(source, torch.Tensor) and source.dim() == 0:
        return [0] * value.dim()
    if packet_name(node) in _LAID_OUT_ANEW and _is_contiguous(value):
        return _default_strides(value.shape)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) and packet_name(node) not in _LIKE_THEIR_INPUT and _is_contiguous(value):
        operands = [x.meta.get("val") for x in node.all_input_nodes]
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        shape = [sizes.term_of(n) for n in value.shape]
        if tensors and all([sizes.term_of(n) for n in x.shape] == shape and _is_contiguous(x) for x in tensors):
            if not _takes_a_number(node):
                return _default_strides(value.shape)
            # At the sizes of the first call: the order of dimensions is the same for all.
            examples = [[[sizes.example_of(n) for n in numbers] for numbers in (x.shape, x.stride())] for x in tensors]
            if not any(n is None for pair in examples for numbers in pair for n in numbers):
                order, _ = torch._prims_common.compute_elementwise_output_logical_to_physical_perm(
                    *(torch.empty_strided(*pair, device="meta") for pair in examples)  # type: ignore[arg-type]
                )
                outward = _default_strides([value.shape[d] for d in order])
                return [outward[order.index(d)] for d in range(value.dim())]
    return list(value.stride())


_LIKE_THEIR_INPUT = ("clone", "hardtanh")  # empty_like comes first
_LAID_OUT_ANEW = (
    *("native_layer_norm", "_log_softmax", "tril", "triu"),
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
    *("_batch_norm_with_update_functional", "_batch_norm_no_update"),
)


def _takes_a_number(node: torch.fx.Node) -> bool:
    """Whether a number is an operand of TensorIterator, of another shape than the tensors."""
    named = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False)) | node.kwargs  # type: ignore[union-attr]
    return any(name in named and not isinstance(named[name], torch.fx.Node) for name in ("self", "other"))


def _default_strides(shape: Sequence[Any]) -> list[Any]:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step if isinstance(size, int) and size <= 1 else step * size
    return strides


def _is_contiguous(value: torch.Tensor) -> bool:
    """Apart from axes of one element; asks nothing of symbolic sizes."""
    wanted = _default_strides(value.shape)
    return all(
        (isinstance(size, int) and size == 1) or sizes.term_of(given) == sizes.term_of(step)
        for size, given, step in zip(value.shape, value.stride(), wanted, strict=True)
    )
