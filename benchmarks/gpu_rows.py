"""The work that gpu.py measures: layers, blocks and models, each with the operations and bytes that it cannot avoid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import zoo
from torch import nn

Tensors = tuple[torch.Tensor, ...]


@dataclasses.dataclass
class Row:
    """A function with its inputs, and the work that it cannot avoid."""

    name: str
    make: Callable[[int], tuple[Callable[..., torch.Tensor], Tensors]]  # of a divisor of its sizes: 1, or more for a dry run
    flops: float = 0.0
    bytes: float = 0.0
    lowest: torch.dtype = torch.float32  # of what it computes in: how far from float64 it may be
    trains: bool = False  # what is made is a model, of which a step is measured


def put(*tensors: torch.Tensor) -> Tensors:
    return tuple(x.cuda() for x in tensors)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(max(size, 1) for size in shape), device="cuda").to(dtype)


def unary(name: str, fn: Callable[[torch.Tensor], torch.Tensor], *shape: int, reads: float = 2) -> Row:
    count = float(torch.Size(shape).numel())
    return Row(name, lambda d: (fn, put(random(*(size // d for size in shape)))), bytes=4 * reads * count)


def product(m: int, n: int, k: int, dtype: torch.dtype) -> Row:
    def make(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
        return torch.matmul, put(random(m // d, k // d, dtype=dtype), random(k // d, n // d, dtype=dtype) / (k // d) ** 0.5)

    return Row(f"matmul {m}x{n}x{k} {str(dtype)[6:]}", make, 2.0 * m * n * k, float(dtype.itemsize) * (m * k + n * k + m * n), dtype)


def linear(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> Row:
    def make(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
        return F.linear, put(random(m // d, k // d, dtype=dtype), random(n // d, k // d, dtype=dtype) / (k // d) ** 0.5, random(n // d, dtype=dtype))

    size = dtype.itemsize
    return Row(f"linear {k}x{n} {str(dtype)[6:]} s={m}", make, 2.0 * m * n * k, float(size) * (m * k + n * k + m * n), dtype)


class RmsNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LlamaBlock(nn.Module):
    """A decoder layer of TinyLlama: grouped queries, rotary positions, causal attention, a gated feed-forward."""

    def __init__(self, size: int, inner: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, size // heads
        self.before, self.after = RmsNorm(size), RmsNorm(size)
        self.q, self.o = (nn.Linear(size, size, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size, groups * self.width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape

        def heads_of(y: torch.Tensor, heads: int) -> torch.Tensor:
            return y.view(b, s, heads, self.width).transpose(1, 2)

        def rotated(y: torch.Tensor) -> torch.Tensor:
            left, right = y.chunk(2, -1)
            return y * cos + torch.cat([-right, left], -1) * sin

        y = self.before(x)
        q, k, v = rotated(heads_of(self.q(y), self.heads)), rotated(heads_of(self.k(y), self.groups)), heads_of(self.v(y), self.groups)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        sizes = [(channels, inner, 1), (inner, inner, 3), (inner, channels, 1)]
        self.convolutions = nn.ModuleList([nn.Conv2d(i, o, k, padding=k // 2, bias=False) for i, o, k in sizes])
        self.norms = nn.ModuleList([nn.BatchNorm2d(o) for _, o, _ in sizes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for k, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = F.relu(y if k < 2 else y + x)
        return y


def decoder(name: str, size: int, inner: int, heads: int, groups: int, length: int, dtype: torch.dtype) -> Row:
    def make(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
        with torch.device("cuda"):
            block = LlamaBlock(size // d, inner // d, max(heads // d, 1), max(groups // d, 1)).to(dtype)
        angle = torch.arange(length).unsqueeze(-1) * torch.logspace(0, -4, block.width // 2)
        turns = torch.cat([angle, angle], -1)
        return block, put(random(1, length, size // d, dtype=dtype), turns.cos().to(dtype), turns.sin().to(dtype))

    weights = 2 * size * size + 2 * size * size * groups // heads + 3 * size * inner
    flops = 2.0 * length * weights + 2.0 * length * length * size
    return Row(f"{name} block {str(dtype)[6:]} s={length}", make, flops, float(dtype.itemsize) * (weights + 2 * length * size), dtype)


def bert(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
    size = 768 // d
    layer = nn.TransformerEncoderLayer(size, 12 // d or 1, 4 * size, dropout=0.0, activation="gelu", batch_first=True).cuda()
    layer.train()  # in eval mode PyTorch takes a path of its own, which no compiler sees
    return layer, put(random(8, 128 // d, size))


def resnet(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
    return Bottleneck(256 // d, 64 // d).cuda().eval(), put(random(16 // d, 256 // d, 56 // d, 56 // d))


class Positional(nn.Module):
    """A model of the zoo, whose one input has no name."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(**{self.name: x})
        return result


def batch_of(case: zoo.Case, batch: int) -> tuple[str, torch.Tensor]:
    sets = [case.inputs(seed) for seed in range(batch)]
    (name,) = sets[0]
    return name, torch.cat([one[name] for one in sets]).cuda()


