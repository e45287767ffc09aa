"""Layers and blocks on a GPU, beside eager mode and Inductor: python benchmarks/gpu.py [--only NAME] [--json FILE] [--budget SECONDS]

Each row compiles, is compared with eager mode's error against float64, and is timed by events of the device: contestants take turns, and the table
shows the median of one call. The L2 cache is overwritten before each timed call, so that small rows do not live in it. The JSON file is written after
every row: what a limit cuts off is what comes after. `--dry` runs small sizes on the stand-in of the tests, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import max_error
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


def put(*tensors: torch.Tensor) -> Tensors:
    return tuple(x.cuda() for x in tensors)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(max(size, 1) for size in shape)).to(dtype)


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


def llama(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
    size, length = 2048 // d, 512 // d
    block = LlamaBlock(size, 5632 // d, 32 // d, max(4 // d, 1)).bfloat16().cuda()
    angle = torch.arange(length).unsqueeze(-1) * torch.logspace(0, -4, block.width // 2)
    turns = torch.cat([angle, angle], -1)
    return block, put(random(1, length, size, dtype=torch.bfloat16), turns.cos().bfloat16(), turns.sin().bfloat16())


def bert(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
    size = 768 // d
    layer = nn.TransformerEncoderLayer(size, 12 // d or 1, 4 * size, dropout=0.0, activation="gelu", batch_first=True).cuda()
    layer.train()  # in eval mode PyTorch takes a path of its own, which no compiler sees
    return layer, put(random(8, 128 // d, size))


def resnet(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
    return Bottleneck(256 // d, 64 // d).cuda().eval(), put(random(16 // d, 256 // d, 56 // d, 56 // d))


def attention(b: int, h: int, s: int, e: int, causal: bool) -> Row:
    def make(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
        shape = (b, max(h // d, 1), s // d, e)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), put(
            *(random(*shape, dtype=torch.bfloat16) for _ in range(3))
        )

    name = f"attention bf16 ({b}, {h}, {s}, {e}){' causal' if causal else ''}"
    return Row(name, make, 4.0 * b * h * s * s * e / (2 if causal else 1), 8.0 * b * h * s * e, torch.bfloat16)


def decoding(heads: int, groups: int, keys: int, e: int) -> Row:
    def make(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
        q = random(1, heads, 1, e, dtype=torch.bfloat16)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), put(
            q, *(random(1, groups, keys // d, e, dtype=torch.bfloat16) for _ in range(2))
        )

    return Row(f"decoding bf16 {heads}/{groups} heads, {keys} keys", make, 4.0 * heads * keys * e, 4.0 * groups * keys * e, torch.bfloat16)


def norm(name: str, rows: int, size: int, make: Callable[[int], nn.Module]) -> Row:
    return Row(name, lambda d: (make(size // d).cuda(), put(random(rows // d, size // d))), bytes=8.0 * rows * size)


def cross_entropy(d: int) -> tuple[Callable[..., torch.Tensor], Tensors]:
    return F.cross_entropy, put(random(2048 // d, 32000 // d), torch.randint(0, 32000 // d, (2048 // d,)))


def rows() -> list[Row]:
    bf16 = torch.bfloat16
    return [
        unary("gelu (32, 18944)", F.gelu, 32, 18944),
        unary("gelu (512, 18944)", F.gelu, 512, 18944),
        unary("softmax (1, 28, 2048, 2048)", lambda x: torch.softmax(x, -1), 1, 28, 2048, 2048),
        norm("rms norm (4096, 4096)", 4096, 4096, RmsNorm),
        norm("layer norm (4096, 4096)", 4096, 4096, nn.LayerNorm),
        unary("column sums (8192, 8192)", lambda x: x.sum(0), 8192, 8192, reads=1),
        Row("cross entropy (2048, 32000)", cross_entropy, bytes=4.0 * 2048 * 32000),
        linear(32, 3584, 3584),
        linear(512, 3584, 3584),
        linear(4096, 4096, 4096, bf16),
        product(4096, 4096, 4096, bf16),
        linear(512, 3584, 3584, bf16),
        linear(512, 18944, 3584, bf16),
        linear(1, 18944, 3584, bf16),
        unary("sum (10000000)", lambda x: x.sum(), 10_000_000, reads=1),
        attention(8, 16, 2048, 64, True),
        attention(1, 32, 2048, 128, False),
        attention(1, 32, 2048, 128, True),
        decoding(32, 8, 8192, 128),
        decoding(32, 32, 8192, 128),
        Row("TinyLlama block bf16 s=512", llama, lowest=bf16),
        Row("BERT layer (8, 128, 768)", bert),
        Row("ResNet bottleneck (16, 256, 56, 56)", resnet),
    ]


class Clock:
    """Times single calls on the device, each after the cache was overwritten."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.cache = None if dry else torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def times(self, run: Callable[[], Any], calls: int) -> list[float]:
        """Seconds of each call."""
        if self.cache is None:
            starts = []
            for _ in range(calls):
                start = time.perf_counter()
                run()
                starts.append(time.perf_counter() - start)
            return starts
        pairs = []
        for _ in range(calls):
            self.cache.zero_()
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            run()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return [1e-3 * start.elapsed_time(end) for start, end in pairs]


