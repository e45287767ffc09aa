"""Real models: eager, Inductor, deplo and other engines side by side; numbers judged by float64 in the same run.

    python benchmarks/models.py [--models bert-base,resnet-50] [--dtype float32|bfloat16] [--threads 2] [--no-inductor] [--peers] [--direct]
                                [--json FILE] [--plot FILE.svg]

Times are medians of interleaved rounds with three rotating input sets (README.md here says how). `error` is the largest difference from the float64
model, of its output and of its KV cache, relative to the largest number there. `aten` counts ATen calls inside one compiled
call, seen by PyTorch's profiler.
`NAME %` is the larger of flops / (FMA peak) and bytes / (DRAM bandwidth) for that contestant's time, peaks measured in the same run;
flops are those of contractions and convolutions, bytes those of weights, inputs and outputs, once each.
--peers adds ONNX Runtime, OpenVINO and zentorch (`make peers` installs them); --direct has deplo called as their sessions are, without Dynamo's
guards (`deplo.jit(..., guards="inputs")`). `vs best peer` is the time of the fastest other over deplo's.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

import harness
import peak
import peers
import plot
import torch
import zoo
from torch.utils.flop_counter import FlopCounterMode


def compile_once(case: zoo.Case, backend: str, inputs: dict[str, Any], direct: bool) -> tuple[Any, float]:
    """The compiled model and the seconds of its first call."""
    torch._dynamo.reset()
    compiled = harness.compiled(case.model, backend, direct, strict=True, allow_library=[])
    start = time.perf_counter()
    compiled(**inputs)
    return compiled, time.perf_counter() - start


def work_of(case: zoo.Case, inputs: dict[str, Any]) -> tuple[float, float]:
    """Floating-point operations of a call, and the bytes that it must move at least."""
    with FlopCounterMode(display=False) as counter:
        output = case.model(**inputs)
    # An embedding's table is read at the rows of its tokens only.
    tables = {id(m.weight): 0 for m in case.model.modules() if isinstance(m, torch.nn.Embedding)}
    tied = {id(m.weight) for m in case.model.modules() if isinstance(m, torch.nn.Linear)}
    read = [p for p in case.model.parameters() if id(p) not in tables or id(p) in tied]
    moved = read + [value for value in inputs.values() if isinstance(value, torch.Tensor)] + [output]
    return float(counter.get_total_flops()), float(sum(t.numel() * t.element_size() for t in moved))


def errors_of(case: zoo.Case, contestants: dict[str, Any], wanted: tuple[torch.Tensor, list[torch.Tensor]], k: int) -> dict[str, float]:
    """Largest errors of the results for the k-th inputs, and of what the calls leave in the KV cache (what runs an ONNX model has none)."""
    output, state = wanted
    errors = {}
    for name, call in contestants.items():
        if case.reset:
            case.reset()
        result = call(k)
        kept = [] if name in peers.ONNX else map(harness.max_error, case.state(), state)
        errors[f"error {name}"] = max([harness.max_error(result, output), *kept])
    return errors


def measure(name: str, args: argparse.Namespace, limits: peak.Limits) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    case = zoo.build(name, args.size, dtype)
    sets = [case.inputs(seed) for seed in range(3)]
    contestants: dict[str, Any] = {"eager": lambda k: case.model(**sets[k])}
    row: dict[str, Any] = {"model": name, "eps": torch.finfo(dtype).eps}
    contestants["eager"](0)  # a lazy KV cache makes its tensors
    for backend in ["inductor"] * args.inductor + ["deplo"]:
        compiled, first = compile_once(case, backend, sets[0], args.direct)
        contestants[backend] = lambda k, compiled=compiled: compiled(**sets[k])
        row[f"first {backend} s"] = first
    calls = harness.aten_calls(lambda: contestants["deplo"](0))
    row["aten"] = " ".join(f"{key[6:]}x{n}" for key, n in sorted(calls.items())) or "none"
    wanted = zoo.reference_and_state(name, args.size, dtype)
    if args.peers:
        peers.add(args.peers, contestants, row, case.model, sets, lambda result: harness.max_error(result, wanted[0]), args.threads)
    row |= errors_of(case, contestants, wanted, 0)
    flops, moved = work_of(case, sets[0])
    others = harness.OtherWork()
    timings = harness.interleave(contestants, args.rounds, args.seconds, len(sets), args.pause)
    row["others"] = others.processors()
    # Once more, with another set: who had kept what came of the first one would be wrong now.
    later = errors_of(case, contestants, zoo.reference_and_state(name, args.size, dtype, seed=2), 2)
    row |= {key: max(error, row[key]) for key, error in later.items()}
    return row | harness.contestant_columns(row, timings, flops, moved, limits, "ms", 1e3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(zoo.NAMES))
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    harness.add_timing_options(parser, rounds=5, seconds=0.3)
    parser.add_argument("--direct", action="store_true", help='deplo by direct calls: deplo.jit(..., guards="inputs")')
    parser.add_argument("--no-inductor", dest="inductor", action="store_false")
    peers.add_options(parser)
    args = parser.parse_args()
    unknown = [name for name in args.models.split(",") if name not in zoo.NAMES]
    if unknown:
        parser.error(f"unknown model {unknown[0]}: the models are {', '.join(zoo.NAMES)}")
    peers.check_options(parser, args)
    warnings.filterwarnings("ignore")
    limits = peak.measure(args.threads)
    print(f"peak: {limits}, {args.threads} threads", file=sys.stderr)
    rows = []
    with torch.no_grad():
        for name in args.models.split(","):
            rows.append(measure(name, args, limits))
            print(f"{name}: {rows[-1]['vs eager']:.2f}x eager", file=sys.stderr, flush=True)
    title = f"{args.dtype}, {args.threads} threads" + ", deplo by direct calls" * args.direct
    harness.show(rows, title, peers.DETAILS)
    harness.show_means(rows)
    harness.write_json(args.json, rows, limits, peers.described(args) | {"dtype": args.dtype, "direct": args.direct})
    plot.draw(args.plot, rows, f"{title}, of {harness.processor()}")
    return harness.report_wrong(rows)


if __name__ == "__main__":
    raise SystemExit(main())
