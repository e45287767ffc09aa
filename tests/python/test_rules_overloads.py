"""Tensor IR of single overloads against eager: corners that models rarely reach, and overloads that AOTAutograd would break up."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from engines import needs_core
from overloads import import_call, overload_of
from torch.utils._pytree import tree_leaves

INF = float("inf")
NAN = float("nan")
BOTH = [True, True]
ALL = [True, True, True]

_generator = torch.Generator().manual_seed(0)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_generator)


def p(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=_generator) + 0.1


def n(*shape: int, low: int = -5, high: int = 5, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=dtype, generator=_generator)


def t(values: object, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def call(name: str, *args: object, **kwargs: object) -> tuple[str, tuple, dict]:
    return f"aten.{name}", args, kwargs


def _attention() -> list[tuple[str, tuple, dict]]:
    q, k, v, wide = r(2, 4, 4, 8), r(2, 4, 5, 8), r(2, 4, 5, 8), r(2, 4, 5, 6)
    grouped = (r(2, 2, 5, 8), r(2, 2, 5, 8))
    mask = t([[0, -INF, 0, 0, -INF], [-INF] * 5, [0] * 5, [-INF, -INF, -INF, -INF, 0]])
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    masked, causal = flash(q, k, v, attn_mask=mask), flash(q, k, v, is_causal=True)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return [
        call("_scaled_dot_product_attention_math.default", q, k, wide, mask),
        call(
            "_scaled_dot_product_attention_math.default",
            q,
            *grouped,
            None,
            0.0,
            True,
            scale=1.0,
            enable_gqa=True,
        ),
        call("scaled_dot_product_attention.default", q, k, wide, mask == 0),
        call(
            "scaled_dot_product_attention.default",
            q,
            *grouped,
            is_causal=True,
            enable_gqa=True,
        ),
        call(f"{name}.default", q, k, v, attn_mask=mask),
        call(f"{name}.default", q, k, v, attn_mask=r(2, 1, 4, 5)),
        call(f"{name}.default", q, *grouped, 0.0, True, scale=0.3),
        call(
            f"{name}_backward.default",
            r(2, 4, 4, 8),
            q,
            k,
            v,
            *masked,
            0.0,
            False,
            attn_mask=mask,
        ),
        call(f"{name}_backward.default", r(2, 4, 4, 8), q, k, v, *causal, 0.0, True),
    ]


def _normalization() -> list[tuple[str, tuple, dict]]:
    x, grad = r(2, 3, 4, 5), r(2, 3, 4, 5)
    weight, bias, mean, var = r(3), r(3), r(3), p(3)
    v, g = r(4, 3, 2), r(4, 1, 1)
    empty = torch.empty(0, dtype=torch.float64)
    backward = "native_batch_norm_backward.default"
    return [
        call("_batch_norm_no_update.default", x, weight, bias, mean, var, 0.1, 1e-5),
        call(
            "_batch_norm_with_update_functional.default",
            x,
            weight,
            bias,
            mean,
            var,
            0.1,
            1e-5,
        ),
        call(
            "_native_batch_norm_legit_no_training.default",
            x,
            weight,
            bias,
            mean,
            var,
            0.1,
            1e-5,
        ),
        call(
            "_native_batch_norm_legit_functional.default",
            x,
            weight,
            bias,
            mean,
            var,
            False,
            0.1,
            1e-5,
        ),
        call(
            "_native_batch_norm_legit_functional.default",
            x,
            None,
            None,
            mean,
            var,
            True,
            0.1,
            1e-5,
        ),
        call("_native_batch_norm_legit.no_stats", x, weight, bias, True, 0.1, 1e-5),
        call("native_batch_norm.default", x, weight, None, None, None, True, 0.1, 1e-5),
        call(backward, grad, x, weight, mean, var, r(3), p(3), True, 1e-5, ALL),
        call(backward, grad, x, weight, mean, var, empty, empty, False, 1e-5, ALL),
        call(
            backward,
            grad,
            x,
            None,
            mean,
            var,
            r(3),
            p(3),
            True,
            1e-5,
            [True, False, True],
        ),
        call("_fused_rms_norm.default", x, [5], r(5), None),
        call("rms_norm.default", x, [4, 5], None, 1e-5),
        *[
            call(
                "native_layer_norm_backward.default",
                r(2, 3, 5),
                r(2, 3, 5),
                [3, 5],
                r(2, 1, 1),
                p(2, 1, 1),
                w,
                w,
                [True, w is not None, w is not None],
            )
            for w in (r(3, 5), None)
        ],
        call("layer_norm.default", x, [4, 5], r(4, 5), r(4, 5)),
        call("native_group_norm.default", r(2, 6, 5), r(6), r(6), 2, 6, 5, 3, 1e-5),
        call(
            "native_group_norm_backward.default",
            r(2, 6, 5),
            r(2, 6, 5),
            r(2, 3),
            p(2, 3),
            r(6),
            2,
            6,
            5,
            3,
            ALL,
        ),
        call("_weight_norm_interface.default", v, g, 0),
        call("_weight_norm_interface.default", v, r(1, 1, 2), 2),
        call(
            "_weight_norm_interface_backward.default",
            r(4, 3, 2),
            v,
            g,
            v.norm(2, (1, 2), True),
            0,
        ),
        call("_softmax.default", t([[-INF, -INF], [INF, 1], [1, 2], [NAN, 1]]), 1, False),
        call("_safe_softmax.default", t([[-INF, -INF], [1, -INF], [1, 2], [NAN, 1]]), 1),
        call("log_softmax.int", r(3, 4), 1),
        call("softmax.int", r(3, 4).float(), 0, torch.float64),
    ]


def _contraction() -> list[tuple[str, tuple, dict]]:
    return [
        call(
            "_int_mm.default",
            n(17, 8, low=-100, high=100, dtype=torch.int8),
            n(8, 16, low=-100, high=100, dtype=torch.int8),
        ),
        call("ger.default", r(3), r(4)),
        call("outer.default", r(3), r(4)),
        call("linear.default", r(2, 3, 4), r(5, 4), r(5)),
        call("linear.default", r(4), r(5, 4)),
        call("linear.default", r(3, 4), r(4)),
        call("matmul.default", r(3), r(3)),
        call("matmul.default", r(3), r(2, 3, 4)),
        call("matmul.default", r(5, 1, 2, 3), r(4, 3, 2)),
        call("matmul.default", r(2, 3, 4), r(4)),
        call("mm.default", r(3, 0), r(0, 4)),
        call("addmm.default", t([NAN] * 4), r(3, 2), r(2, 4), beta=0, alpha=2),
        call("addmm.default", n(3, 4), n(3, 2), n(2, 4), beta=2, alpha=3),
        call(
            "_convolution.default",
            r(2, 4, 5, 6),
            r(6, 2, 3, 3),
            r(6),
            [2, 1],
            [1, 0],
            [1, 2],
            False,
            [0, 0],
            2,
            False,
            False,
            True,
            True,
        ),
        call(
            "convolution.default",
            r(2, 4, 5, 6),
            r(6, 4, 3, 2),
            r(6),
            [2, 1],
            [1, 2],
            [1, 2],
            False,
            [0, 0],
            1,
        ),
        call(
            "convolution.default",
            r(2, 4, 9),
            r(4, 1, 3),
            None,
            [2],
            [2],
            [2],
            False,
            [0],
            4,
        ),
        call(
            "convolution.default",
            r(2, 4, 5, 6),
            r(4, 3, 3, 2),
            r(6),
            [2, 3],
            [1, 0],
            [1, 2],
            True,
            [1, 2],
            2,
        ),
        call(
            "convolution.default",
            r(1, 2, 4, 5, 6),
            r(3, 2, 2, 3, 2),
            r(3),
            [1, 2, 1],
            [0, 1, 0],
            [1, 1, 2],
            False,
            [0, 0, 0],
            1,
        ),
        call(
            "convolution.default",
            r(1, 4, 5),
            r(4, 2, 3),
            None,
            [1],
            [1],
            [1],
            True,
            [0],
            1,
        ),
        call(
            "convolution_backward.default",
            r(2, 6, 3, 5),
            r(2, 4, 5, 6),
            r(6, 4, 3, 2),
            [6],
            [2, 1],
            [1, 0],
            [1, 1],
            False,
            [0, 0],
            1,
            ALL,
        ),
        call(
            "convolution_backward.default",
            r(2, 6, 3, 5),
            r(2, 4, 5, 6),
            r(6, 2, 3, 2),
            [0],
            [2, 1],
            [1, 0],
            [1, 1],
            False,
            [0, 0],
            2,
            [*BOTH, False],
        ),
        call(
            "convolution_backward.default",
            r(2, 6, 10, 16),
            r(2, 4, 5, 5),
            r(4, 3, 3, 2),
            [6],
            [2, 3],
            [1, 0],
            [1, 2],
            True,
            [1, 1],
            2,
            ALL,
        ),
    ]


def _reduction() -> list[tuple[str, tuple, dict]]:
    return [
        call("norm.Scalar", r(3, 4), 3),
        call(
            "norm.ScalarOpt_dim_dtype",
            r(3, 4).float(),
            1.5,
            [1],
            True,
            dtype=torch.float64,
        ),
        call("norm.ScalarOpt_dtype", r(3, 4).float(), None, dtype=torch.float64),
        call("norm.ScalarOpt_dim", r(3, 4), -INF, [0]),
        call("norm.ScalarOpt_dim", r(3, 4), 0, [0]),
        call("std.default", r(3, 4)),
        call("std.dim", r(3, 4), [1], False, True),
        call("std_mean.dim", r(3, 4), [0]),
        call("var.default", r(3, 4), False),
        call("var_mean.default", r(3, 4)),
        call("var.correction", r(3, 4), [1], correction=0.5),
        call("var.correction", r(3, 2), [1], correction=3),
        call("var.correction", r(3, 1), [1]),
        call("sum.dim_IntList", r(3, 0), [1]),
        call("sum.default", n(9, low=0, high=200, dtype=torch.uint8)),
        call("mean.dim", r(3, 0), [1]),
        call("prod.default", r(0)),
        call("any.dim", torch.zeros(3, 0, dtype=torch.bool), 1),
        call("all.default", torch.zeros(0, dtype=torch.uint8)),
        call("all.dim", n(3, 4, low=0, high=2, dtype=torch.uint8), 1),
        call("cumsum.default", n(9, low=0, high=2).bool(), 0),
        call("cumprod.default", r(3, 4), 1),
        call("cummax.default", t([1, 3, 3, NAN, 2, NAN]), 0),
        call("cummin.default", t([3, 1, 1, 5, 0, 0]), 0),
        call("logcumsumexp.default", t([-INF, -INF, 1, 2, INF, 1]), 0),
        *[call(name + ".default", t([[0, 800, -800], [-900, -900.5, -1000]]), 1, False) for name in ("_softmax", "_log_softmax")],
        call("logsumexp.default", t([[-INF, -INF], [INF, 1], [1, 2]]), [1]),
        call("max.dim", t([[1, 2, 2], [NAN, 3, NAN], [-INF, -INF, -INF]]), 1),
        call("min.dim", t([[1, 1, 2], [3, NAN, NAN], [INF, INF, INF]]), 1, True),
        call("argmax.default", r(3, 4)),
        call("argmin.default", r(3, 4), 0, True),
        call("aminmax.default", r(3, 4)),
    ]


def _pooling() -> list[tuple[str, tuple, dict]]:
    window = t([[[[1, NAN, 2, 2], [NAN, 5, 2, 2], [-INF, -INF, 0, 0], [-INF, -INF, 0, -0.0]]]])
    pads = [1, 2, 2, 1, 3, 0]
    return [
        call("max_pool2d_with_indices.default", window, [2, 2]),
        call(
            "max_pool2d_with_indices.default",
            torch.full((1, 1, 4, 4), -INF, dtype=torch.float64),
            [3, 3],
            [2, 2],
            [1, 1],
            [1, 1],
            True,
        ),
        call(
            "max_pool2d_with_indices.default",
            r(3, 7, 8),
            [3, 2],
            [2, 1],
            [1, 1],
            [2, 1],
            True,
        ),
        call("adaptive_avg_pool1d.default", r(2, 3, 7), [3]),
        call("avg_pool1d.default", r(2, 3, 7), [3], [2], [1], True, False),
        call("reflection_pad3d.default", r(2, 3, 4, 5, 6), pads),
        call(
            "reflection_pad3d_backward.default",
            r(2, 3, 7, 8, 9),
            r(2, 3, 4, 5, 6),
            pads,
        ),
        call("reflection_pad2d.default", r(3, 4, 5), [-1, 2, 2, -1]),
        call("reflection_pad1d_backward.default", r(3, 11), r(3, 6), [2, 3]),
        call("replication_pad3d.default", r(2, 3, 4, 5, 6), pads),
        call(
            "replication_pad3d_backward.default",
            r(2, 3, 7, 8, 9),
            r(2, 3, 4, 5, 6),
            pads,
        ),
        call("replication_pad2d.default", r(3, 4, 5), [-1, 2, 2, -1]),
        call("replication_pad1d_backward.default", r(3, 11), r(3, 6), [2, 3]),
        call("upsample_nearest2d.default", r(1, 2, 3, 4), [7, 8], None, None),
        # 49 * (1 / 49) rounds below 1: eager's element is not floor(o / 49) computed in float64.
        call("upsample_nearest1d.default", r(1, 2, 3), [147], None),
        call("_upsample_nearest_exact2d.default", r(1, 2, 3, 4), [7, 8], None, None),
        call(
            "upsample_nearest2d_backward.default",
            r(1, 2, 6, 8),
            [6, 8],
            [1, 2, 3, 4],
            2.0,
            2.0,
        ),
        call("upsample_bilinear2d.default", r(1, 2, 3, 4), [7, 8], False, None, None),
        call("upsample_bilinear2d.default", r(1, 2, 3, 4), [7, 8], True, None, None),
        call("upsample_bilinear2d.default", r(1, 2, 3, 4), [7, 9], False, 2.4, 2.3),
        call("upsample_bilinear2d.default", r(1, 2, 9, 8), [3, 5], False, None, None),
        call(
            "upsample_bilinear2d_backward.default",
            r(1, 2, 6, 8),
            [6, 8],
            [1, 2, 3, 4],
            False,
            2.0,
            2.0,
        ),
        call("upsample_bicubic2d.default", r(1, 2, 5, 4), [7, 8], False, None, None),
        call(
            "upsample_trilinear3d.default",
            r(1, 2, 3, 4, 2),
            [5, 6, 4],
            True,
            None,
            None,
            None,
        ),
    ]


def _backward() -> list[tuple[str, tuple, dict]]:
    indices = t([[0, 1, 1], [4, 2, 1]], torch.int64)
    target = t([1, 0, -100, 4], torch.int64)
    return [
        call("diagonal_backward.default", r(5, 3), [5, 3, 4], 0, 1, 2),
        call("diagonal_backward.default", r(3, 3), [4, 3, 3], -1, 0, 2),
        call("unfold_backward.default", r(3, 4, 3), [3, 9], 1, 3, 2),
        call("unfold_backward.default", r(3, 2, 3), [3, 9], 1, 3, 5),
        call("unfold_backward.default", r(3, 7, 3), [3, 9], 1, 3, 1),
        call("embedding_dense_backward.default", r(2, 3, 4), indices, 6, 2, True),
        call("embedding_dense_backward.default", r(2, 3, 4), indices, 6, -1, False),
        call("masked_scatter_backward.default", r(3, 4), r(3, 4) > 0, [4, 4]),
        call("masked_scatter_backward.default", r(2, 5), r(2, 5) > 0, [10]),
        call("nll_loss_forward.default", r(4, 5), target, p(5), 1, -100),
        call("nll_loss_forward.default", r(5), t(3, torch.int64), None, 2, -100),
        call("nll_loss_backward.default", r(), r(4, 5), target, p(5), 1, -100, p()),
        call("binary_cross_entropy_with_logits.default", r(3, 4), p(3, 4), r(4), r(4), 1),
        call("binary_cross_entropy_with_logits.default", r(3, 4), p(3, 4), None, None, 0),
        call("soft_margin_loss_backward.default", r(3, 4), r(3, 4), r(3, 4).sign(), 0),
        call("soft_margin_loss_backward.default", r(), r(3, 4), r(3, 4).sign(), 1),
        *[
            call("grid_sampler_2d_backward.default", r(2, 3, 4, 5), r(2, 3, 6, 7), r(2, 4, 5, 2) * 1.5, mode, padding, align, [True, True])
            for mode, padding, align in itertools.product((0, 1, 2), (0, 1, 2), (True, False))
        ],
        call("grid_sampler_3d_backward.default", r(2, 3, 2, 4, 5), r(2, 3, 3, 4, 5), r(2, 2, 4, 5, 3) * 1.5, 0, 2, False, [True, True]),
    ]


def _distances() -> list[tuple[str, tuple, dict]]:
    x, y = r(4, 3), r(2, 5, 3)
    x[2], y[:, 1] = x[0], x[0]  # equal rows, at no distance
    left = x.expand(2, 4, 3).contiguous()
    cases = []
    for p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")):
        cases.append(call("_cdist_backward.default", r(2, 4, 5), left, y, p, torch.cdist(left, y, p)))
        cases.append(call("_pdist_backward.default", r(6), x, p, torch.nn.functional.pdist(x, p)))
    return cases


def _antialiased() -> list[tuple[str, tuple, dict]]:
    cases = []
    for name, align in itertools.product(("bilinear", "bicubic", "lanczos"), (True, False)):
        cases.append(call(f"_upsample_{name}2d_aa.default", r(2, 3, 9, 8), [4, 11], align, None, None))
        cases.append(call(f"_upsample_{name}2d_aa_backward.default", r(2, 3, 4, 11), [4, 11], [2, 3, 9, 8], align, None, None))
    return [*cases, call("_upsample_bilinear2d_aa.default", r(1, 2, 9, 8), [3, 3], False, 0.37, 0.4)]


def _bags() -> list[tuple[str, tuple, dict]]:
    """Bags of 3, 0, 2 and 1 indices, of which row 2 may be padding."""
    indices, offsets = t([1, 2, 1, 2, 0, 4], torch.int64), t([0, 3, 3, 5], torch.int64)
    bags, sizes = t([0, 0, 0, 2, 2, 3], torch.int64), t([3, 0, 2, 1], torch.int64)
    ends = torch.cat([offsets, t([6], torch.int64)])
    winners = t([[1, 2], [0, 0], [2, 0], [4, 4]], torch.int64)
    return [
        *[call("_embedding_bag.default", r(5, 2), indices, offsets, False, mode, False, None, False, pad) for mode in (1, 2) for pad in (-1, 2)],
        call("_embedding_bag.default", r(5, 2), indices, ends, False, 1, False, None, True, -1),
        call("_embedding_bag_dense_backward.default", r(4, 2), indices, bags, sizes, sizes, 5, False, 0, r(6), 2),
        call("_embedding_bag_dense_backward.default", r(4, 2), indices, bags, sizes, sizes, 5, False, 1, None, -1),
        call("_embedding_bag_dense_backward.default", r(4, 2), indices, bags, sizes, winners, 5, False, 2, None, -1),
        call("_embedding_bag_per_sample_weights_backward.default", r(4, 2), r(5, 2), indices, offsets, bags, 0, 2),
    ]


def _special() -> list[tuple[str, tuple, dict]]:
    x = torch.linspace(-3.2, 3.1, 11, dtype=torch.float64)
    return [
        *[call(name + ".default", x) for name in ("i0", "special_i0e", "special_i1", "special_i1e", "special_erfcx", "special_log_ndtr", "lgamma")],
        call("special_ndtri.default", p(9)),
        call("special_ndtri.default", t([1e-300, 1e-100, 1e-20, 1e-5, 0.1, 0.5, 0.9, 1 - 1e-10])),
        call("special_zeta.default", x.abs() + 1.1, x.abs() + 0.1),
        call("polygamma.default", 0, x),
        call("polygamma.default", 3, x),
        call("put.default", r(3, 4), t([0, 5, -1, 5], torch.int64), r(4), True),
        call("put.default", r(3, 4), t([[0, 5], [-1, 7]], torch.int64), r(4)),
    ]


def _views() -> list[tuple[str, tuple, dict]]:
    return [
        call("split.Tensor", r(7, 3), 3),
        call("split_with_sizes.default", r(2, 9), [4, 0, 2, 3], 1),
        call("slice_scatter.default", r(6, 9), r(6, 3), 1, 2, 9, 3),
        call("slice_scatter.default", r(6, 9), r(4, 9), 0, 1, 5),
        *[call("diagonal.default", r(4, 6, 2), offset, 0, 1) for offset in (-2, 0, 3)],
        *[call("diagonal_scatter.default", r(4, 6), r(count), offset) for count, offset in ((2, -2), (4, 0), (3, 3))],
        *[call("diag_embed.default", r(2, 3), offset, 0, -1) for offset in (-1, 0, 2)],
        call("pixel_shuffle.default", r(2, 12, 2, 3), 2),
        call("pixel_unshuffle.default", r(2, 3, 4, 6), 2),
        call("masked_scatter.default", r(3, 4), r(3, 4) > 0, r(12)),
        call("unfold.default", r(3, 9), 1, 3, 2),
        call("roll.default", r(4, 5), [1, -7], [0, 1]),
        call("flip.default", r(4, 5), [1]),
        call("upsample_nearest1d.default", r(1, 2, 2).float(), [82], None),  # float32 takes another element than the fraction says
    ]


def _formulas() -> list[tuple[str, tuple, dict]]:
    x, x2 = torch.linspace(-4.1, 5.3, 23, dtype=torch.float64), p(9) * 0.8
    far = t([0.5, 7.9, 14.0, 29.0, 31.0, 80.0, 700.0, -40.0])  # on both sides of where the series gives way to the asymptotic one
    names = ("silu", "sigmoid", "rsqrt", "reciprocal", "frac", "deg2rad", "rad2deg", "mish", "hardsigmoid", "hardswish", "softplus", "elu")
    return [
        *[call(name + ".default", x) for name in names],
        *[call("gelu.default", x, approximate=form) for form in ("none", "tanh")],
        *[call("logit.default", x2, eps) for eps in (None, 0.1)],
        call("leaky_relu_backward.default", r(9), r(9), 0.1, False),
        call("softplus_backward.default", r(9), r(9), 2, 1),
        call("hardtanh_backward.default", r(9), r(9), -0.5, 0.7),
        *[call("elu_backward.default", r(9), 0.7, 1.3, 0.9, of_result, r(9) * 0.6) for of_result in (False, True)],
        *[call("index_add.default", base, 0, n(5, low=0, high=4), source) for base, source in ((r(4, 3), r(5, 3)), (r(4) > 0, r(5) > 0))],
        call("index_add.default", r(4, 3), 1, n(5, low=0, high=3), r(4, 5), alpha=2.5),
        call("logsumexp.default", t([[0, 800, -800], [-900, -900.5, -1000], [-INF] * 3]), [1]),
        call("binary_cross_entropy.default", x2, p(9) * 0.8, p(9), 2),
        call("binary_cross_entropy_backward.default", r(9), x2, p(9) * 0.8, p(9), 0),
        call("_pdist_forward.default", r(5, 3), 2.0),
        call("huber_loss.default", r(9), r(9), 1, 0.7),
        call("huber_loss_backward.default", r(9), r(9), r(9), 0, 0.7),
        *[call("smooth_l1_loss.default", r(9), r(9), 2, beta) for beta in (0.0, 0.7)],
        *[call("smooth_l1_loss_backward.default", r(9), r(9), r(9), 0, beta) for beta in (0.0, 0.7)],
        call("soft_margin_loss.default", r(9), r(9).sign(), 1),
        call("mse_loss.default", r(9), r(9), 1),
        call("mse_loss_backward.default", r(9), r(9), r(9), 0),
        *[call("_adaptive_avg_pool2d_backward.default", r(1, 2, *out), r(1, 2, 7, 8)) for out in ((3, 5), (7, 4), (9, 2))],
        *[call(name + ".default", far) for name in ("special_i0e", "special_i1e")],
    ]


CALLS = [
    *_attention(),
    *_normalization(),
    *_contraction(),
    *_reduction(),
    *_pooling(),
    *_backward(),
    *_bags(),
    *_distances(),
    *_antialiased(),
    call("linspace.default", -3.7, 9.2, 7, dtype=torch.int32),
    call("linspace.default", 5, -2, 4, dtype=torch.int64),
    call("avg_pool2d.default", torch.arange(-20, 22).reshape(1, 6, 7), [3, 2], [2, 2], [1, 1], True, False),
    call("avg_pool2d.default", torch.arange(-20, 22).reshape(1, 6, 7), [2, 2], [2, 1], [0, 0], False, True, 3),
    *_special(),
    *_views(),
    *_formulas(),
]


@needs_core
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("case", range(len(CALLS)), ids=lambda k: f"{k}-{CALLS[k][0]}")
def test_overload_is_decomposed_and_agrees_with_eager(case):
    core = importlib.import_module("deplo._C")
    name, args, kwargs = CALLS[case]
    results = overload_of(name)(*args, **kwargs)
    expected = [results] if isinstance(results, torch.Tensor) else list(results)
    imported = import_call(name, args, kwargs, results)
    text = core.lower(imported.text, "tensor")
    assert "library" not in text, text
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    outputs = core.interpret(text, [tensors[k] for k in imported.arguments], "typed")
    order = sorted((output.index, k) for k, output in enumerate(imported.outputs) if output.kind == "result")
    for output, (_, k) in zip(outputs, order, strict=True):
        # A wrong formula shows in the first digits; sums this short lose a few units of the last place.
        torch.testing.assert_close(output, expected[k], rtol=1e-11, atol=1e-11, equal_nan=True)


@needs_core
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_of_rms_norm(weighted):
    """ATen's backward has no kernel for CPUs: autograd on the formula judges."""
    core = importlib.import_module("deplo._C")
    x, grad, weight = r(2, 3, 5).requires_grad_(), r(2, 3, 5), r(5).requires_grad_() if weighted else None
    rstd = (x.detach().square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    y = torch.nn.functional.rms_norm(x, [5], weight, 1e-3)
    gradients = torch.autograd.grad(y, [t for t in (x, weight) if t is not None], grad)
    name, args, kwargs = call(
        "_fused_rms_norm_backward.default", grad, x.detach(), [5], rstd, None if weight is None else weight.detach(), [True, weighted]
    )
    imported = import_call(name, args, kwargs, (*gradients, None)[:2])
    text = core.lower(imported.text, "tensor")
    assert "library" not in text, text
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    outputs = core.interpret(text, [tensors[k] for k in imported.arguments], "typed")
    for output, expected in zip(outputs, gradients, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)
