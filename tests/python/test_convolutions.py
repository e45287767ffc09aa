"""Convolutions of many shapes against float64: images that fill vectors and images that don't, so that lanes lie along pixels or along weights."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F
from engines import Compiler, feature_sets
from torch import nn

import deplo
from deplo.backend import collect_records
from deplo.capture import capture
from deplo.options import read_options

_C = pytest.importorskip("deplo._C")

# batch, channels, filters, height, width, kernel, stride, padding, dilation, groups
SHAPES = [
    (1, 32, 64, 7, 7, 3, 1, 1, 1, 1),
    (1, 64, 40, 7, 7, 1, 1, 0, 1, 1),
    (2, 24, 48, 14, 14, 3, 1, 1, 1, 1),
    (1, 16, 33, 14, 14, 3, 2, 1, 1, 1),
    (3, 16, 50, 5, 9, 3, 1, 2, 2, 1),
    (1, 20, 64, 9, 5, (3, 1), 1, (1, 0), 1, 1),
    (1, 48, 96, 7, 7, 3, 1, 1, 1, 2),
    (1, 300, 64, 7, 7, 3, 1, 1, 1, 1),
    (1, 16, 16, 28, 28, 3, 1, 1, 1, 1),
    (1, 8, 72, 17, 19, 5, 3, 2, 1, 1),
    (2, 24, 48, 13, 27, 3, 2, 1, 1, 1),
    (1, 40, 64, 31, 45, 3, 1, 1, 1, 1),
    (1, 8, 40, 11, 23, 3, 2, 4, 4, 1),
    (1, 8, 40, 12, 23, 2, 3, 1, 2, 1),
    (1, 3, 32, 40, 41, 7, 2, 3, 1, 1),
    (2, 30, 20, 9, 3, (1, 4), 1, (0, 2), 1, 1),
]


class Convolution(torch.nn.Module):
    def __init__(self, shape: tuple) -> None:
        super().__init__()
        _, channels, filters, _, _, kernel, stride, padding, dilation, groups = shape
        self.conv = torch.nn.Conv2d(channels, filters, kernel, stride, padding, dilation, groups)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(x) + residual)


def prepared(shape: tuple, memory_format: torch.memory_format) -> tuple[Convolution, list[torch.Tensor]]:
    torch.manual_seed(0)
    module = Convolution(shape).requires_grad_(False)
    x = torch.randn(shape[0], shape[1], shape[3], shape[4]).to(memory_format=memory_format)
    return module, [x, torch.randn_like(module.conv(x))]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, memory_format):
    module, inputs = prepared(shape, memory_format)
    wanted = module.double()(*[x.double() for x in inputs])
    module = module.float()
    eager = module(*inputs)
    got = Compiler()(module)(*inputs)
    assert got.stride() == eager.stride()
    # Terms of the sums are of the size of one: their rounding errors are those of the sum of absolute values.
    terms = F.conv2d(inputs[0].abs().double(), module.conv.weight.abs().double(), None, *shape[6:]).max()
    assert float((got - wanted).abs().max()) <= float((eager - wanted).abs().max()) + 2 * torch.finfo(torch.float32).eps * float(terms)


def schedule_of(shape: tuple, memory_format: torch.memory_format, features: str) -> str:
    """The schedule of the convolution, which must come out the same when it is given back."""
    module, inputs = prepared(shape, memory_format)
    (record,) = capture(module, inputs)
    options = read_options(options={"features": features}).to_json()
    text = _C.lower(record.torch_ir, "tile", options)
    ((name, schedule),) = re.findall(r"schedule @(k0\w*): (contraction .*)", text)
    assert _C.lower(record.torch_ir, "tile", json.dumps(json.loads(options) | {"schedule": {name: schedule}})) == text
    return schedule


@pytest.mark.parametrize("features", [name for name in feature_sets() if name != "sse"])
def test_images_are_packed_once_under_overlapping_windows(features):
    for memory_format in (torch.contiguous_format, torch.channels_last):
        windows = [shape for shape in SHAPES if "windows" in schedule_of(shape, memory_format, features)]
        pointwise = SHAPES[1]
        assert pointwise not in windows
        assert len(windows) >= len(SHAPES) // 2, windows


def test_lanes_lie_along_the_weights_of_small_images():
    pointwise = [(1, 64, 256, size, size, 1, 1, 0, 1, 1) for size in (7, 64)]
    small, large = (re.findall(r"vectorize\((\S+)\)", schedule_of(shape, torch.contiguous_format, "avx2")) for shape in pointwise)
    assert small != large


FORMS = {
    "grouped": nn.Conv2d(32, 48, 3, padding=1, groups=4),
    "depthwise": nn.Conv2d(32, 32, 3, padding=1, groups=32),
    "strided": nn.Conv2d(32, 48, 3, stride=2, padding=1),
    "dilated": nn.Conv2d(32, 48, 3, padding=2, dilation=2),
    "pointwise": nn.Conv2d(32, 48, 1),
    "transposed": nn.ConvTranspose2d(32, 48, 3, padding=1),
    "transposed, grouped": nn.ConvTranspose2d(32, 48, 4, stride=2, groups=2),
    "of one dimension": nn.Conv1d(32, 48, 3, padding=1, groups=2),
    "of three": nn.Conv3d(16, 24, 3, padding=1, groups=2),
}


FORMATS = {1: [torch.contiguous_format], 2: [torch.contiguous_format, torch.channels_last], 3: [torch.contiguous_format, torch.channels_last_3d]}


# Lanes along a row of an image would store the phases of a stride one by one: a kernel of its own puts them together.
APART = {("transposed, grouped", torch.contiguous_format)}


@pytest.mark.parametrize(
    ("form", "memory_format"),
    [(name, memory_format) for name, conv in FORMS.items() for memory_format in FORMATS[conv.weight.dim() - 2] if (name, memory_format) not in APART],
    ids=str,
)
def test_one_kernel_with_bias_and_activation_and_no_copy_of_the_image(form, memory_format):
    conv = FORMS[form].requires_grad_(False)
    dims = conv.weight.dim() - 2
    x = torch.randn(2, conv.in_channels, *[13] * dims, generator=torch.Generator().manual_seed(0))
    x = x.to(memory_format=memory_format)
    (graph,) = deplo.explain(nn.Sequential(conv, nn.ReLU()), x, options={"strict": True}).graphs
    assert [k.calls for k in graph.kernels if not k.once] == [1]
    assert graph.description["memory"]["temporaries"] == 0


# The contractions of all phases, and a kernel that puts their results together with bias and activation.
STRIDED = {
    "phases of one and two taps a dimension": (nn.ConvTranspose2d(32, 48, 3, stride=2, padding=1, output_padding=1), 4 + 1),
    "equal phases": (nn.ConvTranspose2d(32, 48, 4, stride=2, padding=1, groups=2), 1 + 1),
    "equal phases without padding": (nn.ConvTranspose2d(32, 48, 4, stride=2, groups=2), 1 + 1),
}


@pytest.mark.parametrize(
    ("form", "memory_format"),
    [(form, fmt) for form in STRIDED for fmt in FORMATS[2] if (form, fmt) != ("equal phases without padding", torch.channels_last)],  # one kernel
    ids=str,
)
def test_phases_of_strided_transposed_convolutions_keep_their_results_only(form, memory_format):
    conv, kernels = STRIDED[form]
    conv = conv.requires_grad_(False)
    x = torch.randn(2, conv.in_channels, 13, 13, generator=torch.Generator().manual_seed(0)).to(memory_format=memory_format)
    (graph,) = deplo.explain(nn.Sequential(conv, nn.ReLU()), x, options={"strict": True}).graphs
    assert [k.calls for k in graph.kernels if not k.once] == [1] * kernels
    # With padding, a phase has an output more in each dimension than the 13 that are read.
    assert graph.description["memory"]["arena_bytes"] <= 2 * 48 * 4 * (13 + 1) ** 2 * 4


# spatial sizes, kernel, stride, padding, output_padding, dilation, groups; channels are 4 a group, filters 3
TRANSPOSED = [
    ((9,), 3, 2, 1, 1, 1, 1),
    ((9,), 2, 2, 0, 0, 1, 2),
    ((9,), 6, 3, 2, 1, 1, 1),
    ((9,), 7, 4, 1, 2, 1, 1),
    ((9,), 1, 3, 0, 2, 1, 1),
    ((9,), 4, 4, 1, 0, 3, 2),
    ((9,), 5, 6, 3, 1, 4, 1),
    ((9,), 3, 2, 0, 1, 2, 1),
    ((5, 7), 4, 2, 1, 0, 1, 1),
    ((5, 7), (3, 2), (2, 3), (0, 1), (1, 0), (1, 2), 2),
    ((5, 7), 3, 1, 1, 0, 2, 1),
    ((3, 4, 2), 3, 2, 1, 1, 1, 1),
]


def transposed(x, weight, bias, case):
    """The transposed convolution of TRANSPOSED's case, of as many dimensions as x has."""
    _, _, stride, padding, output_padding, dilation, groups = case
    function = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d][x.dim() - 3]
    return function(x, weight, bias, stride, padding, output_padding, groups, dilation)


