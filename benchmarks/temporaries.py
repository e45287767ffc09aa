"""How much memory a call takes while it runs: the most that is resident beyond what was before it, for inference and for a training step's forward
and backward pass (activations that are kept between them among it), of eager mode, Inductor and deplo, in processes of their own.

    python benchmarks/temporaries.py [--models bert-base,resnet-50] [--no-inductor] [--size real|tiny] [--threads 2] [--json FILE]

Before a measured call everything that is kept for reuse goes back to the system, so that each page which the call needs counts, whoever asks for it.
Weights were packed and gradients allocated by the calls before. `arena` is what `deplo.explain` prints of the graphs, forward and backward.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
import zoo
from training import trainable

BACKENDS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {"backend": "inductor"},
    "deplo": {"backend": "deplo", "options": {"strict": True}},
}
CALLS = 4  # measured; the median counts


def _of_status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))


def _settle() -> None:
    from deplo.core import core

    gc.collect()
    core().trim_memory()
    ctypes.CDLL(None).malloc_trim(0)


def most_beyond(call: Callable[[], Any]) -> int:
    """Bytes that were resident at most during a call, beyond those before it."""
    found = []
    for _ in range(CALLS):
        _settle()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the highest mark begins anew
        before = _of_status("VmRSS:")
        result = call()
        found.append(_of_status("VmHWM:") - before)
        del result
    return sorted(found)[CALLS // 2]


def child(engine: str, name: str, size: str) -> dict[str, float]:
    """MB of a model, in this process."""
    from deplo.backend import collect_records

    warnings.filterwarnings("ignore")
    keywords = BACKENDS[engine]

    def arenas(records: Sequence[Any]) -> float:
        return sum(json.loads(record.program.describe())["memory"].get("arena_bytes", 0) for record in records) / 1e6

    row: dict[str, float] = {}
    case = zoo.build(name, size)
    given = case.inputs(0)
    with torch.no_grad(), collect_records() as records:
        model = torch.compile(case.model, **keywords) if keywords else case.model
        for _ in range(3):
            model(**given)
        row["inference MB"] = most_beyond(lambda: model(**given)) / 1e6
    if records:
        row["arena MB"] = arenas(records)
    if case.reset is not None:  # blocks with a cache do not train
        return row
    model = case = None  # type: ignore[assignment]
    torch._dynamo.reset()
    module, sets = trainable(name, size)
    with collect_records() as records:
        step = torch.compile(module, **keywords) if keywords else module

        def train() -> None:
            step(**sets[0]).square().mean().backward()

        for _ in range(3):
            train()
        row["training MB"] = most_beyond(train) / 1e6
    if records:
        row["training arena MB"] = arenas(records)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(zoo.NAMES))
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        print(json.dumps(child(*arguments.child, arguments.size)))
        return 0
    rows = []
    for name in arguments.models.split(","):
        row: dict[str, Any] = {"model": name}
        for engine in BACKENDS:
            if engine == "inductor" and arguments.no_inductor:
                continue
            command = [
                sys.executable,
                os.path.abspath(__file__),
                "--child",
                engine,
                name,
                "--size",
                arguments.size,
                "--threads",
                str(arguments.threads),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(done.stderr[-3000:])
            row |= {f"{engine} {what}": value for what, value in json.loads(done.stdout.splitlines()[-1]).items()}
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    harness.show(rows, f"the most that a call takes, {arguments.threads} threads")
    harness.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
