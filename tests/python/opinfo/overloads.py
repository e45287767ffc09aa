"""Core overloads that have a rule and were called in ATen all the same, by profiler and records: the share that samples show to be generated.

`PYTHONPATH=tests/python python -m opinfo.overloads build/opinfo.jsonl ...` writes `deplo/samples.json` anew from whole runs of `make opinfo`, from
which `python -m deplo ops` and docs/ops.md take what is generated in part.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from deplo.operators import GENERATED, MISSING, PARTLY, SAMPLES, Operator

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
    meant = [op for op in table if op.is_core and op.kind in (GENERATED, PARTLY, MISSING)]
    made = [op.name for op in meant if op.kind != MISSING and op.name not in left]
    return made, [op.name for op in meant if op.name not in made]


def own_units(results: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The results by the ATen operator that OpInfo names for them."""
    from opinfo.units import OPS

    units: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        units.setdefault(OPS[result["unit"].split("/")[0]].aten_name.strip("_"), []).append(result)
    return units


def of_own_operator(name: str, units: Mapping[str, list[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    return units.get(name.split(".")[1].strip("_"), [])


def without_call(table: Iterable[Operator], results: list[dict[str, Any]]) -> list[str]:
    """Core overloads that ran in ATen in no unit of their own operator, for whatever reason; in no unit at all where OpInfo has no such operator."""
    units = own_units(results)
    meant = [op.name for op in table if op.is_core and op.kind in (GENERATED, PARTLY)]
    return [name for name in meant if not any(name in result["library"] for result in of_own_operator(name, units) or results)]


def generated_in_part(table: Iterable[Operator], results: list[dict[str, Any]]) -> dict[str, str]:
    """Overloads with a rule that ran in ATen for a reason of their own, or in a unit of their own operator: one of the reasons."""
    left, units = left_to_aten(results), own_units(results)
    found = {}
    for op in table:
        if op.kind in (GENERATED, PARTLY):
            reasons = set(left.get(op.name, ()))
            if any(op.name in result["library"] for result in of_own_operator(op.name, units)):
                reasons = reasons or {"complex numbers, or a graph that asks for values"}
            if reasons:
                found[op.name] = min(reasons)
    return found


def print_share(results: list[dict[str, Any]]) -> None:
    """The share of core overloads without a call in ATen, and the reasons of the others."""
    from deplo.operators import operators

    table = operators()
    left = left_to_aten(results)
    made, rest = core_share(table, results)
    total = len(made) + len(rest)
    share = f"{len(made)} of {total} ({100 * len(made) / total:.1f} %)"
    print(f"\ncore overloads that none of these {len(results)} units left to ATen for a reason of their own: {share}")
    whole = {call for result in results for call, reason in result["library"].items() if reason == OUTSIDE}
    own = without_call(table, results)
    print(f"  that ran in ATen in no unit of their own operator, for whatever reason: {len(own)} ({100 * len(own) / total:.1f} %)")
    for name in sorted(set(made) - set(own)):
        print(f"    not {name}")
    strict = [name for name in made if name not in whole]
    print(f"  in no unit of any operator, graphs that run in ATen as a whole too (complex numbers, functions that ask for values): {len(strict)}")
    for name in rest:
        print(f"  {name}: {'; '.join(sorted(left.get(name, {'no decomposition rule'})))[:200]}")


def main() -> int:
    from deplo.operators import operators
    from opinfo.__main__ import _read

    missing = [path for path in sys.argv[1:] if not Path(path).exists()]
    if missing or not sys.argv[1:]:
        raise SystemExit(
            f"no results in {', '.join(missing)}: give files that make opinfo wrote" if missing else "give the files that make opinfo wrote"
        )
    results = [result for path in sys.argv[1:] for result in _read(path).values()]
    held = {"torch": torch.__version__.split("+")[0], "units": len(results), "left to ATen": generated_in_part(operators(), results)}
    SAMPLES.write_text(json.dumps(held, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
