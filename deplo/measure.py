"""Comparing and timing for the command line and `deplo.explain`."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _double(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(torch.complex128) if value.is_complex() else value.double()


def compare(result: Any, fn: Callable[..., Any], inputs: Sequence[Any], reference: Callable[..., Any] | None = None, seed: int = 0) -> str:
    """A line with the largest error of `result` and of eager, both against float64: what `reference` (fn itself where it is left out) gives for
    the inputs in float64, or eager's own result where that raises. Random numbers are drawn from `seed` on each time."""
    torch.manual_seed(seed)
    expected = fn(*inputs)
    torch.manual_seed(seed)
    try:
        exact = (reference or fn)(*[_double(x) for x in inputs])
    except Exception:  # of any kind: not all operators take float64
        exact = expected
    pairs = zip(*(torch.utils._pytree.tree_leaves(value) for value in (result, expected, exact)), strict=True)
    ours = theirs = 0.0
    for got, eager, judge in pairs:
        if isinstance(got, torch.Tensor) and got.numel() and judge.shape == got.shape:
            ours = max(ours, _distance(got, judge))
            theirs = max(theirs, _distance(eager, judge))
    return f"largest error: deplo {ours:.3g}, eager {theirs:.3g}"


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).max())


def time_interleaved(functions: dict[str, Callable[[], Any]], budget: float = 1.0) -> dict[str, float]:
    """Median seconds a call of each function; they take turns, so that a change of the machine's speed meets all of them."""
    loops = {}
    for name, function in functions.items():
        for _ in range(3):
            function()
        loops[name] = max(1, min(1000, int(0.01 / quickest(function))))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + budget * len(functions)
    while time.perf_counter() < end or len(next(iter(samples.values()))) < 5:
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(loops[name]):
                function()
            samples[name].append((time.perf_counter() - start) / loops[name])
    return {name: statistics.median(values) for name, values in samples.items()}


def quickest(function: Callable[[], Any], calls: int = 20, budget: float = 0.02) -> float:
    """Seconds of the quickest of some calls: any single one may meet a moment at which the machine does something else."""
    best, begin = math.inf, time.perf_counter()
    for _ in range(calls):
        start = time.perf_counter()
        function()
        end = time.perf_counter()
        best = min(best, end - start)
        if end - begin > budget:
            break
    return max(best, 1e-7)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What this machine does at most, with torch's number of threads."""

    flops: float  # float32 operations a second
    bandwidth: float  # bytes a second


@functools.cache
def measure_machine() -> Machine:
    """The best of several matrix products and copies, in about 0.2 s: limits to compare with, not exact ones."""
    a = torch.full((1024, 1024), 0.5)
    source, target = torch.zeros(8 << 20), torch.empty(8 << 20)
    with torch.no_grad():
        product = min(_once(lambda: torch.mm(a, a)) for _ in range(5))
        copy = min(_once(lambda: target.copy_(source)) for _ in range(5))
    return Machine(2 * 1024**3 / product, 2 * source.numel() * 4 / copy)


def _once(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
