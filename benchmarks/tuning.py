"""Heuristic schedules beside tuned ones: `python benchmarks/tuning.py [--tune fast|full] [--seconds N] [ROW ...]`.

Each row is compiled twice, with tune="off" and after a search, and both are called in turns in one process. Winners go to a folder of their own
unless --cache-dir names one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import deplo


def _linear(rows: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    return nn.Linear(3584, 3584), (torch.randn(rows, 3584),)


def _softmax() -> tuple[Any, tuple[torch.Tensor, ...]]:
    return nn.Softmax(-1), (torch.randn(28, 512, 512),)


ROWS: dict[str, Callable[[], tuple[Any, tuple[torch.Tensor, ...]]]] = {
    "linear 3584 s=16": lambda: _linear(16),
    "linear 3584 s=32": lambda: _linear(32),
    "linear 3584 s=197": lambda: _linear(197),
    "softmax 28x512x512": _softmax,
    "layer norm 512x768": lambda: (nn.LayerNorm(768), (torch.randn(512, 768),)),
    "conv 3x3 64 56x56": lambda: (nn.Conv2d(64, 64, 3, padding=1), (torch.randn(1, 64, 56, 56),)),
    "transposed 64-32 4x4 s2": lambda: (nn.ConvTranspose2d(64, 32, 4, 2, 1), (torch.randn(1, 64, 56, 56),)),
    "depthwise 3x3 192 28x28": lambda: (nn.Conv2d(192, 192, 3, padding=1, groups=192), (torch.randn(1, 192, 28, 28),)),
    "max pool 3x3 s2 112x112": lambda: (nn.MaxPool2d(3, 2, 1), (torch.randn(1, 64, 112, 112),)),
    "attention 12x512x64": lambda: (nn.functional.scaled_dot_product_attention, tuple(torch.randn(1, 12, 512, 64) for _ in range(3))),
    "matmul 64x47": lambda: (torch.matmul, (torch.randn(64, 47), torch.randn(47, 64))),
}


def _compiled(model: Any, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Callable[[], Any]:
    torch._dynamo.reset()
    call = torch.compile(model, backend="deplo", options={"strict": True, **options})
    call(*inputs)
    return lambda: call(*inputs)


def measure(functions: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Median seconds a call; each turn begins with another function."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    loops = {}
    for name, function in functions.items():
        function()
        start = time.perf_counter()
        function()
        loops[name] = max(1, min(500, int(2e-3 / max(1e-7, time.perf_counter() - start))))
    names = list(functions)
    for turn in range(turns):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            start = time.perf_counter()
            for _ in range(loops[name]):
                functions[name]()
            samples[name].append((time.perf_counter() - start) / loops[name])
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows that contain this text (default: all)")
    parser.add_argument("--tune", choices=("fast", "full", "auto"), default="fast")
    parser.add_argument("--cache-dir", help="folder of winners")
    parser.add_argument("--threads", type=int, default=0, help="of a call (default: as torch)")
    parser.add_argument("--turns", type=int, default=41)
    arguments = parser.parse_args()
    folder = arguments.cache_dir or tempfile.mkdtemp(prefix="deplo-tuning-")
    print(f"{'row':26} {'heuristic':>12} {'tuned':>12} {'speed':>6} {'search':>8}")
    with torch.no_grad():
        for name, make in ROWS.items():
            if arguments.rows and not any(text in name for text in arguments.rows):
                continue
            torch.manual_seed(0)
            model, inputs = make()
            usual = _compiled(model, inputs, {"tune": "off", "threads": arguments.threads})
            start = time.perf_counter()
            tuned = _compiled(model, inputs, {"tune": arguments.tune, "cache_dir": folder, "threads": arguments.threads})
            searched = time.perf_counter() - start
            times = measure({"usual": usual, "tuned": tuned}, arguments.turns)
            speed = times["usual"] / times["tuned"]
            print(f"{name:26} {1e6 * times['usual']:9.1f} us {1e6 * times['tuned']:9.1f} us {speed:6.2f} {searched:6.1f} s", flush=True)
    for entry in deplo.tune.entries(folder):
        print(f"{entry.kernel}: {1e6 * entry.usual_seconds:.1f} -> {1e6 * entry.seconds:.1f} us ({entry.level}): {entry.schedule}")


if __name__ == "__main__":
    main()
