"""How the core's compile time grows with a graph: CPU seconds down to Kernel IR, without verifiers and machine code, for chains, norms, siblings and
slices written in place.

    python benchmarks/growth.py [--calls 600,1200,2400] [--rounds 3] [--json FILE]

The last column is the exponent: 1 where twice the calls take twice the time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def chain(x: torch.Tensor, y: torch.Tensor, calls: int) -> torch.Tensor:
    for _ in range(calls // 3):
        x = (x * 1.0001 + 0.1).sin()
    return x


def norms(x: torch.Tensor, y: torch.Tensor, calls: int) -> torch.Tensor:
    for _ in range(calls // 3):
        x = torch.nn.functional.layer_norm(x, x.shape[-1:]) * y + x
    return x


def siblings(x: torch.Tensor, y: torch.Tensor, calls: int) -> list[torch.Tensor]:
    return [torch.softmax(x * i + y, -1) for i in range(calls // 3)]


def slices(x: torch.Tensor, y: torch.Tensor, calls: int) -> torch.Tensor:
    x = x.clone()
    for i in range(calls // 4):
        x[:, i % 32 : i % 32 + 8] += y[:, :8] * i
    return x


GRAPHS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Any]] = {"chain": chain, "norms": norms, "siblings": siblings, "slices": slices}


def seconds(name: str, calls: int, rounds: int) -> float:
    """The least of several rounds."""
    from deplo.capture import capture
    from deplo.core import core

    with torch.no_grad():
        (record,) = capture(lambda x, y: GRAPHS[name](x, y, calls), [torch.randn(8, 64), torch.randn(8, 64)])
    times = []
    for _ in range(rounds):
        start = time.process_time()
        core().lower(record.torch_ir, "kernel", json.dumps({"verify": False}))
        times.append(time.process_time() - start)
    return min(times)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", default="600,1200,2400", help="numbers of calls, ascending")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the results here")
    given = parser.parse_args(arguments)
    sizes = [int(n) for n in given.calls.split(",")]
    print(f"{'CPU seconds of':<16}" + "".join(f"{n:>10}" for n in sizes) + f"{'exponent':>10}")
    results = {}
    for name in GRAPHS:
        times = [seconds(name, n, given.rounds) for n in sizes]
        exponent = math.log(times[-1] / times[0]) / math.log(sizes[-1] / sizes[0]) if len(sizes) > 1 else math.nan
        results[name] = {"seconds": dict(zip(given.calls.split(","), times, strict=True)), "exponent": exponent}
        print(f"{name:<16}" + "".join(f"{t:>10.3f}" for t in times) + f"{exponent:>10.2f}")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
