"""What CUDA kernels would do on devices that need not be here, over benchmarks/cases.py, more layers, models, and single operators.

    python benchmarks/sass.py [--devices a100,h100,rtx5090] [--match TEXT] [--suites cases,layers,models,families,operators]
                              [--dtypes float32,bfloat16] [--train bert-base,hiera,...] [--size tiny] [--channels-last] [--worst 20] [--all]
                              [--tf32] [--no-code] [--neighbours] [--json FILE]

No GPU is asked: graphs are captured on the CPU, their kernels compiled by NVRTC, read as SASS, and judged by the figures of `deplo explain --device`;
equal kernels once. What was compiled stays in build/sass. The limits:

    spills      no access of local memory
    bytes       points, reductions: at most 1.1 times the least bytes move
    sectors     the same: nine tenths of the sectors that requests touch are as many as their bytes need, one at least
    wide        the same: nine tenths of the bytes go in accesses of 16 bytes a thread
    banks       contractions, convolutions, attention: at most 1.1 turns of the banks a request
    units       where arithmetic bounds a contraction: half of the main loop's instructions are matrix instructions (none touches registers on
                sm_90a), of tf32, whose numbers are rounded in registers, a fifth; of float32 eight tenths FFMA
    scores      attention keeps its scores in registers
    serial      no kernel runs on one thread
    beaten      with --neighbours: no schedule one step from a product's (half or twice a tile, a stage more or less) is better by 5 %

Kernels whose least bytes take less than a tenth of a launch, and what runs once for weights, count in the last line only. Exits with 1 where a limit
is broken, but for --no-fail.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import importlib.metadata
import json
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cases
import families
import operators
import torch
import torch.nn.functional as F
import zoo

from deplo.capture import capture
from deplo.errors import UnsupportedError, UserError
from deplo.machine_code import LAUNCH_SECONDS, CodeFigures, Judgement, code_of, find_device, judge
from deplo.options import Options, read_options
from deplo.terminal import seconds, table_text

CACHE = Path(__file__).resolve().parents[1] / "build" / "sass"
MEMORY_BOUND = ("points", "reduction")
PRODUCTS = ("contraction", "convolution", "attention")
NO_CODE = CodeFigures(0, 0, 0, 0, "none", 0, {}, 0.0)


@dataclasses.dataclass
class Subject:
    """A function and its inputs, as it is captured."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]
    backward: bool = False


@dataclasses.dataclass
class Row:
    subject: str
    device: str
    kernel: Judgement
    broken: list[str]

    @property
    def small(self) -> bool:
        return self.kernel.least_seconds < LAUNCH_SECONDS / 10 and self.kernel.seconds < 2 * LAUNCH_SECONDS

    @property
    def lost(self) -> float:
        """Seconds of a run beyond what its bytes and arithmetic need."""
        return self.kernel.calls * (self.kernel.seconds - LAUNCH_SECONDS - self.kernel.least_seconds)


# ---- what is judged ------------------------------------------------------------------------------------------------


def _called(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[Callable[..., Any], Sequence[Any]]:
    return lambda *given: module(**dict(zip(inputs, given, strict=True))), list(inputs.values())


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _sdpa(causal: bool) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    values = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1) @ v
    return F.linear(values.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1), w)


def _over_channels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1), -1) @ v


