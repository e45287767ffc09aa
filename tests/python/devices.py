"""Tensors on a GPU for tests: of this machine's, or of a device that stands in for one, whose memory is the host's and whose driver is emulated."""

from __future__ import annotations

import collections
import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

FOLDER = Path(os.environ.get("DEPLO_BUILD", Path(__file__).resolve().parents[2] / "build")) / "tests" / "cuda"
EMULATED = str(FOLDER / "libdeplo_fake_cuda.so")
IS_REAL = torch.cuda.is_available()


@functools.cache
def stand_in() -> ctypes.CDLL:
    """The device that stands in, known to PyTorch from now on. Only for a PyTorch without CUDA."""
    path = FOLDER / "libdeplo_fake_device.so"
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    library.fake_count.restype = ctypes.c_int64
    return library


class Gpu:
    """The device of a test, and the options that compile for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, Any] = {}
        if not IS_REAL:
            self.library = stand_in()
            self.options = {"cuda_driver": EMULATED, "nvrtc": EMULATED}
            monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
            self.counts()

    def put(self, tree: Any) -> Any:
        """Tensors, in their strides and those that share memory still sharing it, or a module: there."""
        if isinstance(tree, torch.nn.Module):
            return tree.cuda()
        moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}

        def one(x: torch.Tensor) -> torch.Tensor:
            key = (x.untyped_storage().data_ptr(), x.dtype)
            if key not in moved:
                moved[key] = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).cuda()
            return moved[key].as_strided(x.shape, x.stride(), x.storage_offset())

        return tree_map_only(torch.Tensor, one, tree)

    def count(self, what: str) -> int:
        """How often this was done since the last time: copies (to and from the host), waits (of the host), allocations, recorded (blocks of another
        stream), stream_waits; or live_bytes. Of the stand-in only."""
        return int(self.library.fake_count(what.encode()))

    def counts(self) -> dict[str, int]:
        return {what: self.count(what) for what in ("copies", "waits", "allocations", "recorded", "stream_waits")}


def fetched(tree: Any) -> Any:
    """Tensors on the CPU, in their strides."""

    def one(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            return x
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        memory = x.detach().as_strided((last + 1 if x.numel() else 0,), (1,)).cpu()
        return memory.as_strided(x.shape, x.stride())

    return tree_map_only(torch.Tensor, one, tree)


def is_clean(judged: Path) -> bool:
    """Whether the emulator's judge wrote of launches, and in none found a race or a read of what nobody wrote."""
    lines = judged.read_text().splitlines()
    return bool(lines) and all(" races=0 unwritten=0" in line for line in lines)


def bank_ways(judged: Path) -> dict[str, float]:
    """Of the launches that the judge wrote of, by its lines: turns of the banks of shared memory for a request."""
    of = {line: dict(word.split("=") for word in line.split() if "=" in word) for line in judged.read_text().splitlines()}
    return {line: float(figures["shared_ways"]) / max(1.0, float(figures["shared_requests"])) for line, figures in of.items()}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


class Driver:
    """The emulated driver: how it behaves, and how often each of its calls was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
        self.monkeypatch, self.log = monkeypatch, log
        self.behave("")

    def behave(self, settings: str) -> None:
        self.monkeypatch.setenv("DEPLO_FAKE_CUDA", f"{settings},log={self.log}")

    def calls(self) -> collections.Counter[str]:
        """Since the last time."""
        made = collections.Counter(self.log.read_text().split()) if self.log.exists() else collections.Counter()
        self.log.unlink(missing_ok=True)
        return made


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    if IS_REAL and not Path(EMULATED).exists():
        pytest.skip("a machine with a GPU builds no emulated driver")
    return Driver(monkeypatch, tmp_path / "calls")
