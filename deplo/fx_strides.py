"""Strides of FX nodes as eager mode has them, where fake tensors have others."""

from __future__ import annotations

import functools
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
        return _laid_out(value)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) and packet_name(node) not in _LIKE_THEIR_INPUT and _is_contiguous(value):
        operands = [x.meta.get("val") for x in node.all_input_nodes]
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        shape = _terms(value.shape)
        if tensors and all(_terms(x.shape) == shape and _is_contiguous(x) for x in tensors):
            if not _takes_a_number(node):
                return _laid_out(value)
            # At the sizes of the first call: the order of dimensions is the same for all.
            examples = tuple(tuple(tuple(sizes.example_of(n) for n in numbers) for numbers in (x.shape, x.stride())) for x in tensors)
            if not any(n is None for pair in examples for numbers in pair for n in numbers):
                order = _order_of(examples)
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


def _laid_out(value: torch.Tensor) -> list[Any]:
    """Default strides of a contiguous tensor: its own, unless some axis has one element."""
    return _default_strides(value.shape) if any(isinstance(size, int) and size <= 1 for size in value.shape) else list(value.stride())


@functools.lru_cache(maxsize=1 << 10)
def _order_of(examples: tuple[Any, ...]) -> list[int]:
    """The dimensions in the order in which TensorIterator lays out a result of such (shape, strides)."""
    tensors = [torch.empty_strided(*pair, device="meta") for pair in examples]
    return torch._prims_common.compute_elementwise_output_logical_to_physical_perm(*tensors)[0]


def _terms(numbers: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(sizes.term_of(n) for n in numbers)


def _is_contiguous(value: torch.Tensor) -> bool:
    """Apart from axes of one element; asks nothing of symbolic sizes."""
    return _are_contiguous(_terms(value.shape), _terms(value.stride()))


@functools.lru_cache(maxsize=1 << 12)
def _are_contiguous(shape: tuple[Any, ...], strides: tuple[Any, ...]) -> bool:
    return all(
        (isinstance(size, int) and size == 1) or given == step for size, given, step in zip(shape, strides, _default_strides(shape), strict=True)
    )
