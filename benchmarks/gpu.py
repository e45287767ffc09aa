"""Layers, blocks and models on a GPU, beside eager mode and Inductor.

    python benchmarks/gpu.py [--only TEXT] [--schedules FILE] [--neighbours] [--profile] [--json FILE] [--budget SECONDS] [--jobs N]

Each row (gpu_rows.py) has a process of its own, so that what one breaks is no other's. Processes compile side by side, and compare with eager mode's
error against float64; then each measures alone: contestants take turns, timed by events of the device, and the table shows the median of one call.
The L2 cache is overwritten before each timed call, so that small rows do not live in it; `wall` is the time of a call among many, with a warm cache,
by the host's clock. What is not compiled when three fifths of the budget are over is left out, and said so. The JSON file is written after every row.
`--schedules` names a JSON file, {row: {kernel: [schedule, ...]}}: further contestants, deplo by each of those; `--neighbours` makes those of rows
with one large kernel: one number of its schedule twice or half, a stage more or less. `--profile` notes each kernel's time.
`--dry` runs small sizes on the stand-in of the tests, whose times mean nothing, and which trains nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_rows import Row, Step, Tensors, rows
from harness import max_error
from torch import nn

MARK = "@@"  # before what a row's process tells the first one
_NUMBERS = re.compile(r"(?P<word>tile|register_block|threads|rows|split|unroll|warps|groups|stages)\([^)]*\)")


class Clock:
    """Times single calls on the device, each after the cache was overwritten."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.cache = None if dry else torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def times(self, run: Callable[[], Any], calls: int) -> list[float]:
        """Seconds of each call."""
        if self.cache is None:
            return [self.wall(run, 1) for _ in range(calls)]
        pairs = []
        for _ in range(calls):
            self.cache.zero_()
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            run()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return [1e-3 * start.elapsed_time(end) for start, end in pairs]

    def wall(self, run: Callable[[], Any], calls: int) -> float:
        """Seconds of one call of many, by the host's clock."""
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if not self.dry:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls


