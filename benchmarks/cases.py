"""Single layers and chains with the figures that say how far each is from the machine's limit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Bench:
    """A function of one input set, with its work: floating-point operations and the bytes that must move at least."""

    name: str
    module: nn.Module
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    flops: float = 0.0
    bytes: float = 0.0
    sums: bool = False  # of its inputs, which may cancel: errors are relative to the sum of their magnitudes
    part_of: str = ""  # a model that runs it
    count: int = 1  # that often


class _Lambda(nn.Module):
    def __init__(self, f: Callable[..., Any], **parameters: torch.Tensor) -> None:
        super().__init__()
        self.f = f
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, *args: torch.Tensor) -> Any:
        return self.f(*args, **dict(self.named_parameters()))


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda seed: (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype),)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def _stencil(x: torch.Tensor) -> torch.Tensor:
    return 0.2 * (x[:, 1:-1, 1:-1] + x[:, :-2, 1:-1] + x[:, 2:, 1:-1] + x[:, 1:-1, :-2] + x[:, 1:-1, 2:])


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def _qkv(*shape: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda seed: tuple(torch.randn(*shape, generator=torch.Generator().manual_seed(3 * seed + i)) for i in range(3))


def _linear(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> Bench:
    size = torch.empty((), dtype=dtype).element_size()
    suffix = " bf16" if dtype == torch.bfloat16 else ""
    return Bench(
        f"linear {k}x{n} s{m}{suffix}",
        nn.Linear(k, n, bias=False).to(dtype),
        _random(m, k, dtype=dtype),
        2.0 * m * n * k,
        size * (m * k + n * k + m * n),
    )


def _conv(name: str, c: int, o: int, hw: int, kernel: int, stride: int = 1, groups: int = 1) -> Bench:
    module = nn.Conv2d(c, o, kernel, stride, kernel // 2, groups=groups, bias=False)
    out = (hw + stride - 1) // stride
    flops = 2.0 * o * out * out * (c // groups) * kernel * kernel
    return Bench(name, module, _random(1, c, hw, hw), flops, 4.0 * (c * hw * hw + o * out * out + module.weight.numel()))


def pointwise_and_norms() -> list[Bench]:
    """Chains whose limit is memory traffic."""
    return [
        Bench("relu(x+1)*2 (8)", _Lambda(lambda x: torch.relu(x + 1) * 2), _random(8), 0, 64),
        Bench("gelu tanh (512,18944)", _Lambda(_gelu), _random(512, 18944), 0, 8.0 * 512 * 18944),
        Bench("rms norm (1,512,2048)", _Lambda(_rms, w=torch.randn(2048)), _random(1, 512, 2048), 0, 8.0 * 512 * 2048),
        Bench("layer norm (4096,768)", nn.LayerNorm(768), _random(4096, 768), 0, 8.0 * 4096 * 768),
        Bench("group norm (2,320,32,32)", nn.GroupNorm(32, 320), _random(2, 320, 32, 32), 0, 8.0 * 2 * 320 * 32 * 32),
        Bench("softmax (1,28,2048,2048)", _Lambda(lambda x: torch.softmax(x, -1)), _random(1, 28, 2048, 2048), 0, 8.0 * 28 * 2048 * 2048),
        Bench("softmax (4096,1024)", _Lambda(lambda x: torch.softmax(x, -1)), _random(4096, 1024), 0, 8.0 * 4096 * 1024),
        Bench("two 5-tap stencils 3x2048x2048", _Lambda(lambda x: _stencil(_stencil(x))), _random(3, 2048, 2048), 0, 8.0 * 3 * 2048 * 2048),
        Bench("transpose (2048,2048)", _Lambda(lambda x: x.t().contiguous()), _random(2048, 2048), 0, 8.0 * 2048 * 2048),
        Bench("sum all 1e7", _Lambda(lambda x: x.sum()), _random(10_000_000), 0, 4e7, sums=True),
        Bench("sum(0) (4096,1024)", _Lambda(lambda x: x.sum(0)), _random(4096, 1024), 0, 4.0 * 4096 * 1024, sums=True),
    ]


def contractions() -> list[Bench]:
    """Linear layers, gates and attention."""
    rows = [_linear(m, 3584, 3584) for m in (1, 4, 32, 128, 512)]
    rows += [_linear(512, 18944, 3584), _linear(197, 768, 768), _linear(197, 3072, 768), _linear(128, 768, 3072)]
    rows += [_linear(m, 3584, 3584, torch.bfloat16) for m in (1, 32, 128)]
    for m in (1, 512):
        gate = _Lambda(lambda x, g, u: F.silu(x @ g) * (x @ u), g=torch.randn(1024, 3072) / 32, u=torch.randn(1024, 3072) / 32)
        rows.append(Bench(f"swiglu 1024-3072 s{m}", gate, _random(m, 1024), 4.0 * m * 1024 * 3072, 4.0 * (2 * 1024 * 3072 + m * 4096)))
    for shape in ((1, 12, 512, 64), (1, 8, 2048, 64)):
        b, h, s, d = shape
        rows.append(
            Bench(f"attention by hand {shape}".replace(" ", ""), _Lambda(_attention), _qkv(*shape), 4.0 * b * h * s * s * d, 16.0 * b * h * s * d)
        )
    causal = _Lambda(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    rows.append(Bench("sdpa causal (1,32,512,64)", causal, _qkv(1, 32, 512, 64), 2.0 * 32 * 512 * 512 * 64, 16.0 * 32 * 512 * 64))
    return rows


# Of ResNet-50, in the order of its stages: channels, filters, image, kernel, stride, and how often a call runs it.
RESNET_50 = [
    (3, 64, 224, 7, 2, 1),
    (64, 64, 56, 1, 1, 1),
    (256, 64, 56, 1, 1, 2),
    (64, 64, 56, 3, 1, 3),
    (64, 256, 56, 1, 1, 4),
    (256, 128, 56, 1, 1, 1),
    (128, 128, 56, 3, 2, 1),
    (256, 512, 56, 1, 2, 1),
    (512, 128, 28, 1, 1, 3),
    (128, 128, 28, 3, 1, 3),
    (128, 512, 28, 1, 1, 4),
    (512, 256, 28, 1, 1, 1),
    (256, 256, 28, 3, 2, 1),
    (512, 1024, 28, 1, 2, 1),
    (1024, 256, 14, 1, 1, 5),
    (256, 256, 14, 3, 1, 5),
    (256, 1024, 14, 1, 1, 6),
    (1024, 512, 14, 1, 1, 1),
    (512, 512, 14, 3, 2, 1),
    (1024, 2048, 14, 1, 2, 1),
    (2048, 512, 7, 1, 1, 2),
    (512, 512, 7, 3, 1, 2),
    (512, 2048, 7, 1, 1, 3),
]


def convolutions() -> list[Bench]:
    """The distinct convolutions of ResNet-50, and a depthwise one."""
    rows = []
    for channels, filters, hw, kernel, stride, count in RESNET_50:
        row = _conv(f"conv {kernel}x{kernel}{f' s{stride}' if stride > 1 else ''} {channels}-{filters} {hw}", channels, filters, hw, kernel, stride)
        rows.append(dataclasses.replace(row, part_of="ResNet-50", count=count))
    return [*rows, _conv("depthwise 3x3 96 112", 96, 96, 112, 3, groups=96)]


def tiny() -> list[Bench]:
    """One small case of each kind, for the tests of the benchmarks."""
    return [
        Bench("rms norm (4,64)", _Lambda(_rms, w=torch.randn(64)), _random(4, 64), 0, 8.0 * 4 * 64),
        _linear(4, 48, 32),
        _linear(4, 48, 32, torch.bfloat16),
        _conv("conv 3x3 8 9", 8, 8, 9, 3),
        Bench("attention by hand (1,2,16,8)", _Lambda(_attention), _qkv(1, 2, 16, 8), 4.0 * 2 * 16 * 16 * 8, 16.0 * 2 * 16 * 8),
    ]


SUITES: dict[str, Callable[[], list[Bench]]] = {
    "pointwise": pointwise_and_norms,
    "contractions": contractions,
    "convolutions": convolutions,
    "tiny": tiny,
}
