"""Convolutions of many shapes against float64: images that fill vectors and images that don't, so that lanes lie along pixels or along weights."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F
from engines import Compiler

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


def test_lanes_lie_along_the_weights_of_small_images():
    vectors = {}
    for shape in (SHAPES[0], SHAPES[8]):
        module, inputs = prepared(shape, torch.contiguous_format)
        (record,) = capture(module, inputs)
        text = _C.lower(record.torch_ir, "tile", read_options(options={"features": "avx2"}).to_json())
        (schedule,) = re.findall(r"schedule @k0\w*: (contraction .*)", text)
        vectors[shape[3]] = re.findall(r"vectorize\((\S+)\)", schedule)
        again = json.loads(read_options(options={"features": "avx2"}).to_json()) | {"schedule": {re.findall(r"schedule @(k0\w*)", text)[0]: schedule}}
        assert _C.lower(record.torch_ir, "tile", json.dumps(again)) == text
    (small,), (large,) = vectors[7], vectors[28]
    assert small.count("*") == 0 and large != small
