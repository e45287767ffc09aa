"""How near the model of schedules comes: each kernel of benchmarks/cases.py, its estimate beside its measured time, and the mean error.

    python benchmarks/estimates.py [--threads 2] [--only TEXT] [--repeats 8] [--measure]

Errors are |log(estimate / time)|, those of kernels of at least --least microseconds (shorter ones measure calls). `--measure`: what the machine does
is measured anew before each case: memory that others share may be twice as fast a minute later.
"""

from __future__ import annotations

import argparse
import math
import statistics

import cases
import torch

import deplo
from deplo.calibration import calibration
from deplo.options import read_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--least", type=float, default=20.0, help="microseconds of the shortest kernels that count")
    parser.add_argument("--measure", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = read_options(options={"threads": args.threads, "tune": "off"})
    errors = []
    for bench in [*cases.pointwise_and_norms(), *cases.contractions(), *cases.convolutions()]:
        if args.only not in bench.name:
            continue
        calibration(options, anew=args.measure)
        with torch.no_grad():
            explained = deplo.explain(bench.module.eval(), *bench.inputs(0), options=options, repeats=args.repeats)
        for kernel in (k for graph in explained.graphs for k in graph.kernels):
            if kernel.once or not kernel.seconds or not kernel.estimated:
                continue
            ratio = kernel.estimated / kernel.seconds
            if 1e6 * kernel.seconds >= args.least:
                errors.append(abs(math.log(ratio)))
            print(f"{bench.name:32} {kernel.name:32} {1e6 * kernel.seconds:10.1f} us, estimate {1e6 * kernel.estimated:10.1f} us, {ratio:5.2f}")
    print(f"error of {len(errors)} kernels: {100 * statistics.mean(errors):.0f} % in the mean, {100 * statistics.median(errors):.0f} % in the median")


if __name__ == "__main__":
    main()
