"""Quantisation by PT2E, and the operators that it puts into graphs: everything is generated, and agrees with eager mode."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import deplo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchao.quantization.pt2e as pt2e
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

quantized = torch.ops.quantized_decomposed
aten = torch.ops.aten
STRICT = {"strict": True, "allow_library": ()}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 96), nn.Linear(96, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


class Convolutions(nn.Module):
    """With a batch norm, padding, a stride, pooling, a residual addition and a layer at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.b, self.c = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 3, padding=1, stride=2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.d = nn.Conv2d(32, 32, 3, padding=1)
        self.e = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.a(x)))
        x = self.pool(torch.relu(self.b(x)))
        x = torch.relu(x + self.d(x))
        return self.e(torch.relu(self.c(x)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / 4, -1)
        return self.o(torch.matmul(weights, v).transpose(1, 2).reshape(b, t, d))


CASES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "layers": (Layers, (24, 64)),
    "convolutions": (Convolutions, (2, 16, 10, 10)),
    "attention": (Attention, (2, 16, 64)),
}


def converted(model: nn.Module, x: torch.Tensor, mode: str) -> Any:
    """The model as PT2E leaves it."""
    qat, dynamic = mode == "qat", mode == "dynamic"
    model.train(qat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=qat, is_dynamic=dynamic))
        if mode == "static":
            quantizer.set_function_type_qconfig(torch.matmul, quantizer.get_global_quantization_config())
        exported = torch.export.export(model, (x,)).module()
        prepared = (prepare_qat_pt2e if qat else prepare_pt2e)(exported, quantizer)
        with torch.no_grad():
            for scale in (1.0, 0.5):
                prepared(x * scale)
        result = convert_pt2e(prepared)
        pt2e.move_exported_model_to_eval(result)
    return result


def randomised(model: nn.Module) -> nn.Module:
    """With biases and statistics that are not all alike."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.is_floating_point() and value.dim() == 1:
                value.copy_(torch.rand_like(value) + (0.5 if "var" in name else 0))
    return model


def exactly(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The converted model, with sums in float64."""

    class Wide(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            packet = func.overloadpacket
            if packet in (aten.addmm, aten.mm, aten.bmm, aten.convolution):
                args = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
                return func(*args, **(kwargs or {})).float()
            return func(*args, **(kwargs or {}))

    with Wide():
        return model(x)


MODELS = [(name, "static", "native") for name in CASES] + [
    ("layers", "static", "avx2"),
    ("convolutions", "static", "avx2"),
    ("layers", "dynamic", "native"),
    ("attention", "dynamic", "native"),
    ("convolutions", "qat", "native"),
]


@pytest.mark.parametrize(("name", "mode", "features"), MODELS)
def test_models_agree_with_eager_mode(name: str, mode: str, features: str) -> None:
    torch.manual_seed(0)
    kind, shape = CASES[name]
    x = torch.randn(shape)
    model = converted(randomised(kind()), x, mode)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="deplo", options=STRICT | {"features": features})
        for sample in (x, x * 3, torch.zeros_like(x)):
            got, theirs, exact = compiled(sample), model(sample), exactly(model, sample)
            assert (got - exact).abs().max() <= 1e-5 * exact.abs().max() + 2 * (theirs - exact).abs().max()


def operator_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    torch.manual_seed(0)
    x, codes = torch.randn(6, 32) * 3, torch.randint(-128, 128, (6, 32), dtype=torch.int8)
    unsigned = torch.randint(0, 256, (6, 32), dtype=torch.uint8)
    scales, zeros = torch.rand(6) + 0.01, torch.randint(-9, 9, (6,))
    scale, zero = torch.tensor([0.037], dtype=torch.float64), torch.tensor([7])
    i8, u8 = (-128, 127, torch.int8), (0, 255, torch.uint8)
    tokens = (scales.double()[:, None], zeros[:, None])
    return {
        "quantize_per_tensor": (quantized.quantize_per_tensor.default, (x, 0.037, 3, *u8)),
        "quantize_per_tensor of bfloat16": (quantized.quantize_per_tensor.default, (x.bfloat16(), 0.037, 3, *i8)),
        "quantize_per_tensor.tensor": (quantized.quantize_per_tensor.tensor, (x, scale, zero, *u8)),
        "dequantize_per_tensor": (quantized.dequantize_per_tensor.default, (unsigned, 0.037, 3, *u8)),
        "dequantize_per_tensor.tensor": (quantized.dequantize_per_tensor.tensor, (codes, scale, zero, *i8)),
        "quantize_per_channel": (quantized.quantize_per_channel.default, (x, scales, zeros, 0, *i8)),
        "dequantize_per_channel": (quantized.dequantize_per_channel.default, (codes, scales, zeros, 0, *i8)),
        "dequantize_per_channel without zeros": (quantized.dequantize_per_channel.default, (codes, scales, None, 0, *i8)),
        "quantize_per_token": (quantized.quantize_per_token.default, (x, *tokens, *i8)),
        "dequantize_per_token": (quantized.dequantize_per_token.default, (codes, *tokens, *i8, torch.float32)),
        "dequantize_per_channel_group": (
            quantized.dequantize_per_channel_group.default,
            (codes, torch.rand(6, 2), torch.randint(-3, 3, (6, 2)), *i8, 16, torch.float32),
        ),
        "choose_qparams": (quantized.choose_qparams.tensor, (x, 0, 255, 1e-6, torch.uint8)),
        "choose_qparams of one sign": (quantized.choose_qparams.tensor, (x.abs() + 1, 0, 255, 1e-6, torch.uint8)),
        "choose_qparams_symmetric": (quantized.choose_qparams_symmetric.tensor, (x, -128, 127, 1e-6, torch.int8)),
        "choose_qparams_per_token": (quantized.choose_qparams_per_token.default, (x, torch.int8)),
        "choose_qparams_per_token_asymmetric": (quantized.choose_qparams_per_token_asymmetric.default, (x, torch.int8)),
    }


