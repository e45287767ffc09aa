"""deplo/formulas.py: each formula beside the ATen call that it stands for, in float64's judgement; nothing stays in ATen."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from engines import needs_core
from torch import nn

pytestmark = needs_core

ALLOWED = {"strict": True, "allow_library": []}


def compiled(fn, dynamic=False):
    torch._dynamo.reset()
    return torch.compile(fn, backend="deplo", dynamic=dynamic, fullgraph=True, options=ALLOWED)


def assert_same(fn, *args):
    """Equal to eager mode, strides too."""
    for got, expected in zip(torch.utils._pytree.tree_leaves(compiled(fn)(*args)), torch.utils._pytree.tree_leaves(fn(*args)), strict=True):
        assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(got.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))


def assert_as_exact(got, expected, exact, slack=4, largest=0.0):
    """No further from float64 than eager mode and a few ulp of the largest number, or of the `largest` term that it is a sum of."""
    assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride())
    if not exact.numel():
        return
    ulp = torch.finfo(got.dtype).eps * max(largest, exact.abs().max().item())
    assert (got.double() - exact).abs().max() <= (expected.double() - exact).abs().max() + slack * ulp


WINDOWS = [torch.hann_window, torch.hamming_window, torch.blackman_window, torch.bartlett_window, torch.kaiser_window]


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_windows(window, dtype):
    kinds = list(itertools.product((0, 1, 2, 5, 16, 33), (True, False)))

    def make(x):
        return [window(length, periodic=periodic, dtype=dtype) + x for length, periodic in kinds]

    zero = torch.zeros((), dtype=dtype)
    for got, expected, (length, periodic) in zip(compiled(make)(zero), make(zero), kinds, strict=True):
        assert_as_exact(got, expected, window(length, periodic=periodic, dtype=torch.float64), largest=1.0)


def test_parameters_and_default_dtype_of_windows():
    zero = torch.zeros(())
    for fn in (
        lambda x: torch.hamming_window(9, True, 0.6, 0.3) + x,
        lambda x: torch.hamming_window(9, False, 0.6) + x,
        lambda x: torch.kaiser_window(9, False, 5.0) + x,
        lambda x: torch.hann_window(9) * (x + 1),
    ):
        assert_as_exact(compiled(fn)(zero), fn(zero), fn(zero).double())


MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": torch.tensor([[False] * 7, [False] * 4 + [True] * 3])},
    "causal": {"mask": torch.ones(7, 7, dtype=torch.bool).triu(1), "is_causal": True},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
@pytest.mark.parametrize(("activation", "dtype"), [("relu", torch.float32), ("gelu", torch.float32), ("gelu", torch.bfloat16)], ids=str)
def test_transformer_encoder_without_gradients(masks, norm_first, activation, dtype):
    """Eager mode runs each layer as one call, aten._transformer_encoder_layer_fwd; padded rows are nobody's."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first, activation=activation)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().to(dtype)
    exact_net, x, given = copy.deepcopy(net).double(), torch.randn(2, 7, 32, dtype=dtype), MASKS[masks]
    kept = ~given.get("src_key_padding_mask", torch.zeros(2, 7, dtype=torch.bool))
    with torch.no_grad():
        assert "_transformer_encoder_layer_fwd" in calls(lambda: net(x, **given))
        step = compiled(net)
        got = step(x, **given)
        assert not any(name in calls(lambda: step(x, **given)) for name in ("addmm", "_softmax", "_transformer_encoder_layer_fwd", "linear"))
        assert_as_exact(got[kept], net(x, **given)[kept], exact_net(x.double(), **given)[kept])


def test_transformer_encoder_of_symbolic_length():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1, enable_nested_tensor=False).eval()
    with torch.inference_mode():
        step = compiled(net, dynamic=True)
        for length in (2, 9, 33):
            x = torch.randn(3, length, 32)
            torch.testing.assert_close(step(x), net(x), atol=2e-6, rtol=0)


