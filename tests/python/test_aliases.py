"""Inputs that share memory of which one is written: eager mode's answer, or a clear error with `strict`."""

from __future__ import annotations

import warnings

import pytest
import torch
from engines import same

from deplo.errors import FallbackWarning, UnsupportedError

_C = pytest.importorskip("deplo._C")


def write_first(x, y):
    x.add_(1)
    return x * y


def write_second(x, y):
    y.mul_(2)
    return x + y, x * x


def write_both(x, y):
    x.mul_(3)
    y.add_(x.detach())
    return x * y


def of_numpy(base):
    """The same memory in a storage that PyTorch takes for another one."""
    return torch.from_numpy(base.detach().numpy())


# Name -> two inputs, views of a base of twelve elements.
PAIRS = {
    "shifted": lambda b: (b[:-2], b[2:]),
    "a view": lambda b: (b, b.view(-1)),
    "windows": lambda b: (b[:6], b[2:8]),
    "transposed": lambda b: (b[:9].view(3, 3), b[:9].view(3, 3).t()),
    "rows of two layouts": lambda b: (b.view(3, 4), b.view(4, 3).t()),
    "one element": lambda b: (b[:4], b[3:4]),
    "detached": lambda b: (b, b.detach()),
    "numpy": lambda b: (b, of_numpy(b)),
    "numpy, shifted": lambda b: (b[2:], of_numpy(b)[:-2]),
    "another storage": lambda b: (b, torch.empty(0).set_(b.detach().untyped_storage(), 0, (12,), (1,))),
    "bits": lambda b: (b, b.view(torch.int32)),
    "expanded, not written": lambda b: (b[:1].expand(5), b[3:8]),
    "halves": lambda b: (b[:6], b[6:]),
    "interleaved": lambda b: (b[::2], b[1::2]),
    "columns": lambda b: (b.view(4, 3)[:, :1], b.view(4, 3)[:, 1:]),
}
APART = ("expanded, not written", "halves", "interleaved", "columns")  # no element in common


def outcome(call, make, grad):
    """What a call gives, what it leaves in memory, and the gradient."""
    leaf = (torch.arange(12.0) / 4).requires_grad_(grad)
    base = leaf * 1 if grad else leaf
    args = make(base)
    try:
        out = call(*args)
    except UnsupportedError:
        raise
    except RuntimeError as error:  # eager mode's, of writes that overlap in one operator
        return str(error)[:60]
    outs = out if isinstance(out, tuple) else (out,)
    left = [x.detach().clone() for x in (*outs, base, *args)]
    if grad:
        weights = [torch.arange(1.0, 1 + o.numel()).view(o.shape) for o in outs]
        sum((o * w).sum() for o, w in zip(outs, weights)).backward()
        left.append(leaf.grad)
    return left


def disjoint(make, grad):
    """Inputs of the same kinds in memory of their own."""
    return [
        x.clone().requires_grad_() * 1 if grad and x.is_floating_point() and x.requires_grad else x.clone()
        for x in make(torch.arange(12.0).requires_grad_(grad) * 1)
    ]


def answered() -> list[tuple[str, object, bool]]:
    """What eager mode does without an error, or bits that are no numbers: an operator may not write an expanded tensor, say."""
    cases = []
    for name, make in PAIRS.items():
        for fn in (write_first, write_second, write_both):
            for grad in (False, True):
                undefined = name == "bits" and fn is not write_first or name.startswith("expanded") and fn is not write_second
                with torch.set_grad_enabled(grad):
                    if not undefined and not isinstance(outcome(fn, make, grad), str):
                        cases.append((name, fn, grad))
    return cases


ANSWERED = answered()


def test_eager_mode_answers_most_pairs():
    assert len(ANSWERED) >= len(PAIRS) * 6 - 18 and {name for name, _, _ in ANSWERED} == set(PAIRS)


@pytest.mark.parametrize(
    ("name", "fn", "grad"), ANSWERED, ids=[f"{name}-{fn.__name__}-{'grad' if grad else 'inference'}" for name, fn, grad in ANSWERED]
)
def test_shared_memory_gives_eager_s_answer(name, fn, grad):
    make = PAIRS[name]
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        wanted = outcome(fn, make, grad)
        for after in ("nothing", "disjoint inputs"):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend="deplo", dynamic=False)
            if after == "disjoint inputs":
                compiled(*disjoint(make, grad))
            for _ in range(2):
                same(outcome(compiled, make, grad), wanted)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
def test_one_warning_says_which_inputs(grad):
    torch._dynamo.reset()
    compiled = torch.compile(write_first, backend="deplo")
    with torch.set_grad_enabled(grad), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(*disjoint(PAIRS["shifted"], grad))
        assert not caught
        for _ in range(3):
            outcome(compiled, PAIRS["numpy, shifted"], grad)
    assert [str(w.message) for w in caught] == ["a call of a graph runs in eager mode: input x, which it writes, shares memory with input y"]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
@pytest.mark.parametrize("name", ["numpy", "bits"])
def test_strict_raises(name, grad):
    torch._dynamo.reset()
    compiled = torch.compile(write_first, backend="deplo", options={"strict": True})
    with torch.set_grad_enabled(grad), pytest.raises(UnsupportedError, match="share(s)? memory"):
        outcome(compiled, PAIRS[name], grad)


@pytest.mark.parametrize("name", APART)
def test_memory_side_by_side_is_compiled(name):
    torch._dynamo.reset()
    compiled = torch.compile(write_second, backend="deplo", options={"strict": True})
    with torch.no_grad():
        for _ in range(2):
            same(outcome(compiled, PAIRS[name], False), outcome(write_second, PAIRS[name], False))


def test_running_statistics_are_written_beside_parameters():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, other = (torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU()) for _ in range(2))
    other.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="deplo", options={"strict": True})
    x = torch.randn(4, 2, 6, 6)
    for _ in range(2):
        same(compiled(x), other(x), scale=64)
        same(dict(model.named_buffers()), dict(other.named_buffers()), scale=64)
    model[1].running_mean.data = other[1].running_mean = other[1].weight.data  # a buffer that is a parameter's memory
    with pytest.raises(UnsupportedError, match="shares memory"):
        model[1].running_mean = model[1].weight.data
        compiled(x)


def test_pairs_are_found_among_many():
    base = torch.arange(40.0)
    views = [base[4 * i : 4 * i + 4] for i in range(10)]
    written = [i == 3 for i in range(13)]
    check = _C.AliasCheck(written, [0] * 13)
    assert check((*views, 7, torch.empty(0), None)) is None
    assert check((*views, 7, base[13:14], base)) in ((3, 11), (3, 12))
    assert check((*views, base[:12], base[16:], base[20:].view(torch.complex64))) is None
    assert _C.AliasCheck(written, [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0])((*views, 7, base[13:14], base[20:])) is None
    assert _C.AliasCheck([True, False], [0, 0])((base.view(torch.complex64), base[3:5])) == (0, 1)
