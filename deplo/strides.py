"""Results in the order of dimensions that eager mode's CPU kernels give them, where PyTorch's shape rules trace another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Layout = Callable[..., Any]
"""The result in the layout of the kernel, of the result and the arguments of the call."""


def contiguous(result: Any, *args: Any, **kwargs: Any) -> Any:
    return result.contiguous()


def like(place: int) -> Layout:
    """The memory format that argument `place` suggests."""

    def layout(result: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        memory_format = torch._prims_common.suggest_memory_format(args[place])
        return result.contiguous(memory_format=memory_format) if result.dim() == args[place].dim() else result.contiguous()

    return layout


def iterated(*places: int) -> Layout:
    """The order in which TensorIterator goes through the arguments at `places`."""

    def layout(result: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if result.dim() < 2:
            return result
        return _in_order_of([t.expand(result.shape) for t in (args[k] for k in places) if isinstance(t, torch.Tensor)], result)

    return layout


def _in_order_of(tensors: list[Any], result: Any) -> Any:
    """The result in the order of dimensions in which TensorIterator goes through tensors of its shape."""
    import torch

    order_of = torch._prims_common.compute_elementwise_output_logical_to_physical_perm
    order = order_of(*tensors)[0]
    # Whether it is contiguous in that order cannot be asked of sizes that depend on data.
    if order == order_of(result)[0]:
        return result
    return result.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])


def indexed(result: Any, x: Any, indices: Any) -> Any:
    """Of x[indices]: TensorIterator goes through x, with strides of 0 along the dimensions of the indices, and through the indices, with strides of 0
    along the others (AdvancedIndex, ATen/native/TensorAdvancedIndexing.cpp); the shape rule forgets the indices."""
    import torch

    given = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given) or any(isinstance(n, int) and n == 0 for n in (*x.shape, *result.shape)):
        return result
    spread: Any = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]
    rank = spread[0].dim()
    if rank < 2:
        return result
    places = [k for k, i in enumerate(indices) if i is not None]
    together = places[-1] - places[0] + 1 == len(places)
    first = places[0] if together else 0
    for k in reversed(places):
        x = x.select(k, 0)

    def placed(t: Any, at: int, count: int) -> Any:
        for _ in range(count):
            t = t.unsqueeze(at)
        return t

    operands = [placed(x, first, rank), *(placed(placed(i, 0, first), first + rank, result.dim() - first - rank) for i in spread)]
    return _in_order_of([t.expand(result.shape) for t in operands], result)


def after_power(result: Any, x: Any, n: Any) -> Any:
    """Of ldexp: the product of x and a power that is contiguous."""
    return iterated(0, 1)(result, x, n.contiguous())


# The kernels were called, eagerly and on fake tensors, with PyTorch's samples in several layouts: the results of these overloads differed.
LAYOUTS: tuple[tuple[Layout, tuple[str, ...]], ...] = (
    (iterated(0), ("binary_cross_entropy.default",)),
    (iterated(1), ("binary_cross_entropy_backward.default",)),
    (
        iterated(0, 1),
        ("copysign.Tensor", "div.Tensor_mode", "floor_divide.default", "heaviside.default", "logaddexp.default", "logaddexp2.default")
        + ("logical_and.default", "logical_or.default", "logical_xor.default", "native_dropout_backward.default")
        + ("special_xlog1py.default", "xlogy.Tensor"),
    ),
    (after_power, ("ldexp.Tensor",)),
    (indexed, ("index.Tensor",)),
    (
        contiguous,
        ("_log_softmax_backward_data.default", "glu_backward.default", "huber_loss_backward.default", "mse_loss_backward.default")
        + ("pow.Scalar", "smooth_l1_loss_backward.default"),
    ),
    (
        like(0),
        ("_batch_norm_no_update.default", "_batch_norm_with_update_functional.default", "_native_batch_norm_legit.no_stats")
        + ("_native_batch_norm_legit_functional.default", "_native_batch_norm_legit_no_training.default", "native_batch_norm.default")
        + ("reflection_pad3d.default", "replication_pad3d.default"),
    ),
    (
        like(1),
        ("batch_norm_backward.default", "max_pool2d_with_indices_backward.default", "native_batch_norm_backward.default")
        + ("reflection_pad2d_backward.default", "reflection_pad3d_backward.default")
        + ("replication_pad2d_backward.default", "replication_pad3d_backward.default"),
    ),
)


def with_strides_of_kernels(table: dict[Any, Any]) -> dict[Any, Any]:
    """The decompositions, and those overloads too, with results that lie as their kernels leave them."""
    import torch

    laid_out = {}
    for layout, names in LAYOUTS:
        for name in names:
            packet, overload = name.split(".")
            call = getattr(getattr(torch.ops.aten, packet), overload)
            laid_out[call] = _laid_out(call, layout, table.get(call))
    return table | laid_out


def _laid_out(overload: Any, layout: Layout, formula: Callable[..., Any] | None) -> Callable[..., Any]:
    inside = threading.local()

    def rule(*args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "active", False):
            return NotImplemented
        inside.active = True
        try:
            results = NotImplemented if formula is None else formula(*args, **kwargs)
            results = overload(*args, **kwargs) if results is NotImplemented else results
        finally:
            inside.active = False
        return (layout(results[0], *args, **kwargs), *results[1:]) if isinstance(results, (tuple, list)) else layout(results, *args, **kwargs)

    return rule
