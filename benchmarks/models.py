"""Real models: eager, Inductor (with --inductor) and deplo side by side; numbers judged by float64 in the same run.

    python benchmarks/models.py [--models bert-base,resnet-50] [--dtype float32|bfloat16] [--threads 2] [--inductor] [--json FILE]

Times are medians of interleaved rounds with three rotating input sets. `error` is the largest difference from the float64
model relative to its largest output. `aten` counts ATen calls inside one compiled call, seen by PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from typing import Any

import harness
import torch
import zoo


def compile_once(case: zoo.Case, backend: str, inputs: dict[str, Any]) -> tuple[Any, float]:
    """The compiled model and the seconds of its first call."""
    torch._dynamo.reset()
    options = {"options": {"strict": True}} if backend == "deplo" else {}
    compiled = torch.compile(case.model, backend=backend, **options)
    start = time.perf_counter()
    compiled(**inputs)
    return compiled, time.perf_counter() - start


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    case = zoo.build(name, args.size, dtype)
    sets = [case.inputs(seed) for seed in range(3)]
    contestants: dict[str, Any] = {"eager": lambda k: case.model(**sets[k])}
    row: dict[str, Any] = {"model": name}
    reset = case.reset or (lambda: None)
    contestants["eager"](0)
    reset()
    eager = contestants["eager"](0).clone()
    wanted = zoo.reference(name, args.size, dtype)
    row["error eager"] = harness.max_error(eager, wanted)
    for backend in ["inductor"] * args.inductor + ["deplo"]:
        compiled, first = compile_once(case, backend, sets[0])
        contestants[backend] = lambda k, compiled=compiled: compiled(**sets[k])
        row[f"first {backend} s"] = first
        reset()
        row[f"error {backend}"] = harness.max_error(contestants[backend](0), wanted)
    calls = harness.aten_calls(lambda: contestants["deplo"](0))
    row["aten"] = " ".join(f"{key[6:]}x{n}" for key, n in sorted(calls.items())) or "none"
    timings = harness.interleave(contestants, rounds=args.rounds, min_seconds=args.seconds)
    for key, timing in timings.items():
        row[f"{key} ms"] = timing.median * 1e3
    row["deplo/eager"] = harness.ratio(timings, "eager", "deplo")
    if args.inductor:
        row["deplo/inductor"] = harness.ratio(timings, "inductor", "deplo")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(zoo.NAMES))
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="least time per contestant and round")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    rows = []
    with torch.no_grad():
        for name in args.models.split(","):
            rows.append(measure(name, args))
            print(f"{name}: {rows[-1]['deplo/eager']:.2f}x eager", file=sys.stderr, flush=True)
    harness.show(rows, f"{args.dtype}, {args.threads} threads")
    mean = math.exp(sum(math.log(row["deplo/eager"]) for row in rows) / len(rows))
    print(f"geometric mean of eager / deplo: {mean:.3f} over {len(rows)} models; slowest {min(row['deplo/eager'] for row in rows):.2f}")
    harness.write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
