"""Interleaved timing, float64 judging and counting of ATen calls from outside; shared by run.py, models.py and the tests."""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peak
import torch

from deplo.measure import quickest

# Calls that only make memory or metadata: every compiled function needs them for its outputs.
BOOKKEEPING = {
    *("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::resize_", "aten::set_"),
    *("aten::as_strided", "aten::detach", "aten::detach_", "aten::view", "aten::alias"),
}

# Seconds without work before each turn: several times what idle threads of OpenMP and ONNX Runtime spin.
PAUSE = 0.4
FAR_OFF = 10


@dataclass
class Timing:
    """Seconds per call of one contestant, one entry a round."""

    name: str
    rounds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


class OtherWork:
    """How many processors were busy with other processes (or kept by the hypervisor) since this was made; 0 where the system does not tell."""

    def __init__(self) -> None:
        self.start = self._read()

    def processors(self) -> float:
        (wall, busy, own), (wall_0, busy_0, own_0) = self._read(), self.start
        return max(0.0, (busy - busy_0 - own + own_0) / max(wall - wall_0, 1e-9))

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds on the wall, of all processors at work, and of this process on them."""
        own = time.process_time()
        try:
            user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
        except (OSError, ValueError):
            return time.perf_counter(), own, own
        return time.perf_counter(), (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK"), own


def turns(names: Sequence[str], round: int) -> list[str]:
    """The order of the contestants in a round: rotated by one every other round and backwards in between, so that none has a place of its own,
    at the front or behind another."""
    first = round // 2 % len(names)
    rotated = [*names[first:], *names[:first]]
    return rotated[::-1] if round % 2 else rotated


def interleave(
    contestants: Mapping[str, Callable[[int], Any]], rounds: int = 5, min_seconds: float = 0.05, sets: int = 3, pause: float = PAUSE
) -> dict[str, Timing]:
    """Times the contestants in turn, round after round, so that drift of the machine hits all alike. Returns seconds per call.

    Each is called as f(k) with k the index of one of `sets` input sets, rotating; a turn lasts about `min_seconds`. Before a turn nothing runs for
    `pause` seconds: threads of OpenMP and of ONNX Runtime go on spinning after a call and would take the processors from whoever is next. The first
    calls of a turn (a tenth, at least one) find cold caches and sleeping threads and are not counted.
    """
    repeats: dict[str, int] = {}
    for name, f in contestants.items():
        for k in range(sets):
            f(k)
        once = quickest(functools.partial(f, 0))
        repeats[name] = sets * math.ceil(min(20000, max(1, min_seconds / once)) / sets)
    timings = {name: Timing(name, []) for name in contestants}
    for round in range(rounds):
        for name in turns(list(contestants), round):
            f, n = contestants[name], repeats[name]
            time.sleep(pause)
            for k in range(max(1, n // 10)):
                f(k % sets)
            start = time.perf_counter()
            for k in range(n):
                f(k % sets)
            timings[name].rounds.append((time.perf_counter() - start) / n)
    return timings


def ratio(timings: Mapping[str, Timing], slower: str, faster: str) -> float:
    """Median over rounds of time(slower) / time(faster)."""
    return statistics.median(a / b for a, b in zip(timings[slower].rounds, timings[faster].rounds, strict=True))


def to_double(value: Any) -> Any:
    """The same structure with floating tensors in float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    if isinstance(value, Mapping):
        return {k: to_double(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_double(v) for v in value)
    return value


def max_error(result: torch.Tensor, reference: torch.Tensor, scale: float | None = None) -> float:
    """Largest |result - reference| relative to `scale`, by default the largest |reference|; infinite where NaN or inf disagree."""
    a = result.double()
    b = reference.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, torch.zeros_like(a), (a - b).abs())
    if not bool(difference.isfinite().all()):
        return float("inf")
    if scale is None:
        scale = float(b[b.isfinite()].abs().max()) if bool(b.isfinite().any()) else 1.0
    return float(difference.max()) / max(scale, 1e-30) if difference.numel() else 0.0


def aten_calls(f: Callable[[], Any]) -> dict[str, int]:
    """ATen operators that ran inside f, counted by PyTorch's profiler, bookkeeping left out."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        f()
    counts: dict[str, int] = {}
    for event in profile.events() or ():
        if event.name.startswith("aten::") and event.name not in BOOKKEEPING:
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts


def contestant_columns(
    row: Mapping[str, Any], timings: Mapping[str, Timing], flops: float, moved: float, limits: peak.Limits, unit: str = "us", scale: float = 1e6
) -> dict[str, Any]:
    """Time, share of the machine's limit, and times as fast as the others and as the fastest of them deplo is; `rounds` holds the seconds of each.

    `row` has the errors of all: who is off by more than FAR_OFF times what deplo may be has done other work and is not called the fastest.
    """
    columns: dict[str, Any] = {f"{name} {unit}": timing.median * scale for name, timing in timings.items()}
    columns |= {f"{name} %": limits.percent(flops, moved, timing.median) for name, timing in timings.items()}
    others = [name for name in timings if name != "deplo"]
    columns |= {f"vs {name}": ratio(timings, name, "deplo") for name in others}
    most = FAR_OFF * allowed_error(row["error eager"], row["eps"])
    far_off = [name for name in others if name != "eager" and not row[f"error {name}"] <= most]
    columns |= {f"{name} error note": f"{name} is off by {row[f'error {name}']:.3g}: not counted as the best peer" for name in far_off}
    best = min((name for name in others if name not in far_off), key=lambda name: timings[name].median)
    columns |= {"best peer": best, "vs best peer": ratio(timings, best, "deplo")}
    return columns | {"rounds": {name: timing.rounds for name, timing in timings.items()}}


def report_wrong(rows: Sequence[Mapping[str, Any]]) -> int:
    """Names the rows where deplo is further from float64 than eager mode and a few units in the last place, or called ATen; 1 if there are some."""
    wrong = 0
    for row in rows:
        name = next(iter(row.values()))
        if not row["error deplo"] <= allowed_error(row["error eager"], row["eps"]):
            print(f"WRONG: {name}: error {row['error deplo']:.3g}, of eager mode {row['error eager']:.3g}", file=sys.stderr)
            wrong = 1
        if row.get("aten", 0) not in (0, "none"):
            print(f"LEFT TO ATEN: {name}: {row['aten']}", file=sys.stderr)
            wrong = 1
    return wrong


def allowed_error(eager: float, eps: float) -> float:
    """What a result may be off by, relative to the largest output, where eager mode is off by `eager`.

    A result is rounded once (eps / 2), as may be what goes into its last sum. Results of 16 bits are rounded from sums in float32, whose own
    errors vanish beside that; in float32 the order of the sums makes the two differ by about as much as either is off, a few eps in deep models.
    """
    return eager + (2 if eps > 1e-5 else 6) * eps


def show_means(rows: Sequence[Mapping[str, Any]]) -> None:
    """The geometric mean and the least of each column `vs NAME`."""
    for key in dict.fromkeys(key for row in rows for key in row if key.startswith("vs ")):
        ratios = [row[key] for row in rows if key in row]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean {key}: {mean:.3f} over {len(ratios)}; least {min(ratios):.2f}")


def double_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A float64 copy of the module: the judge."""
    return copy.deepcopy(module).double()


