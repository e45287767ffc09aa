"""The PyTorch decompositions that deplo asks AOTAutograd to apply, each with its reason; everything else deplo breaks down itself."""

from __future__ import annotations

from typing import Any

_FORMULA = "a formula of overloads that have rules"
_PLACES = "indexing by places that follow from the arguments"

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
    "max_unpool2d.default": _PLACES,
    "max_unpool3d.default": _PLACES,
    "mvlgamma.default": _FORMULA,
    "renorm.default": _FORMULA,
    "rot90.default": _PLACES,
    "rrelu_with_noise_backward.default": _FORMULA,
    "special_xlog1py.default": _FORMULA,
    "tril_indices.default": _PLACES,
    "triu_indices.default": _PLACES,
}


def decompositions() -> dict[Any, Any]:
    """The table for AOTAutograd."""
    import torch
    from torch._decomp import get_decompositions

    overloads = []
    for name in REASONS:
        packet, overload = name.split(".")
        overloads.append(getattr(getattr(torch.ops.aten, packet), overload))
    return dict(get_decompositions(overloads))