def exact(fn: Callable[..., torch.Tensor], inputs: Tensors) -> torch.Tensor:
    """The result in float64."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    if not isinstance(fn, nn.Module):
        return fn(*wide)
    dtype = next(fn.parameters()).dtype
    result: torch.Tensor = fn.double()(*wide)
    fn.to(dtype)  # what it was, exactly
    return result


def neighbours(schedule: str) -> list[str]:
    """Schedules one step away. What is impossible among them is refused when it is compiled."""
    found = []
    for directive in _NUMBERS.finditer(schedule):
        for number in re.finditer(r"(?<![\w.])\d+(?=[,)])", directive[0]):
            n, at = int(number[0]), directive.start() + number.start()
            others = (n - 1, n + 1) if directive["word"] == "stages" else (n // 2, 2 * n)
            found += [f"{schedule[:at]}{other}{schedule[at + len(number[0]) :]}" for other in others if other > 0]
    return found


class Contest:
    """A row's contestants by name, what is known of each, and how to run it."""

    def __init__(self, row: Row, dry: bool, schedules: dict[str, list[str]], near: bool) -> None:
        self.row, self.dry, self.near = row, dry, near
        self.options: dict[str, Any] = {}
        self.peers = ["inductor"]
        if dry:
            sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))
            from devices import EMULATED, stand_in

            stand_in()
            torch.cuda._lazy_init = lambda: None
            self.options, self.peers = {"cuda_driver": EMULATED, "nvrtc": EMULATED}, []
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.manual_seed(0)
        self.fn, self.inputs = row.make(16 if dry else 1)
        self.about: dict[str, Any] = {"name": row.name, "flops": row.flops, "bytes": row.bytes}
        self.hand = [(kernel, schedule) for kernel, found in schedules.items() for schedule in found]
        self.runs: dict[str, Callable[..., torch.Tensor]] = {}

    def compile(self) -> None:
        if self.row.trains:
            want = Step(self.model().double())(*(x.double() if x.is_floating_point() else x for x in self.inputs))
        else:
            want = exact(self.fn, self.inputs)
        self.add("eager", want, lambda: Step(self.model()) if self.row.trains else self.fn)
        for name in self.peers:
            self.compiled(name, want, {"backend": name})
        self.compiled("deplo", want, {"backend": "deplo", "options": self.options})
        kernels = self.about.get("deplo_kernels", [])
        if self.near and len(kernels) <= 2:  # the second one of two gathers what the first one's blocks made
            self.hand += [(kernels[0][0], schedule) for schedule in neighbours(kernels[0][1])]
        for kernel, schedule in self.hand:
            self.compiled(f"deplo[{schedule}]", want, {"backend": "deplo", "options": self.options | {"schedule": {kernel: schedule}}})

    def compiled(self, name: str, want: torch.Tensor, given: dict[str, Any]) -> None:
        torch._dynamo.reset()
        with self.kernels(name):
            self.add(name, want, lambda: Step(self.model(), given) if self.row.trains else torch.compile(self.fn, **given))

    def model(self) -> nn.Module:
        """One more of what a training row trains, with the same weights."""
        torch.manual_seed(0)
        made, _ = self.row.make(16 if self.dry else 1)
        assert isinstance(made, nn.Module)
        return made

    def add(self, name: str, want: torch.Tensor, make: Callable[[], Callable[..., torch.Tensor]]) -> None:
        start = time.perf_counter()
        try:
            run = make()
            result = run(*self.inputs)
            if not self.dry:
                torch.cuda.synchronize()
            self.about[f"{name}_first_call"] = time.perf_counter() - start
            self.about[f"{name}_error"] = max_error(result, want)
            self.runs[name] = run
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            self.about[f"{name}_failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"

    @contextlib.contextmanager
    def kernels(self, name: str) -> Iterator[None]:
        """Notes the kernels of deplo's programs."""
        if not name.startswith("deplo"):
            yield
            return
        from deplo.backend import collect_records

        with collect_records() as records:
            yield
        kernels = [k for record in records if record.program for k in json.loads(record.program.describe())["kernels"]]
        self.about[f"{name}_kernels"] = [[k["name"], k["schedule"], k["calls"]] for k in kernels]
        self.about[f"{name}_fallbacks"] = [record.fallback for record in records if record.fallback]

    def measure(self, clock: Clock) -> None:
        calls, taken = {}, {name: [] for name in self.runs}  # type: ignore[var-annotated]
        for name, run in self.runs.items():  # a turn takes about a thirtieth of a second
            warm = clock.times(lambda run=run: run(*self.inputs), 3)  # type: ignore[misc]
            calls[name] = 2 if self.dry else min(max(int(0.03 / (min(warm) + 1e-4)), 2), 50)
        for turn in range(1 if self.dry else 5):
            for name in list(self.runs)[:: -1 if turn % 2 else 1]:
                taken[name] += clock.times(lambda name=name: self.runs[name](*self.inputs), calls[name])  # type: ignore[misc]
        for name, times in taken.items():
            self.about[name] = statistics.median(times)
            self.about[f"{name}_wall"] = clock.wall(lambda name=name: self.runs[name](*self.inputs), calls[name])  # type: ignore[misc]

    def profile(self) -> None:
        """Microseconds of each kernel in one call."""
        from torch.profiler import ProfilerActivity, profile

        for name in [name for name in self.runs if "[" not in name]:
            self.runs[name](*self.inputs)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(3):
                    self.runs[name](*self.inputs)
                torch.cuda.synchronize()
            self.about[f"{name}_profile"] = sorted(
                ([e.key[:100], e.count / 3, round(e.self_device_time_total / 3, 2)] for e in seen.key_averages() if e.self_device_time_total),
                key=lambda entry: -entry[2],
            )


def work(given: argparse.Namespace) -> None:
    """The process of one row: compiles, waits for its turn, measures."""
    row = rows()[given.row]
    hand = json.loads(Path(given.schedules).read_text()).get(row.name, {}) if given.schedules else {}
    with torch.no_grad():
        contest = Contest(row, given.dry, hand, given.neighbours)
        contest.compile()
        if not given.dry:
            torch.cuda.empty_cache()  # many wait, and share the device's memory
        print(MARK + json.dumps(contest.about), flush=True)
        sys.stdin.readline()
        contest.measure(Clock(given.dry))
        print(MARK + json.dumps(contest.about), flush=True)
        if given.profile:
            contest.profile()
            print(MARK + json.dumps(contest.about), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of compilers are not waited for


class Worker:
    """A row's process, as the first one sees it."""

    def __init__(self, index: int, name: str, arguments: list[str], log: Any) -> None:
        self.name, self.about = name, {"name": name}
        command = [sys.executable, __file__, "--row", str(index), *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
        )
        os.set_blocking(self.process.stdout.fileno(), False)  # type: ignore[union-attr]
        self.told = 0
        self.rest = ""

    def listen(self, deadline: float, until: int) -> bool:
        """Waits for it to have told so many things, or to end. False: neither happened in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            while self.told < until:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    return False
                if not (text := os.read(self.process.stdout.fileno(), 1 << 20).decode(errors="replace")):  # type: ignore[union-attr]
                    return True
                *lines, self.rest = (self.rest + text).split("\n")
                for line in lines:
                    if line.startswith(MARK):
                        self.about = json.loads(line[len(MARK) :])
                        self.told += 1
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def run(given: argparse.Namespace, log: Any) -> list[dict[str, Any]]:
    """All rows: compiles given.jobs at once, then measures one by one."""
    start = time.monotonic()
    arguments = (
        [f"--schedules={given.schedules}"] * bool(given.schedules)
        + ["--dry"] * given.dry
        + ["--profile"] * given.profile
        + ["--neighbours"] * given.neighbours
    )
    waiting = [(k, row.name) for k, row in enumerate(rows()) if given.only in row.name and not (given.dry and row.trains)]
    compiling: list[Worker] = []
    ready: list[Worker] = []
    measured: list[dict[str, Any]] = []
    until = start + 0.6 * given.budget
    while (waiting or compiling) and time.monotonic() < until:
        while waiting and len(compiling) < given.jobs:
            compiling.append(Worker(*waiting.pop(0), arguments, log))
        time.sleep(0.05)
        for worker in list(compiling):
            if worker.listen(time.monotonic(), 1):
                compiling.remove(worker)
                if worker.told:
                    ready.append(worker)
                else:
                    measured.append({"name": worker.name, "deplo_failed": f"its process ended with {worker.process.wait()}"})
    for worker in compiling:
        worker.stop()
        measured.append({"name": worker.name, "deplo_failed": "not compiled in time"})
    measured += [{"name": name, "deplo_failed": "not begun in time"} for _, name in waiting]
    print(f"compiled {len(ready)} rows in {time.monotonic() - start:.0f} s", flush=True)
    for worker in sorted(ready, key=lambda worker: [row.name for row in rows()].index(worker.name)):
        if time.monotonic() - start > given.budget:
            measured.append({**worker.about, "deplo_failed": "not measured in time"})
        else:
            worker.process.stdin.write("\n")  # type: ignore[union-attr]
            worker.process.stdin.flush()  # type: ignore[union-attr]
            if not worker.listen(time.monotonic() + 60, 3 if given.profile else 2):
                worker.about["deplo_failed"] = "a call did not end"
            elif worker.told < 2:
                worker.about["deplo_failed"] = "its process ended"
            measured.append(worker.about)
        worker.stop()
        print(shown(measured[-1], given.dry), flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(measured, indent=1))
    for about in measured:
        if about.get("deplo_failed") and "deplo_error" not in about:
            print(f"{about['name']}: {about['deplo_failed']}")
    return measured


def shown(about: dict[str, Any], dry: bool) -> str:
    cells = [f"{about['name']:38}"]
    for name in ("eager", *([] if dry else ["inductor"]), "deplo"):
        cells.append(f"{1e6 * about[name]:9.1f}" if name in about else f"{'failed':>9}")
    for suffix in ("", "_wall"):
        ratios = [about[name + suffix] / about["deplo" + suffix] for name in ("eager", "inductor") if name + suffix in about and about.get("deplo")]
        cells.append(" ".join(f"{ratio:6.2f}" for ratio in ratios).rjust(13))
    if seconds := about.get("deplo"):
        cells.append(f"{about['flops'] / seconds * 1e-12:7.1f}" if about["flops"] else " " * 7)
        cells.append(f"{about['bytes'] / seconds * 1e-9:6.0f}" if about["bytes"] else " " * 6)
        cells.append(f"{about['deplo_error']:8.1e} {about['eager_error']:8.1e}")
        first = [f"{about[f'{name}_first_call']:.1f}" for name in ("inductor", "deplo") if f"{name}_first_call" in about]
        cells.append("/".join(first).rjust(9))
    by_hand = sorted((about[name], name) for name in about if name.endswith("]"))
    return "\n".join([" ".join(cells), *(f"    {1e6 * seconds:9.1f} {name[5:]}" for seconds, name in by_hand)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--json", default="", help="write the figures there")
    parser.add_argument("--log", default="", help="write there what compilers and failures say")
    parser.add_argument("--schedules", default="", help="a JSON file of schedules by hand")
    parser.add_argument("--neighbours", action="store_true", help="schedules one step away as well")
    parser.add_argument("--profile", action="store_true", help="note the time of each kernel")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds that all may take")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="rows that compile at once")
    parser.add_argument("--dry", action="store_true", help="small sizes on a device that stands in for a GPU")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        work(given)
        return 0
    name = "stand-in" if given.dry else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; us a call, L2 cold; ratios: times of eager and Inductor over deplo's, by the device and by the host")
    peers = ("eager", *([] if given.dry else ["inductor"]), "deplo")
    print(
        f"{'':38} "
        + " ".join(f"{peer:>9}" for peer in peers)
        + f" {'device':>13} {'host':>13} {'TFLOPS':>7} {'GB/s':>6} {'error':>8} {'eager':>8} first s"
    )
    with open(given.log, "w") if given.log else contextlib.nullcontext(sys.stderr) as log:
        measured = run(given, log)
    return int(any("deplo_failed" in about for about in measured))


if __name__ == "__main__":
    sys.exit(main())
