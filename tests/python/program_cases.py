"""The functions that every level must compile and get right, each with full sizes, a small twin, and sizes to call one compilation with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Dims = tuple[int, ...]
INF = float("inf")
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A function of tensors. `make(*dims)` makes its inputs; seed before it to get the same ones again."""

    name: str  # the case's number, then what it is
    fn: Callable[..., Any]
    make: Callable[..., list[torch.Tensor]]
    full: Dims
    small: Dims | None  # the twin that interpreters run; none: another case has the same
    sizes: tuple[Dims, ...]  # what one compilation with symbolic sizes must serve (the first: all different); empty: no size can change
    kernels: int | None = None  # how many must run per call, if that matters
    matmuls: int = 0  # how many kernels with a contraction must run: two of them never share one
    weights: int = 0  # how many of the last inputs are parameters in the compilation with fixed sizes
    bitwise: bool = False  # equal to eager bit by bit: the function rounds in between, or holds nothing that may round differently
    # Where a whole float64 result would take too long: a dimension of the first input along which the results are independent, and the
    # positions that are judged.
    judged: tuple[int, tuple[int, ...]] | None = None
    threads: int = 0
    reference: Callable[..., Any] | None = None  # of float64 inputs, where fn itself depends on the dtype
    # Of float64 inputs, where terms of a sum cancel: how many times larger the sum's rounding errors are in the largest result.
    condition: Callable[..., torch.Tensor] | None = None

    def inputs(self, dims: Dims, seed: int = 0) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return self.make(*dims)


def r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def t(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def w(rows: int, columns: int) -> torch.Tensor:
    """A weight of a layer with `columns` inputs."""
    return torch.randn(rows, columns) / math.sqrt(columns)


def shapes(*dims: Sequence[int]) -> tuple[Dims, ...]:
    return tuple(tuple(d) for d in dims)


# Chains and norms


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rms_norm_by_pow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.pow(x.square().mean(-1, keepdim=True) + 1e-6, -0.5) * weight


def layer_norm_by_hand(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-5) * weight + bias


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def stencil(x: torch.Tensor) -> torch.Tensor:
    inner = x[:, 1:-1, 1:-1]
    return 0.2 * (inner + x[:, :-2, 1:-1] + x[:, 2:, 1:-1] + x[:, 1:-1, :-2] + x[:, 1:-1, 2:])


CHAINS = [
    Case("1 exp of neg", lambda x: torch.exp(torch.neg(x)), lambda n: [r(n)], (8,), (8,), shapes((8,), (13,), (1000,)), kernels=1),
    Case("2 slice of exp of neg", lambda x: torch.exp(torch.neg(x)[5:8]), lambda n: [r(n)], (16,), (16,), shapes((16,), (9,), (40,)), kernels=1),
    Case(
        "3 exp of sum",
        lambda x: torch.exp(x.sum(-1, True)),
        lambda m, n: [r(m, n)],
        (4, 8),
        (4, 8),
        shapes((4, 8), (5, 33), (3, 100)),
        kernels=1,
        condition=lambda x: x.abs().sum(-1).max(),
    ),
    Case("4 softmax", lambda x: torch.softmax(x, -1), lambda m, n: [r(m, n)], (4, 8), (4, 8), shapes((4, 8), (5, 33), (3, 100)), kernels=1),
    Case(
        "5 softmax of scores",
        lambda x: torch.softmax(x, -1),
        lambda b, h, m, n: [r(b, h, m, n)],
        (1, 28, 2048, 2048),
        (1, 3, 4, 19),
        shapes((2, 3, 4, 19), (3, 2, 5, 64), (2, 2, 3, 3)),
        kernels=1,
        judged=(1, (0, 13, 27)),
    ),
    Case(
        "6 softmax along rows",
        lambda x: torch.softmax(x, 1),
        lambda m, n: [r(m, n)],
        (8, 700),
        (8, 31),
        shapes((8, 31), (8, 64), (8, 512)),
        kernels=1,
    ),
    Case("7 rms norm", rms_norm, lambda b, m, n: [r(b, m, n), r(n)], (1, 32, 2048), (1, 3, 20), shapes((2, 3, 20), (3, 2, 64)), 1, weights=1),
    Case("8 rms norm by pow", rms_norm_by_pow, lambda b, m, n: [r(b, m, n), r(n)], (2, 64, 256), (2, 3, 20), shapes((2, 3, 20), (3, 5, 64)), 1),
    Case("9 layer norm", layer_norm_by_hand, lambda m, n: [r(m, n), r(n), r(n)], (64, 2048), (3, 21), shapes((3, 21), (5, 64), (2, 300)), 1),
    Case("10 gelu", tanh_gelu, lambda m, n: [r(m, n)], (32, 18944), (3, 21), shapes((3, 21), (5, 64), (2, 300)), kernels=1),
    Case("11 long gelu", tanh_gelu, lambda m, n: [r(m, n)], (512, 18944), None, shapes((3, 21), (512, 18944)), kernels=1, judged=(0, (0, 255, 511))),
    Case(
        "38 rms norm of tiny values",
        lambda x: F.rms_norm(x, (x.shape[-1],), None, None),
        lambda m, n: [1e-4 * r(m, n)],
        (4, 64),
        (4, 64),
        shapes((4, 64), (3, 20), (2, 100)),
        reference=lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps),
    ),
    Case(
        "43 two stencils",
        lambda x: stencil(stencil(x)),
        lambda c, h, n: [r(c, h, n)],
        (3, 4096, 4096),
        (2, 9, 23),
        shapes((3, 9, 23), (2, 40, 17), (4, 12, 64)),
        kernels=1,
        judged=(0, (1,)),
    ),
]

