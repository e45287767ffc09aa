"""Attention as eager mode of Hugging Face writes it: masks that add the least number, and sinks, which are scores without a value."""

from __future__ import annotations

import json
import re

import pytest
import torch
from engines import feature_sets

from deplo.backend import collect_records

_C = pytest.importorskip("deplo._C")

SLOTS, EVER = 512, 1 << 30
# tokens, place of the first one, window: the last two leave rows that are masked as a whole
PLACES = [(1, 0, EVER), (1, 300, 64), (4, 100, EVER), (40, 300, 64), (200, 100, EVER), (40, -3, EVER), (3, 1000, 64)]


def attend(q, k, v, positions, window, sinks=None):
    slots = torch.arange(k.shape[2])
    counts = (slots <= positions[:, None]) & (slots > positions[:, None] - window)
    mask = torch.where(counts, torch.zeros((), dtype=q.dtype), torch.finfo(q.dtype).min)
    group = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, k.repeat_interleave(group, 1).mT) * q.shape[-1] ** -0.5 + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], -1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = torch.softmax(scores, -1, dtype=scores.dtype)
    return torch.matmul(weights if sinks is None else weights[..., :-1], v.repeat_interleave(group, 1))


def inputs(tokens, first, dtype):
    generator = torch.Generator().manual_seed(tokens)
    q, k, v, sinks = (torch.randn(*s, generator=generator).to(dtype) for s in ((1, 8, tokens, 40), (1, 2, SLOTS, 40), (1, 2, SLOTS, 40), (8,)))
    return q, k, v, torch.arange(tokens) + first, sinks


def check(f, q, k, v, positions, window, sinks, options=None):
    torch._dynamo.reset()
    with collect_records() as records:
        actual = torch.compile(f, backend="deplo", options={"strict": True, **(options or {})})(q, k, v, positions, window, sinks)
    eager = f(q, k, v, positions, window, sinks)
    exact = f(q.double(), k.double(), v.double(), positions, window, sinks if sinks is None else sinks.double())
    # Errors of single numbers differ by chance: all together must not be larger.
    allowed = 1.2 * (eager.double() - exact).norm() + 0.01 * torch.finfo(q.dtype).eps * exact.norm()
    assert (actual.double() - exact).norm() <= allowed, "further from float64 than eager mode"
    text = _C.lower(records[0].torch_ir, "tile", json.dumps({"features": options["features"]} if options else {}))
    assert re.search(r"schedule @\S+: online ", text), "keys are not streamed"
    return text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sunk", [False, True], ids=["least", "sinks"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_masks_by_the_least_number(place, sunk, dtype):
    tokens, first, window = place
    *given, sinks = inputs(tokens, first, dtype)
    text = check(attend, *given, window, sinks if sunk else None)
    assert "for again in 0..2" in text, "all slots are read"


@pytest.mark.parametrize("features", feature_sets())
def test_every_instruction_set(features):
    *given, sinks = inputs(40, 100, torch.float32)
    check(attend, *given, EVER, sinks, {"features": features})


def test_any_number_of_tokens():
    *given, sinks = inputs(9, 200, torch.bfloat16)
    torch._dynamo.mark_dynamic(given[0], 2)
    torch._dynamo.mark_dynamic(given[3], 0)
    text = check(attend, *given, EVER, sinks, {})
    assert "direct(rows=" in text and "register_block" in text


def test_slots_that_no_row_counts_are_not_read():
    """What they hold may be anything, as long as some key counts in every row."""
    q, k, v, positions, sinks = inputs(6, 100, torch.bfloat16)
    expected = attend(q, k, v, positions, EVER, sinks)
    k[:, :, 256:], v[:, :, 256:] = torch.nan, torch.inf
    torch._dynamo.reset()
    actual = torch.compile(attend, backend="deplo")(q, k, v, positions, EVER, sinks)
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("sink", [-torch.inf, torch.inf, torch.nan, 1e4, -1e4], ids=str)
def test_sinks_beyond_all_scores(sink):
    q, k, v, positions, sinks = inputs(6, 100, torch.float32)
    sinks[3] = sink
    torch._dynamo.reset()
    actual = torch.compile(attend, backend="deplo")(q, k, v, positions, EVER, sinks)
    torch.testing.assert_close(actual, attend(q, k, v, positions, EVER, sinks), equal_nan=True)
