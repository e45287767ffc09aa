"""Every second architecture of transformers, forward and backward in one static graph; `make architectures` runs all, with lengths and generation."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import ARCHITECTURES, First, answer, complaint, in_float64
from engines import same
from transformers import CompileConfig

from deplo.backend import collect_records


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


def test_generation_with_a_static_cache() -> None:
    check_generation("llama")


def check_generation(name: str) -> None:
    """generate() that compiles its own forward: eager mode's tokens, by logits that are as near to float64 as its own."""
    torch._dynamo.reset()
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    ids = architecture.inputs(7)["input_ids"]
    settings = {
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    exact = copy.deepcopy(model).double().generate(ids, **settings)
    settings["cache_implementation"] = "static"
    expected = model.generate(ids, **settings)
    how = CompileConfig(backend="deplo", mode=None, options={"strict": True})
    how._compile_all_devices = True  # otherwise only on a GPU
    with collect_records() as records:
        got = model.generate(ids, **settings, compile_config=how)
    assert 1 <= len(records) <= 2 and all(record.program is not None for record in records)
    assert torch.equal(got.sequences, expected.sequences)
    same(got.logits, expected.logits, exact=[x.double() for x in exact.logits])  # which generate() has rounded to float32