def measure(row: Row, clock: Clock, options: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """One row of the table: seconds of each contestant by name, errors, and why one is missing."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    fn, inputs = row.make(16 if clock.dry else 1)
    want = exact(fn, inputs)
    made: dict[str, Callable[..., torch.Tensor]] = {"eager": fn}
    about: dict[str, Any] = {"name": row.name, "flops": row.flops, "bytes": row.bytes}
    for name in names:
        start = time.perf_counter()
        try:
            kept = {"options": options} if name == "deplo" else {}
            compiled = torch.compile(fn, backend=name, **kept)
            result = compiled(*inputs)
            if not clock.dry:
                torch.cuda.synchronize()
            about[f"{name}_first_call"] = time.perf_counter() - start
            about[f"{name}_error"] = max_error(result, want)
            made[name] = compiled
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            about[f"{name}_failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    about["eager_error"] = max_error(fn(*inputs), want)
    calls = {}  # a turn takes about a twentieth of a second
    for name, run in made.items():
        warm = clock.times(lambda run=run: run(*inputs), 3)  # type: ignore[misc]
        calls[name] = 2 if clock.dry else min(max(int(0.05 / min(warm)), 2), 50)
    taken: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(1 if clock.dry else 5):
        for name in list(made)[:: -1 if turn % 2 else 1]:
            taken[name] += clock.times(lambda name=name: made[name](*inputs), calls[name])  # type: ignore[misc]
    about |= {name: statistics.median(times) for name, times in taken.items()}
    return about


def exact(fn: Callable[..., torch.Tensor], inputs: Tensors) -> torch.Tensor:
    """The result in float64."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    if not isinstance(fn, nn.Module):
        return fn(*wide)
    dtype = next(fn.parameters()).dtype
    result: torch.Tensor = fn.double()(*wide)
    fn.to(dtype)  # what it was, exactly
    return result


def shown(about: dict[str, Any], names: list[str]) -> str:
    cells = [f"{about['name']:36}"]
    for name in ("eager", *names):
        cells.append(f"{1e6 * about[name]:10.1f}" if name in about else f"{'failed':>10}")
    best = min((about[name] for name in ("eager", "inductor") if name in about), default=0)
    cells.append(f"{best / about['deplo']:8.2f}" if about.get("deplo") else " " * 8)
    if seconds := about.get("deplo"):
        cells.append(f"{about['flops'] / seconds * 1e-12:8.1f}" if about["flops"] else " " * 8)
        cells.append(f"{about['bytes'] / seconds * 1e-9:8.0f}" if about["bytes"] else " " * 8)
        cells.append(f"{about['deplo_error']:9.1e} {about['eager_error']:9.1e}")
    return " ".join(cells)


def prepare(dry: bool) -> tuple[dict[str, Any], list[str]]:
    """deplo's options, and who is measured beside eager mode."""
    if not dry:
        return {}, ["inductor", "deplo"]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))
    from devices import EMULATED, stand_in

    stand_in()
    torch.cuda._lazy_init = lambda: None
    return {"cuda_driver": EMULATED, "nvrtc": EMULATED}, ["deplo"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--json", default="", help="write the figures there")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no further row starts")
    parser.add_argument("--dry", action="store_true", help="small sizes on a device that stands in for a GPU")
    given = parser.parse_args()
    options, names = prepare(given.dry)
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = {"torch": torch.__version__, "device": "stand-in" if given.dry else torch.cuda.get_device_name()}
    print(f"{machine['device']}, torch {machine['torch']}; us a call, L2 cold; times: how much faster than the better of eager and inductor")
    print(f"{'':36} " + " ".join(f"{name:>10}" for name in ("eager", *names)) + f" {'times':>8} {'TFLOPS':>8} {'GB/s':>8} {'error':>9} {'eager':>9}")
    clock, measured, start = Clock(given.dry), [], time.monotonic()
    with torch.no_grad():
        for row in rows():
            if given.only not in row.name:
                continue
            if time.monotonic() - start > given.budget:
                print(f"{row.name:36} left out: the budget of {given.budget:.0f} s is used up")
                continue
            measured.append(measure(row, clock, options, names))
            print(shown(measured[-1], names), flush=True)
            if given.json:
                Path(given.json).write_text(json.dumps({"machine": machine, "rows": measured}, indent=1))
    return int(any("deplo_failed" in about for about in measured))


if __name__ == "__main__":
    sys.exit(main())
