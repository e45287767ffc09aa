"""Operators that ATen computes in one call of several steps, as formulas of overloads that have rules.

One that returns NotImplemented leaves the call as it is, to ATen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .grouped import grouped_mm

aten = torch.ops.aten

# Windows of signal processing (ATen/native/TensorFactories.cpp): each is a function of the places 0..n-1, periodic ones without the last of n+1.


def _window(shape: Callable[[Any, int], Any], length: Any, periodic: bool, dtype: Any, layout: Any, device: Any) -> Any:
    """shape(places, number of points), for at least two points."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(length, int) or length < 0 or not dtype.is_floating_point or layout not in (None, torch.strided):
        return NotImplemented
    if length < 2:
        return torch.ones(length, dtype=dtype, device=device)
    points = length + periodic
    wide = torch.promote_types(dtype, torch.float32)
    return shape(torch.arange(points, dtype=wide, device=device), points)[:length].to(dtype).contiguous()


def _hamming(alpha: float, beta: float) -> Callable[[Any, int], Any]:
    return lambda places, points: torch.cos(places * (2 * math.pi / (points - 1))) * -beta + alpha


def _blackman(places: Any, points: int) -> Any:
    angle = places * (math.pi / (points - 1))
    return torch.cos(angle * 4) * 0.08 - torch.cos(angle * 2) * 0.5 + 0.42


def _bartlett(places: Any, points: int) -> Any:
    up = places * (2 / (points - 1))
    return torch.where(places <= (points - 1) // 2, up, 2 - up)


def _kaiser(beta: float) -> Callable[[Any, int], Any]:
    def shape(places: Any, points: int) -> Any:
        middle = (points - 1) / 2
        scale = torch.special.i0(places.new_full((), beta))
        return torch.special.i0(beta * torch.sqrt(1 - ((places - middle) / middle) ** 2)) / scale

    return shape


def _windows() -> dict[Any, Callable[..., Any]]:
    def rule(shape: Callable[..., Callable[[Any, int], Any]], *defaults: float) -> Callable[..., Any]:
        """Of a shape with parameters, of which a call gives the first ones."""

        def window(
            length: Any, periodic: bool = True, *given: float, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
        ) -> Any:
            parameters = [*given, *defaults[len(given) :]]
            return NotImplemented if pin_memory else _window(shape(*parameters), length, periodic, dtype, layout, device)

        return window

    packets = {
        aten.hann_window: rule(lambda: _hamming(0.5, 0.5)),
        aten.hamming_window: rule(_hamming, 0.54, 0.46),
        aten.blackman_window: rule(lambda: _blackman),
        aten.bartlett_window: rule(lambda: _bartlett),
        aten.kaiser_window: rule(_kaiser, 12.0),
    }
    names = ("default", "periodic", "periodic_alpha", "periodic_alpha_beta", "beta")
    return {getattr(packet, name): formula for packet, formula in packets.items() for name in names if hasattr(packet, name)}


# The layer of nn.TransformerEncoder without gradients (ATen/native/transformers).


def _marks(mask: Any, mask_type: int | None, shape: Sequence[Any]) -> bool:
    """Whether ATen takes such a mask for scores [B, H, L, S]: sizes that are known must be equal."""
    if len(shape) != 4 or mask_type not in (0, 1, 2):
        return False
    wanted = {0: shape[2:], 1: (shape[0], shape[3]), 2: shape}[mask_type]
    pairs = zip(mask.shape, wanted, strict=False)
    return mask.dim() == len(wanted) and not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)


def masked_softmax(x: Any, mask: Any, dim: int | None = None, mask_type: int | None = None) -> Any:
    """Over the last dimension of [B, H, L, S]; what `mask` (type 0: [L, S], 1: [B, S], 2: all four) marks has no weight. NaN where all is marked."""
    last = x.dim() - 1
    if mask.dtype != torch.bool or not x.is_floating_point() or (last if dim is None else dim % x.dim()) != last:
        return NotImplemented
    if not _marks(mask, mask_type, x.shape):
        return NotImplemented
    if mask_type == 1:
        mask = mask[:, None, None, :]
    return torch.softmax(torch.where(mask, -math.inf, x), -1)


