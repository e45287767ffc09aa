"""The PyTorch decompositions that deplo asks AOTAutograd to apply, each with its reason; everything else deplo breaks down itself."""

from __future__ import annotations

from typing import Any

# Overload -> why PyTorch's rule is taken. Empty: every decomposition is a row of csrc/lower/torch_to_tensor.
REASONS: dict[str, str] = {}


def decompositions() -> dict[Any, Any]:
    """The table for AOTAutograd."""
    import torch
    from torch._decomp import get_decompositions

    overloads = []
    for name in REASONS:
        packet, overload = name.split(".")
        overloads.append(getattr(getattr(torch.ops.aten, packet), overload))
    return dict(get_decompositions(overloads))
