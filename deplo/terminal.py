"""Text for people: coloured IR and tables on a terminal, plain text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

_KEYWORDS = "torch|tensor|loop|tile|kernel|program|for|in|parallel|reduce|scan|map|scatter|library|schedule|store|load|return|write|to|where|if|else"
_RULES = (
    (rf"(?<!\w)\b({_KEYWORDS})\b", "bold cyan"),
    (r"%[\w.]+", "green"),
    (r"@[\w.]+", "bold magenta"),
    (r"\b(bool|[ui](?:8|16|32|64)|f(?:16|32|64)|bf16|ptr|vec)\b", "yellow"),
    (r'"[^"]*"', "blue"),
    (r"(?m)[;#].*$", "dim"),
)


def is_terminal(stream: TextIO | None = None) -> bool:
    return (stream or sys.stdout).isatty()


def show_ir(text: str) -> None:
    """Prints IR text, with colours on a terminal."""
    if not is_terminal():
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(text)
        return
    coloured = Text(text)
    for pattern, style in _RULES:
        coloured.highlight_regex(pattern, style)
    Console().print(coloured, soft_wrap=True)


def table_text(header: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """A table of plain text; the columns in `right` are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for number, row in enumerate(cells):
        parts = [cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(parts).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> None:
    """Prints a table, by rich on a terminal."""
    if is_terminal():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=title, title_justify="left")
            for i, name in enumerate(header):
                table.add_column(name, justify="right" if i in right else "left")
            for row in rows:
                table.add_row(*[str(cell) for cell in row])
            Console().print(table)
            return
    if title:
        print(title)
    print(table_text(header, rows, right))


def quantity(value: float, unit: str) -> str:
    """1234567 as `1.23 M<unit>`."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def seconds(value: float) -> str:
    """0.00123 as `1.23 ms`."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns" if value else "0"
