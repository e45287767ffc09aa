"""The decompositions that deplo asks AOTAutograd to apply, each with its reason; everything else deplo breaks down itself."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from deplo.strides import with_strides_of_kernels

_FORMULA = "a formula of overloads that have rules"
OURS = "a formula of overloads that have rules, below"
IN_FORMULAS = "a formula of overloads that have rules, in formulas.py"
IN_QUANTIZED = "a formula of overloads that have rules, in quantized.py"
_PLACES = "indexing by places that follow from the arguments"

# Overload -> why PyTorch's rule is taken, or whose formula is. What models spend their time in is a row of csrc/lower/torch_to_tensor instead.
REASONS: dict[str, str] = {
    "_chunk_cat.default": _FORMULA,
    "_euclidean_dist.default": _FORMULA,
    "_grouped_mm.default": IN_FORMULAS,
    "_masked_softmax.default": IN_FORMULAS,
    "_transformer_encoder_layer_fwd.default": IN_FORMULAS,
    "_trilinear.default": IN_FORMULAS,
    "_unsafe_masked_index.default": _PLACES,
    "_unsafe_masked_index_put_accumulate.default": _PLACES,
    "_weight_int4pack_mm_for_cpu.default": IN_QUANTIZED,
    "_weight_int8pack_mm.default": IN_QUANTIZED,
    "affine_grid_generator.default": OURS,
    "bartlett_window.default": IN_FORMULAS,
    "bartlett_window.periodic": IN_FORMULAS,
    "bitwise_left_shift.Scalar_Tensor": IN_FORMULAS,
    "bitwise_right_shift.Scalar_Tensor": IN_FORMULAS,
    "blackman_window.default": IN_FORMULAS,
    "blackman_window.periodic": IN_FORMULAS,
    "block_diag.default": _PLACES,
    "bucketize.Scalar": OURS,
    "bucketize.Tensor": OURS,
    "celu.default": _FORMULA,
    "conv_tbc.default": IN_FORMULAS,
    "dist.default": _FORMULA,
    "embedding_renorm.default": OURS,
    "fractional_max_pool2d.default": OURS,
    "fractional_max_pool2d_backward.default": OURS,
    "fractional_max_pool3d.default": OURS,
    "fractional_max_pool3d_backward.default": OURS,
    "frexp.Tensor": IN_FORMULAS,
    "hamming_window.default": IN_FORMULAS,
    "hamming_window.periodic": IN_FORMULAS,
    "hamming_window.periodic_alpha": IN_FORMULAS,
    "hamming_window.periodic_alpha_beta": IN_FORMULAS,
    "hann_window.default": IN_FORMULAS,
    "hann_window.periodic": IN_FORMULAS,
    "histc.default": IN_FORMULAS,
    "isin.Scalar_Tensor": IN_FORMULAS,
    "isin.Tensor_Scalar": IN_FORMULAS,
    "isin.Tensor_Tensor": OURS,
    "kaiser_window.beta": IN_FORMULAS,
    "kaiser_window.default": IN_FORMULAS,
    "kaiser_window.periodic": IN_FORMULAS,
    "ldexp.Tensor": OURS,
    "linalg_cross.default": OURS,
    "linspace.Scalar_Tensor": _FORMULA,
    "linspace.Tensor_Scalar": _FORMULA,
    "linspace.Tensor_Tensor": _FORMULA,
    "logspace.Scalar_Tensor": _FORMULA,
    "logspace.Tensor_Scalar": _FORMULA,
    "logspace.Tensor_Tensor": _FORMULA,
    "logspace.default": _FORMULA,
    "max_unpool2d.default": OURS,
    "max_unpool3d.default": OURS,
    "multi_margin_loss.default": OURS,
    "multi_margin_loss_backward.default": OURS,
    "multilabel_margin_loss_backward.default": OURS,
    "multilabel_margin_loss_forward.default": OURS,
    "mvlgamma.default": _FORMULA,
    "renorm.default": _FORMULA,
    "roll.default": OURS,
    "rot90.default": _PLACES,
    "rrelu_with_noise_backward.default": _FORMULA,
    "searchsorted.Scalar": OURS,
    "searchsorted.Tensor": OURS,
    "segment_reduce.default": OURS,
    "special_modified_bessel_i0.default": IN_FORMULAS,
    "special_modified_bessel_i1.default": IN_FORMULAS,
    "special_xlog1py.default": _FORMULA,
    "special_xlog1py.other_scalar": IN_FORMULAS,
    "special_xlog1py.self_scalar": IN_FORMULAS,
    "tril_indices.default": _PLACES,
    "triu_indices.default": _PLACES,
}


# Packets taken apart where a backward graph follows. The partitioner saves the results of a call as a whole, but computes sums and pointwise
# functions again: so it saves the input of a norm or an activation, which some other call mostly needs as well, and nothing of its own.
RECOMPUTED = (
    ["_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data"]
    + ["_batch_norm_with_update_functional", "_native_batch_norm_legit_functional", "batch_norm_backward", "native_batch_norm_backward"]
    + ["native_group_norm", "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward"]
    + ["elu", "elu_backward", "glu", "glu_backward", "hardsigmoid", "hardsigmoid_backward", "hardswish"]
    + ["hardswish_backward", "hardtanh", "hardtanh_backward", "leaky_relu", "leaky_relu_backward", "log_sigmoid_backward"]
    + ["mish", "mish_backward", "sigmoid_backward", "softplus", "softplus_backward", "tanh_backward", "threshold_backward"]
)


def decompositions(training: bool = False, formulas: bool = True) -> dict[Any, Any]:
    """The table for AOTAutograd; `training` where it makes a backward graph, too. Without `formulas`, those of PyTorch alone."""
    import torch
    from torch._decomp import get_decompositions

    from . import quantized

    overloads: list[Any] = []
    for name, reason in REASONS.items():
        if reason in (OURS, IN_FORMULAS, IN_QUANTIZED):
            continue
        packet, overload = name.split(".")
        overloads.append(getattr(getattr(torch.ops.aten, packet), overload))
    if training:
        overloads += [getattr(torch.ops.aten, packet) for packet in RECOMPUTED]
    theirs = dict(get_decompositions(overloads))
    return with_strides_of_kernels(theirs | _ours() | quantized.formulas() | (_own() if training else {})) if formulas else theirs


@functools.cache
def _ours() -> dict[Any, Any]:
    """Formulas that PyTorch has not, or that it traces with other strides than its CPU kernels give their results.

    One that returns NotImplemented leaves the call as it is, to a rule or to ATen: so PyTorch's tracer reads it.
    """
    import torch
    from torch._decomp import get_decompositions

    from .formulas import formulas

    aten = torch.ops.aten
    formula_of_cross = get_decompositions([aten.linalg_cross.default])[aten.linalg_cross.default]

    def roll(x: torch.Tensor, shifts: list[Any], dims: Sequence[int] = ()) -> Any:
        """A concatenation for each dimension, which keeps the order of the dimensions in memory. Parts of a symbolic size would install guards."""
        if not dims or len(dims) != len(shifts) or any(isinstance(size, int) and size == 0 for size in x.shape):
            return NotImplemented
        if any(isinstance(shift, torch.SymInt) for shift in shifts):
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

    def searchsorted(
        sequence: torch.Tensor, x: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: torch.Tensor | None = None
    ) -> Any:
        """A binary search of as many steps as the length has bits."""
        length = sequence.shape[-1] if sequence.dim() else None
        if not isinstance(length, int):
            return NotImplemented
        if side is not None:
            right = side == "right"
        dtype = torch.result_type(sequence, x)
        if isinstance(x, (bool, int, float)):
            x = torch.scalar_tensor(x, dtype=dtype, device=sequence.device)
        if not isinstance(x, torch.Tensor) or torch.bool in (x.dtype, sequence.dtype) or dtype.is_complex:
            return NotImplemented
        x, sequence = x.to(dtype), sequence.to(dtype)

        def taken(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return aten.index.Tensor(values, [at]) if values.dim() == 1 else values.gather(-1, at)

        first, last = (torch.full(x.shape, end, dtype=torch.int64, device=x.device) for end in (0, length))
        for _ in range(length.bit_length()):
            # The places of ATen's bisection, so that sequences out of order and with NaN give what they give there.
            middle = (first + last) // 2
            at = middle.clamp(max=length - 1)
            value = taken(sequence, at if sorter is None else taken(sorter, at))
            before = ~(value > x if right else value >= x)
            open_ = first < last
            first, last = torch.where(open_ & before, middle + 1, first), torch.where(open_ & ~before, middle, last)
        place = first
        return (place.to(torch.int32) if out_int32 else place).contiguous()

    def isin(x: torch.Tensor, other: torch.Tensor, *, assume_unique: bool = False, invert: bool = False) -> Any:
        """A comparison with each, or a search among the others in order; NaN, which stands last there, is in nothing."""
        count = other.numel()
        refused = x.dtype == torch.bool or x.is_complex()  # by eager mode, whose error the call then gives
        if not isinstance(count, int) or x.dtype != other.dtype or refused:
            return NotImplemented
        if count <= 32:
            found = (x.unsqueeze(-1) == other.flatten()).any(-1)
        else:
            ordered = other.flatten().sort().values
            place = searchsorted(torch.where(ordered.isnan(), math.inf, ordered) if x.is_floating_point() else ordered, x)
            found = ordered[place.clamp(max=count - 1)] == x
        return ~found if invert else found

    def bucketize(x: Any, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
        return searchsorted(boundaries, x, out_int32=out_int32, right=right)

    def affine_grid(theta: torch.Tensor, size: Sequence[Any], align_corners: bool) -> Any:
        """x, y (and z) times their columns of theta, and the last column. PyTorch's formula fails where a side has one point."""
        steps, shape = size[2:], [theta.shape[0], *[1] * (len(size) - 2), len(size) - 2]
        if len(size) not in (4, 5) or not all(isinstance(n, int) for n in steps):
            return NotImplemented
        if 1 in steps and theta.dtype.itemsize < 4:  # eager mode's error
            return NotImplemented
        wide = theta.to(torch.promote_types(theta.dtype, torch.float32))
        grid = wide[..., -1].reshape(shape)
        for d, n in enumerate(reversed(steps)):
            points = torch.linspace(-1, 1, n, dtype=wide.dtype, device=theta.device) if n > 1 else wide.new_zeros(n)
            if not align_corners and n > 1:
                points = points * (n - 1) / n
            grid = grid + wide[..., d].reshape(shape) * points.view([-1 if k == d + 2 else 1 for k in range(len(shape), 0, -1)])
        return grid.to(theta.dtype).contiguous()

    def log_sigmoid(x: torch.Tensor) -> Any:
        """Contiguous, as the CPU's kernel gives it for any order in memory."""
        return NotImplemented if x.is_contiguous() else aten.log_sigmoid_forward.default(x.contiguous())

    def cross(x: torch.Tensor, other: torch.Tensor, *, dim: int = -1) -> Any:
        """PyTorch's formula converts where eager mode refuses."""
        return NotImplemented if x.dtype != other.dtype or x.dtype == torch.bool else formula_of_cross(x, other, dim=dim)

    def embedding_renorm(weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float) -> Any:
        flat = indices.reshape(-1)
        rows = weight[flat]
        norm = torch.linalg.vector_norm(rows, norm_type, 1, keepdim=True)
        return weight.index_put((flat,), torch.where(norm > max_norm, rows * (max_norm / (norm + 1e-7)), rows))

    def fractional_max_pool(x: torch.Tensor, kernel: Sequence[int], output: Sequence[Any], samples: torch.Tensor) -> Any:
        """The greatest element of each window, by its place in the flattened image; of several NaNs the last, of equals the first."""
        rank = len(kernel)
        if x.dim() == rank + 1:
            return tuple(part.squeeze(0) for part in fractional_max_pool(x.unsqueeze(0), kernel, output, samples))
        images, place = x.shape[:2], torch.zeros((), dtype=torch.int64, device=x.device)
        for d, (size, width, count) in enumerate(zip(x.shape[2:], kernel, output, strict=True)):
            starts = _fractional_starts(samples[..., 1 - d if rank == 2 else d], size - width, count)
            shape = [1] * (2 * rank)
            shape[d], shape[rank + d] = count, width
            place = place * size + (starts.unsqueeze(-1) + torch.arange(width, device=x.device)).view(*images, *shape)
        windows = x.flatten(2).gather(-1, place.flatten(2)).view(*images, *output, math.prod(kernel))
        values, first = windows.max(-1)
        nan = torch.where(windows.isnan(), torch.arange(windows.shape[-1], device=x.device), -1).amax(-1)
        return values, place.flatten(-rank).gather(-1, torch.where(nan < 0, first, nan).unsqueeze(-1)).squeeze(-1)

    def fractional_max_pool_backward(grad: torch.Tensor, x: torch.Tensor, kernel: Sequence[int], output: Sequence[Any], indices: torch.Tensor) -> Any:
        rank = len(kernel)
        empty = grad.new_zeros(x.shape).flatten(-rank)
        return empty.scatter_add(-1, indices.flatten(-rank), grad.flatten(-rank)).view(x.shape)

    pools = {aten.fractional_max_pool2d.default: fractional_max_pool, aten.fractional_max_pool3d.default: fractional_max_pool}
    backward = (aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)
    return {
        aten.roll.default: roll,
        aten.affine_grid_generator.default: affine_grid,
        aten.max_unpool2d.default: max_unpool,
        aten.max_unpool3d.default: max_unpool,
        aten.embedding_renorm.default: embedding_renorm,
        aten.linalg_cross.default: cross,
        aten.log_sigmoid_forward.default: log_sigmoid,
        aten.isin.Tensor_Tensor: isin,
        aten.bucketize.Scalar: bucketize,
        aten.bucketize.Tensor: bucketize,
        aten.searchsorted.Scalar: searchsorted,
        aten.searchsorted.Tensor: searchsorted,
        aten.segment_reduce.default: _segment_reduce,
        aten.ldexp.Tensor: _ldexp,
        aten.multi_margin_loss.default: _multi_margin_loss,
        aten.multi_margin_loss_backward.default: _multi_margin_loss_backward,
        aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
        aten.multilabel_margin_loss_backward.default: _multilabel_margin_loss_backward,
        **formulas(),
        **pools,
        **dict.fromkeys(backward, fractional_max_pool_backward),
    }


