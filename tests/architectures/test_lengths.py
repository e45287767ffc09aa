"""Every architecture that takes a length with it as a symbol: forward and backward at lengths that no compile saw."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import ARCHITECTURES, WITH_LENGTHS, First, answer, complaint, in_float64
from engines import Compiler


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", WITH_LENGTHS)
def test_lengths(name: str, backward: bool) -> None:
    torch._dynamo.reset()
    architecture = ARCHITECTURES[name]
    module = First(architecture.build())
    exact = copy.deepcopy(module).double()
    compiler = Compiler()
    compiled = compiler(module, dynamic=True)
    for length in (9, 17, 33, 6, 48):
        inputs = architecture.inputs(length, length)
        got = answer(compiled, module, inputs, backward)
        text = complaint(got, answer(module, module, inputs, backward), answer(exact, exact, in_float64(inputs), backward))
        assert not text, f"length {length}: {text}"
    # Some models compare the length with a number of their config (a window, a table of positions): such a guard is theirs.
    assert compiler.graphs <= 2, f"{compiler.graphs} graphs"
