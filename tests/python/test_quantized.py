"""Products of bytes, exact for every sign of the operands, size and instruction set; float8; layers that torchao quantises."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import feature_sets, packed_by_others
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import deplo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchao.quantization as torchao
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

SHAPES = ((1, 64, 40), (5, 36, 33), (37, 260, 70), (96, 1028, 48), (3, 30, 16))
UNIT_SHAPES = ((16, 64, 33), (37, 1152, 70), (300, 192, 48), (70, 9600, 40))  # whole steps of a matrix unit: some chains, and blocks of k


class Product(nn.Module):
    """rows @ weight.T in int32, by plain operators; of bytes that use their whole range."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
        self.register_buffer("weight", torch.randint(low, high, (n, k), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.int()[:, None, :] * self.weight.int()[None, :, :]).sum(-1, dtype=torch.int32)


@pytest.mark.parametrize("features", ["native", *feature_sets()])
@pytest.mark.parametrize("signs", ["i8 i8", "u8 i8", "i8 u8", "u8 u8"])
def test_products_of_bytes_are_exact(signs: str, features: str) -> None:
    torch.manual_seed(0)
    rows_dtype, weight_dtype = ({"i8": torch.int8, "u8": torch.uint8}[s] for s in signs.split())
    for m, k, n in SHAPES + (UNIT_SHAPES if features == "native" else UNIT_SHAPES[:1]):
        torch._dynamo.reset()
        layer = Product(n, k, weight_dtype)
        x = torch.randint(0, 256, (m, k), dtype=torch.uint8) if rows_dtype == torch.uint8 else torch.randint(-128, 128, (m, k), dtype=torch.int8)
        x[0] = x[0].new_tensor(255 if rows_dtype == torch.uint8 else -128)  # sums that 16 bits would not hold
        compiled = torch.compile(layer, backend="deplo", options={"strict": True, "features": features})
        wanted = x.long() @ layer.weight.long().T
        assert torch.equal(compiled(x).long(), wanted)
        layer.weight.neg_()
        assert torch.equal(compiled(x).long(), x.long() @ layer.weight.long().T)


def dynamically_quantized(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A layer in int8 whose rows are quantised in the call, each by a scale of its own."""
    step = x.abs().amax(-1, keepdim=True).clamp_min(1e-7) / 127
    rows = (x / step).round().clamp(-128, 127).to(torch.int8)
    return torch._int_mm(rows, weight.t()).to(torch.float32) * step * scale + bias


def test_a_dynamically_quantized_layer_is_bytes_from_rows_to_sums() -> None:
    torch.manual_seed(0)
    weight = torch.randint(-128, 128, (96, 256), dtype=torch.int8)
    scale, bias = torch.rand(96), torch.randn(96)
    layer = nn.Module()
    layer.forward = lambda x: dynamically_quantized(x, layer.weight, layer.scale, layer.bias)  # type: ignore[method-assign]
    for name, value in (("weight", weight), ("scale", scale), ("bias", bias)):
        layer.register_buffer(name, value)
    for rows in (20, 64):
        x = torch.randn(rows, 256)
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="deplo", options={"strict": True})
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-6, atol=1e-6)
    report = str(deplo.explain(layer, torch.randn(64, 256)))
    assert "0 library calls" in report and "packed weights 25 kB" in report  # a byte for each weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", ["native", "avx2"])
def test_weights_in_bytes_stay_bytes(dtype: torch.dtype, features: str) -> None:
    """A weight-only layer: its weights are widened a panel at a time, never as a whole."""
    torch.manual_seed(0)
    layer = nn.Module()
    layer.register_buffer("weight", torch.randint(-128, 128, (96, 256), dtype=torch.int8))
    layer.register_buffer("scale", torch.rand(96, dtype=dtype) / 100)
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight.to(x.dtype)) * layer.scale  # type: ignore[method-assign]
    before = packed_by_others()
    for rows in (1, 5, 40, 150):
        torch._dynamo.reset()
        x = torch.randn(rows, 256, dtype=dtype)
        compiled = torch.compile(layer, backend="deplo", options={"strict": True, "features": features})
        exact = x.double() @ layer.weight.double().T * layer.scale.double()
        error, theirs = ((y.double() - exact).abs().max() for y in (compiled(x), layer(x)))
        assert error <= theirs + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert deplo._C.packed_bytes() - before <= 96 * 256 + 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", ["native", "avx2"])
@pytest.mark.parametrize("group", [9, 16, 32, 128])
def test_weights_in_groups_stay_bytes(group: int, features: str, dtype: torch.dtype) -> None:
    """Scales and zero points of groups of k: panels are scaled on the fly, one row streams the bytes."""
    torch.manual_seed(0)
    depth = 288 if group == 9 else 384
    layer = nn.Module()
    layer.register_buffer("weight", torch.randint(-8, 8, (71, depth), dtype=torch.int8))
    layer.register_buffer("zero", torch.randint(-8, 8, (71, depth // group), dtype=torch.int8))
    layer.register_buffer("scale", (torch.rand(71, depth // group) / 100).to(dtype))

    def forward(x: torch.Tensor) -> torch.Tensor:
        whole = layer.weight.reshape(71, -1, group).to(dtype) - layer.zero[:, :, None].to(dtype)
        return torch.nn.functional.linear(x, (whole * layer.scale[:, :, None]).reshape(71, depth))

    layer.forward = forward  # type: ignore[method-assign]
    before = packed_by_others()
    for rows in (1, 3, 40, 150):
        torch._dynamo.reset()
        x = torch.randn(rows, depth, dtype=dtype)
        compiled = torch.compile(layer, backend="deplo", options={"strict": True, "features": features})
        for _ in range(2):
            whole = (layer.weight.double().reshape(71, -1, group) - layer.zero.double()[:, :, None]) * layer.scale.double()[:, :, None]
            exact = x.double() @ whole.reshape(71, depth).T
            error, theirs = ((y.double() - exact).abs().max() for y in (compiled(x), layer(x)))
            assert error <= theirs + 2 * torch.finfo(dtype).eps * exact.abs().max()
            layer.scale.mul_(2)  # what was packed is packed again
            layer.zero.neg_()
    # Lanes are padded to 96; each group has a zero point and a scale.
    assert deplo._C.packed_bytes() - before <= 96 * depth * (1 + (1 + dtype.itemsize) / group) + 3 * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", ["native", "avx2"])
@pytest.mark.parametrize("group", [16, 32, 256])
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8])
def test_weights_of_four_bits_are_packed_two_in_a_byte(codes: torch.dtype, group: int, features: str, dtype: torch.dtype) -> None:
    """As long as all of them are: when one is not, the layer goes back to bytes."""
    torch.manual_seed(0)
    n, depth = 128, 512
    low, high = (-8, 8) if codes == torch.int8 else (0, 16)
    layer = nn.Module()
    layer.register_buffer("weight", torch.randint(low, high, (n, depth), dtype=codes))
    layer.register_buffer("zero", torch.randint(low, high, (n, depth // group), dtype=codes))
    layer.register_buffer("scale", (torch.rand(n, depth // group) / 100).to(dtype))

    def forward(x: torch.Tensor) -> torch.Tensor:
        whole = layer.weight.reshape(n, -1, group).to(dtype) - layer.zero[:, :, None].to(dtype)
        return torch.nn.functional.linear(x, (whole * layer.scale[:, :, None]).reshape(n, depth))

    layer.forward = forward  # type: ignore[method-assign]
    zero = layer.zero.clone()
    before = packed_by_others()
    for rows in (1, 2, 5, 16):
        torch._dynamo.reset()
        x = torch.randn(rows, depth, dtype=dtype)
        compiled = torch.compile(layer, backend="deplo", dynamic=False, options={"strict": True, "features": features})
        for first, centered in ((low, False), (high - 1, True), (100, True), (low, True), (low, False)):  # the third one takes a byte
            layer.weight[3, 5] = first
            layer.zero.copy_(zero * (not centered))
            whole = (layer.weight.double().reshape(n, -1, group) - layer.zero.double()[:, :, None]) * layer.scale.double()[:, :, None]
            exact = x.double() @ whole.reshape(n, depth).T
            error, theirs = ((y.double() - exact).abs().max() for y in (compiled(x), layer(x)))
            assert error <= theirs + 2 * torch.finfo(dtype).eps * exact.abs().max()
            packed = deplo._C.packed_bytes() - before
            factors = n * depth * ((not centered) + dtype.itemsize) / group  # zero points that are 0 are not packed
            assert (packed >= n * depth) if first == 100 else (packed <= n * depth / 2 + factors + 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", ["native", "avx2"])
@pytest.mark.parametrize(("group", "codes"), [(16, torch.int8), (32, torch.uint8), (3200, torch.int8)])
@torch.no_grad()
def test_single_rows_and_many_read_one_copy_of_four_bits(codes: torch.dtype, group: int, features: str, dtype: torch.dtype) -> None:
    """A program for one row and one for any number of them, several blocks of k: the codes are packed once, and stand for the weight."""
    torch.manual_seed(0)
    n, depth = 72, 3200
    low, high = (-8, 8) if codes == torch.int8 else (0, 16)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(low, high, (n, depth), dtype=codes))
            self.register_buffer("scale", (torch.rand(n, depth // group) / 100).to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = self.weight.reshape(n, -1, group).to(dtype) * self.scale[:, :, None]
            return torch.nn.functional.linear(x, whole.reshape(n, depth))

    before, gone = packed_by_others(), deplo._C.owned_bytes()
    layer = Layer()
    eager = copy.deepcopy(layer)  # whose weight stays
    options = {"strict": True, "features": features, "weights": "own", "weight_checks": "versions"}
    one = deplo.jit(layer, options=options, dynamic=False)
    many = deplo.jit(layer, options=options)
    panels = -(-n // 64) * 64
    for step, first in enumerate((low, high - 1, 100, low)):  # the third one takes a byte
        for each in (layer, eager):
            each.weight[3, 5] = first
        whole = eager.weight.double().reshape(n, -1, group) * eager.scale.double()[:, :, None]
        for rows, call in ((40, many), (1, one), (150, many), (2, many), (1, one)):
            x = torch.randn(rows, depth, dtype=dtype)
            if rows > 1:
                torch._dynamo.mark_dynamic(x, 0)
            exact = x.double() @ whole.reshape(n, depth).T
            error, theirs = ((y.double() - exact).abs().max() for y in (call(x), eager(x)))
            assert error <= theirs + 2 * torch.finfo(dtype).eps * exact.abs().max()
        packed = deplo._C.packed_bytes() - before
        if first == 100:
            assert packed >= n * depth
        elif step < 2:  # later, who looked whether all of them fit brought the weight back often: it stays for a while
            assert packed <= panels * depth * (1 / 2 + dtype.itemsize / group) + 2 * 4096
            assert deplo._C.owned_bytes() - gone >= n * depth - 2 * 4096
    assert torch.equal(layer.weight, eager.weight)


@pytest.mark.parametrize("features", ["native", "avx2", "sse"])
def test_float8_is_converted_as_eager_mode_does(features: str) -> None:
    """Every code, and numbers around each of them: halves between two codes, the largest ones, infinities, NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes.float()
    near = torch.cat(
        [numbers, numbers * 1.03125, numbers * 1.0625, numbers * 1.1, numbers / 2, torch.tensor([463.0, 464, 465, 1e9, torch.inf, -torch.inf])]
    )
    near = torch.cat([near, near.nextafter(torch.tensor(torch.inf)), near.nextafter(-torch.tensor(torch.inf))])
    options = {"strict": True, "allow_library": (), "features": features}

    def wide(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)) + (x.view(16, 16).t().contiguous(),)

    def narrow(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.to(dtype).to(torch.float8_e4m3fn) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64))

    for call, x in ((wide, codes), (narrow, near)):
        torch._dynamo.reset()
        for got, wanted in zip(torch.compile(call, backend="deplo", options=options)(x), call(x), strict=True):
            assert got.dtype == wanted.dtype and torch.equal(got.isnan(), wanted.isnan())
            got, wanted = got.double().nan_to_num(7), wanted.double().nan_to_num(7)
            assert torch.equal(got, wanted) and torch.equal(got.signbit(), wanted.signbit())
    torch._dynamo.reset()
    with pytest.raises(deplo.UnsupportedError, match="arithmetic in float8"):
        torch.compile(lambda x: x.abs(), backend="deplo", options=options)(codes)


