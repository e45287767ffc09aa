"""Every example of the tutorial runs and says what it is to say. Most compare themselves with eager mode."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import needs_core

pytestmark = needs_core
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def said(name: str, capfd) -> str:
    """What `python examples/NAME.py` prints."""
    torch._dynamo.reset()
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capfd.readouterr().out


def test_model(capfd):
    out = said("model", capfd)
    assert "largest difference" in out and "0 library calls" in out and "k1_linear_silu_mul" in out


def test_train(capfd):
    first, last = said("train", capfd).split("(")[0].removeprefix("loss ").split("->")
    assert float(last) < 0.5 * float(first)


def test_llm(capfd):
    assert [line.split()[0] for line in said("llm", capfd).splitlines() if "tokens of a prompt" in line] == ["7", "11"]


def test_package(capfd):
    assert "served batches of 1, 3 and 8" in said("package", capfd)


def test_slow(capfd):
    slow, mended = said("slow", capfd).split("== mended")
    assert "graphs 2" in slow and "aten.sort.default" in slow
    assert "graphs 1, calls left to ATen none" in mended


@pytest.mark.gpu
def test_gpu():
    """In a process of its own: other tests stand in for a GPU."""
    ran = subprocess.run([sys.executable, str(EXAMPLES / "gpu.py")], capture_output=True, text=True, check=True)
    if torch.cuda.is_available():
        assert "softmax of (256, 1000) on" in ran.stdout
    else:
        assert ran.stdout.startswith("There is no GPU here")
        assert "__global__" in ran.stdout and "registers" in ran.stdout and "EXIT" in ran.stdout
