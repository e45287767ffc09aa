"""bfloat16 products of two operands that a call makes: pairs of k, in vectors or in a matrix unit, against float64 and eager mode."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F
from engines import Compiler, feature_sets, same

from deplo.capture import capture
from deplo.options import read_options

_C = pytest.importorskip("deplo._C")

# "avx512" leaves the matrix unit out; where a CPU has neither, operands are widened.
FEATURES = ["native", *[name for name in feature_sets() if name != "sse"]]


# batch, rows, k, columns: edges of registers, of blocks of k and of tiles; odd and short k
SIZES = [(3, 64, 64, 64), (2, 33, 65, 47), (1, 300, 600, 290), (2, 17, 1, 40), (2, 40, 31, 33), (1, 5, 1089, 70), (4, 9, 514, 16)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_any_layout(size, features):
    batch, m, k, n = size
    torch._dynamo.reset()
    compiled = Compiler()(lambda a, b: torch.bmm(a, b) * 0.5, {"features": features, "guard": True}, dynamic=False)
    for left in (numbers(batch, m, k), transposed(numbers(batch, m, k))):
        for right in (numbers(batch, k, n, seed=1), transposed(numbers(batch, k, n, seed=1))):
            same(compiled(left, right), torch.bmm(left, right) * 0.5, exact=torch.bmm(left.double(), right.double()) * 0.5)


@pytest.mark.parametrize("features", FEATURES)
def test_products_of_any_size(features):
    torch._dynamo.reset()
    compiled = Compiler()(lambda a, b: torch.bmm(a, b), {"features": features, "guard": True}, dynamic=True)
    for batch, m, k, n in SIZES[:5]:
        a, b = numbers(batch, m, k), transposed(numbers(batch, k, n, seed=1))
        same(compiled(a, b), torch.bmm(a, b), exact=torch.bmm(a.double(), b.double()))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("k", [31, 65, 600])
def test_nothing_leaks_from_neighbours_and_padding(k, features):
    """Rows and columns of infinities and NaN stay apart from others, and steps of k that complete a pair or a block are zeros on both sides."""
    a, b = numbers(2, 37, k), transposed(numbers(2, k, 50, seed=1))
    a[0, 3], a[1, 36], b[0, :, 49], b[1, :, 7] = torch.inf, torch.nan, -torch.inf, torch.nan
    torch._dynamo.reset()
    got = Compiler()(torch.bmm, {"features": features, "guard": True})(a, b)
    assert torch.equal(got.isfinite(), torch.bmm(a.double(), b.double()).isfinite())
    wanted = torch.bmm(a.double(), b.double())
    assert torch.equal(got.isnan(), wanted.isnan())
    finite = wanted.isfinite()
    same(got[finite], torch.bmm(a, b)[finite], exact=wanted[finite])


# batch, channels, filters, height, width, kernel, stride, padding, groups
IMAGES = [
    (1, 64, 64, 14, 14, 3, 1, 1, 1),
    (2, 16, 33, 13, 27, 3, 2, 1, 1),
    (2, 64, 128, 28, 28, 1, 1, 0, 1),
    (1, 64, 48, 15, 9, 1, 2, 0, 1),
    (1, 3, 32, 40, 41, 7, 2, 3, 1),
    (1, 48, 96, 7, 7, 3, 1, 1, 2),
    (2, 131, 24, 9, 8, 5, 1, 2, 1),
    (1, 1, 40, 12, 30, 3, 1, 0, 1),
]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_convolutions_and_their_gradients(shape, memory_format, features):
    batch, channels, filters, height, width, kernel, stride, padding, groups = shape
    x = numbers(batch, channels, height, width).to(memory_format=memory_format)
    w = numbers(filters, channels // groups, kernel, kernel, seed=1).to(memory_format=memory_format)

    def gradients(x, w, f):
        leaves = [t.detach().requires_grad_(True) for t in (x, w)]
        y = f(*leaves)
        return [y, *torch.autograd.grad((y * y).sum(), leaves)]

    def convolution(x, w):
        return F.conv2d(x, w, None, stride, padding, 1, groups)

    torch._dynamo.reset()
    compiled = Compiler()(convolution, {"features": features, "guard": True})
    same(gradients(x, w, compiled), gradients(x, w, convolution), strides=False, exact=gradients(x.double(), w.double(), convolution))
    frozen = Compiler()(lambda x: convolution(x, weights), {"features": features, "guard": True})
    weights = w
    same(frozen(x), convolution(x, w), strides=False, exact=convolution(x.double(), w.double()))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("channels", [3, 64, 131])
def test_windows_take_channels_in_pairs(channels, features):
    """Images of three axes, dilated windows, several blocks of channels; what completes the last pair is zeros on both sides."""
    x, w = numbers(1, channels, 6, 19, 20), numbers(24, channels, 2, 3, 3, seed=1) * 0.1
    x[0, channels - 1, 2, 3, 4], x[0, 0, 5, 18, 19], w[7, channels - 1, 1, 2, 2] = torch.inf, torch.nan, -torch.inf

    def convolution(x, w):
        return F.conv3d(x, w, dilation=(1, 2, 3))

    weights = torch.nn.Parameter(w)
    torch._dynamo.reset()
    with torch.no_grad():
        got = Compiler()(lambda x: convolution(x, weights), {"features": features, "guard": True})(x)
        wanted = convolution(x.double(), w.double())
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf())
        finite = wanted.isfinite()
        same(got[finite], convolution(x, w)[finite], exact=wanted[finite])


def schedules(f, inputs, features: str) -> dict[str, str]:
    """The contractions' schedules, which must come out the same when they are given back."""
    (record,) = capture(f, inputs)
    options = read_options(options={"features": features}).to_json()
    text = _C.lower(record.torch_ir, "tile", options)
    found = dict(re.findall(r"schedule @(\w+): (contraction .*)", text))
    assert _C.lower(record.torch_ir, "tile", json.dumps(json.loads(options) | {"schedule": found})) == text
    return found


def cpu_has(feature: str) -> bool:
    return feature in json.loads(_C.env(""))["cpu features"]


@pytest.mark.parametrize(("features", "needs", "steps"), [("avx512", "avx512bf16", 2), ("native", "amx-bf16", 32)])
@pytest.mark.parametrize("size", [(3, 128, 64, 64), (2, 130, 333, 47)], ids=str)
def test_products_take_the_instructions_of_the_cpu(size, features, needs, steps):
    if not cpu_has(needs):
        pytest.skip(f"this CPU has no {needs}")
    batch, m, k, n = size
    a, b = numbers(batch, m, k), numbers(batch, k, n)
    for f, inputs in ((torch.bmm, [a, b]), (torch.bmm, [a, transposed(b)]), (torch.bmm, [transposed(a), b])):
        (schedule,) = schedules(f, inputs, features).values()
        assert re.search(rf" dot\(\S+={steps}\)", schedule), schedule


@pytest.mark.skipif(not cpu_has("avx512bf16"), reason="no bf16 dot products")
def test_windows_take_the_instructions_of_the_cpu():
    convolution = torch.nn.Conv2d(48, 64, 5, padding=2, dtype=torch.bfloat16)
    with torch.no_grad():
        (schedule,) = schedules(convolution, [numbers(2, 48, 40, 40)], "avx512").values()
    assert re.search(r" dot\(\S+=2\).* windows\)", schedule), schedule
