"""Attention of few queries over a cache: keys and values are read where they lie, once for all queries that share them, as far as they count."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F
from engines import feature_sets

from deplo.backend import collect_records

_C = pytest.importorskip("deplo._C")

# queries, heads, heads of keys, width, slots, tokens in the cache: widths of no whole vectors, odd counts
SIZES = [
    (1, 8, 4, 64, 300, 177),
    (1, 6, 6, 40, 130, 129),
    (3, 4, 2, 24, 200, 71),
    (1, 4, 1, 20, 1024, 700),
    (2, 14, 2, 128, 600, 2),
    (1, 9, 1, 33, 190, 64),
]


def attend(q, k, v, positions, window=0, cap=0.0):
    slots = torch.arange(k.shape[2])[None, None, None, :]
    last = positions[None, None, :, None]
    counts = slots <= last
    if window:
        counts = counts & (slots > last - window)
    if not cap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=counts, enable_gqa=q.shape[1] != k.shape[1])
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    scores = torch.where(counts, (cap * torch.tanh(scores / cap)), -torch.inf)
    return torch.softmax(scores, -1, dtype=torch.float32 if q.dtype != torch.float64 else None).to(q.dtype) @ v.repeat_interleave(group, 1)


def inputs(size, dtype, batch=2):
    queries, heads, shared, width, slots, tokens = size
    generator = torch.Generator().manual_seed(slots)
    q = torch.randn(batch, heads, queries, width, generator=generator).to(dtype)
    k, v = (torch.randn(batch, shared, slots, width, generator=generator).to(dtype) for _ in range(2))
    k[:, :, tokens:] = torch.nan  # slots that no token has filled
    v[:, :, tokens:] = torch.inf
    return q, k, v, torch.arange(tokens - queries, tokens)


def check(f, given, options, tokens):
    """What f gives compiled, against float64 and eager mode over the slots that hold tokens; the Tile IR of its programs."""
    torch._dynamo.reset()
    with collect_records() as records:
        actual = torch.compile(f, backend="deplo", options={"strict": True, **options})(*given)
    q, k, v, positions = given
    k, v = k[:, :, :tokens], v[:, :, :tokens]
    expected = f(q.double(), k.double(), v.double(), positions)
    error = (f(q, k, v, positions).double() - expected).abs().max()
    step = torch.finfo(q.dtype).eps * expected.abs().max()
    assert (actual.double() - expected).abs().max() <= 2 * error + step, "further from float64 than eager mode"
    return "\n".join(_C.lower(r.torch_ir, "tile", json.dumps({k: v for k, v in options.items() if k in ("features", "threads")})) for r in records)


@pytest.mark.parametrize("features", feature_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_slots_without_tokens_are_not_read(size, dtype, features):
    text = check(attend, inputs(size, dtype), {"features": features, "guard": True}, size[-1])
    assert re.search(r"schedule @\S+: online ", text), "keys are not streamed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_windows_and_soft_caps(size, dtype):
    def f(q, k, v, positions):
        return attend(q, k, v, positions, window=50), attend(q, k, v, positions, cap=15.0)

    for which in (0, 1):
        check(lambda *given, which=which: f(*given)[which], inputs(size, dtype), {}, size[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 63, 65, 700, 2000])
def test_threads_take_parts_of_the_keys(tokens, dtype):
    for heads in (4, 8, 1):
        given = inputs((1, heads, 1, 64, 2048, tokens), dtype, batch=1)
        text = check(attend, given, {"threads": 6}, tokens)
        # Threads have every so manieth block of keys; one more kernel puts together what they found.
        assert heads == 1 or re.search(r"parallel par in 0\.\.[56]:", text), "a thread has all keys"


def test_norms_and_rotations_of_queries_stay_apart():
    def f(x, weight, cos, sin, k, v, positions):
        q = F.rms_norm(x.view(1, 1, 8, 64), (64,), weight).transpose(1, 2)
        q = q * cos + torch.cat((-q[..., 32:], q[..., :32]), -1) * sin
        return attend(q, k, v, positions)

    _, k, v, positions = inputs((1, 8, 2, 64, 500, 77), torch.bfloat16, batch=1)
    x, weight, cos, sin = (torch.randn(*s).bfloat16() for s in ((1, 512), (64,), (1, 1, 1, 64), (1, 1, 1, 64)))
    torch._dynamo.reset()
    with collect_records() as records:
        actual = torch.compile(f, backend="deplo", options={"strict": True})(x, weight, cos, sin, k, v, positions)
    torch.testing.assert_close(actual, f(x, weight, cos, sin, k[:, :, :77], v[:, :, :77], positions), rtol=2e-2, atol=2e-2)
    assert "direct(rows=4)" in _C.lower(records[0].torch_ir, "tile", "{}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_of_any_number_of_tokens_have_a_version_for_few(dtype):
    torch._dynamo.reset()
    with collect_records() as records:
        compiled = torch.compile(attend, backend="deplo", options={"strict": True})
        for queries in (64, 2, 8, 9, 40):
            q, k, v, positions = inputs((queries, 4, 2, 32, 300, 177), dtype)
            torch._dynamo.mark_dynamic(q, 2)
            torch._dynamo.mark_dynamic(positions, 0)
            actual = compiled(q, k, v, positions)
            expected = attend(q, k[:, :, :177], v[:, :, :177], positions)
            torch.testing.assert_close(
                actual, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
            )
    texts = [_C.lower(r.torch_ir, "tile", json.dumps({"hints": r.hints})) for r in records]
    rows = 8 if feature_sets()[0] == "avx512" else 4  # of sums that the CPU's registers hold
    assert any(re.search(rf"schedule @\S+_small: online .* direct\(rows={rows}\)", text) for text in texts)


def test_heads_that_lie_side_by_side_are_no_windows():
    def f(x, k, v, positions):
        return attend(x.view(1, 1, 6, 40).transpose(1, 2), k, v, positions)

    _, k, v, positions = inputs((1, 6, 6, 40, 300, 100), torch.bfloat16, batch=1)
    torch._dynamo.reset()
    with collect_records() as records:
        x = torch.randn(1, 240).bfloat16()
        actual = torch.compile(f, backend="deplo", options={"strict": True})(x, k, v, positions)
    torch.testing.assert_close(actual, f(x, k[:, :, :100], v[:, :, :100], positions), rtol=2e-2, atol=1e-2)
    assert "direct(rows=1)" in _C.lower(records[0].torch_ir, "tile", "{}")
