"""Every operator of PyTorch's OpInfo: a few samples of each through AOTAutograd, every sixth operator through torch.compile as a whole.

`make opinfo` runs all samples in all dtypes.
"""

from __future__ import annotations

import zlib

import pytest
from engines import needs_core
from opinfo.units import DIRECTIONS, OPS, Unit, all_units, run_unit

UNITS: dict[str, list[Unit]] = {name: [] for name in OPS}
for unit in all_units():
    UNITS[unit.op].append(unit)


def _chosen(name: str) -> list[tuple[Unit, str]]:
    """Forward in one dtype, another for each operator, and the gradient of every other one; with the engine that runs it."""
    number = zlib.crc32(name.encode())
    forward, backward = ([unit for unit in UNITS[name] if unit.direction == direction] for direction in DIRECTIONS)
    chosen = [(forward[number % len(forward)], "deplo")] if forward else []
    if backward and number % 2:
        chosen.append((backward[0], "deplo"))
    if forward and number % 6 == 0:
        chosen.append((forward[0], "dynamo"))
    return chosen


@needs_core
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in OPS if UNITS[name]])
def test_samples(name):
    for unit, engine in _chosen(name):
        result = run_unit(unit, 1, engine)
        assert result.status in ("none", "generated", "partly", "eager"), "\n".join(result.problems)
        assert result.samples or result.excused
