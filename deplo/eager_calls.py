"""Calls that PyTorch's tracer takes apart by other formulas than eager mode's, kept as calls of ATen for deplo's rules.

Linear interpolation is traced as a + (b - a) * weight, which is NaN where a is infinite; eager mode adds a * (1 - weight) and b * weight.
Nearest and cubic interpolation are traced as indexing, whose gradients scatter, in another order of dimensions than eager mode's.
Bags of embeddings are traced with results of other sizes than the CPU's kernels give (those that the gradient reads).
Margin losses are traced without the end of a list of targets (torch 2.13 counts what stands behind it), and NaN passes their threshold.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_PACKETS = ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"]
_PACKETS += [f"{name}{rank}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)]
_IN_ROWS = ("upsample_bicubic2d", "upsample_nearest3d", "_upsample_nearest_exact3d")  # gradients, whatever the memory format
_LOSSES = ("multi_margin_loss", "multilabel_margin_loss")
_lock = threading.RLock()  # the kernels belong to the process


@contextlib.contextmanager
def calls_as_in_eager_mode() -> Iterator[None]:
    """While AOTAutograd traces inside, the calls named above stay calls. Outside of tracing PyTorch does not ask for these kernels."""
    from torch._subclasses.fake_impls import op_implementations_dict

    with _lock:
        fakes = dict(op_implementations_dict)  # fake tensors ask these first
        saved: list[tuple[Any, dict[Any, Any]]] = []
        try:
            for overload, kernels in _kernels():
                saved.append((overload, dict(overload.py_kernels)))
                for key, kernel in kernels.items():
                    overload.py_kernels.pop(key, None)
                    if kernel:
                        overload.py_kernels[key] = kernel
                overload._dispatch_cache.clear()
                op_implementations_dict.pop(overload, None)
            _forget({overload for overload, _ in saved})
            yield
        finally:
            op_implementations_dict.update(fakes)
            _forget({overload for overload, _ in saved})
            for overload, before in saved:
                overload.py_kernels.clear()
                overload.py_kernels.update(before)
                overload._dispatch_cache.clear()


def _forget(overloads: set[Any]) -> None:
    """Fake tensors remember what calls gave, by whichever kernels."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = torch._guards.detect_fake_mode()
    # What follows from symbolic sizes is kept with them.
    of_sizes = getattr(mode.shape_env, "fake_tensor_cache", None) if mode is not None else None
    for cache in (FakeTensorMode.cache, of_sizes or {}):
        for key in [key for key in list(cache) if key.key[0] in overloads]:
            cache.pop(key, None)
    # torch.export remembers which of ATen's calls are made of others.
    export = sys.modules.get("torch._export.utils")
    if export is not None:
        export._collect_all_valid_cia_ops_for_aten_namespace.cache_clear()


def _kernels() -> list[tuple[Any, dict[Any, Any]]]:
    """Overloads, with the kernels in Python that they have while deplo traces; None: PyTorch's own in C++."""
    import torch
    from torch._C import DispatchKey

    found: list[tuple[Any, dict[Any, Any]]] = []
    for name in _PACKETS:
        packet, backward = getattr(torch.ops.aten, name), getattr(torch.ops.aten, name + "_backward")
        sized = _sized(packet.default)
        found.append((packet.vec, {DispatchKey.Autograd: sized, DispatchKey.CompositeImplicitAutograd: sized}))
        forward: dict[Any, Any] = {DispatchKey.Autograd: None, DispatchKey.CompositeImplicitAutograd: None}
        found.append((packet.default, forward | {DispatchKey.Meta: _nearest} if "nearest" in name else forward))
        found.append((backward.default, {DispatchKey.Meta: _gradient_in_rows if name in _IN_ROWS else _gradient}))
    bags = torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default
    found += [(bag, {DispatchKey.Meta: _bags(with_gradient=bag is bags[0])}) for bag in bags]
    for name in _LOSSES:
        loss = getattr(torch.ops.aten, name if name == "multi_margin_loss" else name + "_forward").default
        kernels: dict[Any, Any] = {DispatchKey.Autograd: None, DispatchKey.CompositeImplicitAutograd: None, DispatchKey.Meta: _loss}
        found.append((loss, kernels if name == "multi_margin_loss" else kernels | {DispatchKey.Meta: _loss_and_targets}))
        found.append((getattr(torch.ops.aten, name + "_backward").default, {DispatchKey.Meta: _gradient_of_loss}))
    return found


