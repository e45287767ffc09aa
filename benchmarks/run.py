"""Layers and chains: eager, Inductor and deplo side by side, each with its share of the machine's peak measured in the same run.

    python benchmarks/run.py [--suite pointwise,contractions,convolutions] [--match TEXT] [--threads 2] [--no-inductor] [--json FILE]

Times are medians of interleaved rounds with three rotating input sets; `error` is judged by float64 at these sizes.
"peak %" is the larger of flops / (FMA peak) and bytes / (DRAM bandwidth), for deplo's time.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from typing import Any

import cases
import harness
import peak
import torch


def measure(bench: cases.Bench, args: argparse.Namespace, limits: tuple[float, float]) -> dict[str, Any]:
    sets = [bench.inputs(seed) for seed in range(3)]
    torch._dynamo.reset()
    contestants: dict[str, Any] = {"eager": lambda k: bench.module(*sets[k])}
    wanted = harness.double_copy(bench.module)(*harness.to_double(sets[0]))
    row: dict[str, Any] = {"case": bench.name, "error eager": harness.max_error(contestants["eager"](0), wanted)}
    for backend in ["inductor"] * args.inductor + ["deplo"]:
        options = {"options": {"strict": True}} if backend == "deplo" else {}
        compiled = torch.compile(bench.module, backend=backend, **options)
        contestants[backend] = lambda k, compiled=compiled: compiled(*sets[k])
        row[f"error {backend}"] = harness.max_error(contestants[backend](0), wanted)
    row["aten"] = sum(harness.aten_calls(lambda: contestants["deplo"](0)).values())
    timings = harness.interleave(contestants, rounds=args.rounds, min_seconds=args.seconds)
    for key, timing in timings.items():
        row[f"{key} us"] = timing.median * 1e6
    flops, bandwidth = limits
    row["peak %"] = 100 * max(bench.flops / flops, bench.bytes / bandwidth) / timings["deplo"].median
    row["vs eager"] = harness.ratio(timings, "eager", "deplo")
    if args.inductor:
        row["vs inductor"] = harness.ratio(timings, "inductor", "deplo")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default=",".join(cases.SUITES))
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="least time per contestant and round")
    parser.add_argument("--no-inductor", dest="inductor", action="store_false")
    parser.add_argument("--json")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    limits = (peak.flops_per_second(args.threads), peak.bytes_per_second(args.threads))
    torch.set_num_threads(args.threads)
    print(f"peak: {limits[0] / 1e9:.0f} GFLOPS float32, {limits[1] / 1e9:.1f} GB/s read, {args.threads} threads", file=sys.stderr)
    rows = []
    with torch.no_grad():
        for suite in args.suite.split(","):
            torch.manual_seed(0)
            for bench in cases.SUITES[suite]():
                if args.match in bench.name:
                    rows.append(measure(bench, args, limits))
                    print(f"{bench.name}: {rows[-1]['vs eager']:.2f}x eager", file=sys.stderr, flush=True)
    harness.show(rows, f"{args.threads} threads")
    for key in ("vs eager", "vs inductor"):
        ratios = [row[key] for row in rows if key in row]
        if ratios:
            print(f"geometric mean {key}: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}; least {min(ratios):.2f}")
    harness.write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
