"""Interleaved timing, float64 judging and counting of ATen calls from outside; shared by run.py, models.py and the tests."""

from __future__ import annotations

import copy
import functools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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


@dataclass
class Timing:
    """Seconds per call of one contestant, one entry a round."""

    name: str
    rounds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def interleave(contestants: Mapping[str, Callable[[int], Any]], rounds: int = 7, min_seconds: float = 0.05, sets: int = 3) -> dict[str, Timing]:
    """Times the contestants in turn, round after round, so that drift of the machine hits all alike.

    Each is called as f(k) with k the index of one of `sets` input sets, rotating. Returns seconds per call.
    """
    repeats: dict[str, int] = {}
    for name, f in contestants.items():
        for k in range(sets):
            f(k)
        once = quickest(functools.partial(f, 0))
        repeats[name] = max(sets, min(20000, int(min_seconds / once)))
    timings = {name: Timing(name, []) for name in contestants}
    for _ in range(rounds):
        for name, f in contestants.items():
            n = repeats[name]
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
    timings: Mapping[str, Timing], flops: float, moved: float, limits: peak.Limits, unit: str = "us", scale: float = 1e6
) -> dict[str, float]:
    """Time, share of the machine's limit, and times as fast as the others deplo is."""
    columns = {f"{name} {unit}": timing.median * scale for name, timing in timings.items()}
    columns |= {f"{name} %": limits.percent(flops, moved, timing.median) for name, timing in timings.items()}
    columns |= {f"vs {name}": ratio(timings, name, "deplo") for name in timings if name != "deplo"}
    return columns


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


def machine() -> dict[str, Any]:
    """What a reader needs to place the figures."""
    return {"machine": platform.machine(), "torch": torch.__version__, "threads": torch.get_num_threads(), "python": platform.python_version()}


def write_json(path: str | None, rows: Sequence[Mapping[str, Any]], limits: peak.Limits | None = None) -> None:
    """Writes the rows with the machine's description and limits; nothing when path is None."""
    if path:
        about = machine() | ({"flops": limits.flops, "bandwidth": limits.bandwidth} if limits else {})
        Path(path).write_text(json.dumps({"machine": about, "rows": list(rows)}, indent=1) + "\n")


def show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Prints rows as a table: rich on a terminal, plain columns in a pipe. Keys that end in `note` go to lines of their own below."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=320)
    table = Table(title=title)
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "eps" and not key.endswith("note")))
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
