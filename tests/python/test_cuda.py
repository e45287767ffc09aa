"""CUDA text: every case compiles for GPUs by NVRTC and computes eager's numbers on a driver that emulates a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Compiler
from program_cases import CASES, Case
from test_cases import check, each

from deplo import backend
from deplo.capture import unwrapped_errors
from deplo.errors import UserError

pytestmark = pytest.mark.usefixtures("fresh_inference")

_C = pytest.importorskip("deplo._C")
ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("sm_80", "sm_90")
EMULATED = Path(os.environ.get("DEPLO_BUILD", ROOT / "build")) / "tests" / "cuda" / "libdeplo_fake_cuda.so"


def nvrtc() -> str:
    """NVRTC of the package nvidia-cuda-nvrtc."""
    spec = importlib.util.find_spec("nvidia.cu13")
    assert spec is not None and spec.submodule_search_locations is not None, "NVRTC is missing: install requirements-dev.txt"
    return str(Path(spec.submodule_search_locations[0]) / "lib" / "libnvrtc.so.13")


class Emulated:
    """A program whose kernels run as CUDA text. Stands where a compiled program stands."""

    def __init__(self, text: str, options: str) -> None:
        cuda = json.dumps({**json.loads(options), "target": "cuda"})
        self.text = _C.lower(text, "kernel", cuda)
        kernels = _C.lower(self.text, "cuda", cuda)
        if kernels:
            assert all(_C.compile_cuda(kernels, arch, nvrtc()) for arch in ARCHS)
        signature, *lines = text.splitlines()
        self.inputs = [item.split(":")[0].strip() for item in _arguments(signature)]
        self.writes = [line.split()[-1] for line in lines if line.startswith("  write ")]
        self.returns = [item for item in lines[-1].removeprefix("  return").strip().split(", ") if item]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        results = _C.run_cuda(self.text, list(inputs), str(EMULATED), str(EMULATED))
        by_name = dict(zip(self.inputs, inputs, strict=True))
        written = [name for name in self.inputs if name in self.writes]
        for name, value in zip(written, results[len(self.returns) :], strict=True):
            by_name[name].copy_(value)
        return [value if item.startswith("%") else None if item == "none" else int(value) for item, value in zip(self.returns, results, strict=False)]


def _arguments(signature: str) -> list[str]:
    """The arguments between the brackets of a graph's first line."""
    depth, parts = 0, [""]
    for char in signature[signature.index("(") + 1 :]:
        depth += (char in "([") - (char in ")]")
        if depth < 0:
            break
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]


class Emulator:
    """Stands where `deplo._C` stands."""

    def __init__(self) -> None:
        self.programs: list[Emulated] = []

    def compile(self, text: str, options: str) -> Emulated:
        self.programs.append(Emulated(text, options))
        return self.programs[-1]


def run_as_cuda_text(case: Case, symbolic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dims = case.sizes[0] if symbolic else case.small
    assert dims is not None
    core = Emulator()
    monkeypatch.setattr(backend, "core", lambda: core)
    compiled = Compiler()(case.fn, dynamic=True if symbolic else None)
    inputs = case.inputs(dims)
    check(case, compiled(*inputs), inputs, dims)
    assert core.programs or case.kernels == 0


@each([case for case in CASES if case.small is not None])
def test_cases_run_as_cuda_text(case: Case, monkeypatch: pytest.MonkeyPatch):
    run_as_cuda_text(case, False, monkeypatch)


@each([case for case in CASES if case.small is not None and case.sizes])
def test_cases_of_symbolic_sizes_run_as_cuda_text(case: Case, monkeypatch: pytest.MonkeyPatch):
    run_as_cuda_text(case, True, monkeypatch)


def test_compiled_functions_refuse_the_target():
    with pytest.raises(UserError, match="target 'cuda'.*--ir cuda"), unwrapped_errors():
        torch.compile(torch.exp, backend="deplo", options={"target": "cuda"})(torch.ones(3))
    with pytest.raises(UserError, match="--ir cuda"):
        _C.compile("torch @f(%x: f32[2] user)\n  return %x\n", '{"target": "cuda"}')
