"""Tables and drawings of a machine's services, for `python -m deplo topology`."""

from __future__ import annotations

import colorsys
import html
from collections.abc import Sequence

from .terminal import quantity, seconds
from .topology import Choice, ranges
from .topology_tree import SERVICE, Node

HEADER = (
    "processes",
    "copies x parallel",
    "cores",
    "threads",
    "nodes",
    "bandwidth",
    "memory",
    "compute",
    "barriers",
    "all-reduce",
    "step",
    "tokens/s",
)
_CELL, _GAP, _TITLE = 16, 4, 14
_UNUSED = "#e4e4e4"


def rows(choices: Sequence[Choice], phase: str) -> list[tuple[str, ...]]:
    """One for each choice; times are those of a decode step for `both`, and the step that of prompts and answers."""
    table = []
    for choice in choices:
        part = choice.prefill if phase == "prefill" else choice.decode
        first = choice.services[0]
        table.append(
            (
                str(len(choice.services)),
                f"{choice.copies} x {choice.parallel}",
                str(first.cores),
                str(len(first.processors)),
                str(len(first.nodes)),
                quantity(first.bandwidth, "B/s"),
                *(seconds(value) for value in (part.memory, part.compute, part.synchronize, part.reduce, choice.seconds(phase))),
                f"{choice.rate(phase):.4g}",
            )
        )
    return table


def steps_text(choice: Choice) -> str:
    """How the tree became the services."""
    return ", then ".join(choice.candidate.steps)


def environment_lines(choice: Choice, kind: str) -> list[str]:
    """Commands of a shell that start the processes of a choice. vLLM pins its workers by its own variable."""
    if kind == "vllm":
        binds = "|".join(ranges(service.processors) for service in choice.services)
        return [f"export VLLM_CPU_OMP_THREADS_BIND='{binds}'", f"vllm serve MODEL --tensor-parallel-size {choice.parallel}"]
    return [f"DEPLO_PIN=both torchrun --nproc-per-node {len(choice.services)} SCRIPT.py"]


def tree_text(node: Node, indent: int = 0) -> list[str]:
    """Equal neighbours are one line with their number."""
    lines: list[str] = []
    at = 0
    while at < len(node.children):
        child = node.children[at]
        same = 1
        while at + same < len(node.children) and _shape(node.children[at + same]) == _shape(child):
            same += 1
        size = f" ({quantity(child.bytes, 'B')})" if child.bytes else ""
        lines.append("  " * indent + f"{same} x {child.kind}{size}")
        lines += tree_text(child, indent + 1)
        at += same
    return lines


def _shape(node: Node) -> object:
    return (node.kind, node.bytes, tuple(_shape(child) for child in node.children))


# SVG


def _colour(number: int, count: int) -> str:
    red, green, blue = colorsys.hls_to_rgb(number / max(count, 1), 0.68 if number % 2 else 0.56, 0.65)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def svg(machine: Node, chosen: Sequence[tuple[str, Choice]]) -> str:
    """The machine once for each choice and its title: boxes in boxes, a square for each core in the colour of its process, grey where it is idle."""
    panels, top, width = [], 8.0, 0.0
    for title, choice in chosen:
        process = {core.index: (k, part) for k, part in enumerate(choice.candidate.tree.of_kind(SERVICE)) for core in _cores(part)}
        colours = {core: _colour(k, len(choice.services)) for core, (k, _) in process.items()}
        body, (w, h) = _box(machine, colours, {core: f"process {k}" for core, (k, _) in process.items()}, root=True)
        panels.append(f'<g transform="translate(8,{top + 18})"><text class="title" x="0" y="-6">{html.escape(title)}</text>{body}</g>')
        top += h + 34
        width = max(width, w)
    style = "text{font:9px sans-serif;fill:#333}.title{font-weight:bold;font-size:12px}rect{stroke:#777;stroke-width:.6}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 16:.0f}" height="{top:.0f}" viewBox="0 0 {width + 16:.0f} {top:.0f}">'
        f"<style>{style}</style>{''.join(panels)}</svg>\n"
    )


def _cores(node: Node) -> list[Node]:
    """Cores by their first processor, whose number is the system's and one of its kind."""
    return [core.children[0] for core in node.of_kind("core")]


def _box(node: Node, colours: dict[int, str], names: dict[int, str], root: bool = False) -> tuple[str, tuple[float, float]]:
    if node.kind == "core":
        number = node.children[0].index
        label = f"core with processors {ranges(node.numbers('pu'))}, {names.get(number, 'idle')}"
        fill = colours.get(number, _UNUSED)
        return f'<rect width="{_CELL}" height="{_CELL}" fill="{fill}"><title>{label}</title></rect>', (_CELL, _CELL)
    parts = [_box(child, colours, names) for child in node.children]
    wide = _per_row(node)
    x = y = row = 0.0
    width, out = 0.0, []
    for at, (body, (w, h)) in enumerate(parts):
        if at and at % wide == 0:
            x, y, row = 0.0, y + row + _GAP, 0.0
        out.append(f'<g transform="translate({x + _GAP:g},{y + _TITLE:g})">{body}</g>')
        x += w + _GAP
        width, row = max(width, x), max(row, h)
    name = node.kind + (f" {node.index}" if node.index >= 0 and not root else "") + (f" {quantity(node.bytes, 'B')}" if node.bytes else "")
    size = (max(width + _GAP, 5.2 * len(name) + 8), y + row + _TITLE + _GAP)
    frame = f'<rect width="{size[0]:g}" height="{size[1]:g}" fill="#fff" rx="2"/><text x="4" y="10">{html.escape(name)}</text>'
    return frame + "".join(out), size


def _per_row(node: Node) -> int:
    """Parts side by side: as many as keep a machine of two sockets on a screen."""
    count, kind = len(node.children), node.children[0].kind
    if kind == "core":
        return 4 if count <= 16 else 8
    return 2 if kind in ("package", "numa") else 4