@pytest.mark.parametrize("features", ["native", "avx2"])
@pytest.mark.parametrize("depth", [320, 9600])
@torch.no_grad()
def test_single_rows_and_many_read_one_copy_of_bytes(depth: int, features: str) -> None:
    """Programs for one row, for some and for any number of them read the same panels, whichever instruction multiplies them."""
    torch.manual_seed(0)
    n = 96
    before = packed_by_others()
    layer = Product(n, depth, torch.int8)
    options = {"strict": True, "features": features, "weights": "own", "weight_checks": "versions"}
    few, many = deplo.jit(layer, options=options, dynamic=False), deplo.jit(layer, options=options)
    weight = layer.weight.clone()
    for rows, call in ((40, many), (3, few), (64, few), (150, many), (2, many)):
        x = torch.randint(-128, 128, (rows, depth), dtype=torch.int8)
        if call is many:
            torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(call(x).long(), x.long() @ weight.long().T)
    assert deplo._C.packed_bytes() - before <= n * depth * 1.05 + 4096
    assert torch.equal(layer.weight, weight)


def in_float64(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Eager mode's result with products of the same operands in float64."""

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm):
                return func(*(a.double() for a in args), **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Wide():
        return layer(x).double()


CONFIGS: dict[str, tuple[Callable[[], Any], float]] = {
    "float8": (torchao.Float8WeightOnlyConfig, 1.1),
    "int4 under int8": (
        lambda: torchao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)),
        1.1 + 6 / 32,
    ),
    "int4 with zeros under int8": (
        lambda: torchao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=PerGroup(64), weight_mapping_type=MappingType.ASYMMETRIC
        ),
        1.1 + 6 / 64,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", ["native", "avx2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_of_torchao_stay_narrow(name: str, features: str, dtype: torch.dtype) -> None:
    """All of it is generated, and weights take a byte at most, with what their factors need."""
    torch.manual_seed(0)
    config, bytes_each = CONFIGS[name]
    layer = nn.Sequential(nn.Linear(256, 160)).to(dtype).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao.quantize_(layer, config())
    before = packed_by_others()
    for rows in (1, 5, 40, 150):
        torch._dynamo.reset()
        x = torch.randn(rows, 256, dtype=dtype) + 0.5
        with torch.no_grad():
            compiled = torch.compile(layer, backend="deplo", options={"strict": True, "allow_library": (), "features": features})
            got, theirs, exact = compiled(x).double(), layer(x).double(), in_float64(layer, x)
        assert (got - exact).abs().max() <= (theirs - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert deplo._C.packed_bytes() - before <= 160 * 256 * bytes_each + 8192