def processor() -> str:
    """The CPU's name, family and model, and the instructions that decide how fast contractions can be."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", "").split())
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    named = f"{fields.get('model name', platform.machine())}, family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    return ", ".join([named, " ".join(flag for flag in known if flag in flags)])


def machine() -> dict[str, Any]:
    """What a reader needs to place the figures."""
    about = {"machine": platform.machine(), "processor": processor(), "processors": os.cpu_count()}
    return about | {"torch": torch.__version__, "threads": torch.get_num_threads(), "python": platform.python_version()}


def write_json(path: str | None, rows: Sequence[Mapping[str, Any]], limits: peak.Limits | None = None, more: Mapping[str, Any] | None = None) -> None:
    """Writes the rows with the machine's description, its limits and what else is told of the run; nothing when path is None."""
    if path:
        about = machine() | ({"flops": limits.flops, "bandwidth": limits.bandwidth} if limits else {}) | dict(more or {})
        Path(path).write_text(json.dumps({"machine": about, "rows": list(rows)}, indent=1) + "\n")


def compiled(module: torch.nn.Module, backend: str, direct: bool = False, **options: Any) -> Callable[..., Any]:
    """The module by torch.compile; `options` are deplo's, and `direct` has deplo check arguments itself in later calls."""
    if backend != "deplo":
        return torch.compile(module, backend=backend)  # type: ignore[no-any-return]
    if direct:
        import deplo

        return deplo.jit(module, guards="inputs", options=options)
    return torch.compile(module, backend=backend, options=options)  # type: ignore[no-any-return]


def judged(contestants: Mapping[str, Callable[[int], torch.Tensor]], wanted: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Columns of a row: each contestant's error against `wanted`, in float64, and the calls that deplo leaves to ATen."""
    row: dict[str, Any] = {"eps": torch.finfo(dtype).eps}
    row |= {f"error {who}": max_error(call(0), wanted) for who, call in contestants.items()}
    row["aten"] = " ".join(f"{key[6:]}x{n}" for key, n in sorted(aten_calls(lambda: contestants["deplo"](0)).items())) or "none"
    return row


def conclude(rows: Sequence[Mapping[str, Any]], column: str, title: str, args: argparse.Namespace, limits: peak.Limits) -> int:
    """Shows what was measured beside eager mode, what of it is slower, and writes args.json; the exit status. `column` names the rows."""
    show(rows, title)
    show_means(rows)
    slower = [row[column] for row in rows if row["vs eager"] < 1]
    print(f"slower than eager mode: {', '.join(slower) or 'none'}")
    write_json(args.json, rows, limits, {"dtype": args.dtype})
    return report_wrong(rows)


def add_subject_options(parser: argparse.ArgumentParser, what: str) -> None:
    """--match, --dtype and --json."""
    parser.add_argument("--match", default="", help=f"only {what} whose names hold this")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", help="all figures, with the machine's description")


def add_timing_options(parser: argparse.ArgumentParser, rounds: int, seconds: float) -> None:
    """--threads, --rounds, --seconds and --pause: how long a run takes, mostly rounds * contestants * (seconds + pause) for a row."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=seconds, help="about the time of a contestant's turn in a round")
    parser.add_argument("--pause", type=float, default=PAUSE, help="seconds without work before each turn")


def show(rows: Sequence[Mapping[str, Any]], title: str, hide: Collection[str] = ()) -> None:
    """Prints rows as a table: rich on a terminal, plain columns in a pipe. Keys that end in `note` go to lines of their own below; what is no
    single value is left out, as are the columns of `hide`."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=320)
    table = Table(title=title)
    hidden = {"eps", *hide}
    keys = [key for row in rows for key, value in row.items() if key not in hidden and not key.endswith("note") and not isinstance(value, dict)]
    columns = list(dict.fromkeys(keys))
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "model") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(format_cell(row.get(c, "")) for c in columns))
    console.print(table)
    for row in rows:
        for key, text in row.items():
            if key.endswith("note"):
                print(f"{next(iter(row.values()))}: {text}")


def format_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
