"""`deplo.explain`: what became of a model: kernels, library calls with their reasons, memory, cache, times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .backend import Record, collect_records, compile_with
from .capture import sum_of, unwrapped_errors
from .options import Options, read_options
from .terminal import quantity, seconds, show_table, table_text

_KERNEL_COLUMNS = ("kernel", "runs", "implements", "flops", "bytes", "time", "of roofline")


@dataclasses.dataclass
class GraphReport:
    """One compiled graph. `kernels` and `library` are rows of the core's description, with its keys."""

    kind: str
    ops: int
    torch_ir: str
    fallback: str
    import_seconds: float
    compile_seconds: float
    description: dict[str, Any]

    @property
    def kernels(self) -> list[dict[str, Any]]:
        return list(self.description.get("kernels", []))

    @property
    def library(self) -> list[dict[str, Any]]:
        return list(self.description.get("library", []))

    def title(self) -> str:
        if self.fallback:
            return f"{self.kind}: runs in eager mode: {self.fallback}"
        return (
            f"{self.kind}: {self.ops} ATen calls became {len(self.kernels)} kernels and {len(self.library)} library calls"
            f" (imported in {seconds(self.import_seconds)}, compiled in {seconds(self.compile_seconds)})"
        )

    def kernel_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for kernel in self.kernels:
            rows.append(
                (
                    str(kernel.get("name", "")),
                    str(kernel.get("calls", 1)),
                    ", ".join(kernel.get("ops", [])),
                    _amount(kernel.get("flops"), "flop"),
                    _amount(kernel.get("bytes"), "B"),
                    seconds(kernel["seconds"]) if kernel.get("seconds") else "",
                    f"{100 * kernel['roofline']:.0f} %" if kernel.get("roofline") else "",
                )
            )
        return rows

    def library_rows(self) -> list[tuple[str, str]]:
        return [(str(call.get("op", "")), str(call.get("reason", ""))) for call in self.library]

    def notes(self) -> list[str]:
        return [f"{name}: {_plain(self.description[name])}" for name in ("memory", "cache") if self.description.get(name)]


def _amount(value: Any, unit: str) -> str:
    return quantity(value, unit) if isinstance(value, (int, float)) else str(value or "")


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')} {_bytes_or(key, item)}" for key, item in value.items())
    return str(value)


def _bytes_or(key: Any, value: Any) -> str:
    return quantity(value, "B") if "bytes" in str(key) and isinstance(value, (int, float)) else _plain(value)


class Explanation:
    """What `deplo.explain` returns. Prints as tables; `graphs` holds the figures, `result` what the model returned."""

    def __init__(self, graphs: list[GraphReport], result: Any) -> None:
        self.graphs = graphs
        self.result = result

    def __str__(self) -> str:
        parts = []
        for graph in self.graphs:
            parts.append(graph.title())
            if graph.kernels:
                parts.append(table_text(*_without_empty(_KERNEL_COLUMNS, graph.kernel_rows())))
            if graph.library:
                parts.append(table_text(("library call", "reason"), graph.library_rows()))
            parts.extend(graph.notes())
            parts.append("")
        return "\n".join(parts).rstrip() + "\n"

    __repr__ = __str__

    def show(self) -> None:
        """Prints it: with rich on a terminal, plain in a pipe."""
        for graph in self.graphs:
            print(graph.title())
            if graph.kernels:
                header, rows, right = _without_empty(_KERNEL_COLUMNS, graph.kernel_rows())
                show_table("", header, rows, right)
            if graph.library:
                show_table("", ("library call", "reason"), graph.library_rows())
            for note in graph.notes():
                print(note)


def _without_empty(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> tuple[list[str], list[list[str]], list[int]]:
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    right = [at for at, i in enumerate(kept) if header[i] not in ("kernel", "implements")]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows], right


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    backward: bool = False,
    repeats: int = 3,
    **keywords: Any,
) -> Explanation:
    """Compiles `model(*inputs, **keywords)` afresh, runs it `repeats` times with each kernel timed, and says what became of it.

    `backward` also runs and explains the gradient of the sum of the outputs. The model's compiled code elsewhere is dropped
    (torch._dynamo.reset). Raises UserError for bad options.
    """
    checked = options if isinstance(options, Options) else read_options(options=options)

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return compile_with(checked, gm, example_inputs)

    torch._dynamo.reset()
    result = None
    with collect_records() as records, unwrapped_errors():
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        for turn in range(1 + repeats):
            if turn == 1:
                _profile(records)
            result = compiled(*inputs, **keywords)
            if backward:
                sum_of(result).backward()  # type: ignore[no-untyped-call]
    torch._dynamo.reset()
    return Explanation([_report(record) for record in records], result)


def _profile(records: list[Record]) -> None:
    for record in records:
        if hasattr(record.program, "set_profiling"):
            record.program.set_profiling(True)


def _report(record: Record) -> GraphReport:
    description: Any = record.program.describe() if hasattr(record.program, "describe") else {}
    if isinstance(description, str):
        description = json.loads(description)
    ops = sum(1 for line in record.torch_ir.splitlines()[1:] if not line.lstrip().startswith(("write ", "return")))
    return GraphReport(record.kind, ops, record.torch_ir, record.fallback, record.import_seconds, record.compile_seconds, description)