def _fractional_starts(sample: Any, room: Any, count: Any) -> Any:
    """Where the windows of one dimension start, in the arithmetic of ATen: `sample` [N, C] gives [N, C, count]."""
    import torch

    number = torch.arange(count, device=sample.device)
    if isinstance(count, int) and count == 1:
        return (number + room).expand(*sample.shape, count)
    step = torch.full((), room / (count - 1), dtype=sample.dtype, device=sample.device)
    sample = sample.unsqueeze(-1)
    starts = ((number.to(sample.dtype) + sample) * step).to(torch.int64) - (sample * step).to(torch.int64)
    return torch.where(number == count - 1, room, starts)


def _ldexp(x: Any, n: Any) -> Any:
    """x * 2^n, rounded once where n is whole, as eager mode does; else, as there, the product."""
    import torch

    if not x.is_floating_point() or n.is_floating_point():
        return x * torch.pow(x.new_full((), 2.0, dtype=x.dtype if x.is_floating_point() else torch.float32), n)
    if n.dtype == torch.bool or x.is_complex() or n.is_complex():
        return NotImplemented

    def power(exponent: Any) -> Any:
        return ((exponent + 1023) << 52).view(torch.float64)

    n = n.to(torch.int64)
    if x.dtype != torch.float64:  # exact in float64, so that nothing is rounded twice
        return (x.to(torch.float64) * power(n.clamp(-400, 400))).to(torch.float32).to(x.dtype)
    n = n.clamp(-2200, 2200)
    for _ in range(2):  # steps down that leave the bits of x as they are, if the last one can round
        step = torch.where(n > 1023, 1023, torch.where(n < -1022, -969, 0))
        x, n = x * power(step), n - step
    return x * power(n.clamp(-1022, 1023))


