"""The figures of `python -m deplo report`, as SVG inside of its page. What a shape stands for is its title, which browsers show under the pointer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from .terminal import quantity, seconds

if TYPE_CHECKING:
    from .report import Span

WIDTH, LEFT, RIGHT = 1120, 90, 20
_COLORS = {"kernel": "#00734d", "library": "#cc6655"}
_TEXT = 'font-size="11" font-family="system-ui, sans-serif"'


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" role="img" aria-label="{label}">' + "\n".join(parts) + "</svg>"


def _line(x0: float, y0: float, x1: float, y1: float, color: str = "#999", width: float = 1.0, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x0:.2f}" y1="{y0:.2f}" x2="{x1:.2f}" y2="{y1:.2f}" stroke="{color}" stroke-width="{width:g}"{dashes}/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", color: str = "#333") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" fill="{color}" {_TEXT}>{escape(text)}</text>'


def _decades(low: float, high: float) -> tuple[int, int]:
    return math.floor(math.log10(low)), max(math.ceil(math.log10(high)), math.floor(math.log10(low)) + 1)


def roofline(points: Sequence[tuple[str, float, float, float]], peak: float, bandwidth: float) -> str:
    """Points (name, flops, bytes, seconds) by operations a byte and a second, both logarithmic, under peak (flop/s) and bandwidth (B/s)."""
    height, top, bottom = 380, 15, 40
    places = [(name, flops / size, flops / time, time) for name, flops, size, time in points]
    ridge = peak / bandwidth
    x0, x1 = _decades(min([ridge, *(p[1] for p in places)]), max([ridge * 4, *(p[1] for p in places)]))
    y0, y1 = _decades(min([peak, *(p[2] for p in places)]), max([peak, *(p[2] for p in places)]))

    def at(intensity: float, speed: float) -> tuple[float, float]:
        x = LEFT + (math.log10(intensity) - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return x, height - bottom - (math.log10(speed) - y0) / (y1 - y0) * (height - top - bottom)

    parts = []
    for decade in range(x0, x1 + 1):
        x, _ = at(10.0**decade, 10.0**y0)
        parts += [_line(x, top, x, height - bottom, "#eee"), _text(x, height - bottom + 15, f"{10.0**decade:g}")]
    for decade in range(y0, y1 + 1):
        _, y = at(10.0**x0, 10.0**decade)
        parts += [_line(LEFT, y, WIDTH - RIGHT, y, "#eee"), _text(LEFT - 6, y + 4, quantity(10.0**decade, "flop/s"), "end")]
    # The roof begins where the plot does: at its left side, or where bandwidth reaches the lowest speed shown.
    start = max(10.0**x0, 10.0**y0 / bandwidth)
    parts.append(_line(*at(start, start * bandwidth), *at(ridge, peak), "#444", 1.5))
    parts.append(_line(*at(ridge, peak), *at(10.0**x1, peak), "#444", 1.5))
    total = sum(p[3] for p in places)
    for name, intensity, speed, time in sorted(places, key=lambda p: -p[3]):
        x, y = at(intensity, speed)
        radius = 3 + 9 * math.sqrt(time / total)
        said = escape(f"{name}: {quantity(speed, 'flop/s')}, {intensity:.3g} flop/B, {seconds(time)}")
        circle = f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius:.2f}" fill="#00734d" fill-opacity="0.55" stroke="#004d33">'
        parts.append(f"{circle}<title>{said}</title></circle>")
    for name, intensity, speed, _ in sorted(places, key=lambda p: -p[3])[:5]:
        x, y = at(intensity, speed)
        right = x > WIDTH * 0.75
        parts.append(_text(x - 14 if right else x + 14, y + 4, name, "end" if right else "start"))
    parts.append(_text((LEFT + WIDTH) / 2, height - 6, "operations for each byte (logarithmic); circles grow with time"))
    return _svg(height, parts, "roofline")


def _time_axis(spans: Sequence[Span], y: float) -> tuple[float, list[str]]:
    """Points of the picture a second, and the axis at height y."""
    total = max(spans[-1].start + spans[-1].seconds, 1e-9)
    scale = (WIDTH - LEFT - RIGHT) / total
    parts = [_line(LEFT, y, WIDTH - RIGHT, y)]
    for part in range(5):
        x = LEFT + (WIDTH - LEFT - RIGHT) * part / 4
        parts += [_line(x, y, x, y + 4), _text(x, y + 16, seconds(total * part / 4), ("start", "middle", "middle", "middle", "end")[part])]
    return scale, parts


def timeline(spans: Sequence[Span]) -> str:
    """Bars of the steps of one call, kernels above calls of the library."""
    height = 95
    scale, parts = _time_axis(spans, height - 25)
    for lane, kind in enumerate(_COLORS):
        parts.append(_text(LEFT - 6, 26 + 30 * lane, {"kernel": "kernels", "library": "library"}[kind], "end"))
    for span in spans:
        x, y, width = LEFT + span.start * scale, 10 + 30 * (span.kind == "library"), max(span.seconds * scale, 0.5)
        said = escape(f"{span.name}: {seconds(span.seconds)}" + (f"; {span.what}" if span.what else ""))
        bar = f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="24" fill="{_COLORS[span.kind]}" stroke="#fff" stroke-width="0.4">'
        parts.append(f"{bar}<title>{said}</title></rect>")
        if (letters := int(width / 6.5)) >= 4:
            shown = span.name if len(span.name) <= letters else span.name[: letters - 1] + "…"
            parts.append(_text(x + width / 2, y + 16, shown, color="#fff"))
    return _svg(height, parts, "timeline")


def memory(spans: Sequence[Span], arena: int) -> str:
    """Bytes of live temporaries step by step, on the timeline's axis; a dashed line where their common memory (arena bytes) ends."""
    height, top, bottom = 160, 15, 25
    scale, parts = _time_axis(spans, height - bottom)
    most = max([arena, 1, *(span.live for span in spans)])

    def y(size: float) -> float:
        return height - bottom - size / most * (height - top - bottom)

    corners = [f"{LEFT},{y(0):.2f}"]
    for span in spans:
        x, end = LEFT + span.start * scale, LEFT + (span.start + span.seconds) * scale
        corners += [f"{x:.2f},{y(span.live):.2f}", f"{end:.2f},{y(span.live):.2f}"]
    corners.append(f"{WIDTH - RIGHT},{y(0):.2f}")
    parts.append(f'<polygon points="{" ".join(corners)}" fill="#56b4e9" fill-opacity="0.6" stroke="#2b7bb0"/>')
    if arena:
        parts += [_line(LEFT, y(arena), WIDTH - RIGHT, y(arena), "#444", 1, "5 4"), _text(WIDTH - RIGHT, y(arena) - 4, "arena", "end")]
    parts += [_text(LEFT - 6, y(most) + 4, quantity(most, "B"), "end"), _text(LEFT - 6, y(0) + 4, "0", "end")]
    return _svg(height, parts, "memory")