def transposed_operands(case) -> list[torch.Tensor]:
    sizes, kernel, groups = case[0], case[1], case[-1]
    window = kernel if isinstance(kernel, tuple) else (kernel,) * len(sizes)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((2, 4 * groups, *sizes), (4 * groups, 3, *window), (3 * groups,))]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("case", TRANSPOSED, ids=str)
def test_transposed_in_phases_against_float64(case, dynamic):
    operands = [x.requires_grad_() for x in transposed_operands(case)]
    doubles = [x.detach().double().requires_grad_() for x in operands]
    function = torch.compile(lambda *operands: transposed(*operands, case), backend="deplo", options={"strict": True}, dynamic=dynamic)
    seed = torch.randn(transposed(*operands, case).shape, generator=torch.Generator().manual_seed(1))
    results = []
    for call, inputs in ((function, operands), (lambda *x: transposed(*x, case), operands), (lambda *x: transposed(*x, case), doubles)):
        y = call(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, seed.to(y.dtype))])
    for got, eager, wanted in zip(*results, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
        # At most 3 * 4 * 27 terms of about one: twice the rounding of their sum beside eager mode's own error.
        assert (got - wanted).abs().max() <= (eager - wanted).abs().max() + 2 * torch.finfo(torch.float32).eps * wanted.abs().max()


@pytest.mark.parametrize("case", [case for case in TRANSPOSED if case[2] != 1], ids=str)
def test_no_product_with_a_zero_between_inputs(case):
    """An infinite weight of the last tap reaches the outputs of this tap's phase, and no other."""
    x, weight, bias = transposed_operands(case)
    x = x.abs() + 1
    weight.flatten(2)[:, :, -1] = torch.inf
    wanted = transposed(x.double(), weight.double().where(weight < torch.inf, 0), bias.double(), case)
    phase = torch.ones(wanted.shape[2:], dtype=torch.bool)
    for d, (size, taps) in enumerate(zip(phase.shape, weight.shape[2:], strict=True)):
        stride, padding, dilation = (n if isinstance(n, int) else n[d] for n in (case[2], case[3], case[5]))
        along = (torch.arange(size) + padding - (taps - 1) * dilation) % stride == 0
        phase &= along.view(-1, *[1] * (phase.dim() - d - 1))
    got = torch.compile(lambda *operands: transposed(*operands, case), backend="deplo", options={"strict": True}, dynamic=False)(x, weight, bias)
    assert bool((~phase).any())
    assert torch.allclose(got[..., ~phase].double(), wanted[..., ~phase], rtol=1e-5, atol=1e-5)
    reached = transposed(torch.ones_like(x), (weight == torch.inf).float(), None, case) > 0
    assert bool((got[reached] == torch.inf).all())


# Of sizes at which all windows of the input, side by side, take megabytes.
LARGE = [
    (1, 64, 64, 56, 56, 3, 1, 1, 1, 1),
    (1, 32, 32, 112, 112, 3, 1, 1, 1, 1),
    (4, 16, 32, 64, 64, 5, 1, 2, 1, 1),
    (1, 3, 64, 224, 224, 7, 2, 3, 1, 1),
    (1, 64, 128, 112, 112, 3, 2, 1, 1, 1),
    (1, 32, 32, 64, 64, 3, 1, 4, 4, 1),
    (2, 32, 64, 48, 48, 3, 1, 1, 1, 4),
    (1, 128, 128, 28, 28, 3, 1, 1, 1, 1),
]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_no_copy_of_all_windows(shape, memory_format):
    """im2col copies each element of the input into every window that it lies in; temporaries and a thread's scratch memory stay far below."""
    module, inputs = prepared(shape, memory_format)
    torch._dynamo.reset()
    with torch.no_grad(), collect_records() as records:
        result = torch.compile(module, backend="deplo", options={"strict": True})(*inputs)
    memory = json.loads(records[0].program.describe())["memory"]
    windows = shape[0] * shape[1] * shape[5] ** 2 * result.shape[2] * result.shape[3] * 4
    assert memory["arena_bytes"] + memory["scratch_bytes_per_thread"] <= windows / 10
    core_cache = max(json.loads(_C.target("{}"))["l2_bytes"], 1 << 19)
    assert memory["scratch_bytes_per_thread"] <= core_cache / 2  # whatever the image


def test_scratch_memory_does_not_grow_with_the_image():
    sizes = []
    for side in (28, 56, 112):
        module, inputs = prepared((1, 32, 32, side, side, 3, 1, 1, 1, 1), torch.contiguous_format)
        torch._dynamo.reset()
        with torch.no_grad(), collect_records() as records:
            torch.compile(module, backend="deplo", options={"strict": True}, dynamic=False)(*inputs)
        memory = json.loads(records[0].program.describe())["memory"]
        sizes.append(memory["arena_bytes"] + memory["scratch_bytes_per_thread"])
    assert sizes[2] <= 2 * sizes[0]  # the image is sixteen times as large


def test_eager_mode_refuses_output_padding_of_a_stride():
    x, weight = torch.randn(1, 4, 5), torch.randn(4, 2, 3)

    def padded(x, weight):
        return F.conv_transpose1d(x, weight, stride=2, output_padding=2)

    for call in (padded, torch.compile(padded, backend="deplo")):
        with pytest.raises(RuntimeError, match="output padding must be smaller than either stride or dilation"):
            call(x, weight)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layer", [nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(3, 24, (3, 7), 2, dilation=2, padding=(3, 1))], ids=["3x3", "dilated"])
def test_gradients_of_no_images_are_zeros(layer, dynamic):
    torch._dynamo.reset()
    x = torch.randn(0, layer.in_channels, 32, 32, requires_grad=True)
    layer.zero_grad()
    Compiler()(layer, dynamic=dynamic)(x).sum().backward()
    assert x.grad.shape == x.shape and all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())
