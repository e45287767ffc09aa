"""Every second architecture of transformers, forward and backward in one static graph; `make architectures` runs all, with lengths and generation."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import ARCHITECTURES, First, answer, complaint, in_float64


@pytest.mark.parametrize("name", list(ARCHITECTURES)[::2])
def test_forward_and_backward(name: str) -> None:
    check(name)


def check(name: str) -> None:
    torch._dynamo.reset()
    architecture = ARCHITECTURES[name]
    module = First(architecture.build())
    inputs = architecture.inputs(9)
    exact = copy.deepcopy(module).double()
    compiled = torch.compile(module, backend="deplo", options={"strict": True}, dynamic=False)
    got = answer(compiled, module, inputs, True)
    text = complaint(got, answer(module, module, inputs, True), answer(exact, exact, in_float64(inputs), True))
    assert not text, text