def model(name: str, batch: int, channels_last: bool = False) -> Row:
    def make(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
        case = zoo.build(name, "tiny" if d > 1 else "real", torch.bfloat16)
        argument, x = batch_of(case, 1 if d > 1 else batch)
        module = Positional(case.model, argument).cuda()
        if channels_last:
            module, x = module.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module, (x,)

    return Row(f"{name} bfloat16 b{batch}{' channels last' if channels_last else ''}", make, lowest=torch.bfloat16)


class Step:
    """Forward, backward and update of a model: what it returns is the loss."""

    def __init__(self, model: nn.Module, compile_with: dict[str, Any] | None = None) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.forward: Callable[..., torch.Tensor] = torch.compile(model, **compile_with) if compile_with else model

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = self.forward(x).square().mean()
            loss.backward()
        self.optimizer.step()
        return loss.detach()


def training(name: str, batch: int, dtype: torch.dtype = torch.float32) -> Row:
    """A model whose step is measured; without dropout, so that losses can be compared."""

    def make(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
        known, size = ("bert-base", "tiny") if name == "bert-tiny" else (name, "tiny" if d > 1 else "real")
        case = zoo.build(known, size, dtype)
        for module in case.model.modules():
            for attribute in ("p", "attention_dropout", "dropout_prob", "drop_prob", "dropout"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
        argument, x = batch_of(case, 2 if d > 1 else batch)
        return Positional(case.model, argument).cuda().requires_grad_(True).train(), (x,)

    return Row(f"training {name} {str(dtype)[6:]} b{batch}", make, lowest=dtype, trains=True)


def attention(b: int, h: int, s: int, e: int, causal: bool) -> Row:
    def make(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
        shape = (b, max(h // d, 1), s // d, e)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), put(
            *(random(*shape, dtype=torch.bfloat16) for _ in range(3))
        )

    name = f"attention bf16 ({b}, {h}, {s}, {e}){' causal' if causal else ''}"
    return Row(name, make, 4.0 * b * h * s * s * e / (2 if causal else 1), 8.0 * b * h * s * e, torch.bfloat16)


def decoding(batch: int, heads: int, groups: int, keys: int, e: int) -> Row:
    def make(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
        q = random(max(batch // d, 1), heads, 1, e, dtype=torch.bfloat16)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), put(
            q, *(random(max(batch // d, 1), groups, keys // d, e, dtype=torch.bfloat16) for _ in range(2))
        )

    name = f"decoding bf16 b{batch} {heads}/{groups} heads, {keys} keys"
    return Row(name, make, 4.0 * batch * heads * keys * e, 4.0 * batch * groups * keys * e, torch.bfloat16)


def cross_entropy(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
    return F.cross_entropy, put(random(2048 // d, 32000 // d), torch.randint(0, 32000 // d, (2048 // d,)))


def norm_of(name: str, rows: int, size: int, make: Callable[[int], nn.Module], dtype: torch.dtype = torch.float32) -> Row:
    return Row(
        f"{name} ({rows}, {size}) {str(dtype)[6:]}",
        lambda d: (make(size // d).to(dtype).cuda(), put(random(rows // d, size // d, dtype=dtype))),
        bytes=2.0 * dtype.itemsize * rows * size,
        lowest=dtype,
    )


def rows() -> list[Row]:
    bf16, f32 = torch.bfloat16, torch.float32
    lengths = (1, 32, 128, 512)
    return [
        unary("copy (16384, 8192)", lambda x: x.clone(), 16384, 8192),
        unary("gelu (32, 18944)", F.gelu, 32, 18944),
        unary("gelu (512, 18944)", F.gelu, 512, 18944),
        unary("softmax (1, 28, 2048, 2048)", lambda x: torch.softmax(x, -1), 1, 28, 2048, 2048),
        norm_of("rms norm", 8192, 4096, RmsNorm),
        norm_of("layer norm", 8192, 4096, nn.LayerNorm),
        norm_of("rms norm", 8192, 4096, RmsNorm, bf16),
        norm_of("layer norm", 8192, 4096, nn.LayerNorm, bf16),
        unary("column sums (8192, 8192)", lambda x: x.sum(0), 8192, 8192, reads=1),
        Row("cross entropy (2048, 32000)", cross_entropy, bytes=4.0 * 2048 * 32000),
        unary("sum (100000000)", lambda x: x.sum(), 100_000_000, reads=1),
        unary("cumsum (8192, 4096)", lambda x: x.cumsum(-1), 8192, 4096),
        linear(32, 3584, 3584),
        linear(512, 3584, 3584),
        linear(4096, 4096, 4096, bf16),
        product(4096, 4096, 4096, bf16),
        linear(512, 18944, 3584, bf16),
        linear(1, 18944, 3584, bf16),
        linear(16, 18944, 3584, bf16),
        attention(1, 16, 2048, 128, False),
        attention(1, 16, 2048, 128, True),
        attention(8, 16, 2048, 64, True),
        decoding(1, 32, 8, 4096, 128),
        decoding(16, 32, 8, 4096, 128),
        decoding(16, 32, 32, 4096, 128),
        *(decoder("TinyLlama", 2048, 5632, 32, 4, s, dtype) for dtype in (f32, bf16) for s in lengths),
        *(decoder("Qwen2.5-7B", 3584, 18944, 28, 4, s, dtype) for dtype in (f32, bf16) for s in lengths),
        Row("BERT layer (8, 128, 768)", bert),
        Row("ResNet bottleneck (16, 256, 56, 56)", resnet),
        model("bert-base", 8),
        model("vit-base", 8),
        model("resnet-50", 8, channels_last=True),
        training("bert-tiny", 8),
        training("resnet-50", 8),
        training("bert-base", 8, bf16),
    ]
