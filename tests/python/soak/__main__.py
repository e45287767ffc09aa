"""`python -m soak`: everything at once for a while, in processes that this one watches.

A process of several Python threads calls one set of models at random sizes, compiles, resets Dynamo, empties caches, loads and drops packages, writes
weights, takes memory, forks, and gets signals; every result is compared with eager mode's. Wrong values, errors, crashes, hangs and growth of memory
end in a report and an exit code of 1. The same seed draws the same actions; how they meet is up to the system.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

MB = 1 << 20
# Of the process in which everything happens, from the second quiet moment to the last one: arenas of several threads fill with what PyTorch keeps of
# each compilation.
ALLOWED = 48 * MB
ALLOWED_OF_COMPILATION = 48 << 10


def run(arguments: list[str], seconds: float, signals: random.Random | None) -> tuple[int, dict[str, Any]]:
    """One process of the soak, under signals if wanted: its exit code and what it printed."""
    with tempfile.TemporaryDirectory(prefix="deplo-soak-") as folder:
        folders = {"DEPLO_CACHE_DIR": os.path.join(folder, "kernels"), "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "torch")}
        environment = {**os.environ, **folders, "MALLOC_ARENA_MAX": "4"}
        for path in folders.values():
            os.makedirs(path, mode=0o700)
        command = [sys.executable, "-m", *arguments, *(["--folder", folder] if signals else [])]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        until = time.monotonic() + seconds
        while process.poll() is None:
            if signals is not None and _handles(process.pid):
                process.send_signal(signals.choice([signal.SIGUSR1, signal.SIGCHLD, signal.SIGINT]))
            if time.monotonic() > until:
                process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
                print(f"HANG: {' '.join(command)} goes on after {seconds:.0f} s", file=sys.stderr)
                until += 1e9
            time.sleep(0.02 if signals is None else signals.expovariate(40))
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    return process.returncode, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def _handles(pid: int) -> bool:
    """Whether the process has a handler for SIGUSR1, and does not take it as its end."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def growth_of(sizes: list[list[int]]) -> tuple[int, int]:
    """Bytes that resident memory grew by from the second quarter of the quiet moments, when everything had happened, to the last; how many it may."""
    if len(sizes) < 8:
        return 0, ALLOWED
    quarter = len(sizes) // 4
    early, late = sizes[quarter : 2 * quarter], sizes[-quarter:]
    compiled = late[-1][1] - early[0][1]
    return statistics.median_low([size for size, _ in late]) - statistics.median_high(
        [size for size, _ in early]
    ), ALLOWED + ALLOWED_OF_COMPILATION * compiled


def main() -> int:
    parser = argparse.ArgumentParser("python -m soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None, help="by default the time, so that every run is another")
    parser.add_argument("--clients", type=int, default=4, help="threads besides the main one")
    parser.add_argument("--calls", type=int, default=10_000, help="that may not grow memory; 0: leave this part out")
    parser.add_argument("--recompilations", type=int, default=500)
    parser.add_argument("--loads", type=int, default=200, help="of packages")
    arguments = parser.parse_args()
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    start = time.monotonic()
    failed = []
    counts = [f"--{name}={getattr(arguments, name)}" for name in ("calls", "recompilations", "loads")]
    if arguments.calls or arguments.recompilations or arguments.loads:
        code, told = run(["soak.growth", *counts], 600 + arguments.seconds, None)
        for name, result in told.get("growth", {}).items():
            print(f"{result['times']} {name}: resident memory grew by {result['grown KB']} KB, {result['allowed KB']} are allowed", flush=True)
        failed += told.get("failed", []) or ([f"python -m soak.growth ended with {code}"] if code else [])
    left = max(arguments.seconds - (time.monotonic() - start), min(10.0, arguments.seconds))
    mixed = ["soak.mixed", f"--seed={seed}", f"--seconds={left}", f"--clients={arguments.clients}"]
    code, told = run(mixed, left + 300, random.Random(seed))
    failed += told.get("failed", []) or ([f"python -m {' '.join(mixed)} ended with {code}"] if code or not told else [])
    grown, allowed = growth_of(told.get("resident", []))
    if grown > allowed:
        failed.append(f"resident memory grew by {grown // MB} MB: {[size // MB for size, _ in told['resident']]}")
    print(", ".join(f"{count} {name}" for name, count in sorted(told.get("counts", {}).items())))
    print(f"resident MB when quiet: {' '.join(str(size // MB) for size, _ in told.get('resident', []))}; {allowed // MB} more are allowed")
    print(f"soak: {time.monotonic() - start:.0f} s, seed {seed}: {f'{len(failed)} failures' if failed else 'clean'}")
    for text in failed:
        print(f"FAILED: {text}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
