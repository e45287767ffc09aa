"""What this machine does at most, measured once: peaks of its instructions, bandwidths of its caches, and what faults and threads cost.

Everything but page faults is measured on code that deplo generates from Kernel IR, so that a peak is what its kernels could reach.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import time
from typing import Any

import torch

from .core import core
from .measure import quickest
from .options import Options

_SUMS = 12  # in registers: enough to hide the latency of a multiply-add with 16 registers
_FORMAT = 1
_PAGE = 4096


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Operations (a multiply-add is two) and bytes a second, of one core where nothing else is said, and seconds; 0: not there, or unknown."""

    f32: float
    bf16: float  # products of pairs (AVX512-BF16)
    int8: float  # products of four bytes (VNNI)
    l1: float  # read
    l2: float
    l3: float
    dram: float
    dram_all: float  # by all threads
    page_fault: float  # of a page that was never touched
    barrier: float  # between two steps of a program on all threads
    fork: float  # of the first step on all threads, after a pause
    threads: int

    def figures(self) -> str:
        """JSON of all of it, as the core's estimates read it."""
        return json.dumps(dataclasses.asdict(self))

    def rows(self) -> list[tuple[str, str]]:
        """For people: name and value."""
        peaks = [f"{name} {value / 1e9:.0f}" for name, value in (("f32", self.f32), ("bf16", self.bf16), ("int8", self.int8)) if value]
        reads = [f"{name} {value / 1e9:.0f}" for name, value in (("L1", self.l1), ("L2", self.l2), ("L3", self.l3), ("memory", self.dram))]
        return [
            ("peak of a core", f"{', '.join(peaks)} GOPS"),
            ("reads of a core", f"{', '.join(reads)} GB/s"),
            ("reads of all", f"memory {self.dram_all / 1e9:.0f} GB/s by {self.threads} threads"),
            ("costs", f"page fault {1e6 * self.page_fault:.2f} us, barrier {1e6 * self.barrier:.2f} us, fork {1e6 * self.fork:.1f} us"),
        ]


def calibration(options: Options, anew: bool = False) -> Calibration:
    """That of this machine: from the cache folder, or measured (about a second) and kept there."""
    path = _path(options)
    if path and not anew and (known := _read(path)):
        return known
    found = measure_calibration(options)
    if path:
        _write(path, found)
    return found


def _path(options: Options) -> str:
    folder = options.cache_folder()
    if not folder:
        return ""
    text = options.to_json()
    about = [_FORMAT, core().winners_machine(text), json.loads(core().target(text))["features"]]
    return os.path.join(folder, f"machine-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}.json")


