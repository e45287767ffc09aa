"""What became of each graph that was compiled: `deplo.explain` shows it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Record:
    """What became of one graph."""

    kind: str  # forward, backward, inference
    torch_ir: str = ""
    program: Any = None
    fallback: str = ""  # why the graph runs in eager mode, if it does; a program may be there that lacks a GPU
    import_seconds: float = 0.0
    compile_seconds: float = 0.0
    hints: dict[str, int] = dataclasses.field(default_factory=dict)
    left: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # calls between this graph's parts that stay in ATen, and why
    background: Any = None  # its tier.Tiered, where it compiles in the background: the program comes later
    search: Any = None  # its finetune.Finetuned, where schedules are searched in the background
    restored: bool = False  # from PyTorch's cache or a package: nothing was imported, and compile_seconds are those of linking it


_collectors: list[list[Record]] = []
_collectors_lock = threading.Lock()


@contextlib.contextmanager
def collect_records() -> Iterator[list[Record]]:
    """Gathers the records of all graphs that compile inside the block, in any thread."""
    records: list[Record] = []
    with _collectors_lock:
        _collectors.append(records)
    try:
        yield records
    finally:
        with _collectors_lock:
            _collectors[:] = [other for other in _collectors if other is not records]


def publish(record: Record) -> None:
    with _collectors_lock:
        for records in _collectors:
            records.append(record)