def _rows(x: Any) -> Any:
    """[N, C] of a matrix, a vector or a number."""
    return x.reshape(1, -1) if x.dim() < 2 else x


def _margins(x: Any, target: Any, margin: float) -> tuple[Any, Any, Any]:
    """[N, C] of multi_margin_loss: margin - x[target] + x, whether it counts (NaN does not), and [N, 1] of the target."""
    import torch

    x, target = _rows(x), target.reshape(-1, 1)
    z = margin - x.gather(1, target) + x
    return z, (z > 0) & (torch.arange(x.shape[1], device=x.device) != target), target


def _multi_margin_loss(x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1) -> Any:
    """ATen/native/LossMultiMargin.cpp: sums over classes of max(0, margin - x[target] + x)^p * weight[target] / C."""
    import torch

    z, counts, place = _margins(x, target, margin)
    terms = torch.where(counts, z if p == 1 else z * z, 0.0)
    if weight is not None:
        terms = terms * weight[place]
    rows = terms.sum(1) / z.shape[1]
    return rows.view(target.shape) if reduction == 0 else rows.mean() if reduction == 1 else rows.sum()


def _multi_margin_loss_backward(grad: Any, x: Any, target: Any, p: Any, margin: Any, weight: Any = None, reduction: int = 1) -> Any:
    import torch

    z, counts, place = _margins(x, target, margin)
    scale = 1.0 / (z.shape[1] * (z.shape[0] if reduction == 1 and x.numel() > 0 else 1))
    terms = counts.to(x.dtype) * scale if p == 1 else torch.where(counts, 2 * scale * z, 0.0)
    if weight is not None:
        terms = terms * weight[place]
    terms = terms.scatter_add(1, place, -terms.sum(1, keepdim=True))
    return (terms * (grad.reshape(-1, 1) if reduction == 0 else grad)).view(x.shape)


