"""Single operators of 0.1 to 10 ms, as collections of tasks for kernels have them (KernelBench's first level; `--chains`, its second: a layer with
what follows it): deplo beside eager mode.

    python benchmarks/operators.py [--chains] [--match TEXT] [--dtype float32|bfloat16] [--dynamic] [--threads 2] [--rounds 5] [--json FILE]

Weights of convolutions are parameters, as of a layer; all else is an argument, so that nothing is packed before a call. Times are medians of turns
with three sets of inputs (README.md here says how); `vs eager` is eager mode's time over deplo's. Numbers are judged by float64, as in run.py.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chains
import harness
import peak
import torch
import torch.nn.functional as F

Operator = tuple[str, Callable[..., Any], list[tuple[int, ...]]]


def chained() -> list[Operator]:
    """Chains of layers, whose modules are made when they are asked for."""
    return [(name, Made(make), [shape]) for name, make, shape in chains.chains()]


@dataclass(frozen=True)
class Made:
    """How a module is made."""

    make: Callable[[], torch.nn.Module]

    def module(self, dtype: torch.dtype) -> torch.nn.Module:
        """The same weights each time."""
        torch.manual_seed(0)
        return self.make().eval().to(dtype)


def operators() -> list[Operator]:
    """Name, function and the shapes of its inputs."""
    matrix, rows, image = (1024, 1024), (2048, 4096), (4, 64, 112, 112)
    products: list[Operator] = [
        ("matmul square", torch.matmul, [matrix, matrix]),
        ("matmul 512x2048x256", torch.matmul, [(512, 2048), (2048, 256)]),
        ("matmul small k", torch.matmul, [(2048, 32), (32, 2048)]),
        ("matmul large k", torch.matmul, [(64, 65536), (65536, 64)]),
        ("matmul odd sizes", torch.matmul, [(513, 771), (771, 1027)]),
        ("matmul a transposed", lambda a, b: a.T @ b, [matrix, matrix]),
        ("matmul b transposed", lambda a, b: a @ b.T, [matrix, matrix]),
        ("matmul both transposed", lambda a, b: a.T @ b.T, [matrix, matrix]),
        ("matmul tall", torch.matmul, [(32768, 64), (64, 64)]),
        ("matmul wide", torch.matmul, [(64, 64), (64, 32768)]),
        ("matrix vector", torch.matmul, [(2048, 4096), (4096, 1)]),
        ("vector matrix", torch.matmul, [(1, 4096), (4096, 2048)]),
        ("two rows by a matrix", torch.matmul, [(2, 4096), (4096, 2048)]),
        ("four rows by a matrix", torch.matmul, [(4, 4096), (4096, 2048)]),
        ("four rows by a transposed matrix", lambda a, b: a @ b.T, [(4, 4096), (2048, 4096)]),
        ("sixteen rows by a transposed matrix", lambda a, b: a @ b.T, [(16, 4096), (2048, 4096)]),
        ("bmm 32x128x128", torch.bmm, [(32, 128, 256), (32, 256, 128)]),
        ("bmm of vectors", torch.bmm, [(64, 1, 512), (64, 512, 256)]),
        ("matmul of three axes", torch.matmul, [(8, 128, 512), (512, 384)]),
        ("einsum of four axes", lambda a, b: torch.einsum("bijl,lk->bijk", a, b), [(4, 16, 32, 256), (256, 128)]),
        ("diagonal by matrix", lambda a, b: torch.diag(a) @ b, [(1024,), matrix]),
        ("lower triangles", lambda a, b: torch.tril(torch.tril(a) @ torch.tril(b)), [matrix, matrix]),
        ("outer product", torch.outer, [(2048,), (1024,)]),
        ("bilinear", lambda x, y, w: F.bilinear(x, y, w), [(256, 64), (256, 64), (32, 64, 64)]),
    ]
    points: list[Operator] = [
        (name, f, [rows])
        for name, f in (
            ("relu", torch.relu),
            ("leaky_relu", F.leaky_relu),
            ("sigmoid", torch.sigmoid),
            ("tanh", torch.tanh),
            ("silu", F.silu),
            ("gelu", F.gelu),
            ("selu", F.selu),
            ("hardsigmoid", F.hardsigmoid),
            ("softplus", F.softplus),
            ("softsign", F.softsign),
            ("elu", F.elu),
            ("hardtanh", F.hardtanh),
            ("mish", F.mish),
            ("exp", torch.exp),
            ("sin", torch.sin),
            ("erf", torch.erf),
            ("pow 3", lambda x: x**3),
            ("times a number", lambda x: x * 3.14),
            ("transposed", lambda x: x.T.contiguous()),
            ("dropout, evaluating", lambda x: F.dropout(x, 0.5, False) + 1),
        )
    ]
    along: list[Operator] = [
        (name, f, [rows])
        for name, f in (
            ("softmax", lambda x: torch.softmax(x, -1)),
            ("softmax down", lambda x: torch.softmax(x, 0)),
            ("log_softmax", lambda x: torch.log_softmax(x, -1)),
            ("logsumexp", lambda x: torch.logsumexp(x, -1)),
            ("sum", lambda x: x.sum(-1)),
            ("sum down", lambda x: x.sum(0)),
            ("sum of all", lambda x: x.sum()),
            ("mean", lambda x: x.mean(-1)),
            ("max", lambda x: x.max(-1)[0]),
            ("min down", lambda x: x.min(0)[0]),
            ("argmax", lambda x: x.argmax(-1)),
            ("argmin down", lambda x: x.argmin(0)),
            ("prod", lambda x: (1 + 0.001 * x).prod(-1)),
            ("var", lambda x: x.var(-1)),
            ("std down", lambda x: x.std(0)),
            ("norm", lambda x: torch.linalg.vector_norm(x, dim=-1)),
            ("frobenius norm", lambda x: x / torch.linalg.norm(x)),
            ("l1 norm", lambda x: x / x.abs().mean(-1, keepdim=True)),
            ("l2 norm", lambda x: F.normalize(x, dim=-1)),
            ("layer_norm", lambda x: F.layer_norm(x, x.shape[-1:])),
            ("rms_norm", lambda x: F.rms_norm(x, x.shape[-1:])),
            ("cumsum", lambda x: x.cumsum(-1)),
            ("cumsum down", lambda x: x.cumsum(0)),
            ("cumprod", lambda x: (1 + 0.001 * x).cumprod(-1)),
            ("cumsum backward", lambda x: x.flip(-1).cumsum(-1).flip(-1)),
            ("cummax", lambda x: x.cummax(-1)[0]),
            ("any", lambda x: (x > 5).any(-1)),
        )
    ]
    images: list[Operator] = [
        ("batch_norm", lambda x, m, v: F.batch_norm(x, m, v.abs()), [image, (64,), (64,)]),
        ("instance_norm", F.instance_norm, [image]),
        ("group_norm", lambda x: F.group_norm(x, 8), [image]),
        ("max_pool1d", lambda x: F.max_pool1d(x, 4, 2, 1), [(32, 64, 4096)]),
        ("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), [image]),
        ("max_pool3d", lambda x: F.max_pool3d(x, 3, 2, 1), [(2, 32, 32, 56, 56)]),
        ("avg_pool1d", lambda x: F.avg_pool1d(x, 8, 4, 2), [(32, 64, 4096)]),
        ("avg_pool2d", lambda x: F.avg_pool2d(x, 3), [image]),
        ("avg_pool3d", lambda x: F.avg_pool3d(x, 3, 2, 1), [(2, 32, 32, 56, 56)]),
        ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 7), [image]),
        ("interpolate nearest", lambda x: F.interpolate(x, scale_factor=2), [(4, 32, 56, 56)]),
        ("interpolate bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [(4, 32, 56, 56)]),
        ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), [image]),
        ("pad reflecting", lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), [image]),
        ("conv1d", lambda x, w: F.conv1d(x, w), [(8, 64, 4096), (128, 64, 3)]),
        ("conv1d, strided and dilated", lambda x, w: F.conv1d(x, w, stride=3, dilation=4), [(8, 64, 8192), (128, 64, 3)]),
        ("conv2d 3x3", lambda x, w: F.conv2d(x, w, padding=1), [(2, 64, 56, 56), (64, 64, 3, 3)]),
        ("conv2d 1x1", F.conv2d, [(2, 64, 56, 56), (128, 64, 1, 1)]),
        ("conv2d 11x11, of three channels", lambda x, w: F.conv2d(x, w, stride=4, padding=2), [(4, 3, 224, 224), (64, 3, 11, 11)]),
        ("conv2d 5x9, dilated", lambda x, w: F.conv2d(x, w, dilation=(2, 3)), [(2, 32, 64, 64), (64, 32, 5, 9)]),
        ("conv2d depthwise", lambda x, w: F.conv2d(x, w, padding=1, groups=64), [image, (64, 1, 3, 3)]),
        ("conv2d in groups", lambda x, w: F.conv2d(x, w, padding=1, groups=4), [(2, 64, 56, 56), (64, 16, 3, 3)]),
        ("conv3d", lambda x, w: F.conv3d(x, w), [(1, 16, 16, 56, 56), (32, 16, 3, 3, 3)]),
        ("conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w, stride=2), [(8, 64, 1024), (64, 64, 4)]),
        ("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1), [(2, 64, 28, 28), (64, 64, 4, 4)]),
        ("conv_transpose2d, stride 3 of 5x5", lambda x, w: F.conv_transpose2d(x, w, stride=3), [(2, 32, 28, 28), (32, 64, 5, 5)]),
        ("conv_transpose3d", lambda x, w: F.conv_transpose3d(x, w, stride=2), [(1, 16, 8, 28, 28), (16, 32, 3, 3, 3)]),
    ]
    losses: list[Operator] = [
        ("mse_loss", F.mse_loss, [rows, rows]),
        ("huber_loss", F.smooth_l1_loss, [rows, rows]),
        ("kl_div", lambda x, y: F.kl_div(x, torch.softmax(y, -1), reduction="batchmean"), [rows, rows]),
        ("hinge", lambda x, y: (1 - x * y).clamp(min=0).mean(), [rows, rows]),
        ("cosine similarity", lambda x, y: (1 - F.cosine_similarity(x, y)).mean(), [rows, rows]),
        ("triplet_margin_loss", F.triplet_margin_loss, [rows, rows, rows]),
        ("cross_entropy", lambda x, y: F.cross_entropy(x, torch.softmax(y, -1)), [(1024, 4096)] * 2),
        ("attention", F.scaled_dot_product_attention, [(2, 8, 256, 64)] * 3),
        ("pairwise distances", lambda x, y: torch.cdist(x, y), [(512, 64), (512, 64)]),
        ("embedding_bag", lambda w, x: F.embedding_bag((x.float() * 1000).long().remainder(8192), w), [(8192, 256), (1024, 16)]),
        ("index_select", lambda x, y: x.index_select(0, (y.float() * 1000).long().remainder(2048)), [rows, (2048,)]),
        ("gather", lambda x, y: x.gather(1, (y.float() * 1000).long().remainder(4096)), [rows, (2048, 1024)]),
        ("scatter_add", lambda x, y: x.scatter_add(1, (y.float() * 1000).long().remainder(4096), y), [rows, (2048, 1024)]),
    ]
    return [*products, *points, *along, *images, *losses]


class Layer(torch.nn.Module):
    """A convolution's function with its weight."""

    def __init__(self, f: Callable[..., Any], weight: torch.Tensor) -> None:
        super().__init__()
        self.f = f
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.f(x, self.weight)
        return result