def _attention(x: Any, heads: int, weights: Sequence[Any], mask: Any, mask_type: Any) -> Any:
    """[B, L, D] of self-attention; `weights` are those of q, k and v together and of the result, each with a bias."""
    qkv_weight, qkv_bias, out_weight, out_bias = weights
    q, k, v = F.linear(x, qkv_weight, qkv_bias).reshape(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
    shares = torch.softmax(scores, -1) if mask is None else masked_softmax(scores, mask.to(torch.bool), -1, mask_type)
    return F.linear((shares @ v).transpose(1, 2).flatten(2), out_weight, out_bias)


def _can_attend(x: Any, embed_dim: int, heads: int, parameters: Sequence[Any], mask: Any, mask_type: Any) -> bool:
    """What ATen checks as well, so that its error says what is wrong."""
    if x.dim() != 3 or any(p is None or p.dtype != x.dtype for p in parameters) or not x.is_floating_point():
        return False
    if heads < 1 or embed_dim % heads or x.shape[-1] != embed_dim or any(isinstance(n, int) and n == 0 for n in x.shape):
        return False
    return mask is None or _marks(mask, mask_type, (x.shape[0], heads, x.shape[1], x.shape[1]))


def transformer_encoder_layer(
    x: Any, embed_dim: int, heads: int, qkv_weight: Any, qkv_bias: Any, out_weight: Any, out_bias: Any, use_gelu: bool, norm_first: bool, eps: float,
    norm1_weight: Any, norm1_bias: Any, norm2_weight: Any, norm2_bias: Any, up_weight: Any, up_bias: Any, down_weight: Any, down_bias: Any,
    mask: Any = None, mask_type: int | None = None,
) -> Any:  # fmt: skip
    attention = (qkv_weight, qkv_bias, out_weight, out_bias)
    others = (norm1_weight, norm1_bias, norm2_weight, norm2_bias, up_weight, up_bias, down_weight, down_bias)
    if not _can_attend(x, embed_dim, heads, (*attention, *others), mask, mask_type):
        return NotImplemented

    def norm(y: Any, weight: Any, bias: Any) -> Any:
        return F.layer_norm(y, (embed_dim,), weight, bias, eps)

    def feed_forward(y: Any) -> Any:
        inner = F.linear(y, up_weight, up_bias)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), down_weight, down_bias)

    if norm_first:
        x = x + _attention(norm(x, norm1_weight, norm1_bias), heads, attention, mask, mask_type)
        return x + feed_forward(norm(x, norm2_weight, norm2_bias))
    x = norm(x + _attention(x, heads, attention, mask, mask_type), norm1_weight, norm1_bias)
    return norm(x + feed_forward(x), norm2_weight, norm2_bias)


# Single calls.


def trilinear(a: Any, b: Any, c: Any, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, unroll_dim: int = 1) -> Any:
    """Sums of products of three tensors, each of which lacks some dimensions: two contractions, the first over what `a` lacks."""
    rank = a.dim() + len(expand1)
    if len({a.dtype, b.dtype, c.dtype}) > 1 or a.dtype == torch.bool or a.is_complex() or rank > 26:
        return NotImplemented
    summed = {d % rank for d in sumdim}

    def axes(lacking: Sequence[int]) -> list[int]:
        return [d for d in range(rank) if d not in {k % rank for k in lacking}]

    def text(dims: Sequence[int]) -> str:
        return "".join("abcdefghijklmnopqrstuvwxyz"[d] for d in dims)

    first, second, third = axes(expand1), axes(expand2), axes(expand3)
    if {*first, *second, *third} != set(range(rank)):
        return NotImplemented
    inner = [d for d in sorted({*second, *third}) if d not in summed or d in first]
    pair = torch.einsum(f"{text(second)},{text(third)}->{text(inner)}", b, c)
    return torch.einsum(f"{text(first)},{text(inner)}->{text([d for d in range(rank) if d not in summed])}", a, pair).contiguous()


def conv_tbc(x: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    """[T, B, C] convolved along time with [K, C, O]."""
    if x.dim() != 3 or weight.dim() != 3 or bias.dim() != 1 or len({x.dtype, weight.dtype, bias.dtype}) > 1:
        return NotImplemented
    return F.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad).permute(2, 0, 1).contiguous()


