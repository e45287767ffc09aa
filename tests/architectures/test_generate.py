"""Greedy generation gives eager mode's tokens: by a loop with a static cache, and by generate() around a compiled forward."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, DECODERS
from test_architectures import check_generation
from transformers import StaticCache

from deplo import backend
from deplo.options import read_options

STEPS = 12


def greedy(forward, config, ids: torch.Tensor) -> torch.Tensor:
    """Prefill, then one token a step, with the cache's tensors updated in place."""
    cache = StaticCache(config=config, max_cache_len=ids.shape[1] + STEPS)
    position = torch.arange(ids.shape[1])
    tokens = [ids]
    current = ids
    for _ in range(STEPS):
        logits = forward(input_ids=current, past_key_values=cache, cache_position=position, use_cache=True).logits
        current = logits[:, -1:].argmax(-1)
        tokens.append(current)
        position = position[-1:] + 1
    return torch.cat(tokens, 1)


# These keep their own kind of cache: transformers refuses a static one for them.
NO_STATIC_CACHE = {"bloom", "gpt-neo"}


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in NO_STATIC_CACHE])
def test_greedy_with_a_static_cache(name: str) -> None:
    torch._dynamo.reset()
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    ids = architecture.inputs(7)["input_ids"]
    options = read_options(options={"strict": True})
    compiled = torch.compile(model, backend=lambda gm, inputs: backend.compile_with(options, gm, inputs))
    with torch.no_grad():
        expected = greedy(model, model.config, ids)
        got = greedy(compiled, model.config, ids)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", DECODERS)
def test_generate(name: str) -> None:
    """generate() with its default cache, around a compiled forward."""
    torch._dynamo.reset()
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    ids = architecture.inputs(7)["input_ids"]
    settings = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **settings)
    options = read_options(options={"strict": True})
    model.forward = torch.compile(model.forward, backend=lambda gm, inputs: backend.compile_with(options, gm, inputs))
    assert torch.equal(model.generate(ids, **settings), expected)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "t5", "bart"])
def test_generate_with_a_static_cache(name: str) -> None:
    check_generation(name)
