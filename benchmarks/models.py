"""Real models: eager, Inductor, deplo and other engines side by side; numbers judged by float64 in the same run.

    python benchmarks/models.py [--models bert-base,resnet-50] [--dtype float32|bfloat16] [--threads 2] [--no-inductor] [--peers] [--json FILE]

Times are medians of interleaved rounds with three rotating input sets. `error` is the largest difference from the float64
model, of its output and of its KV cache, relative to the largest number there. `aten` counts ATen calls inside one compiled
call, seen by PyTorch's profiler.
`NAME %` is the larger of flops / (FMA peak) and bytes / (DRAM bandwidth) for that contestant's time, peaks measured in the same run;
flops are those of contractions and convolutions, bytes those of weights, inputs and outputs, once each.
--peers adds ONNX Runtime and OpenVINO (`make peers` installs them).
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
import torch
import zoo
from run import add_peers
from torch.utils.flop_counter import FlopCounterMode


def compile_once(case: zoo.Case, backend: str, inputs: dict[str, Any]) -> tuple[Any, float]:
    """The compiled model and the seconds of its first call."""
    torch._dynamo.reset()
    options = {"options": {"strict": True, "allow_library": []}} if backend == "deplo" else {}
    compiled = torch.compile(case.model, backend=backend, **options)
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
    """Largest errors of the results for the k-th inputs, and of what the calls leave in the KV cache (peers have none)."""
    output, state = wanted
    errors = {}
    for name, call in contestants.items():
        if case.reset:
            case.reset()
        result = call(k)
        kept = [] if name in peers.NAMES else map(harness.max_error, case.state(), state)
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
        compiled, first = compile_once(case, backend, sets[0])
        contestants[backend] = lambda k, compiled=compiled: compiled(**sets[k])
        row[f"first {backend} s"] = first
    calls = harness.aten_calls(lambda: contestants["deplo"](0))
    row["aten"] = " ".join(f"{key[6:]}x{n}" for key, n in sorted(calls.items())) or "none"
    wanted = zoo.reference_and_state(name, args.size, dtype)
    if args.peers:
        add_peers(contestants, row, case.model, sets, lambda result: harness.max_error(result, wanted[0]), args.threads)
    row |= errors_of(case, contestants, wanted, 0)
    flops, moved = work_of(case, sets[0])
    timings = harness.interleave(contestants, rounds=args.rounds, min_seconds=args.seconds)
    # Once more, with another set: who had kept what came of the first one would be wrong now.
    later = errors_of(case, contestants, zoo.reference_and_state(name, args.size, dtype, seed=2), 2)
    row |= {key: max(error, row[key]) for key, error in later.items()}
    return row | harness.contestant_columns(timings, flops, moved, limits, "ms", 1e3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(zoo.NAMES))
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="least time per contestant and round")
    parser.add_argument("--no-inductor", dest="inductor", action="store_false")
    parser.add_argument("--peers", action="store_true", help="also ONNX Runtime and OpenVINO")
    parser.add_argument("--json")
    args = parser.parse_args()
    unknown = [name for name in args.models.split(",") if name not in zoo.NAMES]
    if unknown:
        parser.error(f"unknown model {unknown[0]}: the models are {', '.join(zoo.NAMES)}")
    if args.peers:
        try:
            peers.require()
        except peers.Unavailable as error:
            parser.error(str(error))
    warnings.filterwarnings("ignore")
    limits = peak.measure(args.threads)
    print(f"peak: {limits}, {args.threads} threads", file=sys.stderr)
    rows = []
    with torch.no_grad():
        for name in args.models.split(","):
            rows.append(measure(name, args, limits))
            print(f"{name}: {rows[-1]['vs eager']:.2f}x eager", file=sys.stderr, flush=True)
    harness.show(rows, f"{args.dtype}, {args.threads} threads")
    harness.show_means(rows)
    harness.write_json(args.json, rows, limits)
    return harness.report_wrong(rows)


if __name__ == "__main__":
    raise SystemExit(main())
