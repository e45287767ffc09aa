"""What deplo does to real models, and to a softmax: `make demo`.

    python examples/demo.py [--size real|tiny] [--threads N]

Weights are random with a fixed seed. `error` is the largest difference from the float64 model, relative to its largest output.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import harness
import zoo

from deplo import explanation
from deplo.backend import collect_records

MODELS = {"TinyLlama block, 128 tokens": "llama-block-s128", "ResNet-50": "resnet-50"}


def row_of(title: str, case: zoo.Case, expected: torch.Tensor) -> dict[str, Any]:
    """Compiles one model, checks it against eager mode and float64, and measures it."""
    inputs = [case.inputs(seed) for seed in range(3)]
    reset = case.reset or (lambda: None)
    case.model(**inputs[0])
    reset()
    eager = case.model(**inputs[0]).clone()
    torch._dynamo.reset()
    compiled = torch.compile(case.model, backend="deplo", options={"strict": True, "allow_library": []})
    reset()
    with collect_records() as records:
        start = time.perf_counter()
        result = compiled(**inputs[0]).clone()
        first = time.perf_counter() - start
    described = [explanation.report_of(record) for record in records]
    reset()
    timings = harness.interleave({"eager": lambda k: case.model(**inputs[k]), "deplo": lambda k: compiled(**inputs[k])}, rounds=5, min_seconds=0.3)
    return {
        "model": title,
        "eager ms": timings["eager"].median * 1e3,
        "deplo ms": timings["deplo"].median * 1e3,
        "speed-up": timings["eager"].median / timings["deplo"].median,
        "first call s": first,
        "of it deplo s": sum(record.import_seconds + record.compile_seconds for record in records),
        "kernels": sum(len(graph.kernels) for graph in described),
        "library calls": sum(len(graph.library) for graph in described),
        "error eager": harness.max_error(eager, expected),
        "error deplo": harness.max_error(result, expected),
    }


def show_levels() -> None:
    """A softmax at each level of the IR."""
    from deplo.capture import capture
    from deplo.core import core
    from deplo.options import read_options

    record = capture(lambda x: torch.softmax(x, -1), [torch.randn(4, 8)])[0]
    options = read_options().to_json(record.hints)
    for level in ("torch", "tensor", "loop", "tile", "kernel"):
        lines = core().lower(record.torch_ir, level, options).splitlines()
        shown = lines[:24] + ([f"  ... {len(lines) - 24} more lines"] if len(lines) > 24 else [])
        print(f"\n-- {level} IR of softmax(x, -1)\n" + "\n".join(shown))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    rows = []
    with torch.no_grad():
        for title, name in MODELS.items():
            print(f"compiling {title} ...", file=sys.stderr, flush=True)
            rows.append(row_of(title, zoo.build(name, arguments.size), zoo.reference(name, arguments.size)))
    harness.show(rows, f"float32, {arguments.threads} threads")
    show_levels()
    eps = torch.finfo(torch.float32).eps
    wrong = [row["model"] for row in rows if not row["error deplo"] <= harness.allowed_error(row["error eager"], eps)]
    if wrong:
        print(f"WRONG: {', '.join(wrong)}: further from float64 than eager mode", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