# Contractions


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ gate) * (x @ up)


def epilogue(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight * 0.125 + bias) + residual


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.relu(F.linear(x, up)), down)


def linear_case(name: str, m: int, k: int, n: int, twin: bool = False) -> Case:
    full = (m, k, n)
    sizes = shapes((5, 24, 17), (16, 40, 33), full)
    small = (5, 24, 17) if twin else None
    return Case(name, F.linear, lambda m, k, n: [r(m, k), w(n, k)], full, small, sizes, matmuls=1, weights=1, judged=(0, (0, 1, m // 2, m - 1)))


def matmul_case(name: str, m: int, k: int, n: int, small: Dims | None = None, kernels: int = 1) -> Case:
    full = (m, k, n)
    sizes = shapes(small or (5, 24, 17), (16, 40, 33), (64, 2, 3), full)
    return Case(name, torch.matmul, lambda m, k, n: [r(m, k), r(k, n)], full, small, sizes, matmuls=kernels, judged=(0, (0, 1, m // 2, m - 1)))


def into_matmul(name: str, f: Callable[..., torch.Tensor], scale: bool = False) -> Case:
    def make(m: int, k: int, n: int) -> list[torch.Tensor]:
        return [r(m, k), r(k, n), *([r(k)] if scale else [])]

    return Case(name, f, make, (32, 64, 32), (5, 12, 7), shapes((5, 12, 7), (16, 40, 33)), matmuls=1)


CONTRACTIONS = [
    Case("12 tiny linear", F.linear, lambda m, k, n: [r(m, k), w(n, k)], (4, 3, 2), (4, 3, 2), shapes((4, 3, 2), (5, 7, 3)), 1, weights=1),
    Case("13 mlp", mlp, lambda m, n, h: [r(m, n), w(h, n), w(n, h)], (8, 64, 256), (3, 6, 10), shapes((3, 6, 10), (5, 16, 40)), matmuls=2, weights=2),
    linear_case("14 linear s32", 32, 3584, 3584, twin=True),
    linear_case("14 linear s128", 128, 3584, 3584),
    linear_case("14 linear s512", 512, 3584, 3584),
    linear_case("15 linear up", 512, 3584, 18944),
    linear_case("16 linear down", 512, 18944, 3584),
    matmul_case("17 square 512", 512, 512, 512, (5, 24, 17)),
    matmul_case("17 square 1024", 1024, 1024, 1024),
    matmul_case("17 square 2048", 2048, 2048, 2048),
    matmul_case("18 long contraction", 128, 2048, 128, (3, 640, 5), kernels=2),  # chunks of k, and what adds them up
    matmul_case("19 odd contraction", 64, 47, 64, (9, 47, 10)),
    Case(
        "20 matmul with epilogue",
        epilogue,
        lambda m, k, n: [r(m, k), r(k, n), r(n), r(m, n)],
        (128, 256, 192),
        (5, 12, 17),
        shapes((5, 12, 17), (16, 40, 33)),
        kernels=1,
    ),
    Case(
        "21 bfloat16 transposed",
        lambda a, b: a @ b.T,
        lambda m, k, n: [r(m, k, dtype=torch.bfloat16), r(n, k, dtype=torch.bfloat16)],
        (128, 128, 128),
        (5, 12, 7),
        shapes((5, 12, 7), (16, 40, 33)),
        matmuls=1,
    ),
    Case(
        "22 batched scores",
        lambda q, k: q @ k.transpose(-1, -2),
        lambda b, h, m, n, d: [r(b, h, m, d), r(b, h, n, d)],
        (1, 4, 128, 128, 64),
        (1, 2, 5, 7, 8),
        shapes((2, 3, 5, 7, 8), (3, 2, 16, 20, 12)),
        matmuls=1,
    ),
    Case(
        "23 swiglu",
        swiglu,
        lambda b, s, k, n: [r(b, s, k), w(k, n), w(k, n)],
        (1, 512, 1024, 3072),
        (1, 5, 8, 11),
        shapes((2, 5, 8, 11), (3, 4, 24, 33)),
    ),
    Case(
        "24 rms norm then linear",
        lambda x, scale, weight: F.linear(rms_norm(x, scale), weight),
        lambda m, k, n: [r(m, k), r(k), w(n, k)],
        (2, 1024, 4099),
        (2, 16, 21),
        shapes((2, 16, 21), (5, 40, 33)),
        matmuls=1,
        weights=2,
    ),
    into_matmul("25 relu into matmul", lambda x, y: torch.relu(x) @ y),
    into_matmul("25 sigmoid into matmul", lambda x, y: torch.sigmoid(x) @ y),
    into_matmul("25 mul into matmul", lambda x, y: (x * x) @ y),
    into_matmul("25 broadcast into matmul", lambda x, y, scale: (x * scale) @ y, scale=True),
]

# Attention

sdpa = F.scaled_dot_product_attention


def qkv(b: int, h: int, s: int, d: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [r(b, h, s, d, dtype=dtype) for _ in range(3)]


def grouped_qkv(b: int, h: int, group: int, s: int, d: int) -> list[torch.Tensor]:
    """Queries with a dimension of their own for the heads that share a key head, so that the sizes show what divides what."""
    return [r(b, h, group, s, d), r(b, h, s, d), r(b, h, s, d)]


def masked_qkv(b: int, h: int, s: int, d: int) -> list[torch.Tensor]:
    mask = torch.rand(b, 1, s, s) < 0.6
    mask[..., 0] = True
    return [*qkv(b, h, s, d), mask]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def llama_attention(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor
) -> torch.Tensor:
    """Causal self-attention with rotary positions and grouped queries.

    x is (b, s, n), cos and sin (s, d), the weights q (h, group, d, n), k and v (h, d, n), o (n, h, group, d).
    """
    query, key, value = ((x @ m.flatten(0, -2).t()).unflatten(-1, m.shape[:-1]) for m in (q, k, v))
    query = query.flatten(2, 3).transpose(1, 2)
    y = sdpa(rotate(query, cos, sin), rotate(key.transpose(1, 2), cos, sin), value.transpose(1, 2), is_causal=True, enable_gqa=True)
    return F.linear(y.transpose(1, 2).flatten(2), o.flatten(1))


def attention_inputs(b: int, s: int, h: int, group: int, d: int, n: int) -> list[torch.Tensor]:
    angles = torch.outer(torch.arange(s).float(), 10000.0 ** (-torch.arange(0, d, 2).float() / d)).repeat(1, 2)
    weights = [w(h * group * d, n).view(h, group, d, n), w(h * d, n).view(h, d, n), w(h * d, n).view(h, d, n)]
    return [r(b, s, n), angles.cos(), angles.sin(), *weights, w(n, h * group * d).view(n, h, group, d)]


def llama_block(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    attention, (norm1, norm2, gate, up, down) = rest[:6], rest[6:]
    x = x + llama_attention(rms_norm(x, norm1), *attention)
    h = rms_norm(x, norm2)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def block_inputs(b: int, s: int, h: int, group: int, d: int, n: int, inner: int) -> list[torch.Tensor]:
    return [*attention_inputs(b, s, h, group, d, n), r(n), r(n), w(inner, n), w(inner, n), w(n, inner)]


def attention_case(s: int, twin: bool = False) -> Case:
    full = (1, s, 4, 8, 64, 2048)
    sizes = shapes((2, 5, 3, 4, 6, 7), (3, 9, 2, 3, 8, 18), (2, *full[1:]))  # PyTorch fixes a batch of one
    small = (1, 5, 2, 2, 6, 8) if twin else None
    return Case(f"30 llama attention s{s}", llama_attention, attention_inputs, full, small, sizes, weights=4)


def block_case(s: int, twin: bool = False) -> Case:
    full = (1, s, 4, 8, 64, 2048, 5632)
    sizes = shapes((2, 5, 3, 4, 6, 7, 8), (3, 9, 2, 3, 8, 18, 40), (2, *full[1:]))
    small = (1, 4, 2, 2, 6, 8, 12) if twin else None
    return Case(f"31 llama block s{s}", llama_block, block_inputs, full, small, sizes, weights=9)


ATTENTION = [
    Case("26 attention", sdpa, qkv, (1, 2, 16, 8), (1, 2, 6, 8), shapes((2, 3, 6, 8), (3, 4, 16, 12))),
    Case("26 causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), qkv, (1, 2, 16, 8), (1, 2, 6, 8), shapes((2, 3, 6, 8), (3, 4, 16, 12))),
    Case("26 masked", lambda q, k, v, m: sdpa(q, k, v, m), masked_qkv, (1, 2, 16, 8), (1, 2, 6, 8), shapes((2, 3, 6, 8), (3, 4, 16, 12))),
    Case(
        "27 grouped queries",
        lambda q, k, v: sdpa(q.flatten(1, 2), k, v, is_causal=True, enable_gqa=True),
        grouped_qkv,
        (1, 8, 2, 32, 16),
        (1, 2, 2, 6, 8),
        shapes((2, 4, 3, 6, 8), (3, 6, 2, 16, 12)),
    ),
    Case("28 dynamic attention", sdpa, qkv, (1, 2, 37, 8), (1, 2, 8, 8), shapes((2, 3, 8, 6), (2, 3, 16, 6), (2, 3, 37, 6))),
    Case(
        "29 bfloat16 attention",
        sdpa,
        lambda b, h, s, d: qkv(b, h, s, d, dtype=torch.bfloat16),
        (1, 4, 128, 64),
        (1, 2, 6, 8),
        shapes((2, 3, 6, 8), (3, 4, 16, 12)),
    ),
    attention_case(32, twin=True),
    attention_case(512),
    block_case(32, twin=True),
    block_case(128),
    block_case(512),
    Case(
        "39 attention with a scale",
        lambda q, k, v: sdpa(q.flatten(1, 2), k, v, scale=1.0, enable_gqa=True),
        grouped_qkv,
        (1, 8, 2, 32, 16),
        (1, 2, 2, 6, 8),
        shapes((2, 4, 3, 6, 8), (3, 6, 2, 16, 12)),
    ),
]

# Views, reductions and layouts


def strided_inputs(m: int, n: int) -> list[torch.Tensor]:
    return [r(2 * m, n)[::2], r(n, m).t(), r(m, 1).expand(m, n), r(m, 2 * n)[:, 1::2]]


def aliases(n: int) -> list[torch.Tensor]:
    base = r(n + 2)
    return [base[:n], base[2:]]


def add_to_aliased(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x + y


def add_to_column(x: torch.Tensor) -> torch.Tensor:
    x[:, 0].add_(1)
    return x.sum(1)


def ties(m: int, n: int) -> list[torch.Tensor]:
    x = torch.randint(0, 3, (m, n)).float()
    x[1, 2] = x[2, 0] = x[2, 3] = NAN
    return [x]


MATRIX = shapes((4, 5), (3, 8), (7, 33))
CUBE = shapes((3, 4, 5), (2, 3, 8), (5, 7, 33))
VIEWS = [
    Case("32 permute", lambda x: x.permute(0, 2, 1), lambda a, b, c: [r(a, b, c)], (2, 3, 4), (2, 3, 4), CUBE, kernels=0),
    Case("32 permute in memory", lambda x: x.permute(0, 2, 1).contiguous(), lambda a, b, c: [r(a, b, c)], (2, 3, 4), (2, 3, 4), CUBE, kernels=1),
    Case(
        "33 sum of outer axes",
        lambda x: x.sum((0, 2)),
        lambda a, b, c: [r(a, b, c)],
        (3, 4, 5),
        (3, 4, 5),
        CUBE,
        condition=lambda x: x.abs().sum((0, 2)).max() / x.sum((0, 2)).abs().max(),
    ),
    Case(
        "34 sum of everything", lambda x: x.sum(), lambda m, n: [r(m, n)], (4, 5), (4, 5), MATRIX, condition=lambda x: x.abs().sum() / x.sum().abs()
    ),
    Case("35 add with alpha", lambda x, y: torch.add(x, y, alpha=2), lambda m, n: [r(m, n), r(m, n)], (4, 5), (4, 5), MATRIX, kernels=1),
    Case("36 every second column", lambda x: x[:, ::2] + 0, lambda m, n: [r(m, n)], (4, 5), (4, 5), MATRIX),
    Case("36 every second column as a view", lambda x: x[:, ::2], lambda m, n: [r(m, n)], (4, 5), (4, 5), MATRIX, kernels=0),
    Case("36 flip", lambda x: x.flip(0), lambda m, n: [r(m, n)], (4, 5), (4, 5), MATRIX, kernels=1),
    Case(
        "37 cat",
        lambda a, b, c: torch.cat([a, b, c], 1),
        lambda m, i, j, k: [r(m, i), r(m, j), r(m, k)],
        (4, 3, 5, 2),
        (4, 3, 5, 2),
        shapes((4, 3, 5, 2), (3, 8, 2, 20)),
    ),
    Case("49 odd layouts", lambda a, b, c, d: a * b + torch.exp(c) - d, strided_inputs, (6, 9), (4, 5), MATRIX),
    Case(
        "49 reversed and reduced",
        lambda a, b, c, d: (a.flip(0, 1) @ b.t() + d.flip(1).sum(-1)) * c.sum(1),
        lambda m, n: strided_inputs(m, n),
        (6, 9),
        (4, 5),
        MATRIX,
    ),
    Case("50 in place on a view", add_to_column, lambda m, n: [r(m, n)], (4, 3), (4, 3), MATRIX),
    Case("50 inputs that alias", add_to_aliased, aliases, (6,), (6,), shapes((6,), (9,), (100,)), bitwise=True),
    Case("50 inputs that alias, not written", lambda x, y: torch.exp(x) + y, aliases, (6,), (6,), shapes((6,), (9,), (100,))),
]

# Precision, integers and special values


def special_rows(m: int, n: int) -> list[torch.Tensor]:
    x = r(m, n)
    x[0, 1], x[1, 2], x[2, 0] = INF, -INF, NAN
    x[3] = -INF
    return [x]


def masked_row(b: int, h: int, s: int, d: int) -> list[torch.Tensor]:
    inputs = masked_qkv(b, h, s, d)
    inputs[3][..., 1, :] = False
    return inputs


def negatives(dtype: torch.dtype) -> Callable[[int], list[torch.Tensor]]:
    def make(n: int) -> list[torch.Tensor]:
        b = torch.randint(1, 7, (n,)) * (1 - 2 * torch.randint(0, 2, (n,)))
        return [torch.randint(-40, 40, (n,)).to(dtype), b.to(dtype)]

    return make


def divisions(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return a // b, a % b, torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b)


def bytes_of(n: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (n,), dtype=torch.uint8), torch.randint(0, 256, (n,), dtype=torch.uint8)]


LINE = shapes((12,), (9,), (100,))
NUMBERS = [
    Case("40 rounding in between", lambda x: x.half().float() * 1e-3, lambda m, n: [r(m, n)], (8, 40), (3, 21), MATRIX, kernels=1, bitwise=True),
    Case("41 softmax of special values", lambda x: torch.softmax(x, -1), special_rows, (6, 40), (5, 11), shapes((5, 11), (6, 40))),
    Case(
        "41 attention of a masked row",
        lambda q, k, v, m: sdpa(q, k, v, m),
        masked_row,
        (1, 2, 16, 8),
        (1, 2, 6, 8),
        shapes((2, 3, 6, 8), (3, 4, 16, 12)),
    ),
    Case("44 sum of ones", lambda x: x.sum(), lambda n: [torch.ones(n)], (10_000_000,), (1000,), LINE, bitwise=True),
    Case("45 mean of halves", lambda x: x.mean(), lambda n: [torch.full((n,), 0.5)], (100_000_000,), (1000,), LINE, threads=1, bitwise=True),
    Case("46 division of int64", divisions, negatives(torch.int64), (50,), (12,), LINE, bitwise=True),
    Case("46 division of int8", divisions, negatives(torch.int8), (50,), (12,), LINE, bitwise=True),
    Case("46 bytes wrap", lambda a, b: (a + b, a - b, a * b, -a, a << 1), bytes_of, (50,), (12,), LINE, bitwise=True),
    Case("47 ties and NaN", lambda x: (*x.max(1), *x.min(1), x.argmax(), x.argmin(0)), ties, (6, 9), (4, 5), MATRIX),
    Case(
        "52 masks",
        lambda x, y: (torch.where(x > y, x, y), x.masked_fill((x < 0) | (y < 0), -1.0)),
        lambda m, n: [r(m, n), r(m, n)],
        (6, 9),
        (4, 5),
        MATRIX,
    ),
    Case(
        "52 masks as values",
        lambda x, y: ((x > y).sum(1), (x > 0).all(1), (y > 1).any(0), ~(x > y) ^ (y > 0)),
        lambda m, n: [r(m, n), r(m, n)],
        (6, 9),
        (4, 5),
        MATRIX,
    ),
]

# Convolutions


def conv_case(name: str, options: str = "", groups: int = 1) -> Case:
    # Written out, since Dynamo would make integers of a closure symbolic.
    convolve = eval(f"lambda x, weight, bias: torch.relu(F.conv2d(x, weight, bias{options}))", {"torch": torch, "F": F})

    def make(b: int, c: int, h: int, width: int, o: int) -> list[torch.Tensor]:
        return [r(b, c, h, width), r(o, c // groups, 3, 3) / 8, r(o)]

    return Case(
        name,
        convolve,
        make,
        (1, 8, 32, 32, 16),
        (1, 8, 5, 6, 4),
        shapes((5, 8, 6, 7, 4), (6, 16, 17, 20, 12)),
        weights=2,
    )


def enlarge_and_project(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An image of tokens that lie in lines, twice as large, its points side by side; and tokens of it."""
    image = F.interpolate(tokens.movedim(-1, 1), scale_factor=2, mode="bilinear").contiguous()
    return image, torch.relu(F.linear(image.flatten(2).mT, weight, bias))


def enlarge_and_join(x: torch.Tensor, beside: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A U-Net's way up, with borders that reflect."""
    image = torch.cat([F.interpolate(x, scale_factor=2), beside], 1)
    return F.conv2d(F.pad(image, (1, 1, 1, 1), mode="reflect"), weight, bias)


CONVOLUTIONS = [
    conv_case("42 convolution"),
    conv_case("42 strided convolution", ", stride=2, padding=1"),
    conv_case("42 dilated convolution", ", dilation=2, padding=2"),
    conv_case("42 grouped convolution", ", groups=4, padding=1", groups=4),
    Case(
        "42 enlarged tokens, and a projection of the image",
        enlarge_and_project,
        lambda b, h, width, c, o: [r(b, h, width, c), r(o, c), r(o)],
        (2, 16, 16, 16, 24),
        (1, 2, 3, 4, 3),
        shapes((2, 3, 4, 5, 6), (4, 12, 13, 20, 17), (3, 16, 17, 24, 33)),
        weights=2,
    ),
    Case(
        "42 windows of an image that is enlarged, joined and reflected",
        enlarge_and_join,
        lambda b, c, h, width, o: [r(b, c, h, width), r(b, c, 2 * h, 2 * width), r(o, 2 * c, 3, 3) / 8, r(o)],
        (2, 16, 14, 16, 24),
        (1, 2, 3, 4, 3),
        shapes((2, 5, 4, 6, 7), (3, 8, 12, 13, 20), (4, 16, 17, 9, 33)),
        weights=2,
    ),
    Case(
        "42 transposed convolution",
        lambda x, weight, bias: torch.relu(F.conv_transpose2d(x, weight, bias, stride=2, padding=1, output_padding=1)),
        lambda b, c, h, width, o: [r(b, c, h, width), r(c, o, 3, 3) / 8, r(o)],
        (1, 8, 32, 32, 16),
        (1, 4, 5, 6, 3),
        shapes((2, 4, 6, 7, 5), (5, 8, 16, 20, 7)),
        weights=2,
    ),
]

# Empty tensors, single elements and indices


def indices(m: int, n: int) -> list[torch.Tensor]:
    """Data, and indices into its rows: repeated, some negative (for what may take those), some of them per column."""
    signed = torch.randint(-m, m, (7,))
    signed[3:5] = signed[0]
    return [r(m, n), signed, torch.randint(0, m, (7, n)), r(7, n)]


def put_by_index(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.index_put(x, (rows,), values, accumulate=True), x.scatter_add(0, columns, values), x.scatter_reduce(0, columns, values, "amax")


EDGES = [
    Case(
        "48 no elements",
        lambda x: (x * 2, x.sum(), x.sum(1), torch.softmax(x, 1)),
        lambda m, n: [r(m, n)],
        (0, 5),
        (0, 5),
        shapes((0, 5), (0, 8), (0, 33)),
    ),
    Case(
        "48 rows of no elements",
        lambda x: (x + 1, x.sum(1), x.prod(1), x.t() @ x),
        lambda m, n: [r(m, n)],
        (4, 0),
        (4, 0),
        shapes((4, 0), (9, 0), (100, 0)),
    ),
    Case(
        "48 stacks of steps",
        lambda x, y: (torch.stack([x * k + y for k in range(9)], -1), torch.stack([torch.sin(x + k) for k in range(12)], 1)),
        lambda m, n: [r(m, n), r(m, n)],
        (33, 70),
        (2, 3),
        shapes((4, 5), (9, 6), (17, 40)),
    ),
    Case("48 single numbers", lambda x, y: (x * y + 1, torch.exp(x).sum(), x.unsqueeze(0) - y), lambda: [r(), r()], (), (), ()),
    Case("48 broadcasts of both sides", lambda x, y: x * y + x, lambda m, n: [r(m, 1), r(1, n)], (6, 9), (4, 5), MATRIX, kernels=1),
    Case(
        "51 gather",
        lambda x, rows, columns, values: (x[rows], x.gather(0, columns), x.index_select(0, rows % x.shape[0])),
        indices,
        (6, 9),
        (4, 5),
        MATRIX,
    ),
    Case("51 scatter", put_by_index, indices, (6, 9), (4, 5), MATRIX),
    Case(
        "51 last write wins",
        lambda x, row, values: (x.index_put((row,), values), x.scatter(0, row.remainder(x.shape[0])[:, None].expand_as(values), values)),
        lambda m, n: [r(m, n), torch.tensor([-1, 0, -m + 1]), r(3, n)],
        (6, 9),
        (4, 5),
        MATRIX,
    ),
]

CASES = [*CHAINS, *CONTRACTIONS, *ATTENTION, *VIEWS, *NUMBERS, *CONVOLUTIONS, *EDGES]
CASES.sort(key=lambda case: int(case.name.split()[0]))
