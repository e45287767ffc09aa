"""What whole models take of memory, in fresh processes: eager mode, what PyTorch's tracing leaves (`aot_eager`, which compiles nothing), and
deplo with each value of the option `weights`.

    python benchmarks/memory.py [--models bert-base,resnet-50] [--weights auto,own] [--dtype float32|bfloat16] [--threads 2] [--json FILE]

`held` is what is resident after ten calls (PSS), `peak` the most that was ever resident. Ratios are those to eager mode.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from typing import Any

import torch
import zoo

MODELS = ("bert-base", "resnet-50", "vit-base", "tinyllama-1.1b")
CALLS = 10
TRACED = "aot_eager"


def _model(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any]]:
    if not name.startswith("tinyllama"):
        case = zoo.build(name, "real", dtype)
        return case.model, case.inputs(0)
    from deplo.llm_bench import build

    model = build(name, "bf16" if dtype == torch.bfloat16 else "none", length=64)
    return model, {"input_ids": torch.arange(32)[None], "use_cache": False}


def _held() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def child(name: str, engine: str, dtype: torch.dtype) -> dict[str, float]:
    """The figures of this process, in MB."""
    model, inputs = _model(name, dtype)
    weights = sum(p.nbytes for p in {id(p): p for p in (*model.parameters(), *model.buffers())}.values())
    call: Any = model
    if engine == TRACED:
        call = torch.compile(model, backend=TRACED)
    elif engine != "eager":
        call = torch.compile(model, backend="deplo", options={"strict": True, "weights": engine})
    with torch.no_grad():
        for _ in range(CALLS):
            call(**inputs)
    figures = {}
    if engine not in ("eager", TRACED):
        from deplo.core import core

        figures = {"packed": core().packed_bytes() / 1e6, "gone": core().owned_bytes() / 1e6}
        core().trim_memory()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"weights": weights / 1e6, "held": _held() / 1e6, "peak": peak / 1e6, **figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--weights", default="auto,own")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default="")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(child(*args.child, dtype)))
        return 0
    rows = []
    for name in args.models.split(","):
        eager: dict[str, float] = {}
        for engine in ("eager", TRACED, *args.weights.split(",")):
            command = [sys.executable, __file__, "--dtype", args.dtype, "--threads", str(args.threads), "--child", name, engine]
            done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(done.stderr[-3000:])
            row: dict[str, Any] = {"model": name, "engine": engine, **json.loads(done.stdout.splitlines()[-1])}
            eager = eager or row
            row |= {f"{what} / eager": row[what] / eager[what] for what in ("held", "peak")}
            rows.append(row)
            print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
