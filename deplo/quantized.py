"""Operators that quantise, dequantise and multiply what is quantised, as the formulas that eager mode computes for them.

Scales and zero points that are tensors stay tensors, where eager mode reads them as numbers. One that returns NotImplemented leaves the call as it
is, to ATen, whose error it then gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Formula = Callable[..., Any]

_BYTES = (torch.uint8, torch.int8, torch.int16, torch.int32)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _number(x: Any, dtype: torch.dtype) -> Any:
    """One element of a tensor, without dimensions, or the number that it is."""
    return x.reshape(()).to(dtype) if isinstance(x, torch.Tensor) else x


def _inverse(scale: Any) -> Any:
    """1 / scale in float64, which then multiplies as float32."""
    if not isinstance(scale, torch.Tensor):
        return 1.0 / scale
    return (1.0 / _number(scale, torch.float64)).to(torch.float32)


def _lies_within(low: Any, high: Any, dtype: torch.dtype) -> bool:
    """Whether the bounds are numbers of an integer dtype; eager mode refuses others."""
    if not isinstance(low, int) or not isinstance(high, int) or dtype not in _BYTES:
        return False
    return torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max


def _are_single(*values: Any) -> bool:
    return all(not isinstance(v, torch.Tensor) or v.numel() == 1 for v in values)


def quantize_per_tensor(x: torch.Tensor, scale: Any, zero_point: Any, low: Any, high: Any, dtype: torch.dtype) -> Any:
    """Whole numbers of `dtype`, of float32, float16 or bfloat16; scale and zero point are numbers, or tensors of one element."""
    x = _wide(x)
    if (
        x.dtype != torch.float32
        or not _are_single(scale, zero_point)
        or not _lies_within(low, high, dtype)
        or (not isinstance(scale, torch.Tensor) and scale == 0)
    ):
        return NotImplemented
    return torch.clamp(torch.round(x * _inverse(scale)) + _number(zero_point, torch.float32), low, high).to(dtype)


def dequantize_per_tensor(
    x: torch.Tensor, scale: Any, zero_point: Any, low: Any, high: Any, dtype: torch.dtype, *, out_dtype: torch.dtype | None = None
) -> Any:
    """(x - zero_point) * scale, each rounded to `out_dtype`, which is float32 if there is none."""
    if x.dtype != dtype or dtype not in _BYTES or not _are_single(scale, zero_point):
        return NotImplemented
    out_dtype = out_dtype or torch.float32
    if not out_dtype.is_floating_point:
        return NotImplemented
    wide = out_dtype if out_dtype == torch.float64 else torch.float32
    whole = (x.to(out_dtype).to(wide) - _number(zero_point, wide)).to(out_dtype)
    return (whole.to(wide) * _number(scale, wide)).to(out_dtype)


def _along(values: torch.Tensor, axis: int, rank: int) -> torch.Tensor:
    shape = [1] * rank
    shape[axis] = -1
    return values.reshape(shape)


def quantize_per_channel(x: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int, low: int, high: int, dtype: torch.dtype) -> Any:
    """Scale and zero point of x[..., i, ...] are those at i, along `axis`."""
    x = _wide(x)
    if x.dtype != torch.float32 or not 0 <= axis < x.dim() or not _lies_within(low, high, dtype):
        return NotImplemented
    scale, zero = _along(scales, axis, x.dim()), _along(zero_points, axis, x.dim())
    return torch.clamp(torch.round(x * (1.0 / scale)) + zero, low, high).to(dtype)


def dequantize_per_channel(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: Any,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """The difference is one of integers, the product is in the dtype of `scales`."""
    if x.dtype != dtype or dtype not in _BYTES or not 0 <= axis < x.dim() or not scales.is_floating_point():
        return NotImplemented
    whole = x if zero_points is None else x - _along(zero_points, axis, x.dim())
    return (whole * _along(scales, axis, x.dim())).to(out_dtype or torch.float32)


def quantize_per_token(x: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, low: int, high: int, dtype: torch.dtype) -> Any:
    """Each vector along the last dimension by its own scale and zero point."""
    if not _lies_within(low, high, dtype):
        return NotImplemented
    return x.mul(1.0 / scales).add(zero_points).round().clamp(low, high).to(dtype)


def dequantize_per_token(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    low: int,
    high: int,
    dtype: torch.dtype,
    output_dtype: torch.dtype = torch.float32,
) -> Any:
    return ((x - zero_points) * scales).to(output_dtype)


def _group_size(x: torch.Tensor, scales: torch.Tensor, size: int) -> int | None:
    """That of groups along the last dimension of a matrix; None where eager mode refuses."""
    if x.dim() != 2 or size <= 1:
        return None
    if size > x.shape[-1] and scales.shape[-1] == 1:
        size = x.shape[-1]
    return size if x.shape[-1] % size == 0 else None


def dequantize_per_channel_group(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: Any,
    low: int,
    high: int,
    dtype: torch.dtype,
    group_size: int = 128,
    output_dtype: torch.dtype = torch.float32,
) -> Any:
    size = _group_size(x, scales, group_size)
    if size is None:
        return NotImplemented
    whole = x.reshape(-1, size)
    whole = whole if zero_points is None else whole.sub(zero_points.reshape(-1, 1))
    return whole.mul(scales.reshape(-1, 1)).reshape(x.shape).to(output_dtype)


def choose_qparams(symmetric: bool) -> Formula:
    """Scale [1] in float32 and zero point [1] in int64 of a range that holds 0 and all of x (torch.ao.quantization.utils.determine_qparams)."""

    def rule(x: torch.Tensor, low: int, high: int, eps: float, dtype: torch.dtype) -> Any:
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or dtype not in _BYTES or not low < high or low > 0 or high < 0:
            return NotImplemented
        least, most = torch.aminmax(x)
        least, most = torch.minimum(least, torch.zeros_like(least)), torch.maximum(most, torch.zeros_like(most))
        smallest = torch.full((1,), eps, dtype=torch.float32, device=x.device)
        if symmetric:
            most = torch.maximum(-least, most)
            scale = torch.maximum(most / (float(high - low) / 2), smallest)
            middle = {torch.int8: 0, torch.uint8: 128}.get(dtype, 0)
            return scale.to(torch.float64), torch.full((1,), middle, dtype=torch.int64, device=x.device)
        scale = torch.maximum((most - least) / float(high - low), smallest)
        zero = low - torch.round(least / scale).to(torch.int32)
        return scale.to(torch.float64), torch.clamp(zero, low, high).to(torch.int64)

    return rule


def choose_qparams_per_token(x: torch.Tensor, dtype: torch.dtype) -> Any:
    """Scale and zero point (0) of each vector along the last dimension, in its own dtype (float32 for float16)."""
    if dtype != torch.int8 or not x.is_floating_point():
        return NotImplemented
    most = x.abs().amax(dim=-1, keepdim=True)
    most = most.to(torch.float32) if most.dtype == torch.float16 else most
    scales = most.clamp(min=1e-5).div(127)
    return scales, torch.zeros_like(scales)


def choose_qparams_per_token_asymmetric(x: torch.Tensor, dtype: torch.dtype) -> Any:
    """Of a range that holds 0; scale in float64 and zero point in int64."""
    return torch.ops.quantized_decomposed._choose_qparams_per_token_asymmetric_impl(x, dtype)


def weight_int8pack_mm(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> Any:
    """x [M, K] times weight [N, K] in int8, scaled by channel: [M, N] in the dtype of x."""
    if x.dim() != 2 or weight.dim() != 2 or weight.dtype != torch.int8 or scales.dim() != 1 or x.dtype == torch.float64:
        return NotImplemented
    product = torch.mm(x.to(torch.float32), weight.to(x.dtype).to(torch.float32).t())
    return (product * scales.to(torch.float32)).to(x.dtype)


def _int4_codes(packed: torch.Tensor, n: int, k: int) -> Any:
    """[N, K] of what _convert_weight_to_int4pack_for_cpu packed on this machine (ATen/native/cpu/int4mm_kernel.cpp); NotImplemented for its last
    columns where they fill no block."""
    lanes = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability())
    if lanes is None or n % (4 * lanes):
        return NotImplemented
    blocks = packed.reshape(n // (4 * lanes), k, 2 * lanes // 16, 16)
    # Byte [k, j, d] of a block holds the codes of columns 16 j + d and, above, of those half a block further on.
    halves = torch.stack([blocks & 15, blocks >> 4], 1)
    return halves.permute(0, 1, 3, 4, 2).reshape(n, k)


def weight_int4pack_mm_for_cpu(x: torch.Tensor, weight: torch.Tensor, group: int, scale_and_zeros: torch.Tensor) -> Any:
    """x [M, K] times weights in 4 bits of groups along k; `scale_and_zeros` [K / group, N, 2]: a weight is (code - 8) * scale + zero."""
    if x.dim() != 2 or weight.dtype != torch.uint8 or not isinstance(x.shape[1], int) or x.dtype == torch.float64 or scale_and_zeros.dim() != 3:
        return NotImplemented
    k, n = x.shape[1], scale_and_zeros.shape[1]
    codes = _int4_codes(weight, n, k) if k % group == 0 else NotImplemented
    if codes is NotImplemented:
        return NotImplemented
    scale, zero = (part.t().unsqueeze(-1) for part in scale_and_zeros.unbind(-1))
    whole = (codes.to(torch.int8) - 8).reshape(n, k // group, group).to(x.dtype) * scale + zero
    return torch.mm(x, whole.reshape(n, k).t().to(x.dtype))


def formulas() -> dict[Any, Formula]:
    """By overload: of the libraries that are loaded, which is when something imports them."""
    found: dict[Any, Formula] = {
        torch.ops.aten._weight_int8pack_mm.default: weight_int8pack_mm,
        torch.ops.aten._weight_int4pack_mm_for_cpu.default: weight_int4pack_mm_for_cpu,
    }
    ops = torch.ops.quantized_decomposed
    table: dict[str, Formula] = {
        "quantize_per_tensor.default": quantize_per_tensor,
        "quantize_per_tensor.tensor": quantize_per_tensor,
        "dequantize_per_tensor.default": dequantize_per_tensor,
        "dequantize_per_tensor.tensor": dequantize_per_tensor,
        "quantize_per_channel.default": quantize_per_channel,
        "dequantize_per_channel.default": dequantize_per_channel,
        "quantize_per_token.default": quantize_per_token,
        "dequantize_per_token.default": dequantize_per_token,
        "dequantize_per_channel_group.default": dequantize_per_channel_group,
        "choose_qparams_per_token.default": choose_qparams_per_token,
        "choose_qparams_per_token_asymmetric.default": choose_qparams_per_token_asymmetric,
        "choose_qparams.tensor": choose_qparams(symmetric=False),
        "choose_qparams_symmetric.tensor": choose_qparams(symmetric=True),
    }
    for name, formula in table.items():
        packet, _, overload = name.partition(".")
        if hasattr(ops, packet):
            found[getattr(getattr(ops, packet), overload)] = formula
    return found