def _read(path: str) -> Calibration | None:
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        if any(isinstance(value, bool) or not isinstance(value, int | float) or value < 0 for value in values.values()):
            return None
        return Calibration(**values)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _write(path: str, found: Calibration) -> None:
    """All or nothing; no folder or no space is no error."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(found), file)
        os.replace(temporary, path)


def measure_calibration(options: Options) -> Calibration:
    """Measures it, in less than two seconds."""
    text = options.replace(tune="off", verify=False, guard=False, dump="", dump_dir="", stop_after="", time=False).to_json()
    about = json.loads(core().target(text))
    lanes, features = int(about["vector_bytes"]) // 4, set(about["features"])
    l1, l2, l3 = (int(about[f"{cache}_bytes"]) for cache in ("l1", "l2", "l3"))
    threads = options.threads or torch.get_num_threads()
    far = torch.ones(max(2 * l3, 64 << 20) // 4, device="cpu")
    reads = [_read_speed(far, size, lanes, 1, text) for size in (l1 // 2, l2 // 2, min(l3 // 2, 8 << 20), far.numel() * 4)]
    barrier, fork = _thread_costs(threads, text)
    return Calibration(
        f32=_peak("f32", lanes, 2 * lanes, text),
        bf16=_peak("bf16", lanes, 4 * lanes, text) if "avx512bf16" in features else 0.0,
        int8=_peak("int8", lanes, 8 * lanes, text) if features & {"avx512vnni", "avxvnni"} else 0.0,
        l1=reads[0],
        l2=reads[1],
        l3=reads[2],
        dram=reads[3],
        dram_all=_read_speed(far, far.numel() * 4, lanes, threads, text),
        page_fault=_page_fault(),
        barrier=barrier,
        fork=fork,
        threads=threads,
    )


def _compile(text: str, options: str, threads: int) -> Any:
    return core().compile(text, json.dumps(json.loads(options) | {"threads": threads}))


_STEPS = {"f32": "fma(a, a, {0})", "bf16": "dot2(a, a, a, a, {0})", "int8": "dot4(a, a, {0})"}


def _peak(kind: str, lanes: int, operations: int, options: str) -> float:
    """Operations a second of one core: multiply-adds to independent sums, operands in registers."""
    operand, result = {"f32": ("f32", "f32"), "bf16": ("bf16", "f32"), "int8": ("i32", "i32")}[kind]
    count = 20000
    lines = [
        "program @peak(x: {0}[{1}] user)",
        "  buffer y: {2}[{3}] output",
        "  call @k(x, y)",
        "  return y",
        "",
        "kernel @k(a0: ptr {0}, out y0: ptr {2}) symbols () chunks 1 scratch 0",
        "  a: {0}x{1} = load a0[0]",
        "  zero: {2}x{1} = constant " + ("0" if kind == "int8" else "0.0"),
        "  for par in (thread // threads)..((thread + 1) // threads) step 1:",
        *(f"    var c{i}: {{2}}x{{1}} = zero" for i in range(_SUMS)),
        f"    for k in 0..{count} step 1:",
    ]
    for i in range(_SUMS):
        lines += [f"      f{i}: {{2}}x{{1}} = {_STEPS[kind].format(f'c{i}')}", f"      c{i} <- f{i}"]
    lines += [f"    store y0[{i * lanes}] = c{i}" for i in range(_SUMS)]
    program = _compile("\n".join(lines).format(operand, lanes, result, lanes * _SUMS) + "\n", options, 1)
    types = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32}
    x = torch.ones(lanes, device="cpu").to(types[operand])
    return operations * _SUMS * count / quickest(lambda: program.run([x]), 7, 0.08)


def _read_speed(memory: torch.Tensor, size: int, lanes: int, threads: int, options: str) -> float:
    """Bytes a second that sums of `size` bytes read, again and again, so that they lie in the nearest cache that holds them."""
    step = 8 * lanes
    pieces = 4 * threads if threads > 1 else 1
    each = max(1, size // 4 // step // pieces) * step
    again = max(1, (4 << 20) // (each * pieces * 4))
    lines = [
        f"program @read(x: f32[{each * pieces}] user)",
        f"  buffer y: f32[{step * pieces}] output",
        "  call @k(x, y)",
        "  return y",
        "",
        f"kernel @k(a0: ptr f32, out y0: ptr f32) symbols () chunks {pieces} scratch 0",
        f"  zero: f32x{lanes} = constant 0.0",
        f"  for par in (thread*{pieces} // threads)..((thread*{pieces} + {pieces}) // threads) step 1:",
        *(f"    var c{i}: f32x{lanes} = zero" for i in range(8)),
        f"    for r in 0..{again} step 1:",
        f"      for i in 0..{each} step {step}:",
    ]
    for i in range(8):
        lines += [
            f"        v{i}: f32x{lanes} = load a0[par*{each} + i + {i * lanes}]",
            f"        s{i}: f32x{lanes} = add(c{i}, v{i})",
            f"        c{i} <- s{i}",
        ]
    lines += [f"    store y0[par*{step} + {i * lanes}] = c{i}" for i in range(8)]
    program = _compile("\n".join(lines) + "\n", options, threads)
    x = memory[: each * pieces]
    program.run([x])
    return 4.0 * each * pieces * again / quickest(lambda: program.run([x]), 7, 0.08)


def _page_fault() -> float:
    """Seconds for each page of fresh memory, beside those of writing to it again."""
    pages = 2048
    seconds = []
    with mmap.mmap(-1, pages * _PAGE) as memory:
        for _ in range(2):
            start = time.perf_counter()
            for page in range(pages):
                memory[page * _PAGE] = 1
            seconds.append(time.perf_counter() - start)
    return max(0.0, seconds[0] - seconds[1]) / pages


def _thread_costs(threads: int, options: str) -> tuple[float, float]:
    """Seconds between two steps on all threads, and of waking them; zeros where there is one thread."""
    if threads < 2:
        return 0.0, 0.0
    steps = 64

    def program(count: int, threads: int) -> Any:
        lines = ["program @steps(x: f32[1] user)", f"  buffer y: f32[{threads}] output"]
        lines += ["  call @k(x, y)"] * count + ["  return y", ""]
        lines += [
            f"kernel @k(a0: ptr f32, out y0: ptr f32) symbols () chunks {threads} scratch 0",
            f"  for par in (thread*{threads} // threads)..((thread*{threads} + {threads}) // threads) step 1:",
            "    v: f32 = load a0[0]",
            "    store y0[par] = v",
        ]
        made = _compile("\n".join(lines) + "\n", options, threads)
        made.run([x])
        return made

    x = torch.ones(1, device="cpu")
    many, one, alone = program(steps, threads), program(1, threads), program(1, 1)
    barrier = (quickest(lambda: many.run([x]), 30, 0.08) - quickest(lambda: one.run([x]), 30, 0.08)) / (steps - 1)
    waking = []
    for _ in range(9):
        time.sleep(2e-3)
        waking.append(quickest(lambda: one.run([x]), 1))
    return max(0.0, barrier), max(0.0, sorted(waking)[len(waking) // 2] - quickest(lambda: alone.run([x]), 30, 0.08))
