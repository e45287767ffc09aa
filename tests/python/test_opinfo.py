"""Every operator of PyTorch's OpInfo: a few samples of each through AOTAutograd, every sixth operator through torch.compile as a whole.

`make opinfo` runs all samples in all dtypes, and with OPINFO=--special those with NaN, infinities, zeros and extremes in them.
"""

from __future__ import annotations

import re

import pytest
import torch
from engines import needs_core
from opinfo import units
from opinfo.judge import complaint
from opinfo.sample import UNITS, chosen, expected, seen, title
from opinfo.units import OPS, run_unit

EXPECTED = expected()

PLACE = re.compile(r" at units\.py:\d+")  # of the call in the harness itself


@needs_core
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in OPS if UNITS[name]])
def test_samples(name):
    for unit, engine in chosen(name):
        result = run_unit(unit, 1, engine)
        assert result.status in ("none", "generated", "partly", "eager"), "\n".join(result.problems)
        assert result.samples or result.excused
        was, now = EXPECTED.get(title(unit, engine)), seen(result)
        assert coverage(now) == coverage(was), f"{title(unit, engine)}: {now} where sample.json has {was}: write it anew if that is right"


@needs_core
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for k, name in enumerate(OPS) if UNITS[name] and k % 10 == 0])
def test_samples_with_special_values(name):
    units = [unit for unit in UNITS[name] if unit.dtype in ("float32", "int32")]
    for unit in units[:2]:
        result = run_unit(unit, 1, special=True)
        assert result.status in ("none", "generated", "partly", "eager"), "\n".join(result.problems)


def coverage(held):
    """What deplo leaves to ATen; reasons are text for readers."""
    return None if held is None else (held["status"], sorted(PLACE.sub("", call) for call in held["library"]))


@needs_core
def test_what_is_expected_exists():
    assert set(EXPECTED) <= {title(unit, engine) for name in OPS for unit, engine in chosen(name)}


@needs_core
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "overload"),
    [
        ("xlogy", torch.ops.aten.xlogy.Tensor),
        ("ldexp", torch.ops.aten.ldexp.Tensor),
        ("copysign", torch.ops.aten.copysign.Tensor),
        ("nn.functional.max_unpool2d", torch.ops.aten.max_unpool2d.default),
    ],
    ids=str,
)
def test_the_judge_notices_a_wrong_formula(name, overload, monkeypatch):
    """What bears witness, PyTorch's own trace, has none of the formulas that are judged."""
    assert overload in units.decompositions()
    table = units.decompositions

    def wrong(**given):
        formulas = table(**given)
        if overload not in formulas:
            return formulas

        def moved(*args, **kwargs):
            result = formulas[overload](*args, **kwargs)
            return result if result is NotImplemented else result + 1

        return formulas | {overload: moved}

    monkeypatch.setattr(units, "decompositions", wrong)
    assert run_unit(units.Unit(name, "float32", "forward"), 1).status == "wrong"


def test_a_proven_value_outweighs_eagers():
    """Where float64 gives another answer than eager mode, eager's is the one to meet, unless mathematics says which is right."""
    got, eager, exact = torch.tensor([-0.0]), torch.tensor([2.8e-8]), torch.tensor([0.0], dtype=torch.float64)
    assert complaint(got, eager, exact, single_elements=True)
    assert not complaint(got, eager, exact, single_elements=True, proven=True)
    assert complaint(eager * 3, eager, exact, single_elements=True, proven=True)
    beside = [torch.cat([t, t.new_tensor([last])]) for t, last in ((got, 0.6), (eager, 0.5), (exact, 0.5))]
    assert complaint(*beside, single_elements=True, proven=True)
