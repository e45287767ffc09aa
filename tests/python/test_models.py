"""Real architectures with tiny configs: every op of the strict list generated, numbers judged by float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import harness
import zoo

# ATen operators that compiled models may not call: everything that deplo is there to generate. What may remain is named per model.
ALLOWED: dict[str, set[str]] = {}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def judge(case: zoo.Case, name: str, dtype: torch.dtype) -> tuple[float, float, dict[str, int]]:
    """Errors of eager and of deplo against float64, and the ATen calls of one compiled call."""
    inputs = case.inputs(0)
    reset = case.reset or (lambda: None)
    compiled = torch.compile(case.model, backend="deplo", options={"strict": True})
    with torch.no_grad():
        case.model(**inputs)
        reset()
        eager = case.model(**inputs).clone()
        compiled(**inputs)
        reset()
        result = compiled(**inputs).clone()
        calls = harness.aten_calls(lambda: compiled(**inputs))
        wanted = zoo.reference(name, "tiny", dtype)
    return harness.max_error(eager, wanted), harness.max_error(result, wanted), calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_model(name: str, dtype: torch.dtype):
    case = zoo.build(name, "tiny", dtype)
    eager, ours, calls = judge(case, name, dtype)
    # A few units in the last place of the largest output, on top of what eager is off by.
    slack = 16 * torch.finfo(dtype).eps
    assert ours <= eager + slack, f"error {ours} against float64, eager's is {eager}"
    assert not {c for c in calls if c not in ALLOWED.get(name, set())}, f"ATen calls left: {calls}"