def layers() -> list[Subject]:
    """Layers of GPUs' usual sizes that no case has."""

    def image(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return _random(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)

    products = [
        Subject(f"matmul 4096 {str(dtype)[6:]}", lambda dtype=dtype: (torch.matmul, [_random(4096, 4096, dtype=dtype)] * 2))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    attention = [
        Subject(
            f"attention{' causal' if causal else ''} (1,16,2048,128) bf16", lambda causal=causal: (_sdpa(causal), [_random(1, 16, 2048, 128)] * 3)
        )
        for causal in (False, True)
    ]
    attention.append(
        Subject("attention by hand, heads merged (8,12,196,64) bf16", lambda: (_by_hand, [*[_random(8, 12, 196, 64)] * 3, _random(768, 768)]))
    )
    attention.append(Subject("attention over channels (8,4,48,784) bf16", lambda: (_over_channels, [_random(8, 4, 48, 784)] * 3)))
    attention.append(Subject("decode over 4096 bf16", lambda: (_sdpa(False), [_random(1, 32, 1, 128), *[_random(1, 8, 4096, 128)] * 2])))
    images = [
        Subject(
            f"conv 3x3 64 (16,56,56) {str(dtype)[6:]}",
            lambda dtype=dtype: (lambda x, w: F.relu(F.conv2d(x, w, padding=1)), [image(dtype, 16, 64, 56, 56), image(dtype, 64, 64, 3, 3)]),
        )
        for dtype in (torch.bfloat16, torch.float32)
    ]
    image_ops: dict[str, Callable[..., Any]] = {
        "depthwise 3x3": lambda x: F.conv2d(x, torch.ones(96, 1, 3, 3, dtype=x.dtype), padding=1, groups=96),
        "depthwise 7x7": lambda x: F.conv2d(x, torch.ones(96, 1, 7, 7, dtype=x.dtype), padding=3, groups=96),
        "max_pool 3x3 s2": lambda x: F.max_pool2d(x, 3, 2, 1),
        "avg_pool 2x2": lambda x: F.avg_pool2d(x, 2),
        "bilinear x2": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        "nearest x2": lambda x: F.interpolate(x, scale_factor=2.0),
        "adaptive average": lambda x: F.adaptive_avg_pool2d(x, 1),
        "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
        "group norm": lambda x: F.silu(F.group_norm(x, 32)),
    }
    windows = [
        Subject(f"{name} (8,96,56,56){' channels last' if last else ''}", lambda f=f, last=last: (f, [_image(last, 8, 96, 56, 56)]))
        for name, f in image_ops.items()
        for last in (False, True)
    ]
    rows: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
        "layer norm (4096,4096)": (lambda x: F.layer_norm(x, (4096,)), (4096, 4096)),
        "softmax (64,50257)": (lambda x: torch.softmax(x, -1), (64, 50257)),
        "cross entropy (2048,32000)": (lambda x: F.cross_entropy(x, torch.arange(2048)), (2048, 32000)),
        "column sums (65536,1024)": (lambda x: x.sum(0), (65536, 1024)),
        "argmax (4096,4096)": (lambda x: x.argmax(-1), (4096, 4096)),
        "cumsum (4096,4096)": (lambda x: x.cumsum(-1), (4096, 4096)),
        "odd sizes (1023,1021)": (lambda x: torch.relu(x) + 1, (1023, 1021)),
        "slice (4096,4096)": (lambda x: x[:, 1:-1] * 2, (4096, 4096)),
        "transposed chain (4096,4096)": (lambda x: torch.relu(x.t() + x), (4096, 4096)),
        "permute (8,16,512,64)": (lambda x: x.permute(0, 2, 1, 3).contiguous(), (8, 16, 512, 64)),
    }
    simple = [
        Subject(f"{name} {str(dtype)[6:]}", lambda f=f, shape=shape, dtype=dtype: (f, [_random(*shape, dtype=dtype)]))
        for name, (f, shape) in rows.items()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return [*products, *attention, *images, *windows, *simple]


def _image(last: bool, *shape: int) -> torch.Tensor:
    return _random(*shape, dtype=torch.float32).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def subjects(suites: Sequence[str], dtypes: Sequence[torch.dtype], train: Sequence[str], size: str, channels_last: bool = False) -> list[Subject]:
    found: list[Subject] = []
    if "cases" in suites:
        for bench in [bench for suite in cases.SUITES if (suite == "tiny") == (size == "tiny") for bench in cases.SUITES[suite]()]:
            found.append(Subject(bench.name, lambda bench=bench: (bench.module.eval(), bench.inputs(0))))
    if "layers" in suites and size != "tiny":
        found += layers()
    if "models" in suites:
        for name in zoo.NAMES:
            for dtype in dtypes:
                found.append(Subject(f"{name} {str(dtype)[6:]}", lambda name=name, dtype=dtype: _model(name, size, dtype, channels_last)))
    more = {one.name: one for one in families.families()}
    if "families" in suites:
        for name in more:
            for dtype in dtypes:
                found.append(Subject(f"{name} {str(dtype)[6:]}", lambda name=name, dtype=dtype: _called(*more[name].make(dtype))))
    if "operators" in suites:
        for operator in operators.operators():
            for dtype in dtypes:
                if not operators.eager_lacks(operator, dtype):
                    found.append(
                        Subject(f"{operator[0]} {str(dtype)[6:]}", lambda operator=operator, dtype=dtype: operators.task(operator, dtype, 0))
                    )
    for name in train:
        for dtype in dtypes:

            def made(name: str = name, dtype: torch.dtype = dtype) -> tuple[Callable[..., Any], Sequence[Any]]:
                return _called(*more[name].make(dtype)) if name in more else _model(name, size, dtype, channels_last)

            found.append(Subject(f"{name} {str(dtype)[6:]} training", made, backward=True))
    return found


def _model(name: str, size: str, dtype: torch.dtype, channels_last: bool = False) -> tuple[Callable[..., Any], Sequence[Any]]:
    case = zoo.build(name, size, dtype)
    inputs = case.inputs(0)
    if channels_last:
        case.model.to(memory_format=torch.channels_last)
        images = {key: x for key, x in inputs.items() if isinstance(x, torch.Tensor) and x.dim() == 4}
        inputs |= {key: x.contiguous(memory_format=torch.channels_last) for key, x in images.items()}
    if case.reset is not None:  # what creates its state is no part of it
        with torch.no_grad():
            case.model(**inputs)
        case.reset()
    return (lambda: case.model(**inputs)), ()


# ---- judging -------------------------------------------------------------------------------------------------------


def broken_limits(kernel: Judgement, arch: str, judged: bool = True) -> list[str]:
    """The names of limits that a kernel breaks; what only machine code tells if it was `judged`."""
    j, found = kernel, []
    if j.spills or j.stack_bytes:
        found.append("spills")
    if j.work in MEMORY_BOUND:
        if j.bytes > 1.1 * j.least_bytes:
            found.append("bytes")
        if j.least_sectors_per_request < 0.9 * j.sectors_per_request:
            found.append("sectors")
        if j.wide_share < 0.9:
            found.append("wide")
    if j.work in PRODUCTS and j.bank_ways > 1.1:
        found.append("banks")
    if j.work == "contraction" and judged and j.limits["arithmetic"] > j.least_bytes / max(j.bytes, 1.0) * j.limits["memory"]:
        share = {name: n / max(j.instructions, 1) for name, n in j.mix.items()}
        matrix = share.get("HMMA", 0.0) + share.get("HGMMA", 0.0)
        if j.matrix == 0.5:
            good = matrix >= 0.2
        elif arch.startswith("sm_9") and matrix:
            good = "HGMMA" in share and not any(name.startswith(("load", "shared")) for name in share)
        elif matrix:
            good = matrix >= 0.5
        else:
            good = share.get("FFMA", 0.0) >= 0.8
        if not good:
            found.append("units")
    if j.work == "attention":
        stored = judged and any(name.startswith(("store", "shared store")) for name in j.mix)
        if not j.schedule.startswith("gpu_online") or (stored and j.where == "loop"):
            found.append("scores")
    if j.schedule.startswith("gpu_serial"):
        found.append("serial")
    return found


class Codes:
    """Figures of machine code, kept in a folder by text, architecture and the compiler's version."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.known: dict[str, CodeFigures] = {}
        self.version = importlib.metadata.version("nvidia-cuda-nvrtc") if folder else ""

    def __call__(self, text: str, arch: str, options: Options) -> CodeFigures:
        if self.folder is None:
            return NO_CODE
        key = hashlib.sha256(f"{arch} {self.version} {sorted(CodeFigures.__annotations__)}\n{text}".encode()).hexdigest()
        if key in self.known:
            return self.known[key]
        file = self.folder / f"{key}.json"
        if file.exists():
            figures = CodeFigures(**json.loads(file.read_text()))
        else:
            figures = code_of(text, arch, options)
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(dataclasses.asdict(figures)))
        self.known[key] = figures
        return figures


_TILED = ("gpu_matrix", "gpu_tiles", "gpu_groups", "gpu_online", "gpu_chain")
_NUMBER = re.compile(r"(?P<word>tile|warps|groups|split|stages)\([^)]*\)")


def neighbours(schedule: str) -> list[str]:
    """Schedules of products on matrix units one step away: one number of a tile, of warps or of groups twice or half, or a stage more or less."""
    if not schedule.startswith(_TILED):
        return []
    found = []
    for directive in _NUMBER.finditer(schedule):
        for number in re.finditer(r"(?<![\w.])\d+(?=[,)])", directive[0]):
            n = int(number[0])
            for other in (n - 1, n + 1) if directive["word"] == "stages" else (n // 2, 2 * n):
                if other > 0:
                    at = directive.start() + number.start()
                    found.append(f"{schedule[:at]}{other}{schedule[at + len(number[0]) :]}")
    return found


def beaten(kernel: Judgement, again: Callable[[dict[str, str]], list[Judgement]]) -> str:
    """A neighbour of the kernel's schedule, without a spill, whose estimate is better by more than 5 %; empty: there is none. `again` judges with
    schedules by hand."""
    best, least = "", kernel.seconds / 1.05
    for schedule in neighbours(kernel.schedule):
        try:
            others = {other.name: other for other in again({kernel.name: schedule})}
        except (UserError, UnsupportedError):
            continue  # tiles that do not fit
        other = others.get(kernel.name)
        if other and not other.spills and other.seconds < least:
            best, least = schedule, other.seconds
    return best


def judged(subject: Subject, devices: Sequence[str], codes: Codes, compare: bool = False) -> Iterator[tuple[str, Row | str]]:
    """The rows of a subject, or why a part of it has none."""
    torch.manual_seed(0)
    fn, inputs = subject.make()
    target, _ = find_device(devices[0])
    options = read_options(options={"target": target.name})
    with contextlib.nullcontext() if subject.backward else torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        records = capture(fn, inputs, backward=subject.backward, options=options, parts=True)
    for record in records:
        for reason in [record.fallback, *(f"{op} stays in ATen" for op, _ in record.left)]:
            if reason:
                yield subject.name, reason
    for name in devices:
        target, device = find_device(name)
        for record in records:
            if not record.torch_ir:
                continue

            def again(schedules: dict[str, str], record: Any = record, target: Any = target, device: Any = device) -> list[Judgement]:
                hand = options.replace(schedule=schedules)
                return judge(record.torch_ir, record.hints, record.kind != "inference", target, device, hand, codes)

            for kernel in again({}):
                row = Row(subject.name, name, kernel, broken_limits(kernel, device["arch"], codes.folder is not None))
                if compare and (better := beaten(kernel, again)):
                    row.broken.append("beaten")
                    print(f"{subject.name}: {name}: {kernel.schedule} is beaten by {better}", file=sys.stderr, flush=True)
                yield subject.name, row


# ---- showing -------------------------------------------------------------------------------------------------------


def shown(rows: Sequence[Row]) -> str:
    header = (
        "subject",
        "device",
        "kernel",
        "work",
        "schedule",
        "calls",
        "of least",
        "sectors",
        "wide",
        "ways",
        "main loop",
        "time",
        "least",
        "bound",
        "breaks",
    )
    table = []
    for row in rows:
        j = row.kernel
        mix = ", ".join(f"{100 * n / max(j.instructions, 1):.0f} % {name}" for name, n in list(j.mix.items())[:3])
        table.append(
            (
                row.subject,
                row.device,
                j.name,
                j.work,
                j.schedule.split()[0],
                j.calls,
                f"{j.bytes / j.least_bytes:.2f}" if j.least_bytes else "",
                f"{100 * j.least_sectors_per_request / max(j.sectors_per_request, 1e-9):.0f} %",
                f"{100 * j.wide_share:.0f} %",
                f"{j.bank_ways:.2f}",
                mix,
                seconds(j.seconds),
                seconds(j.least_seconds),
                j.bound,
                ", ".join(row.broken),
            )
        )
    return table_text(header, table, [5, 6, 7, 8, 9, 11, 12])


def summary(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Per device: kernels, those that break each limit, and their time beside the least."""
    lines = []
    for device in names:
        mine = [row for row in rows if row.device == device]
        counted = [row for row in mine if not row.kernel.once and not row.small]
        others = [row for row in mine if row.kernel.once or row.small]
        counts = Counter(name for row in counted for name in row.broken)
        small = Counter(name for row in others for name in row.broken)
        ratios = [(row.kernel.seconds - LAUNCH_SECONDS) / row.kernel.least_seconds for row in counted if row.kernel.least_seconds]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0
        bad = sum(bool(row.broken) for row in counted)
        told = ", ".join(f"{name} {n}" for name, n in counts.most_common()) or "none"
        lines.append(f"{device}: {len(counted)} kernels, {bad} break a limit ({told}); {mean:.2f} of the least time in geometric mean")
        told = ", ".join(f"{name} {n}" for name, n in small.most_common()) or "none"
        lines.append(f"{device}: {len(others)} more are small or run once: {sum(bool(row.broken) for row in others)} break a limit ({told})")
        lost = sum(row.lost for row in counted)
        lines.append(f"{device}: estimated beyond the least: {seconds(lost)} of {seconds(sum(r.kernel.calls * r.kernel.seconds for r in counted))}")
    return "\n".join(lines)


def distinct(rows: Sequence[Row]) -> list[Row]:
    """Of kernels that a model has several times the first, with their number as its calls."""
    found: dict[Any, Row] = {}
    for row in rows:
        j = row.kernel
        key = (row.subject, row.device, j.schedule, j.work, j.bytes, j.asked_bytes, j.least_bytes, j.flops, j.instructions, j.registers, j.once)
        if key in found:
            first = found[key]
            found[key] = dataclasses.replace(first, kernel=dataclasses.replace(first.kernel, calls=first.kernel.calls + j.calls))
        else:
            found[key] = row
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="a100,h100,rtx5090")
    parser.add_argument("--match", default="", help="subjects whose name contains this")
    parser.add_argument("--suites", default="cases,layers,models")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of models")
    parser.add_argument("--train", default="bert-base,resnet-50", help="models whose training step is judged as well")
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--channels-last", action="store_true", help="models and their images in channels_last")
    parser.add_argument("--worst", type=int, default=20, help="rows of a device that are shown: those that break limits, most time lost first")
    parser.add_argument("--all", action="store_true", help="every row")
    parser.add_argument("--tf32", action="store_true", help="as PyTorch's switches allow it for products and convolutions of float32; else for none")
    parser.add_argument("--no-code", action="store_true", help="without NVRTC: only what addresses tell")
    parser.add_argument("--neighbours", action="store_true", help="compile each product's schedule one step away as well: none may be better by 5 %%")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 where limits are broken")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    with torch.backends.__allow_nonbracketed_mutation():  # torch.testing, where something imported it, freezes it
        torch.backends.cudnn.allow_tf32 = args.tf32
    devices = args.devices.split(",")
    codes = Codes(None if args.no_code else CACHE)
    rows: list[Row] = []
    refused: list[tuple[str, str]] = []
    dtypes = [getattr(torch, name) for name in args.dtypes.split(",")]
    found = subjects(args.suites.split(","), dtypes, [n for n in args.train.split(",") if n], args.size, args.channels_last)
    for subject in (s for s in found if args.match in s.name):
        print(f"{subject.name}", file=sys.stderr, flush=True)
        for name, row in judged(subject, devices, codes, args.neighbours):
            rows.append(row) if isinstance(row, Row) else refused.append((name, row))
        gc.collect()
    rows = distinct(rows)
    for device in devices:
        mine = [row for row in rows if row.device == device]
        if not args.all:
            mine = [row for row in mine if not row.kernel.once and not row.small and (row.broken or row.lost > 1e-6)]
            mine = sorted(mine, key=lambda row: -row.lost)[: args.worst]
        print(shown(mine), end="\n\n")
    for name, reason in refused:
        print(f"{name}: {reason}")
    print(summary(rows, devices))
    if args.json:
        args.json.write_text(json.dumps([{**dataclasses.asdict(row), "small": row.small, "lost": row.lost} for row in rows], indent=1))
    breaks = any(row.broken and not row.small and not row.kernel.once for row in rows)
    return 1 if breaks and not args.no_fail else 0


if __name__ == "__main__":
    sys.exit(main())
