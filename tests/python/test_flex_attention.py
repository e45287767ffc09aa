"""flex_attention written out: what score_mod and mask_mod may do, its gradient, other sizes, and what the compiler makes of it."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from deplo.records import collect_records

_HEADS, _KEYS = 4, 96
_BIAS = torch.randn(_HEADS, _KEYS, _KEYS, generator=torch.Generator().manual_seed(1))
_DOCUMENTS = torch.randint(0, 3, (_KEYS,), generator=torch.Generator().manual_seed(2)).sort()[0]

_SCORES = {
    "plain": None,
    "alibi": lambda score, b, h, i, j: score + (j - i) * torch.exp2(-(h + 1.0)),
    "soft cap": lambda score, b, h, i, j: 5 * torch.tanh(score / 5),
    "bias": lambda score, b, h, i, j: score + _BIAS[h, i, j],
    "window": lambda score, b, h, i, j: torch.where(i - j < 16, score, -float("inf")),
}
_MASKS = {
    "all": None,
    "causal": lambda b, h, i, j: i >= j,
    "documents": lambda b, h, i, j: _DOCUMENTS[i] == _DOCUMENTS[j],
    "prefix": lambda b, h, i, j: (j < 10 + b) | (i >= j),
    "rows without keys": lambda b, h, i, j: (i % 5 != 0) & (i >= j),
}


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="deplo", options={"strict": True, **options})


def tensors(seed, *shapes, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


def as_exact(got, eager, exact):
    """`got` is as near to the float64 result as eager mode's is, to a factor."""
    for ours, theirs, true in zip(got, eager, exact, strict=True):
        scale = true.abs().amax().clamp(min=1e-30)
        error, allowed = (((x.double() - true).abs().amax() / scale).item() for x in (ours, theirs))
        assert error <= 2 * allowed + 4 * torch.finfo(ours.dtype).eps, (error, allowed)


@pytest.mark.parametrize("features", ["avx2", "native"])
@pytest.mark.parametrize(
    ("heads", "queries", "keys", "depth", "columns"), [((4, 4), 77, 101, 40, 64), ((4, 2), 130, 300, 64, 20), ((2, 2), 9, 600, 80, 80)]
)
def test_operator(heads, queries, keys, depth, columns, features):
    """bf16 where sums, blocks and matrices end in the middle; causal, masked by a tensor (a row of nothing, too), scaled by a negative number."""
    q, k, v = tensors(0, (2, heads[0], queries, depth), (2, heads[1], keys, depth), (2, heads[1], keys, columns), dtype=torch.bfloat16)
    mask = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, 0, 3] = False
    for settings in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": -0.3}):

        def attend(q, k, v, settings=settings):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=heads[0] != heads[1], **settings)

        torch._dynamo.reset()
        with torch.no_grad():
            got = torch.compile(attend, backend="deplo", options={"features": features})(q, k, v)
            as_exact([got], [attend(q, k, v)], [attend(q.double(), k.double(), v.double())])


def test_weights_that_stay_float32():
    """Of bf16 values: neither they nor the result is rounded."""

    def attend(q, k, v):
        wide = torch.promote_types(q.dtype, torch.float32)
        return torch.softmax(q.to(wide) @ k.to(wide).mT * 0.125, -1) @ v.to(wide)

    q, k, v = tensors(0, *[(2, 3, 70, 64)] * 3, dtype=torch.bfloat16)
    as_exact([compiled(attend)(q, k, v)], [attend(q, k, v)], [attend(q.double(), k.double(), v.double())])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("score", "mask"), [(s, "causal") for s in _SCORES] + [("alibi", m) for m in _MASKS])
def test_functions_of_users(score, mask, dtype):
    block_mask = create_block_mask(_MASKS[mask], 2, None, _KEYS, _KEYS, device="cpu") if _MASKS[mask] else None

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod=_SCORES[score], block_mask=block_mask, enable_gqa=True, return_lse=True)

    given = tensors(0, (2, _HEADS, _KEYS, 16), (2, 2, _KEYS, 16), (2, 2, _KEYS, 8), dtype=dtype)
    with torch.no_grad():
        got, eager, exact = compiled(attend)(*given), attend(*given), attend(*(x.double() for x in given))
    assert [x.stride() for x in got] == [x.stride() for x in eager]
    no_keys = exact[1] == -float("inf")
    assert torch.equal(got[1] == -float("inf"), no_keys)
    as_exact([got[0], got[1].masked_fill(no_keys, 0)], [eager[0], eager[1].masked_fill(no_keys, 0)], [exact[0], exact[1].masked_fill(no_keys, 0)])


def test_gradients_of_tensors_and_of_what_is_captured(monkeypatch):
    """PyTorch refuses gradients on CPUs in front of an operator that has them."""
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)
    block_mask = create_block_mask(lambda b, h, i, j: _DOCUMENTS[i] >= _DOCUMENTS[j], None, None, _KEYS, _KEYS, device="cpu")

    def attend(q, k, v, bias, table):
        def score(score, b, h, i, j):
            return 3 * torch.tanh(score / 3) + bias[h, i, j] + table[h, i - j + _KEYS - 1]

        return flex_attention(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=True)

    def gradients(function, dtype):
        shapes = [(1, _HEADS, _KEYS, 16)] + 2 * [(1, 2, _KEYS, 16)] + [(_HEADS, _KEYS, _KEYS), (_HEADS, 2 * _KEYS - 1)]
        given = [x.detach().to(dtype).requires_grad_() for x in tensors(3, *shapes)]
        result = function(*given)
        return torch.autograd.grad(result, given, tensors(4, result.shape)[0].to(dtype))

    as_exact(gradients(compiled(attend), torch.float32), gradients(attend, torch.float32), gradients(attend, torch.float64))


def test_one_graph_for_all_lengths():
    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where((i >= j) & (i - j < 32), score, -float("inf")))

    call = compiled(attend)
    with torch.no_grad(), collect_records() as records:
        for length in (40, 77, 130, 513):
            given = tensors(length, *3 * [(1, 2, length, 16)])
            for x in given:
                torch._dynamo.mark_dynamic(x, 2)
            as_exact([call(*given)], [attend(*given)], [attend(*(x.double() for x in given))])
    assert len(records) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_one_kernel_that_leaves_masked_keys_out(dtype):
    """As of attention that was written by hand: keys are taken in blocks, and keys behind the mask are not read, so that their NaN does not show."""
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 1024, device="cpu")

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (j - i) * 0.01, block_mask=block_mask, enable_gqa=True)

    q, k, v = tensors(0, (1, 4, 256, 64), (1, 2, 1024, 64), (1, 2, 1024, 64), dtype=dtype)
    with torch.no_grad(), collect_records() as records:
        eager, exact = attend(q, k, v), attend(q.double(), k.double(), v.double())
        k[:, :, 512:] = v[:, :, 512:] = float("nan")
        as_exact([compiled(attend)(q, k, v)], [eager], [exact])
    (kernel,) = json.loads(records[-1].program.describe())["kernels"]
    assert kernel["schedule"].startswith("online")
