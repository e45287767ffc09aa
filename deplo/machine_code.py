"""What NVIDIA's compiler makes of kernels, read without a GPU: PTX, SASS, registers, spills, the mix of a main loop, limits of a device."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .core import core
from .errors import UnsupportedError, UserError
from .options import Options
from .targets import Target, packaged, targets

DISASSEMBLER = (("nvidia.cu13", "bin/nvdisasm"), ("nvidia.cuda_nvdisasm", "bin/nvdisasm"))
LEVELS = ("ptx", "sass")  # below the text that NVRTC takes

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?);?\s*$")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_SECTION = re.compile(r"^\.text\.(\S+):")
_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11
_RESERVED_SHARED = 1024  # of a block, by sm_90 and later
_REGISTERS_SM = 65536
_REGISTER_UNIT = 256  # a warp's registers are given out in such pieces
LAUNCH_SECONDS = 2.5e-6
_CACHE_BYTES_PER_CLOCK = 64  # of an SM, from the L2 or its own cache


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    guarded: bool
    name: str  # with its modifiers: LDG.E.128.CONSTANT
    operands: str


@dataclasses.dataclass
class KernelCode:
    """One kernel's machine code."""

    name: str
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    instructions: list[Instruction] = dataclasses.field(default_factory=list)
    labels: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def spills(self) -> int:
        """Accesses of local memory: what did not fit in registers, or arrays that have no constant indices."""
        return sum(i.name.startswith(("LDL", "STL")) for i in self.instructions)

    def loops(self) -> list[list[Instruction]]:
        """The bodies of innermost loops: from a label to a branch back to it, without another one inside."""
        found = []
        for at in self.instructions:
            target = _TARGET.search(at.operands) if at.name.startswith("BRA") else None
            start = self.labels.get(target[1], at.address + 1) if target else at.address + 1
            if start < at.address:
                found.append((start, at.address))
        # To try again whether a flag is raised is no work.
        found = [
            loop for loop in found if any(class_of(i) not in ("barrier", "branch") for i in self.instructions if loop[0] <= i.address <= loop[1])
        ]
        inner = [loop for loop in found if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in found)]
        return [[i for i in self.instructions if start <= i.address <= end] for start, end in inner]

    def main_loop(self) -> tuple[str, list[Instruction]]:
        """Where most work is done: the innermost loop with the most of it; all instructions where there is none."""

        def work(body: Sequence[Instruction]) -> tuple[int, int]:
            weights = {"HGMMA": 512, "HMMA": 64, "FFMA": 4, "load": 4, "store": 4, "load 128": 16, "store 128": 16, "exchange": 0}
            return sum(weights.get(class_of(i), 1) for i in body), len(body)

        best = max(self.loops(), key=work, default=None)
        return ("loop", best) if best and work(best)[0] > 8 else ("all", [i for i in self.instructions if i.name != "NOP"])


def class_of(instruction: Instruction) -> str:
    """What kind of work an instruction does, as tables show it."""
    name, _, rest = instruction.name.partition(".")
    if name in ("HGMMA", "QGMMA", "IGMMA"):
        return "HGMMA"
    if name in ("HMMA", "IMMA", "UTCHMMA", "DMMA"):
        return "HMMA"
    if name in ("FFMA", "FFMA2"):
        return "FFMA"
    if name in ("LDGSTS", "UTMALDG"):
        return "copy"
    if name in ("LDG", "LD", "STG", "ST"):
        return ("load" if name[0] == "L" else "store") + (" 128" if "128" in rest.split(".") else "")
    if name in ("LDS", "LDSM"):
        return "shared"
    if name in ("STS", "STSM"):
        return "shared store"
    if name in ("LDL", "STL"):
        return "spill"
    if name in ("SHFL", "VOTE", "REDUX"):
        return "exchange"
    if name in ("BAR", "WARPSYNC", "DEPBAR", "LDGDEPBAR", "BSYNC", "BSSY", "SYNCS"):
        return "barrier"
    if name in ("BRA", "EXIT", "CALL", "RET", "BREAK", "JMP"):
        return "branch"
    if name[0] == "F" or name in ("MUFU", "HADD2", "HFMA2", "HMUL2", "DADD", "DMUL", "DFMA", "DSETP"):
        return "float"
    return "integer"