def _margins_of_lists(x: Any, target: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    """Of multilabel_margin_loss, whose lists of targets end at the first -1: [N, C, C] of 1 - x[target] + x and whether it counts; [N, C] places."""
    import torch

    x, target = _rows(x), _rows(target)
    classes = torch.arange(x.shape[1], device=x.device)
    listed = (target < 0).to(torch.int64).cumsum(1) == 0
    place = torch.where(listed, target, 0)
    z = 1 - x.gather(1, place).unsqueeze(2) + x.unsqueeze(1)
    is_target = ((place.unsqueeze(2) == classes) & listed.unsqueeze(2)).any(1)
    return z, listed.unsqueeze(2) & ~is_target.unsqueeze(1) & (z > 0), (place, is_target)


def _multilabel_margin_loss(x: Any, target: Any, reduction: int) -> Any:
    """ATen/native/LossMultiLabelMargin.cpp: sums over targets and other classes of max(0, 1 - x[target] + x) / C."""
    import torch

    z, counts, (_, is_target) = _margins_of_lists(x, target)
    rows = torch.where(counts, z, 0.0).sum((1, 2)) / z.shape[2]
    loss = rows.view(target.shape[:-1]) if reduction == 0 else rows.mean() if reduction == 1 else rows.sum()
    return loss, is_target.to(x.dtype).view(target.shape)


def _multilabel_margin_loss_backward(grad: Any, x: Any, target: Any, reduction: int, is_target: Any) -> Any:
    z, counts, (place, _) = _margins_of_lists(x, target)
    terms = counts.to(x.dtype) / (z.shape[2] * (z.shape[0] if reduction == 1 else 1))
    result = terms.sum(1).scatter_add(1, place, -terms.sum(2))
    return (result * (grad.reshape(-1, 1) if reduction == 0 else grad)).view(x.shape)


def _segment_reduce(
    data: Any, reduce: str, *, lengths: Any = None, indices: Any = None, offsets: Any = None, axis: int = 0, unsafe: bool = False, initial: Any = None
) -> Any:
    """A scatter: each element to the segment that it is in, and what is in none to one more at either side."""
    import torch

    if indices is not None or (lengths is None) == (offsets is None) or not data.is_floating_point():
        return NotImplemented
    if offsets is None:
        if not unsafe:
            check = torch.ops.aten._assert_async.msg
            check((lengths >= 0).all(), "lengths contains negative value!")
            check((lengths.sum(-1) == data.shape[axis]).all(), "segment_reduce(): Expected all rows of lengths along axis to sum to data.size(axis)")
        offsets = torch.nn.functional.pad(lengths.cumsum(-1), (1, 0))
    counts = offsets.diff(dim=-1)
    place = (torch.arange(data.shape[axis], device=data.device).unsqueeze(-1) >= offsets.unsqueeze(-2)).sum(-1)

    def per_segment(values: Any) -> Any:
        return values.view(*values.shape, *[1] * (data.dim() - values.dim()))

    kind = {"max": "amax", "min": "amin", "mean": "sum"}.get(reduce, reduce)
    first = {"max": -math.inf, "min": math.inf, "prod": 1.0}.get(reduce, 0.0) if initial is None else initial
    shape = list(data.shape)
    shape[axis] = offsets.shape[-1] + 1
    result = data.new_full(shape, first).scatter_reduce(axis, per_segment(place).expand(data.shape), data, kind)
    result = result.narrow(axis, 1, offsets.shape[-1] - 1)
    if reduce == "mean":
        counts = per_segment(counts)
        result = torch.where(counts == 0, math.nan if initial is None else initial, result / counts)
    return result.contiguous()


@functools.cache
def _own() -> dict[Any, Any]:
    """Forms in which the partitioner finds less to save."""
    import torch
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    formula_of_log_sigmoid = get_decompositions([aten.log_sigmoid_forward])[aten.log_sigmoid_forward.default]
    formula_of_group_norm = get_decompositions([aten.native_group_norm_backward])[aten.native_group_norm_backward.default]
    pool, pool_backward = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default

    def alias(x: torch.Tensor) -> Any:
        """It knows that this can be shown again."""
        return aten.alias.default(x)

    def transpose(x: torch.Tensor, a: int, b: int) -> Any:
        """Of the views, it does not know transpose."""
        dims = list(range(x.dim()))
        if dims:
            dims[a], dims[b] = dims[b], dims[a]
        return aten.permute.default(x, dims)

    def product_of_vectors(a: torch.Tensor, b: torch.Tensor) -> Any:
        """Pointwise, so that it may be computed again."""
        return a * b if isinstance(a.shape[2], int) and a.shape[2] == 1 else NotImplemented

    def repeated(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
        """A view of one tensor, which may be computed again, where it is concatenated with itself, as the angles of rotary embeddings are."""
        x = tensors[0]
        if len(tensors) == 1 or any(other is not x for other in tensors) or x.dim() == 0:
            return NotImplemented
        if x.dim() in (4, 5) and torch._prims_common.suggest_memory_format(x) != torch.contiguous_format:
            return NotImplemented
        dim %= x.dim()
        shape = [*x.shape[:dim], len(tensors) * x.shape[dim], *x.shape[dim + 1 :]]
        return x.unsqueeze(dim).expand(*x.shape[:dim], len(tensors), *x.shape[dim:]).clone(memory_format=torch.contiguous_format).view(shape)

    def wide(x: torch.Tensor) -> Any:
        return x if x.dtype == torch.float64 else x.to(torch.float32)

    def hardswish(x: torch.Tensor) -> Any:
        """The quotient first: six times a large number would overflow."""
        v = wide(x)
        return (v * ((v + 3).clamp(0, 6) / 6)).to(x.dtype)

    def log_sigmoid(x: torch.Tensor) -> Any:
        """Pointwise, and contiguous as the CPU's kernel gives it."""
        return formula_of_log_sigmoid(x.contiguous())

    def places_in_windows(x: torch.Tensor, kernel: list[int], stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Any:
        """Indices by way of places in their windows, which need one byte each to save."""
        values, indices = pool(x, kernel, stride, padding, dilation, ceil_mode)
        (kh, kw), (sh, sw), (ph, pw), (dh, dw) = (_pair(v) for v in (kernel, stride or kernel, padding, dilation))
        if not 0 < kh * kw <= 128:
            return values, indices
        height, width = x.shape[-2:]
        # Vectors of 32 bits divide, those of 64 do not.
        short = isinstance(height, int) and isinstance(width, int) and (height + 2 * ph) * (width + 2 * pw) < 2**31
        dtype = torch.int32 if short else torch.int64
        rows = torch.arange(values.shape[-2], device=x.device, dtype=dtype).unsqueeze(-1) * sh - ph
        columns = torch.arange(values.shape[-1], device=x.device, dtype=dtype) * sw - pw
        at = indices.to(dtype)
        place = (at // width - rows) // dh * kw + (at % width - columns) // dw
        place = place.to(torch.int8).to(dtype)
        return values, ((rows + place // kw * dh) * width + columns + place % kw * dw).to(torch.int64)

    def dropout_by_its_mask(x: torch.Tensor, p: float, train: Any = True) -> Any:
        """Its values are pointwise functions of the mask, which the gradient needs anyway. In the order of ATen's Dropout.cpp."""
        values, mask = aten.native_dropout.default(x, p, train is not False)
        return (values if train is False or p in (0, 1) else x * mask * (1 / (1 - p))), mask

    def shape_alone(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        """The operand's values play no part: they need not be saved."""
        return pool_backward(grad, grad.new_empty(x.shape), *rest)

    def statistics(x: torch.Tensor, dims: list[int], eps: float) -> Any:
        """x as it is computed with, its mean and 1 / sqrt(variance + eps); in float64, for the variance of floats from 1.8e19 on is no float."""
        variance, mean = torch.var_mean(x.to(torch.float64), dims, correction=0, keepdim=True)
        if x.dtype == torch.float64:  # what rounding left of the mean, as in csrc/lower/torch_to_tensor/normalization.cpp
            mean = torch.where(variance <= mean * mean, mean + (x - mean).mean(dims, keepdim=True), mean)
        v = wide(x)
        return v, mean.to(v.dtype), torch.rsqrt(variance + eps).to(v.dtype)

    def of_statistics(x: torch.Tensor, *parameters: Any) -> Any:
        """Their dtype, which is that of the first parameter; None where eager mode refuses the mixture."""
        given = [p.dtype for p in parameters if p is not None] or [x.dtype]
        mixed = any(dtype != x.dtype for dtype in given)
        return None if mixed and (x.dtype not in (torch.bfloat16, torch.float16) or any(dtype != torch.float32 for dtype in given)) else given[0]

    def layer_norm(x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
        dtype = of_statistics(x, weight, bias)
        if dtype is None:
            return NotImplemented
        dims = list(range(x.dim() - len(shape), x.dim()))
        v, mean, rstd = statistics(x.contiguous(), dims, eps)
        y = (v - mean) * rstd
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
        return y.to(x.dtype), mean.to(dtype), rstd.to(dtype)

    def group_norm(x: torch.Tensor, weight: Any, bias: Any, n: int, channels: int, inner: int, groups: int, eps: float) -> Any:
        dtype = of_statistics(x, weight, bias)
        if dtype is None:
            return NotImplemented
        v, mean, rstd = statistics(x.reshape(n, groups, channels // groups, inner), [2, 3], eps)
        y = ((v - mean) * rstd).view(x.shape)
        channelwise = (1, channels, *[1] * (x.dim() - 2))
        y = y if weight is None else y * weight.reshape(channelwise)
        y = y if bias is None else y + bias.reshape(channelwise)
        return y.to(x.dtype), mean.to(dtype).reshape(n, groups), rstd.to(dtype).reshape(n, groups)

    def group_norm_backward(grad: torch.Tensor, x: torch.Tensor, mean: Any, rstd: Any, weight: Any, *rest: Any) -> Any:
        """PyTorch's formula, which divides by the number of elements in Python."""
        if all(size != 0 for size in x.shape[1:] if isinstance(size, int)):
            return formula_of_group_norm(grad, x, mean, rstd, weight, *rest)
        channels = grad.sum([d for d in range(x.dim()) if d != 1])
        return tuple(v if wanted else None for v, wanted in zip((torch.zeros_like(x), channels, channels.clone()), rest[-1], strict=True))

    def batch_norm(formula: Callable[..., Any]) -> Callable[..., Any]:
        """PyTorch's formula, with statistics in the dtype of the parameters."""

        def rule(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
            dtype = of_statistics(x, weight, bias, mean, var)
            if dtype is None:
                return NotImplemented
            y, *statistics = formula(x.to(dtype), weight, bias, mean, var, *rest)
            return y.to(x.dtype), *statistics

        return rule

    def batch_norm_without_averages(x: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
        dtype = of_statistics(x, weight, bias)
        if dtype is None or dtype == x.dtype:
            return NotImplemented
        y, *statistics = without_averages(x.to(dtype), weight, bias, *rest)
        return y.to(x.dtype), *statistics

    norms = (torch.ops.aten._native_batch_norm_legit_functional.default, torch.ops.aten._batch_norm_with_update_functional.default)
    without_averages = torch.ops.aten._native_batch_norm_legit.no_stats
    formulas = get_decompositions(norms)
    return {
        **{overload: batch_norm(formulas[overload]) for overload in norms},
        without_averages: batch_norm_without_averages,
        aten.native_layer_norm.default: layer_norm,
        aten.native_group_norm.default: group_norm,
        aten.native_group_norm_backward.default: group_norm_backward,
        aten.detach.default: alias,
        aten.transpose.int: transpose,
        aten.bmm.default: product_of_vectors,
        aten.cat.default: repeated,
        aten.log_sigmoid_forward.default: log_sigmoid,
        aten.hardswish.default: hardswish,
        aten.native_dropout.default: _once(dropout_by_its_mask),
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
