"""Core overloads that have a rule and were called in ATen all the same, by profiler and records: the share that samples show to be generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deplo.operators import GENERATED, MISSING, Operator

OUTSIDE = "outside of the program"  # of a graph that runs in ATen as a whole: complex numbers, or a function that asks for values (cov)


def left_to_aten(results: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """Overloads by name, with the reasons of their own for which units (with a `library` of reasons by call) left them to ATen."""
    left: dict[str, set[str]] = {}
    for result in results:
        for call, reason in result["library"].items():
            if reason != OUTSIDE:
                left.setdefault(call, set()).add(reason)
    return left


def core_share(table: Iterable[Operator], results: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Core overloads that deplo means to generate: those that it generated in every unit, and those that it did not, or has no rule for."""
    left = left_to_aten(results)
    meant = [op for op in table if op.is_core and op.kind in (GENERATED, MISSING)]
    made = [op.name for op in meant if op.kind == GENERATED and op.name not in left]
    return made, [op.name for op in meant if op.name not in made]


def without_call(table: Iterable[Operator], results: list[dict[str, Any]]) -> list[str]:
    """Core overloads that ran in ATen in no unit of their own operator, for whatever reason; in no unit at all where OpInfo has no such operator."""
    from opinfo.units import OPS

    units: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        units.setdefault(OPS[result["unit"].split("/")[0]].aten_name.strip("_"), []).append(result)
    meant = [op.name for op in table if op.is_core and op.kind == GENERATED]
    return [name for name in meant if not any(name in result["library"] for result in units.get(name.split(".")[1].strip("_"), results))]


def print_share(results: list[dict[str, Any]]) -> None:
    """The share of core overloads without a call in ATen, and the reasons of the others."""
    from deplo.operators import operators

    table = operators()
    left = left_to_aten(results)
    made, rest = core_share(table, results)
    total = len(made) + len(rest)
    print(f"\ncore overloads that no unit left to ATen for a reason of their own: {len(made)} of {total} ({100 * len(made) / total:.1f} %)")
    whole = {call for result in results for call, reason in result["library"].items() if reason == OUTSIDE}
    own = without_call(table, results)
    print(f"  that ran in ATen in no unit of their own operator, for whatever reason: {len(own)} ({100 * len(own) / total:.1f} %)")
    for name in sorted(set(made) - set(own)):
        print(f"    not {name}")
    strict = [name for name in made if name not in whole]
    print(f"  in no unit of any operator, graphs that run in ATen as a whole too (complex numbers, functions that ask for values): {len(strict)}")
    for name in rest:
        print(f"  {name}: {'; '.join(sorted(left.get(name, {'no decomposition rule'})))[:200]}")
