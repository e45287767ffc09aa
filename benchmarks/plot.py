"""Bars of how fast each contestant is beside eager mode, row by row, as a picture.

python benchmarks/plot.py benchmarks/README.md docs/speeds.svg    # of the table of milliseconds in a text: the README's picture
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peers

COLORS = {"eager": "#9a9a9a", "inductor": "#e69f00", "onnxruntime": "#56b4e9", "openvino": "#8f6bb3", "zentorch": "#cc6655", "deplo": "#00734d"}


def draw(path: str | None, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Writes a picture (SVG, or what the name ends in) of the rows, whose `rounds` hold seconds per contestant; nothing when path is None.

    A bar is as long as the contestant is times as fast as eager mode, by medians, with its time beside it. Needs matplotlib.
    """
    if not path:
        return
    peers.reach()
    import matplotlib.patches
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "deplo", "font.size": 8}):
        bars = sum(len(row["rounds"]) + 1 for row in rows)
        figure = Figure(figsize=(8, 1.2 + 0.16 * bars), layout="constrained")
        axes = figure.subplots()
        place, ticks = 0, []
        for row in rows:
            medians = {name: statistics.median(seconds) for name, seconds in row["rounds"].items()}
            ticks.append((place + (len(medians) - 1) / 2, str(next(iter(row.values())))))
            for name in sorted(medians, key=list(COLORS).index):
                speed = medians["eager"] / medians[name]
                axes.barh(place, speed, 0.9, color=COLORS[name])
                axes.text(speed, place, f" {time_of(medians[name])}", va="center", fontsize=6)
                place += 1
            place += 1
        axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.6)
        axes.margins(x=0.12)
        axes.set_xlabel("times as fast as eager mode")
        axes.set_title(title, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        shown = [name for name in COLORS if any(name in row["rounds"] for row in rows)]
        handles = [matplotlib.patches.Patch(color=COLORS[name], label=name) for name in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(shown), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def time_of(seconds: float) -> str:
    """Three digits with the unit that suits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def rows_of_table(text: str) -> list[dict[str, Any]]:
    """The rows of the first Markdown table whose first column is `ms`, as `draw` takes them: one time in seconds for each contestant."""
    lines = text[text.index("| ms |") :].splitlines()
    header = [cell.strip().lower().replace(" ", "") for cell in lines[0].strip("|").split("|")]
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        times = {name: [float(cell) * 1e-3] for name, cell in zip(header, cells, strict=True) if name in COLORS and re.fullmatch(r"[\d.]+", cell)}
        rows.append({"case": cells[0], "rounds": times})
    return rows


if __name__ == "__main__":
    source, target = sys.argv[1:]
    draw(target, rows_of_table(Path(source).read_text()), "times as fast as eager mode; milliseconds beside the bars")
