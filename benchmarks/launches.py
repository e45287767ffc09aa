"""What the host pays for a call on a GPU: python benchmarks/launches.py [--replay] [--kernels N]

Times Program.run of graphs with one kernel and with many, which are too small to matter. Without a GPU the tests' stand-in and emulated driver take
its place (DEPLO_BUILD names the build folder): kernels then do nothing, and the driver's own time is that of an emulator.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deplo
from deplo.backend import collect_records

TESTS = Path(__file__).resolve().parents[1] / "tests" / "python"


def prepare() -> dict[str, Any]:
    """The options for the device at hand."""
    if torch.cuda.is_available():
        return {}
    sys.path.insert(0, str(TESTS))
    from devices import EMULATED, stand_in

    os.environ["DEPLO_FAKE_CUDA"] = "idle=1"
    stand_in()
    torch.cuda._lazy_init = lambda: None
    return {"cuda_driver": EMULATED, "nvrtc": EMULATED}


def chain(kernels: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A graph of so many kernels, of one output: products of small matrices, which never share a kernel."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(kernels):
            x = x @ w
        return x

    return fn


def microseconds(run: Callable[[], Any], calls: int = 500, rounds: int = 9) -> float:
    """Of one call, the median of rounds. The host alone is timed: what it starts is waited for between rounds."""
    times = []
    for _ in range(rounds):
        deplo.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls * 1e6)
    deplo.synchronize()
    return statistics.median(times)


def measure(kernels: int, options: dict[str, Any]) -> tuple[float, float]:
    """Of the program alone, and of the function that torch.compile gives, in us."""
    torch._dynamo.reset()
    fn = chain(kernels)
    x, w = torch.randn(4, 4, device="cuda"), torch.randn(4, 4, device="cuda")
    compiled = torch.compile(fn, backend="deplo", options={**options, "strict": True})
    with torch.no_grad(), collect_records() as records:
        compiled(x, w)
        program = records[0].program
        program.run([x, w])
        return microseconds(lambda: program.run([x, w])), microseconds(lambda: compiled(x, w))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action="store_true", help="record launches and repeat them (CUDA graphs)")
    parser.add_argument("--kernels", type=int, default=33)
    given = parser.parse_args()
    options = {**prepare(), "replay": given.replay}
    (one, one_compiled), (many, many_compiled) = (measure(kernels, options) for kernels in (1, given.kernels))
    print(f"a program of 1 kernel: {one:.2f} us a call, {one_compiled:.2f} us by torch.compile")
    print(f"a program of {given.kernels} kernels: {many:.2f} us a call, {many_compiled:.2f} us by torch.compile")
    print(f"each further kernel: {(many - one) / (given.kernels - 1):.2f} us")


if __name__ == "__main__":
    main()
