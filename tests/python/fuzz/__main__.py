"""`python -m fuzz`: random programs until the time is up; the first failure is shrunk, written to a folder and printed."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from deplo.options import read_options
from fuzz.check import Wrong, check, write_failure
from fuzz.ir import IrWrong, check_ir, ir_programs
from fuzz.loop import loop_programs
from fuzz.programs import programs

ROUND = 50  # programs between two looks at the clock
SHRINK_SECONDS = 60


class Enough(BaseException):
    """Stops Hypothesis where shrinking takes long."""


def main() -> int:
    parser = argparse.ArgumentParser("python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; by default the time, so that every run is another")
    parser.add_argument("--kind", choices=["torch", "ir", "loop", "all"], default="all")
    parser.add_argument("--output", default="build/fuzz", help="folder for what fails")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.time()
    number = int(start) if arguments.seed is None else arguments.seed
    options = read_options()
    kinds: dict[str, tuple[Any, Callable[[Any], bool | None]]] = {
        "torch": (programs(), lambda program: check(program, options)),
        "ir": (ir_programs(), check_ir),
        "loop": (loop_programs(), check_ir),
    }
    chosen = list(kinds) if arguments.kind == "all" else [arguments.kind]
    counts = dict.fromkeys(chosen, 0)
    unjudged = dict.fromkeys(chosen, 0)
    # What ends the process leaves its program here.
    last = Path(arguments.output) / f"last_{arguments.kind}.txt"
    last.parent.mkdir(parents=True, exist_ok=True)

    def one_round(number: int, kind: str) -> tuple[Any, Exception] | None:
        found: list[tuple[Any, Exception]] = []
        first_failure = 0.0
        strategy, judge = kinds[kind]

        @seed(number)
        @settings(
            max_examples=ROUND,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        @given(strategy)
        def attempt(program: Any) -> None:
            nonlocal first_failure
            counts[kind] += 1
            if first_failure and time.time() - first_failure > SHRINK_SECONDS:
                raise Enough
            last.write_text(f"{kind}, seed {number}\n{program!r}\n")
            try:
                if judge(program) is False:
                    unjudged[kind] += 1
            except (Wrong, IrWrong) as error:
                found.append((program, error))
                first_failure = first_failure or time.time()
                raise

        try:
            attempt()
        except (Wrong, IrWrong, Enough):
            return min(found, key=lambda pair: len(repr(pair[0])))
        return None

    failed = 0
    while time.time() - start < arguments.seconds:
        kind = chosen[number % len(chosen)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            failure = one_round(number, kind)
        if failure is not None:
            failed += 1
            path = write_failure(arguments.output, *failure)
            print(f"{kind}, seed {number}: {str(failure[1]).splitlines()[0]}\n{failure[0]!r}written to {path}", flush=True)
        number += 1
    last.unlink(missing_ok=True)
    shown = ", ".join(f"{count} {kind}{f' ({unjudged[kind]} of which have no digits)' if unjudged[kind] else ''}" for kind, count in counts.items())
    print(f"programs: {shown}, in {time.time() - start:.0f} s; {failed} failures (seeds up to {number - 1})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