def calls(fn):
    """Names of the ATen calls of fn()."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fn()
    return {event.key.removeprefix("aten::") for event in profile.key_averages()}


@pytest.mark.parametrize("mask_type", [0, 1, 2])
def test_masked_softmax(mask_type):
    torch.manual_seed(mask_type)
    x, mask = torch.randn(2, 3, 4, 4), torch.rand(2, 3, 4, 4) < 0.4
    mask[0, 0, 1] = True  # NaN where all is marked
    mask = {0: mask[0, 0], 1: mask[:, 0, 0], 2: mask}[mask_type]

    def fn(x, mask):
        return torch._masked_softmax(x, mask, 3, mask_type)

    torch.testing.assert_close(compiled(fn)(x, mask), fn(x, mask), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_frexp(dtype):
    info = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1, -1, 0.5, 3, 1e-3, float("inf"), -float("inf"), float("nan")]
    numbers += [info.max, info.min, info.tiny, info.tiny / 4, -info.tiny / 3, info.smallest_normal * info.eps]
    assert_same(torch.frexp, torch.tensor(numbers, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("bins", "low", "high"), [(10, -1, 1), (7, -2, 3.5), (100, 0, 1), (3, -0.1, 0.2)])
def test_histc(dtype, bins, low, high):
    torch.manual_seed(bins)
    x = torch.cat([torch.randn(1000, dtype=dtype), torch.tensor([low, high, float("nan"), float("inf"), -float("inf")], dtype=dtype)])
    assert_same(lambda x: torch.histc(x, bins, low, high), x)


def test_numbers_beside_tensors():
    whole, real = torch.randint(-5, 5, (3, 4)), torch.randn(3, 4)
    whole[0, 0] = 2
    for fn, x in (
        (lambda x: torch.isin(x, 2), whole),
        (lambda x: torch.isin(x, 2, invert=True), whole),
        (lambda x: torch.isin(2, x), whole),
        (lambda x: torch.isin(9, x, invert=True), whole),
        (lambda x: torch.isin(x, 0.5), real),
        (lambda x: 100 >> x.abs(), whole),
        (lambda x: -100 >> x.abs(), whole.to(torch.int32)),
        (lambda x: 100 << x.abs(), whole.to(torch.int16)),
    ):
        assert_same(fn, x)


@pytest.mark.parametrize(
    ("x", "y"),
    [(torch.linspace(0, 2, 12).view(3, 4), 2.0), (0, torch.tensor([-1.0, 0.5, float("nan")])), (2, torch.arange(3))],
    ids=["number last", "number first", "whole numbers"],
)
def test_xlog1py_of_a_number(x, y):
    got, expected = compiled(torch.special.xlog1py)(x, y), torch.special.xlog1py(x, y)
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bilinear(dtype):
    torch.manual_seed(0)
    net = nn.Bilinear(20, 30, 40).to(dtype)
    a, b = (torch.randn(17, n, dtype=dtype, requires_grad=True) for n in (20, 30))
    exact = F.bilinear(*(t.detach().double() for t in (a, b, net.weight, net.bias)))
    got, expected = compiled(net)(a, b), net(a, b)
    assert_as_exact(got.detach(), expected.detach(), exact)
    inputs = (a, b, *net.parameters())
    for one, other in zip(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, atol=20 * torch.finfo(dtype).eps * other.abs().max().item(), rtol=0)


@pytest.mark.parametrize("summed", [[], [0], [1, 2], [0, 1, 2]], ids=str)
def test_trilinear(summed):
    x, y, z = torch.randn(4, 5), torch.randn(4, 6), torch.randn(5, 6)
    args = ([2], [1], [0], summed)
    exact = torch._trilinear(x.double(), y.double(), z.double(), *args)
    assert_as_exact(compiled(torch._trilinear)(x, y, z, *args), torch._trilinear(x, y, z, *args), exact)


def test_convolution_of_time_batch_channels():
    x, weight, bias = torch.randn(9, 2, 4), torch.randn(3, 4, 5), torch.randn(5)
    exact = torch.conv_tbc(x.double(), weight.double(), bias.double(), 1)
    assert_as_exact(compiled(lambda *args: torch.conv_tbc(*args, 1))(x, weight, bias), torch.conv_tbc(x, weight, bias, 1), exact)


def test_numbers_and_masks_that_do_not_fit_are_left_to_aten():
    """Eager mode wraps the numbers around, and refuses the mask."""
    x = torch.arange(40, 50, dtype=torch.uint8)
    for fn in (lambda x: torch.isin(x, 300), lambda x: torch.isin(300, x)):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(fn, backend="deplo", dynamic=False)(x), fn(x))
    scores, mask = torch.randn(2, 3, 4, 4), torch.zeros(1, 3, 4, 4, dtype=torch.bool)
    for fn in (lambda *args: torch._masked_softmax(*args, 3, 2), torch.compile(lambda *args: torch._masked_softmax(*args, 3, 2), backend="deplo")):
        with pytest.raises(RuntimeError):
            fn(scores, mask)
