"""The units that `make test` runs, and what must become of each: `sample.json` lists those of which something stays in ATen, with the reasons.

`PYTHONPATH=tests/python python -m opinfo.sample` writes it anew; read what changed before you commit it.
"""

from __future__ import annotations

import json
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

from opinfo.units import DIRECTIONS, OPS, Result, Unit, all_units, run_unit

EXPECTED = Path(__file__).with_name("sample.json")
UNITS: dict[str, list[Unit]] = {name: [] for name in OPS}
for _unit in all_units():
    UNITS[_unit.op].append(_unit)


def chosen(name: str) -> list[tuple[Unit, str]]:
    """Forward in one dtype, another for each operator, and the gradient of every other one; with the engine that runs it."""
    number = zlib.crc32(name.encode())
    forward, backward = ([unit for unit in UNITS[name] if unit.direction == direction] for direction in DIRECTIONS)
    units = [(forward[number % len(forward)], "deplo")] if forward else []
    if backward and number % 2:
        units.append((backward[0], "deplo"))
    if forward and number % 6 == 0:
        units.append((forward[0], "dynamo"))
    return units


def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EXPECTED.read_text())
    return found


def title(unit: Unit, engine: str) -> str:
    return f"{unit.name} by {engine}"


def seen(result: Result) -> dict[str, Any] | None:
    """What the file holds about a result: nothing where deplo generates all of it, or where PyTorch has nothing to compile."""
    return None if result.status in ("none", "generated") else {"status": result.status, "library": dict(sorted(result.library.items()))}


def main() -> int:
    lines = []
    warnings.simplefilter("ignore")
    for name in OPS:
        for unit, engine in chosen(name):
            held = seen(run_unit(unit, 1, engine))
            if held is not None:
                lines.append(f"{json.dumps(title(unit, engine))}: {json.dumps(held)}")
                print(lines[-1], flush=True)
    EXPECTED.write_text("{\n" + ",\n".join(sorted(lines)) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
