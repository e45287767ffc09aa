"""Layers and chains: eager, Inductor, deplo and other engines side by side, each with its share of the machine's peak measured in the same run.

    python benchmarks/run.py [--suite pointwise,contractions,convolutions] [--match TEXT] [--threads 2] [--no-inductor] [--peers] [--direct]
                             [--json FILE] [--plot FILE.svg]

Times are medians of interleaved rounds with three rotating input sets (README.md here says how); `error` is judged by float64 at these sizes.
`NAME %` is the larger of flops / (FMA peak) and bytes / (DRAM bandwidth) for that contestant's time; it passes 100 where data stay in cache.
--peers adds ONNX Runtime, OpenVINO and zentorch (`make peers` installs them), --direct has deplo called without Dynamo's guards. `vs best peer` is
the time of the fastest other over deplo's.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import cases
import harness
import peak
import peers
import plot
import torch


def measure(bench: cases.Bench, args: argparse.Namespace, limits: peak.Limits) -> dict[str, Any]:
    sets = [bench.inputs(seed) for seed in range(3)]
    torch._dynamo.reset()
    contestants: dict[str, Any] = {"eager": lambda k: bench.module(*sets[k])}
    module = harness.double_copy(bench.module)

    def judge(result: torch.Tensor, k: int = 0) -> float:
        inputs = harness.to_double(sets[k])
        scale = float(module(*[x.abs() for x in inputs]).max()) if bench.sums else None
        return harness.max_error(result, module(*inputs), scale)

    eager = contestants["eager"](0)
    row: dict[str, Any] = {"case": bench.name, "eps": torch.finfo(eager.dtype).eps, "error eager": judge(eager)}
    for backend in ["inductor"] * args.inductor + ["deplo"]:
        compiled = harness.compiled(bench.module, backend, args.direct, strict=True, allow_library=[])
        contestants[backend] = lambda k, compiled=compiled: compiled(*sets[k])
        row[f"error {backend}"] = judge(contestants[backend](0))
    row["aten"] = sum(harness.aten_calls(lambda: contestants["deplo"](0)).values())
    if args.peers:
        peers.add(args.peers, contestants, row, bench.module, sets, judge, args.threads)
    others = harness.OtherWork()
    timings = harness.interleave(contestants, args.rounds, args.seconds, len(sets), args.pause)
    row["others"] = others.processors()
    # Once more, with another set: who had kept what came of the first one would be wrong now.
    for name, call in contestants.items():
        row[f"error {name}"] = max(row[f"error {name}"], judge(call(len(sets) - 1), len(sets) - 1))
    return row | harness.contestant_columns(row, timings, bench.flops, bench.bytes, limits)


def show_totals(rows: list[dict[str, Any]], benches: list[cases.Bench]) -> None:
    """For each model of which all parts were run: their times, each as often as a call of the model runs it."""
    for model in sorted({bench.part_of for bench in benches} - {""}):
        parts = [(row, bench.count) for row, bench in zip(rows, benches, strict=True) if bench.part_of == model]
        if len(parts) != sum(bench.part_of == model for suite in cases.SUITES.values() for bench in suite()):
            continue
        names = [key[:-3] for key in parts[0][0] if key.endswith(" us") and all(key in row for row, _ in parts)]
        times = {name: sum(row[f"{name} us"] * count for row, count in parts) / 1e3 for name in names}
        shown = [f"{name} {time:.1f} ms" + (f" ({time / times['deplo']:.3f} of deplo's)" if name != "deplo" else "") for name, time in times.items()]
        print(f"{len(parts)} kinds of layers of {model}, each as often as it runs them: {', '.join(shown)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default=",".join(name for name in cases.SUITES if name != "tiny"), help=", ".join(cases.SUITES))
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    harness.add_timing_options(parser, rounds=5, seconds=0.1)
    parser.add_argument("--direct", action="store_true", help='deplo by direct calls: deplo.jit(..., guards="inputs")')
    parser.add_argument("--no-inductor", dest="inductor", action="store_false")
    peers.add_options(parser)
    args = parser.parse_args()
    unknown = [name for name in args.suite.split(",") if name not in cases.SUITES]
    if unknown:
        parser.error(f"unknown suite {unknown[0]}: the suites are {', '.join(cases.SUITES)}")
    peers.check_options(parser, args)
    warnings.filterwarnings("ignore")
    limits = peak.measure(args.threads)
    print(f"peak: {limits}, {args.threads} threads", file=sys.stderr)
    rows = []
    benches = []
    with torch.no_grad():
        for suite in args.suite.split(","):
            torch.manual_seed(0)
            for bench in cases.SUITES[suite]():
                if args.match in bench.name:
                    benches.append(bench)
                    rows.append(measure(bench, args, limits))
                    print(f"{bench.name}: {rows[-1]['vs eager']:.2f}x eager", file=sys.stderr, flush=True)
    title = f"{args.threads} threads" + ", deplo by direct calls" * args.direct
    harness.show(rows, title, peers.DETAILS)
    harness.show_means(rows)
    show_totals(rows, benches)
    harness.write_json(args.json, rows, limits, peers.described(args) | {"direct": args.direct})
    plot.draw(args.plot, rows, f"{title}, of {harness.processor()}")
    return harness.report_wrong(rows)


if __name__ == "__main__":
    raise SystemExit(main())
