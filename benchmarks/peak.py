"""The machine's limits, measured with kernels that deplo compiles from Kernel IR text: nothing else's code is trusted for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Limits:
    """What the machine does at most with some number of threads."""

    flops: float  # float32 operations a second, an FMA counts two
    bandwidth: float  # bytes a second read from memory

    def percent(self, flops: float, moved: float, seconds: float) -> float:
        """How much of its limit work reaches that takes `seconds`: of flops or of bandwidth, whichever takes longer."""
        return 100 * max(flops / self.flops, moved / self.bandwidth) / seconds

    def __str__(self) -> str:
        return f"{self.flops / 1e9:.0f} GFLOPS float32, {self.bandwidth / 1e9:.1f} GB/s read"


def measure(threads: int) -> Limits:
    """The limits of `threads` threads, now; sets torch's number of threads."""
    torch.set_num_threads(threads)
    return Limits(flops_per_second(threads), bytes_per_second(threads))


def _best(f: Callable[[], Any], seconds: float = 0.3) -> float:
    """Least seconds of one call over repeated calls."""
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        f()
        best = min(best, time.perf_counter() - start)
    return best


def flops_per_second(threads: int) -> float:
    """float32 FMA peak of `threads` threads: independent chains in registers. An FMA counts two."""
    from deplo import _C

    lanes = json.loads(_C.env())["vector bytes"] // 4
    chains, steps = 10, 200_000
    lines = [
        f"program @peak(x: f32[{lanes}] strides [1] user)",
        f"  buffer y: f32[{threads}, {lanes}] strides [{lanes}, 1] output",
        "  call @fma_chains(x, y)",
        "  return y",
        f"kernel @fma_chains(x: ptr f32, out y: ptr f32) symbols () chunks {threads} scratch 0",
        f"  v: f32x{lanes} = load x[0]",
    ]
    lines += [f"  var a{i}: f32x{lanes} = v" for i in range(chains)]
    lines.append(f"  for j in 0..{steps} step 1:")
    for i in range(chains):
        lines += [f"    t{i}: f32x{lanes} = fma(a{i}, v, v)", f"    a{i} <- t{i}"]
    previous = "a0"
    for i in range(1, chains):
        lines.append(f"  s{i}: f32x{lanes} = add({previous}, a{i})")
        previous = f"s{i}"
    lines.append(f"  store y[thread*{lanes}] = {previous}")
    program = _C.compile("\n".join(lines) + "\n", f'{{"threads": {threads}}}')
    x = torch.full((lanes,), 0.5)
    return 2.0 * lanes * chains * steps * threads / _best(lambda: program([x]))


def bytes_per_second(threads: int) -> float:
    """DRAM read bandwidth of `threads` threads over 256 MiB, by a compiled sum."""
    import deplo  # noqa: F401  the backend by name

    x = torch.ones(64 << 20)
    f = torch.compile(lambda t: t.sum(), backend="deplo")
    f(x)
    return x.numel() * 4 / _best(lambda: f(x), 1.0)
