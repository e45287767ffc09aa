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


def judge(case: zoo.Case, name: str, dtype: torch.dtype) -> tuple[list[tuple[float, float]], dict[str, int]]:
    """Errors of eager and of deplo against float64, of the output and of each tensor of the KV cache, and the ATen calls of one compiled call."""
    inputs = case.inputs(0)
    reset = case.reset or (lambda: None)
    compiled = torch.compile(case.model, backend="deplo", fullgraph=True, options={"strict": True, "allow_library": []})
    with torch.no_grad():
        case.model(**inputs)
        reset()
        eager = [case.model(**inputs).clone(), *(tensor.clone() for tensor in case.state())]
        compiled(**inputs)
        reset()
        result = [compiled(**inputs).clone(), *(tensor.clone() for tensor in case.state())]
        calls = harness.aten_calls(lambda: compiled(**inputs))
        output, state = zoo.reference_and_state(name, "tiny", dtype)
    wanted = [output, *state]
    return [(harness.max_error(e, w), harness.max_error(r, w)) for e, r, w in zip(eager, result, wanted, strict=True)], calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_model(name: str, dtype: torch.dtype):
    case = zoo.build(name, "tiny", dtype)
    errors, calls = judge(case, name, dtype)
    assert len(errors) == (3 if "block" in name else 1)
    for eager, ours in errors:
        assert ours <= harness.allowed_error(eager, torch.finfo(dtype).eps), f"error {ours} against float64, eager's is {eager}"
    assert not {c for c in calls if c not in ALLOWED.get(name, set())}, f"ATen calls left: {calls}"