def task(operator: Operator, dtype: torch.dtype, seed: int) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The function and its arguments; a convolution is a layer, whose weight is that of seed 0, a chain a module."""
    name, f, shapes = operator

    def drawn(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    if isinstance(f, Made):
        return f.module(dtype), drawn(seed)
    return (Layer(f, drawn(0)[1]), drawn(seed)[:1]) if name.startswith("conv") else (f, drawn(seed))


def eager_lacks(operator: Operator, dtype: torch.dtype) -> str:
    """What eager mode, by itself, says of an operator that it does not have in this dtype; empty where it has it."""
    f, given = task(operator, dtype, 0)
    try:
        f(*given)
    except NotImplementedError as error:
        return str(error)
    return ""


def measure(operator: Operator, args: argparse.Namespace, limits: peak.Limits) -> dict[str, Any]:
    name, dtype = operator[0], getattr(torch, args.dtype)
    f, _ = task(operator, dtype, 0)
    sets = [task(operator, dtype, seed)[1] for seed in range(3)]
    exact, _ = task(operator, dtype, 0)
    if isinstance(exact, torch.nn.Module):
        exact = exact.double()
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="deplo", dynamic=args.dynamic)
    contestants = {"eager": lambda k: f(*sets[k]), "deplo": lambda k: compiled(*sets[k])}
    row = {"operator": name} | harness.judged(contestants, exact(*(x.double() for x in sets[0])), dtype)
    timings = harness.interleave(contestants, args.rounds, args.seconds, len(sets), args.pause)
    moved = sum(x.numel() * x.element_size() for x in [*sets[0], contestants["eager"](0)])
    return row | harness.contestant_columns(row, timings, 0.0, float(moved), limits, "us", 1e6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_subject_options(parser, "operators")
    harness.add_timing_options(parser, rounds=5, seconds=0.05)
    parser.add_argument("--chains", action="store_true", help="layers with what follows them, instead of single operators")
    parser.add_argument("--dynamic", action="store_true", help="all sizes are symbols: programs that serve any")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    limits = peak.measure(args.threads)
    rows = []
    with torch.no_grad():
        for operator in chained() if args.chains else operators():
            if args.match not in operator[0]:
                continue
            if lacking := eager_lacks(operator, getattr(torch, args.dtype)):
                print(f"{operator[0]}: nothing to stand beside, eager mode says: {lacking}", flush=True)
                continue
            rows.append(measure(operator, args, limits))
            print(f"{operator[0]}: {rows[-1]['vs eager']:.2f}x eager", file=sys.stderr, flush=True)
    title = f"{args.dtype}, {args.threads} threads{', symbolic sizes' if args.dynamic else ''}"
    return harness.conclude(rows, "operator", title, args, limits)


if __name__ == "__main__":
    raise SystemExit(main())
