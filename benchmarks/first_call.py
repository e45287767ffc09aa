"""What deplo adds to the first call of real models, cold: each in a process of its own with an empty cache folder; and its overhead per call.

    python benchmarks/first_call.py [--models resnet-50,bert-base,llama-block-s128] [--size real|tiny] [--threads 2] [--warm] [--json FILE]

`import` is the translation of the FX graph, `compile` the core's work up to machine code, `deplo` their sum; `compiled` counts the
kernels that LLVM made, `later graphs` those that calls 2 and 3 had to compile. With --warm the same models run again in new processes
on the cache folders that the first ones filled, deplo's and PyTorch's: `compiled` must be 0, and nothing is imported. Errors are those of the
third call, against float64.
The last table compares a function of eight elements with an empty program behind Dynamo and AOTAutograd: the difference is deplo's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import harness
import torch
import zoo


def child(name: str, size: str, threads: int, dtype: str) -> dict[str, Any]:
    """One model, in this process."""
    from deplo.backend import collect_records

    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    case = zoo.build(name, size, getattr(torch, dtype))
    inputs = [case.inputs(seed) for seed in range(3)]
    seconds = []
    with torch.no_grad(), collect_records() as records:
        case.model(**inputs[0])  # a lazy KV cache makes its tensors
        model = torch.compile(case.model, backend="deplo", options={"strict": True, "allow_library": []})
        counts = []
        for k in range(3):
            if case.reset:
                case.reset()
            start = time.perf_counter()
            result = model(**inputs[k])
            seconds.append(time.perf_counter() - start)
            counts.append(len(records))
        result = result.clone()
        if case.reset:
            case.reset()
        eager = case.model(**inputs[2])
        wanted = zoo.reference(name, size, getattr(torch, dtype), seed=2)
    described = [json.loads(record.program.describe()) for record in records]
    own = sum(r.import_seconds + r.compile_seconds for r in records)
    return {
        "model": name,
        "eps": torch.finfo(getattr(torch, dtype)).eps,
        "first call s": seconds[0],
        "import s": sum(r.import_seconds for r in records),
        "compile s": sum(r.compile_seconds for r in records),
        "deplo s": own,
        "compiled": sum(d["cache"]["compiled"] for d in described),
        "later graphs": counts[2] - counts[0],
        "call 3 ms": seconds[2] * 1e3,
        "error eager": harness.max_error(eager, wanted),
        "error deplo": harness.max_error(result, wanted),
    }


def run_child(name: str, args: argparse.Namespace, cache: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, "--size", args.size, "--threads", str(args.threads), "--dtype", args.dtype]
    folders = {"DEPLO_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": os.path.join(cache, "torch")}
    done = subprocess.run(command, env={**os.environ, **folders}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stderr[-4000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def overhead() -> dict[str, Any]:
    """Microseconds per call of relu(x + 1) * 2 on eight elements: deplo, and an empty program in its place."""
    from torch._dynamo.backends.common import aot_autograd

    def nothing(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        def run(arguments: list[Any]) -> list[torch.Tensor]:
            arguments.clear()
            return [torch.empty(8)]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + 1) * 2

    x = torch.randn(8)
    empty = aot_autograd(fw_compiler=nothing, inference_compiler=nothing)
    calls: dict[str, Any] = {"eager us": f}
    with torch.no_grad():
        for name, backend in (("empty us", empty), ("deplo us", "deplo")):

            def g(x: torch.Tensor) -> torch.Tensor:
                return torch.relu(x + 1) * 2

            calls[name] = torch.compile(g, backend=backend)
            calls[name](x)
        # Eight elements: none of these starts a thread that could go on spinning.
        timings = harness.interleave({name: lambda k, c=c: c(x) for name, c in calls.items()}, rounds=9, pause=0.0)
    row = {name: timing.median * 1e6 for name, timing in timings.items()}
    differences = [a - b for a, b in zip(timings["deplo us"].rounds, timings["empty us"].rounds, strict=True)]
    row["deplo beyond empty us"] = statistics.median(differences) * 1e6
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet-50,bert-base,llama-block-s128")
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warm", action="store_true", help="also on the filled cache folder, in new processes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    args = parser.parse_args()
    unknown = [name for name in args.models.split(",") if name not in zoo.NAMES]
    if unknown:
        parser.error(f"unknown model {unknown[0]}: the models are {', '.join(zoo.NAMES)}")
    if args.child:
        print(json.dumps(child(args.child, args.size, args.threads, args.dtype)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="deplo-first-call-") as folder:
        for run in ["cold", "warm"][: 1 + args.warm]:
            for name in args.models.split(","):
                rows.append({**run_child(name, args, os.path.join(folder, name)), "cache": run})
                print(f"{name}, {run}: {rows[-1]['deplo s']:.2f} s", file=sys.stderr, flush=True)
    harness.show(rows, f"first call, {args.threads} threads")
    torch.set_num_threads(args.threads)
    per_call = overhead()
    harness.show([per_call], "one call, eight elements")
    harness.write_json(args.json, [*rows, per_call])
    again = [row["model"] for row in rows if row["later graphs"] or (row["cache"] == "warm" and row["compiled"])]
    if again:
        print(f"COMPILED AGAIN: {', '.join(again)}", file=sys.stderr)
    return int(bool(again)) | harness.report_wrong(rows)


if __name__ == "__main__":
    raise SystemExit(main())
