"""`python -m soak.growth`: resident memory before and after many calls, many recompilations, many loads of packages. Prints a line of JSON.

PyTorch keeps some 30 KB of each compilation whatever the backend: recompilations are judged beside those by the backend aot_eager.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch

from soak.mixed import EXPORTED, STRICT, Held, Packages, compile_without_limit
from soak.watch import resident_bytes, settled_bytes

ALLOWED = {"calls": 1 << 20, "recompilations": 4 << 20, "loads": 2 << 20}  # bytes: pages of arenas that are half empty


def grown(act: Callable[[int], None], times: int, first: int) -> int:
    """Bytes that `times` acts after the first ones left behind."""
    for k in range(first):
        act(k)
    before = settled_bytes()
    for k in range(times):
        act(first + k)
    return settled_bytes() - before


def calls(times: int) -> int:
    """Of many sizes, by each way of calling."""
    rng = random.Random(1)
    shared = [Held(name, engine, 0) for name in ("small", "softmax", "accumulate", "table") for engine in ("dynamic", "direct")]

    def act(k: int) -> None:
        shared[k % len(shared)].check(rng)

    # Dynamo's graphs are kept on both sides of the comparison: only calls come between.
    for k in range(max(times // 5, 200)):
        act(k)
    before = resident_bytes()
    for k in range(times):
        act(k)
    return resident_bytes() - before


def recompilations(times: int) -> int:
    """By deplo, beyond those that only trace."""

    def compile(backend: str, k: int) -> None:
        scale = 1.0 + k % 50
        fn: Any = lambda x: torch.softmax(x * scale, -1) + k  # noqa: E731
        x = torch.randn(4, 8 + k % 40)
        options = STRICT if backend == "deplo" else None
        torch.testing.assert_close(torch.compile(fn, backend=backend, options=options, dynamic=False)(x), fn(x))
        if k % 10 == 9:
            torch._dynamo.reset()

    first = times // 5
    without = grown(lambda k: compile("aot_eager", k), times, first)
    return grown(lambda k: compile("deplo", k), times, first) - without


def loads(times: int) -> int:
    """Of packages that are called and dropped."""
    with tempfile.TemporaryDirectory(prefix="deplo-soak-") as folder:
        packages = Packages(folder)
        rng = random.Random(2)
        return grown(lambda k: packages.check(EXPORTED[k % len(EXPORTED)], rng), times, max(times // 5, 20))


def main() -> int:
    parser = argparse.ArgumentParser("python -m soak.growth", description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--recompilations", type=int, default=500)
    parser.add_argument("--loads", type=int, default=200)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    compile_without_limit()
    results, failed = {}, []
    with torch.no_grad():
        for measure, times in ((calls, arguments.calls), (recompilations, arguments.recompilations), (loads, arguments.loads)):
            if times == 0:
                continue
            name = measure.__name__
            results[name] = {"times": times, "grown KB": measure(times) // 1024, "allowed KB": ALLOWED[name] // 1024}
            if results[name]["grown KB"] > results[name]["allowed KB"]:
                failed.append(f"{times} {name} left {results[name]['grown KB']} KB behind")
    print(json.dumps({"growth": results, "failed": failed}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
