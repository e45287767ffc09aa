"""The page of `python -m deplo report`: HTML that is also XML, without scripts and without anything from elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from .report_figures import memory, roofline, timeline
from .terminal import quantity, seconds

if TYPE_CHECKING:
    from .report import GraphPage, ModelReport

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1c1c; margin: 2em auto; max-width: 1180px; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; }
h2 { border-bottom: 1px solid #ccc; margin-top: 2em; }
table { border-collapse: collapse; margin: 0.6em 0; }
th, td { padding: 0.15em 0.8em 0.15em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #eee; }
td.number, th.number { text-align: right; white-space: nowrap; }
code, pre { font: 12px/1.35 ui-monospace, monospace; }
td pre { margin: 0; white-space: pre-wrap; max-width: 60em; }
.levels { display: flex; gap: 0.8em; overflow-x: auto; align-items: flex-start; }
.levels section { flex: 0 0 auto; }
.levels h4 { margin: 0.3em 0; }
.levels pre { width: 46em; max-height: 40em; overflow: auto; background: #f6f6f6; padding: 0.6em; margin: 0; }
summary { cursor: pointer; font-weight: 600; margin: 0.6em 0; }
svg { max-width: 100%; height: auto; }
.note { color: #555; }
"""
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def text_of(value: Any) -> str:
    """Text as HTML and XML may hold it."""
    return escape(_NOT_XML.sub("\ufffd", str(value)))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of cells that are HTML; the columns in `numbers` are aligned to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if at in numbers else "" for at in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)) + "</tr>"

    return "<table>" + "\n".join([line(header, "th"), *(line(row, "td") for row in rows)]) + "</table>"


def page_of(report: ModelReport) -> str:
    """The whole page."""
    title = f"deplo: {text_of(report.title)}"
    parts = [f"<h1>{title}</h1>", _summary(report), _breaks(report), _left(report)]
    parts += [_graph(number, page, report) for number, page in enumerate(report.graphs)]
    head = f'<meta charset="utf-8"/><title>{title}</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _summary(report: ModelReport) -> str:
    from . import __version__

    graphs = [page.report for page in report.graphs]
    kernels = [kernel for graph in graphs for kernel in graph.kernels if not kernel.once]
    spans = [span for page in report.graphs for span in page.spans]
    machine = report.explanation.machine
    rows = [
        ("graphs", str(len(graphs))),
        ("breaks between graphs", str(len(report.breaks))),
        ("kernels", str(len(kernels))),
        ("library calls, calls in eager mode", f"{sum(len(g.library) for g in graphs)}, {sum(len(g.left) for g in graphs)}"),
        ("time in steps of a call", text_of(seconds(sum(span.seconds for span in spans)))),
        ("of it in library calls", text_of(seconds(sum(span.seconds for span in spans if span.kind == "library")))),
        ("work and traffic of a call", f"{quantity(sum(k.flops for k in kernels), 'flop')}, {quantity(sum(k.bytes for k in kernels), 'B')}"),
        ("import and compilation", text_of(seconds(sum(g.import_seconds + g.compile_seconds for g in graphs)))),
        ("this machine at most", f"{quantity(machine.flops, 'flop/s')} in float32, {quantity(machine.bandwidth, 'B/s')}"),
        (
            "made by",
            f"deplo {text_of(__version__)}, torch {text_of(torch.__version__)}, {torch.get_num_threads()} threads of {os.cpu_count()} processors",
        ),
    ]
    note = '<p class="note">trace.json beside this page opens in Perfetto (ui.perfetto.dev) and in chrome://tracing.</p>'
    return table(("", ""), rows) + note


def _breaks(report: ModelReport) -> str:
    if not report.breaks:
        return "<h2>Breaks between graphs</h2><p>None: Dynamo traced one graph.</p>" if report.graphs else _no_graph()
    rows = [(f"<code>{text_of(item.place)}</code>", f"<pre>{text_of(item.reason)}</pre>") for item in report.breaks]
    return "<h2>Breaks between graphs</h2>" + table(("where", "why"), rows)


def _no_graph() -> str:
    from .explanation import NO_GRAPH

    return f"<h2>Graphs</h2><p>{text_of(NO_GRAPH)}</p>"


def _left(report: ModelReport) -> str:
    """Every call that a kernel of deplo's does not compute, with the reason, and what it takes where that is known."""
    rows: list[tuple[str, str, str, str]] = []
    for number, page in enumerate(report.graphs):
        graph = page.report
        if graph.fallback:
            rows.append((str(number), "the whole graph", text_of(graph.fallback), ""))
        rows += [(str(number), f"<code>{text_of(op)}</code>", text_of(why), "") for op, why in graph.left]
        calls = [span for span in page.spans if span.kind == "library"]
        rows += [(str(number), f"<code>{text_of(span.name)}</code>", text_of(span.what), text_of(seconds(span.seconds))) for span in calls]
        if not calls:
            rows += [(str(number), f"<code>{text_of(op)}</code>", text_of(why), "") for op, why in graph.library]
    if not rows:
        return "<h2>Left to ATen</h2><p>Nothing.</p>"
    return "<h2>Left to ATen</h2>" + table(("graph", "call", "why", "time"), rows, [0, 3])


def _graph(number: int, page: GraphPage, report: ModelReport) -> str:
    graph = page.report
    parts = [f"<h2>Graph {number}</h2><p>{text_of(graph.title())}</p>"]
    machine = report.explanation.machine
    if graph.kernels:
        rows = [
            (
                f"<code>{text_of(row[0])}</code>",
                *(text_of(cell) for cell in row[1:]),
                f"<details><summary>schedule</summary><code>{text_of(kernel.schedule)}</code></details>",
            )
            for row, kernel in zip(graph.kernel_rows(machine), graph.kernels, strict=True)
        ]
        header = ("kernel", "runs", "implements", "flops", "bytes", "time", "of limit", "")
        parts.append("<h3>Kernels</h3>" + table(header, rows, [1, 3, 4, 5, 6]))
        parts += [f'<p class="note">{text_of(note)}</p>' for note in graph.notes(machine)]
    points = [
        (kernel.name, kernel.flops, kernel.bytes, kernel.seconds)
        for kernel in graph.kernels
        if not kernel.once and kernel.seconds and kernel.flops and kernel.bytes
    ]
    if points and graph.has_limits:
        without = sum(1 for kernel in graph.kernels if not kernel.once and kernel.seconds and not kernel.flops)
        more = f" Kernels that only move memory are not in it: {without}." if without else ""
        parts.append("<h3>Roofline</h3>" + roofline(points, machine.flops, machine.bandwidth))
        limits = "Lines: this machine's float32 peak and bandwidth of memory, as measured before. Data in caches may lie above them."
        parts.append(f'<p class="note">{limits}{more}</p>')
    if page.spans:
        parts.append("<h3>Timeline</h3>" + timeline(page.spans))
        how = "Means of the measured calls, one step behind another; steps that pack weights only when they change are not in it."
        parts.append(f'<p class="note">{how}</p>')
        arena = graph.description.get("memory", {}).get("arena_bytes", 0)
        parts.append("<h3>Memory of temporaries over time</h3>" + memory(page.spans, arena))
    if page.texts:
        levels = [f"<section><h4>{text_of(level)}</h4><pre>{text_of(text)}</pre></section>" for level, text in page.texts]
        parts.append(f'<details><summary>IR at each level</summary><div class="levels">{"".join(levels)}</div></details>')
    return "\n".join(parts)