def _bags(with_gradient: bool) -> Callable[..., Any]:
    """What EmbeddingBag.cpp gives: of sums on its fast path, no bag of each index; without a gradient, they count the last offset as a bag."""
    import torch

    def bags(
        weight: Any,
        indices: Any,
        offsets: Any,
        scale: Any = False,
        mode: int = 0,
        sparse: Any = False,
        samples: Any = None,
        last: Any = False,
        pad: Any = -1,
    ) -> Any:
        if indices.dtype not in (torch.int32, torch.int64) or offsets.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(f"expected indices and offsets to be int or long, got {indices.dtype} and {offsets.dtype}")
        if samples is not None and (mode != 0 or samples.dim() != 1):
            raise RuntimeError("embedding_bag: per_sample_weights are one-dimensional, and for mode='sum'")
        whole = indices.new_empty(0, dtype=torch.promote_types(indices.dtype, offsets.dtype))
        count = offsets.shape[0] - (1 if last else 0)
        in_rows = weight.stride(1) == 1 and (samples is None or samples.stride(0) == 1)
        fast = mode == 0 and weight.dtype != torch.float64 and in_rows and pad < 0
        counted = count if with_gradient or mode != 0 else offsets.shape[0]
        winners = whole.new_empty(count, weight.shape[1]) if mode == 2 else whole.new_empty(counted)
        return weight.new_empty(count, weight.shape[1]), whole.new_empty(0 if fast else indices.shape[0]), whole.new_empty(counted), winners

    return bags


def _loss(x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1) -> Any:
    """One number for each row, or one for all."""
    return x.new_empty(target.shape if reduction == 0 else ())


def _loss_and_targets(x: Any, target: Any, reduction: int) -> Any:
    return x.new_empty(target.shape[:-1] if reduction == 0 else ()), x.new_empty(target.shape)


def _gradient_of_loss(grad: Any, x: Any, *rest: Any, **named: Any) -> Any:
    return x.new_empty(x.shape)


def _nearest(x: Any, output_size: Sequence[Any], *scales: Any) -> Any:
    """PyTorch 2.13 has this kernel refuse an empty batch: it hands torch._check a number where a bool is asked for."""
    from torch._meta_registrations import upsample_common_check
    from torch._prims_common import suggest_memory_format

    check_size: Any = upsample_common_check
    size = check_size(x.shape, output_size, num_spatial_dims=x.dim() - 2)
    if x.shape[1] == 0:
        raise RuntimeError(f"Non-empty data tensor expected but got a tensor with sizes {list(x.shape)}")
    return x.new_empty(size).to(memory_format=suggest_memory_format(x))


def _gradient(grad: Any, output_size: Sequence[Any], input_size: Sequence[Any], *rest: Any) -> Any:
    """What the gradient looks like: PyTorch knows it for numbers only."""
    from torch._prims_common import suggest_memory_format

    return grad.new_empty(input_size).to(memory_format=suggest_memory_format(grad))


def _gradient_in_rows(grad: Any, output_size: Sequence[Any], input_size: Sequence[Any], *rest: Any) -> Any:
    return grad.new_empty(input_size)


def _sized(call: Any) -> Callable[..., Any]:
    """The overload that takes a size or factors, by the one that takes both: PyTorch's own, in C++, makes symbolic sizes constants."""
    from torch._decomp import decompositions

    size_of: Any = decompositions.upsample_compute_output_size

    def vec(x: Any, output_size: Sequence[Any] | None, *rest: Any) -> Any:
        *align_corners, scale_factors = rest
        size = size_of(x.size(), output_size, scale_factors)
        return call(x, size, *align_corners, *(scale_factors or (None,) * len(size)))

    return vec
