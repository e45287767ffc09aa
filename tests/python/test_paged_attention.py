"""Attention over a cache in pages: a table says which block holds which keys. It is read as far as tokens go, at places that are checked once."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F
from engines import feature_sets

from deplo.backend import collect_records

_C = pytest.importorskip("deplo._C")

PAGE = 16


def attend(q, keys, values, table, positions):
    """Blocks of `keys` and `values` are (tokens, heads, width), as most engines keep them."""
    batch, _, tokens, _ = q.shape
    k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (keys, values))
    slots = torch.arange(k.shape[2])
    last = positions[:, None] + torch.arange(tokens)
    counts = slots <= last[:, None, :, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=counts, enable_gqa=q.shape[1] != k.shape[1])


def selected(q, keys, values, table, positions):
    """Blocks are (heads, tokens, width)."""
    batch, pages = table.shape
    k, v = (c.index_select(0, table.flatten()).view(batch, pages, *c.shape[1:]).transpose(1, 2).flatten(2, 3) for c in (keys, values))
    counts = torch.arange(k.shape[2]) <= (positions[:, None] + torch.arange(q.shape[2]))[:, None, :, None]
    scores = torch.where(counts, q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * 0.125, -torch.inf)
    return torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def inputs(f, tokens, dtype, pages=12, heads=(8, 2), width=64):
    generator = torch.Generator().manual_seed(tokens)
    inner = (PAGE, heads[1], width) if f is attend else (heads[1], PAGE, width)
    keys, values = (torch.randn(40, *inner, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(2, heads[0], tokens, width, generator=generator).to(dtype)
    table = torch.randperm(40, generator=generator)[: 2 * pages].view(2, pages)
    if f is attend:
        table[1, -1] -= 40  # counts from the end
    return q, keys, values, table, torch.tensor([pages * PAGE - tokens - 5, 37])


def check(f, given, options=None, **keywords):
    """What f gives compiled, against float64; the Tile IR of its program."""
    torch._dynamo.reset()
    q, keys, values, table, positions = given
    with collect_records() as records:
        actual = torch.compile(f, backend="deplo", options={"strict": True, **(options or {})}, **keywords)(*given)
    exact = f(q.double(), keys.double(), values.double(), table, positions)
    assert (actual.double() - exact).norm() <= 1.2 * (f(*given).double() - exact).norm() + 1e-7 * exact.norm()
    return _C.lower(records[0].torch_ir, "tile", json.dumps(options or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("f", [attend, selected], ids=["indexed", "selected"])
def test_keys_are_streamed_from_pages(f, tokens, dtype):
    text = check(f, inputs(f, tokens, dtype))
    assert re.search(r"schedule @\S+: online ", text), "all pages are gathered"
    assert text.count("check ") == 2, "places are checked more than once"


@pytest.mark.parametrize("features", feature_sets())
def test_every_instruction_set(features):
    check(attend, inputs(attend, 2, torch.bfloat16), {"features": features, "guard": True})


def test_any_number_of_pages():
    given = inputs(attend, 1, torch.float32)
    torch._dynamo.mark_dynamic(given[3], 1)
    assert "direct(rows=" in check(attend, given)


def test_layers_write_tokens_and_share_places():
    """Each writes its token's keys and values where the table says, and reads all of them."""
    weights = torch.randn(2, 4, 256, 256, generator=torch.Generator().manual_seed(1)) / 16

    def f(x, table, positions, *caches):
        block, slot = table.gather(1, positions[:, None] // PAGE)[:, 0], positions % PAGE
        for layer in range(2):
            keys, values = caches[2 * layer : 2 * layer + 2]
            q, k, v = (F.linear(x, weights[layer, n].to(x.dtype)[: 64 * heads]).view(2, heads, 64) for n, heads in ((0, 4), (1, 2), (2, 2)))
            keys[block, slot], values[block, slot] = k, v
            x = x + F.linear(attend(q[:, :, None], keys, values, table, positions).flatten(1), weights[layer, 3].to(x.dtype))
        return x

    _, keys, values, table, positions = inputs(attend, 1, torch.float32)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(2))
    torch._dynamo.reset()
    given = [[x.to(t), table, positions, *(c.to(t).clone() for c in (keys, values, values, keys))] for t in (torch.float32, torch.float64)]
    with collect_records() as records:
        actual = torch.compile(f, backend="deplo", options={"strict": True})(*given[0])
    exact = f(*given[1])
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(given[0][3:], given[1][3:], strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    text = _C.lower(records[0].torch_ir, "tile", "{}")
    streams = re.findall(r"schedule @(\S+): online ", text)
    assert sum(text.count(f"call @{name}(") for name in streams) == 2, "a layer gathers all pages"
    assert len(re.findall(r"call @\S+\(table, place0\)", text)) == 1, "places are computed twice"


@pytest.mark.parametrize("at", [(0, 0), (1, 11)], ids=["read", "behind all tokens"])
def test_pages_that_are_not_there(at):
    given = inputs(attend, 1, torch.float32)
    given[3][at] = 40
    torch._dynamo.reset()
    with pytest.raises(IndexError):
        torch.compile(attend, backend="deplo")(*given)