def assemble(text: str, arch: str, options: Options) -> bytes:
    """NVRTC's code for `sm_90a`, or its PTX for `compute_90a`. Raises UnsupportedError where NVRTC is missing or does not know the architecture."""
    values = json.loads(options.replace(target=next(t.name for t in targets() if t.devices)).to_json({}, False))
    return bytes(core().assemble(text, json.dumps({**values, "arch": arch})))


def ptx(text: str, arch: str, options: Options) -> str:
    return assemble(text, arch.replace("sm_", "compute_"), options).decode().rstrip("\0")


def sass(text: str, arch: str, options: Options) -> str:
    return disassemble(assemble(text, arch, options))


def disassemble(cubin: bytes) -> str:
    """The listing of nvdisasm. Raises UnsupportedError that says what to install."""
    tool = packaged(DISASSEMBLER) or shutil.which("nvdisasm")
    if not tool:
        raise UnsupportedError("the disassembler nvdisasm was not found: install the package nvidia-cuda-nvdisasm, or CUDA's bin folder in PATH")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnsupportedError(f"{tool} does not read this code: {done.stderr.strip()}; install a newer nvidia-cuda-nvdisasm")
    return done.stdout


def read_code(cubin: bytes) -> dict[str, KernelCode]:
    """The kernels of a cubin by name."""
    kernels: dict[str, KernelCode] = {}
    current: KernelCode | None = None
    for line in disassemble(cubin).splitlines():
        if section := _SECTION.match(line):
            current = kernels.setdefault(section[1], KernelCode(section[1]))
        elif current is None:
            continue
        elif label := _LABEL.match(line):
            # The next instruction's address, whatever comes between.
            current.labels[label[1]] = current.instructions[-1].address + 16 if current.instructions else 0
        elif found := _INSTRUCTION.match(line):
            current.instructions.append(Instruction(int(found[1], 16), found[2] is not None, found[3], found[4]))
    _read_resources(cubin, kernels)
    return kernels


