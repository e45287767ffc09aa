"""The decompositions that deplo asks AOTAutograd to apply, each with its reason; everything else deplo breaks down itself."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

_FORMULA = "a formula of overloads that have rules"
_PLACES = "indexing by places that follow from the arguments"
_LAYOUT = "indexing whose result is laid out as eager mode does"

# Overload -> why PyTorch's rule is taken. What models spend their time in is a row of csrc/lower/torch_to_tensor instead.
REASONS: dict[str, str] = {
    "_chunk_cat.default": _FORMULA,
    "_euclidean_dist.default": _FORMULA,
    "_unsafe_masked_index.default": _PLACES,
    "_unsafe_masked_index_put_accumulate.default": _PLACES,
    "bitwise_left_shift.Scalar_Tensor": _FORMULA,
    "block_diag.default": _PLACES,
    "celu.default": _FORMULA,
    "dist.default": _FORMULA,
    "isin.Tensor_Tensor": _FORMULA,
    "ldexp.Tensor": _FORMULA,
    "linalg_cross.default": _FORMULA,
    "linspace.Scalar_Tensor": _FORMULA,
    "linspace.Tensor_Scalar": _FORMULA,
    "linspace.Tensor_Tensor": _FORMULA,
    "logspace.Scalar_Tensor": _FORMULA,
    "logspace.Tensor_Scalar": _FORMULA,
    "logspace.Tensor_Tensor": _FORMULA,
    "logspace.default": _FORMULA,
    "max_unpool2d.default": _LAYOUT,
    "max_unpool3d.default": _LAYOUT,
    "mvlgamma.default": _FORMULA,
    "renorm.default": _FORMULA,
    "roll.default": _LAYOUT,
    "rot90.default": _PLACES,
    "rrelu_with_noise_backward.default": _FORMULA,
    "special_xlog1py.default": _FORMULA,
    "tril_indices.default": _PLACES,
    "triu_indices.default": _PLACES,
}


# Packets taken apart where a backward graph follows. The partitioner saves the results of a call as a whole, but computes sums and pointwise
# functions again: so it saves the input of a norm or an activation, which some other call mostly needs as well, and nothing of its own.
RECOMPUTED = (
    ["_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data"]
    + ["_batch_norm_with_update_functional", "_native_batch_norm_legit_functional", "batch_norm_backward", "native_batch_norm_backward"]
    + ["native_group_norm", "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward"]
    + ["elu", "elu_backward", "gelu", "gelu_backward", "glu", "glu_backward", "hardsigmoid", "hardsigmoid_backward", "hardswish"]
    + ["hardswish_backward", "hardtanh", "hardtanh_backward", "leaky_relu", "leaky_relu_backward", "log_sigmoid_backward", "log_sigmoid_forward"]
    + ["mish", "mish_backward", "sigmoid_backward", "silu", "silu_backward", "softplus", "softplus_backward", "tanh_backward", "threshold_backward"]
)


def decompositions(training: bool = False) -> dict[Any, Any]:
    """The table for AOTAutograd; `training` where it makes a backward graph, too."""
    import torch
    from torch._decomp import get_decompositions

    overloads: list[Any] = []
    for name, reason in REASONS.items():
        if reason == _LAYOUT:
            continue
        packet, overload = name.split(".")
        overloads.append(getattr(getattr(torch.ops.aten, packet), overload))
    if training:
        overloads += [getattr(torch.ops.aten, packet) for packet in RECOMPUTED]
    return dict(get_decompositions(overloads)) | _as_eager_lays_out() | (_own() if training else {})


@functools.cache
def _as_eager_lays_out() -> dict[Any, Any]:
    """Calls whose results PyTorch traces with strides that its CPU kernels do not give them."""
    import torch

    aten = torch.ops.aten

    def roll(x: torch.Tensor, shifts: list[Any], dims: Sequence[int] = ()) -> Any:
        """A concatenation for each dimension, which keeps the order of the dimensions in memory."""
        if not dims or len(dims) != len(shifts) or any(isinstance(size, int) and size == 0 for size in x.shape):
            return NotImplemented
        for shift, dim in zip(shifts, dims, strict=True):
            size = x.shape[dim]
            start = (size - shift) % size
            x = torch.cat([x.narrow(dim, start, size - start), x.narrow(dim, 0, start)], dim)
        return x

    def max_unpool(x: torch.Tensor, indices: torch.Tensor, output_size: Sequence[Any], *rest: Any) -> Any:
        """A scatter in each image, which checks the indices as eager mode does; images of two dimensions keep the memory format."""
        rank = len(output_size)
        images = x.shape[:-rank]
        empty = x.new_zeros([*images, math.prod(output_size)])
        result = empty.scatter(-1, indices.flatten(-rank), x.flatten(-rank)).view(*images, *output_size)
        return result.contiguous(memory_format=torch._prims_common.suggest_memory_format(x)) if x.dim() == 4 and rank == 2 else result

    return {aten.roll.default: roll, aten.max_unpool2d.default: max_unpool, aten.max_unpool3d.default: max_unpool}


@functools.cache
def _own() -> dict[Any, Any]:
    """Forms in which the partitioner finds less to save."""
    import torch

    aten = torch.ops.aten
    pool, pool_backward = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default

    def alias(x: torch.Tensor) -> Any:
        """It knows that this can be shown again."""
        return aten.alias.default(x)

    def product_of_vectors(a: torch.Tensor, b: torch.Tensor) -> Any:
        """Pointwise, so that it may be computed again."""
        return a * b if isinstance(a.shape[2], int) and a.shape[2] == 1 else NotImplemented

    def places_in_windows(x: torch.Tensor, kernel: list[int], stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Any:
        """Indices by way of places in their windows, which need one byte each to save."""
        values, indices = pool(x, kernel, stride, padding, dilation, ceil_mode)
        (kh, kw), (sh, sw), (ph, pw), (dh, dw) = (_pair(v) for v in (kernel, stride or kernel, padding, dilation))
        if not 0 < kh * kw <= 128:
            return values, indices
        rows = torch.arange(values.shape[-2], device=x.device).unsqueeze(-1) * sh - ph
        columns = torch.arange(values.shape[-1], device=x.device) * sw - pw
        width = x.shape[-1]
        place = (indices // width - rows) // dh * kw + (indices % width - columns) // dw
        place = place.to(torch.int8).to(torch.int64)
        return values, (rows + place // kw * dh) * width + columns + place % kw * dw

    def shape_alone(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        """The operand's values play no part: they need not be saved."""
        return pool_backward(grad, grad.new_empty(x.shape), *rest)

    return {
        aten.detach.default: alias,
        aten.bmm.default: product_of_vectors,
        pool: _once(places_in_windows),
        pool_backward: _once(shape_alone),
    }


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _once(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule uses the operator that it is for, and means ATen's."""
    inside = threading.local()

    def guarded(*args: Any) -> Any:
        if getattr(inside, "active", False):
            return NotImplemented
        inside.active = True
        try:
            return rule(*args)
        finally:
            inside.active = False

    return guarded
