"""The table of ATen overloads: which deplo generates, which it leaves to ATen and why, which PyTorch breaks up before deplo sees them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .core import core
from .decompositions import IN_FORMULAS, IN_QUANTIZED, OURS, REASONS

GENERATED, LIBRARY, DECOMPOSED, MISSING = "generated", "library", "decomposed by PyTorch", "library (no rule yet)"
PARTLY = "generated in part"  # it has a rule, and ran in ATen in one of PyTorch's samples
SAMPLES = Path(__file__).with_name("samples.json")  # written by tests/python/opinfo/overloads.py


@dataclasses.dataclass(frozen=True)
class Operator:
    """One overload: how it runs, and the file of its rule or the reason."""

    name: str
    is_core: bool
    kind: str
    where: str


def operators() -> list[Operator]:
    """All overloads tagged `core`, and all others that deplo has a rule or a reason for; sorted by name."""
    files = dict(core().overload_files())
    reasons = dict(core().library_packets())
    found = [_operator(overload, files, reasons) for overload in _aten_overloads()]
    return sorted((_in_part(op) for op in found if op is not None), key=lambda op: op.name)


def _in_part(op: Operator) -> Operator:
    reason = left_in_samples().get(op.name) if op.kind == GENERATED else None
    return op if reason is None else dataclasses.replace(op, kind=PARTLY, where=f"{op.where}; in ATen: {reason}")


@functools.cache
def left_in_samples() -> dict[str, str]:
    """Overloads with a rule that ran in ATen in one of PyTorch's samples of all operators and dtypes, counted from outside; with the reasons."""
    left: dict[str, str] = json.loads(SAMPLES.read_text())["left to ATen"]
    return left


def _aten_overloads() -> Iterator[Any]:
    names = {schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else []:
            yield getattr(packet, overload)


def _operator(overload: Any, files: dict[str, str], reasons: dict[str, str]) -> Operator | None:
    name = str(overload)
    is_core = torch.Tag.core in overload.tags
    if name in files:
        return Operator(name, is_core, GENERATED, files[name])
    if name.startswith("aten.sym_"):
        return Operator(name, is_core, GENERATED, "fx_import.py: sizes are expressions") if is_core else None
    if reason := REASONS.get(name.removeprefix("aten.")):
        if file := {OURS: "decompositions.py", IN_FORMULAS: "formulas.py", IN_QUANTIZED: "quantized.py"}.get(reason):
            return Operator(name, is_core, GENERATED, file)
        return Operator(name, is_core, DECOMPOSED, f"{reason} (decompositions.py)")
    if not any("Tensor" in str(value.type) for value in (*overload._schema.arguments, *overload._schema.returns)):
        return None  # of Python's numbers
    packet = name.rpartition(".")[0]
    functional = not overload._schema.is_mutable
    if packet in reasons and (functional or is_core):
        return Operator(name, is_core, LIBRARY, reasons[packet])
    if not is_core:
        return None
    if not functional:
        return Operator(name, is_core, DECOMPOSED, "AOTAutograd makes it functional")
    if overload._can_decompose():
        return Operator(name, is_core, DECOMPOSED, "a composite of other overloads")
    return Operator(name, is_core, MISSING, "no decomposition rule")


def core_share(table: list[Operator]) -> tuple[int, int]:
    """How many overloads tagged core deplo generates in all samples, of how many that it means to (all but those with a reason, and composites)."""
    meant = [op for op in table if op.is_core and op.kind in (GENERATED, PARTLY, MISSING)]
    return sum(op.kind == GENERATED for op in meant), len(meant)


def summary(table: list[Operator]) -> str:
    """A sentence on the share of core overloads."""
    made, meant = core_share(table)
    core_ops = [op for op in table if op.is_core]
    left = sum(op.kind == LIBRARY for op in core_ops)
    composite = sum(op.kind == DECOMPOSED for op in core_ops)
    return (
        f"Of {len(core_ops)} overloads tagged core, {left} are left to ATen on purpose (random numbers, sorting, linear algebra, Fourier transforms,"
        f" sizes or branches that depend on values) and {composite} never reach a backend; of the other {meant}, deplo generates {made}"
        f" ({100 * made / meant:.1f} %) in all of PyTorch's samples and dtypes, and {sum(op.is_core and op.kind == PARTLY for op in table)} in part."
    )


def markdown(table: list[Operator]) -> str:
    """docs/ops.md."""
    lines = [
        "# ATen overloads",
        "",
        "Made by `python -m deplo ops --markdown > docs/ops.md`. A rule may leave a call to ATen whose dtype or arguments it does not handle.",
        'An overload is "generated" where that happened in none of PyTorch\'s own samples, in all dtypes, forward and backward, counted by a',
        "profiler from outside (`make opinfo`; `python -m opinfo.overloads` makes `deplo/samples.json` of what it wrote); complex numbers and graphs",
        "that ask for values count in samples of its own operator.",
        "",
        summary(table),
        "",
        "| overload | core | how it runs | rule's table, or reason |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| `{op.name}` | {'core' if op.is_core else ''} | {op.kind} | {op.where} |" for op in table]
    return "\n".join(lines) + "\n"