def _read_resources(cubin: bytes, kernels: Mapping[str, KernelCode]) -> None:
    """Registers, stack and shared memory, from the ELF file's sections."""
    offset = struct.unpack_from("<Q", cubin, 40)[0]
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + k * size) for k in range(count)]

    def text(table: tuple[int, ...], at: int) -> str:
        start = table[4] + at
        return cubin[start : cubin.index(b"\0", start)].decode()

    named = {text(sections[names_at], s[0]): s for s in sections}
    symbols = named[".symtab"]
    strings = sections[symbols[6]]
    names = [text(strings, struct.unpack_from("<I", cubin, symbols[4] + k * symbols[9])[0]) for k in range(symbols[5] // symbols[9])]
    info = named[".nv.info"]
    at, end = info[4], info[4] + info[5]
    while at + 4 <= end:
        kind, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if kind == 4:
            if attribute in (_REGCOUNT, _FRAME_SIZE) and length >= 8:
                symbol, value = struct.unpack_from("<II", cubin, at + 4)
                if kernel := kernels.get(names[symbol]):
                    setattr(kernel, "registers" if attribute == _REGCOUNT else "stack_bytes", value)
            at += 4 + length
        else:
            at += 4
    for name, kernel in kernels.items():
        if shared := named.get(f".nv.shared.{name}"):
            kernel.shared_bytes = shared[5]


# ---- judging -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Judgement:
    """What is known of one kernel on a device without running it. Bytes and sectors are those of a whole launch."""

    name: str
    schedule: str
    work: str  # attention, convolution, contraction, window, reduction, points; empty for what schedules add
    operators: list[str]
    calls: int  # in one run of the program
    once: bool  # it packs weights
    threads: int  # of a block
    blocks: int
    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    occupancy: float  # of the SM's warps that are resident at once
    where: str  # what `mix` counts: the main loop, or all
    instructions: int
    mix: dict[str, int]
    matrix: float  # of the rate of matrix units for 16 bits; 0: none multiplies
    bytes: float  # moved by the device's memory
    asked_bytes: float  # by the kernel's accesses, which caches serve in part
    least_bytes: float
    sectors_per_request: float
    least_sectors_per_request: float
    wide_share: float  # of the bytes asked for, in accesses of 16 bytes a thread
    bank_ways: float  # 1: no conflicts
    barriers: float
    complete: bool  # every address was known
    flops: float
    seconds: float  # estimated, with the launch
    bound: str  # by what
    limits: dict[str, float]  # seconds that each part of the device needs alone
    least_seconds: float  # of the least bytes and the arithmetic, without the launch


def find_device(name: str) -> tuple[Target, dict[str, Any]]:
    """The device's figures, and the target that knows it. Raises UserError that names the devices."""
    known = [(target, device) for target in targets() for device in target.devices]
    for target, device in known:
        if device["name"] == name:
            return target, device
    raise UserError(f"--device {name}: expected one of {', '.join(device['name'] for _, device in known)}")


@dataclasses.dataclass(frozen=True)
class CodeFigures:
    """What judging reads of one kernel's machine code."""

    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    where: str
    instructions: int
    mix: dict[str, int]
    matrix: float  # of the rate of matrix units for 16 bits; 0: none multiplies

    @staticmethod
    def of(code: KernelCode) -> CodeFigures:
        where, body = code.main_loop()
        mix = dict(Counter(class_of(i) for i in body).most_common())
        products = [i for i in code.instructions if class_of(i) in ("HMMA", "HGMMA")]
        matrix = (0.5 if all("TF32" in i.name.split(".") for i in products) else 1.0) if products else 0.0
        return CodeFigures(code.registers, code.spills, code.stack_bytes, code.shared_bytes, where, len(body), mix, matrix)


def code_of(text: str, arch: str, options: Options) -> CodeFigures:
    """Of the one kernel of a text. Raises UnsupportedError where NVRTC or the disassembler is missing."""
    (code,) = read_code(assemble(text, arch, options)).values()
    return CodeFigures.of(code)


def judge(
    text: str,
    hints: Mapping[str, int],
    training: bool,
    target: Target,
    device: Mapping[str, Any],
    options: Options,
    code: Callable[[str, str, Options], CodeFigures] = code_of,
) -> list[Judgement]:
    """The kernels of IR text, in order; those of equal text go through `code` once, all processors at it."""
    options = options.replace(target=target.name, arch=device["arch"])
    about = json.loads(core().judge(text, options.to_json(dict(hints), training)))
    texts = list({kernel["text"] for kernel in about})
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        figures = dict(zip(texts, pool.map(lambda one: code(one, device["arch"], options), texts), strict=True))
    return [_judge(kernel, figures[kernel["text"]], device) for kernel in about]


def _judge(about: Mapping[str, Any], code: CodeFigures, device: Mapping[str, Any]) -> Judgement:
    memory = about["memory"]
    own_shared = max(code.shared_bytes, about["shared_bytes"])  # large arrays are no part of the code
    shared = own_shared + min(about["scratch_bytes"], device["shared_kb_block"] * 1024)
    resident = occupancy(about["threads"], code.registers, shared, device)
    peak = (device["bf16_tflops"] * code.matrix or device["float32_tflops"]) * 1e12
    # What is asked for again and again comes from the L2, if it fits.
    sizes, cached = about["buffers"], device["l2_mb"] * 1e6 / 2
    moved = sum(min(asked, sizes[name]) if sizes.get(name, cached) < cached else asked for name, asked in memory["of_buffers"].items())
    clocks = device["sms"] * device["ghz"] * 1e9  # of all SMs a second
    at_once = device["sms"] * max(resident * device["warps_sm"] // -(-about["threads"] // 32), 1)  # blocks
    limits = {
        "memory": moved / (device["dram_gb_s"] * 1e9),
        "arithmetic": about["flops"] / peak,
        "shared memory": memory["shared_ways"] / clocks,
        "caches": memory["global_sectors"] * 32 / (_CACHE_BYTES_PER_CLOCK * clocks),
        "instructions": memory["instructions"] / (4 * clocks),
        "latency": memory["clocks"] * max(about["blocks"] / at_once, 1.0) / (device["ghz"] * 1e9),
    }
    bound = max(limits, key=lambda name: limits[name])
    requests = max(memory["global_requests"], 1.0)
    return Judgement(
        name=about["name"],
        schedule=about["schedule"],
        work=about["work"],
        operators=about["operators"],
        calls=about["calls"],
        once=about["once"],
        threads=about["threads"],
        blocks=about["blocks"],
        registers=code.registers,
        spills=code.spills,
        stack_bytes=code.stack_bytes,
        shared_bytes=own_shared,
        occupancy=resident,
        where=code.where,
        instructions=code.instructions,
        mix=code.mix,
        matrix=code.matrix,
        bytes=moved,
        asked_bytes=memory["global_bytes"],
        least_bytes=about["bytes"],
        sectors_per_request=memory["global_sectors"] / requests,
        least_sectors_per_request=memory["least_sectors"] / requests,
        wide_share=memory["wide_bytes"] / max(memory["global_bytes"], 1.0),
        bank_ways=memory["shared_ways"] / max(memory["shared_requests"], 1.0) if memory["shared_requests"] else 1.0,
        barriers=memory["barriers"],
        complete=memory["complete"],
        flops=about["flops"],
        seconds=limits[bound] + LAUNCH_SECONDS,
        bound=bound,
        limits=limits,
        least_seconds=max(about["bytes"] / (device["dram_gb_s"] * 1e9), limits["arithmetic"]),
    )


def occupancy(threads: int, registers: int, shared_bytes: int, device: Mapping[str, Any]) -> float:
    """The share of an SM's warps that blocks of so many threads, with their registers and shared memory, keep resident."""
    warps = -(-threads // 32)
    per_warp = -(-max(registers, 1) * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    most = [device["warps_sm"] // warps, _REGISTERS_SM // (per_warp * warps), 32]
    if shared_bytes:
        reserved = 0 if device["arch"] < "sm_90" and len(device["arch"]) == 5 else _RESERVED_SHARED
        most.append(device["shared_kb_sm"] * 1024 // max(shared_bytes, reserved))
    return float(min(most) * warps / device["warps_sm"])


def rows(judgements: Sequence[Judgement]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table that `explain --device` prints."""
    from .terminal import quantity, seconds

    header = ("kernel", "registers", "spills", "shared", "occupancy", "instructions", "bytes", "of least", "sectors", "bank ways", "time", "bound by")
    table: list[tuple[str, ...]] = []
    for j in judgements:
        share = ", ".join(f"{100 * n / max(j.instructions, 1):.0f} % {name}" for name, n in list(j.mix.items())[:4])
        table.append(
            (
                j.name,
                str(j.registers),
                str(j.spills),
                quantity(j.shared_bytes, "B"),
                f"{100 * j.occupancy:.0f} %",
                f"{j.where} {j.instructions}: {share}",
                quantity(j.bytes, "B"),
                f"{j.bytes / j.least_bytes:.2f}" if j.least_bytes else "",
                f"{j.sectors_per_request:.1f} ({j.least_sectors_per_request:.1f})",
                f"{j.bank_ways:.2f}",
                seconds(j.seconds),
                j.bound,
            )
        )
    return header, table