@pytest.mark.parametrize("name", operator_cases())
def test_operators_give_eager_modes_bits(name: str) -> None:
    call, args = operator_cases()[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: call(*a), backend="deplo", options=STRICT)
    for got, wanted in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (compiled(*args), call(*args))), strict=True):
        assert got.dtype == wanted.dtype or name == "choose_qparams_per_token"  # whose shape rule says otherwise than it does
        assert torch.equal(got.double(), wanted.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_are_multiplied(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, k, group = 128, 128, 32
    weight, scales = torch.randint(-128, 128, (n, k), dtype=torch.int8), (torch.rand(n) / 100).to(dtype)
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    packed = aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    parameters = torch.rand(k // group, n, 2).to(dtype)
    spread = parameters.double().repeat_interleave(group, 0)
    whole = (codes.double().T - 8) * spread[..., 0] + spread[..., 1]
    for rows in (1, 5, 40):
        x = torch.randn(rows, k, dtype=dtype)
        torch._dynamo.reset()
        int8 = torch.compile(lambda x: aten._weight_int8pack_mm(x, weight, scales), backend="deplo", options=STRICT)
        int4 = torch.compile(lambda x: aten._weight_int4pack_mm_for_cpu(x, packed, group, parameters), backend="deplo", options=STRICT)
        for got, exact in (
            (int8(x), x.double() @ weight.double().T * scales.double()),
            (int4(x), x.double() @ whole),
        ):
            assert (got.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_zero_points_of_weights_are_seen() -> None:
    """They are 0 as PT2E sets them, which a compiled program takes as a fact that may change."""
    torch.manual_seed(0)
    x = torch.randn(24, 64)
    model = converted(Layers(), x, "static")
    with torch.no_grad():
        compiled = torch.compile(model, backend="deplo", options=STRICT)
        for value in (0, 5, -3, 0):
            for name, zero in model.named_buffers():
                if "zero_point" in name:
                    zero.fill_(value)
            exact = exactly(model, x)
            assert (compiled(x) - exact).abs().max() <= 1e-5 * exact.abs().max() + 2 * (model(x) - exact).abs().max()


def test_bytes_flow_between_quantised_layers() -> None:
    x = torch.randn(24, 64)
    model = converted(Layers(), x, "static")
    with torch.no_grad():
        report = str(deplo.explain(model, x))
    assert "0 library calls" in report and "arena" in report
    kilobytes = float(report.split("memory: arena ")[1].split(" kB")[0])
    assert kilobytes < 24 * (64 + 96) * 4 / 1000 / 2  # quantised rows take a byte each


@pytest.mark.parametrize("features", ["native", "avx2"])
def test_gelu_that_becomes_a_byte_is_near(features: str) -> None:
    """Each byte is one that a value within 2^-17 of the exact one rounds to, so near to halves as the numbers below come."""

    def to_byte(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.round(torch.nn.functional.gelu(x) * scale).clamp(-128, 127).to(torch.int8)

    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-14, 14, 300_001), torch.randn(300_000, generator=generator)])
    exact = x.double() / 2 * torch.special.erfc(-x.double() / math.sqrt(2))  # 1 + erf, as in PyTorch, loses digits beside -8
    wanted = torch.randint(-120, 120, x.shape, generator=generator) + 0.5 + torch.randn(x.shape, generator=generator) * 2**-14
    scale = (wanted.double() / exact).float().nan_to_num(1, 1, 1)
    torch._dynamo.reset()
    got = torch.compile(to_byte, backend="deplo", options=STRICT | {"features": features})(x, scale).double()
    value = exact * scale.double()
    inside = (value.abs() < 126) & (exact.abs() > 1e-35)  # smaller ones may be flushed to 0
    assert inside.sum() > 500_000
    off = ((got - value).abs() - 0.5)[inside] / value.abs()[inside]
    assert off.max() <= 2**-17 + 2**-23