def grouped_product(x: Any, weights: Any, ends: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """[S, N] of rows [S, K], sorted by group, times a matrix of [G, K, N] each (`deplo.grouped`)."""
    if ends is None or bias is not None or out_dtype not in (None, x.dtype) or x.dtype != weights.dtype:
        return NotImplemented
    if x.dim() != 2 or weights.dim() != 3 or ends.dim() != 1 or not isinstance(weights.shape[0], int) or ends.shape[0] != weights.shape[0]:
        return NotImplemented
    return grouped_mm(x, weights, ends)


def frexp(x: Any) -> Any:
    """x = mantissa * 2^exponent with 0.5 <= |mantissa| < 1, by the bits of float64, to which narrower floats widen exactly."""
    if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return NotImplemented
    wide = x.to(torch.float64)
    tiny = wide.abs() < 2.0**-1022  # subnormal in float64, and exact times 2^54
    bits = torch.where(tiny, wide * 2.0**54, wide).view(torch.int64)
    exponent = ((bits >> 52) & 0x7FF) - torch.where(tiny, 1022 + 54, 1022)
    mantissa = ((bits & ~(0x7FF << 52)) | (1022 << 52)).view(torch.float64)
    kept = (wide == 0) | ~torch.isfinite(wide)
    return torch.where(kept, wide, mantissa).to(x.dtype), torch.where(kept, 0, exponent).to(torch.int32)


def histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Counts in bins of equal width, the last one closed; with min == max the range is that of the values, which ATen checks."""
    if x.dtype not in (torch.float32, torch.float64) or bins < 1 or not min < max or not math.isfinite(float(max) - float(min)):
        return NotImplemented
    flat = x.reshape(-1)
    low, high = (torch.full((), end, dtype=x.dtype, device=x.device) for end in (min, max))
    inside = (flat >= low) & (flat <= high)
    place = (torch.where(inside, flat - low, 0) * bins / (high - low)).to(torch.int64).clamp(max=bins - 1)
    return x.new_zeros(bins).scatter_add(0, place, inside.to(x.dtype))


def _holds(dtype: torch.dtype, number: int) -> bool:
    """Whether a whole number is one of the dtype; eager mode wraps others around."""
    return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def _isin_scalar(x: Any, number: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    if not isinstance(number, (int, float)) or isinstance(number, bool) or x.dtype == torch.bool or x.is_complex():
        return NotImplemented
    if not x.is_floating_point() and (isinstance(number, float) or not _holds(x.dtype, number)):
        return NotImplemented
    return x != number if invert else x == number


def _scalar_isin(number: Any, x: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    found = _isin_scalar(x, number)
    return found if found is NotImplemented else ~found.any() if invert else found.any()


def _shift(overload: Any) -> Callable[..., Any]:
    """A number shifted by a tensor, in the tensor's dtype."""

    def rule(number: Any, x: Any) -> Any:
        if not isinstance(number, int) or isinstance(number, bool) or x.is_floating_point() or x.dtype == torch.bool or not _holds(x.dtype, number):
            return NotImplemented
        return overload(torch.full_like(x, number), x)

    return rule


def _xlog1py(x: Any, y: Any) -> Any:
    """x * log1p(y), 0 where x is 0, NaN where y is; one of the two is a number."""
    dtype = torch.result_type(x, y)
    if dtype.is_complex:
        return NotImplemented
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    x, y = (t.to(dtype) if isinstance(t, torch.Tensor) else torch.full((), t, dtype=dtype) for t in (x, y))
    return torch.where(y.isnan(), math.nan, torch.where(x == 0, 0.0, x * torch.log1p(y)))


def formulas() -> dict[Any, Callable[..., Any]]:
    """By overload."""
    return {
        **_windows(),
        torch.ops.aten._masked_softmax.default: masked_softmax,
        torch.ops.aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer,
        torch.ops.aten._trilinear.default: trilinear,
        torch.ops.aten._grouped_mm.default: grouped_product,
        aten.bitwise_left_shift.Scalar_Tensor: _shift(aten.bitwise_left_shift.Tensor),
        aten.bitwise_right_shift.Scalar_Tensor: _shift(aten.bitwise_right_shift.Tensor),
        aten.conv_tbc.default: conv_tbc,
        aten.frexp.Tensor: frexp,
        aten.histc.default: histc,
        aten.isin.Scalar_Tensor: _scalar_isin,
        aten.isin.Tensor_Scalar: _isin_scalar,
        aten.special_modified_bessel_i0.default: torch.special.i0,
        aten.special_modified_bessel_i1.default: torch.special.i1,
        aten.special_xlog1py.other_scalar: _xlog1py,
        aten.special_xlog1py.self_scalar: _xlog1py,
    }
