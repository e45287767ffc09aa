"""Convolutions of few channels on matrix units, from windows in shared memory: eager mode and float64 judge the numbers, the emulator races, reads of
what nobody wrote, and conflicts of banks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import EMULATED, bank_ways, is_clean
from engines import Compiler, same

import deplo
from deplo.capture import capture
from deplo.core import core
from deplo.options import read_options

pytestmark = pytest.mark.usefixtures("fresh_inference")
pytest.importorskip("deplo._C")
OPTIONS = {"target": "cuda", "cuda_driver": EMULATED, "nvrtc": EMULATED}
# Turns of the banks for a request: images are small, and points of pieces in three channels lie 24 bytes apart.
_MOST_WAYS, _OTHER_WAYS = 1.5, {"pieces in channels": 2.7, "7x7 strided in channels": 1.65}
_BF16, _F16 = torch.bfloat16, torch.float16


def layer(
    shape: tuple[int, ...], channels: int, kernel: int, last: bool, dtype: torch.dtype = _BF16, **kind: Any
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.conv2d(x, w, b, **kind))

    x = torch.randn(shape).to(dtype)
    w = (torch.randn(channels, shape[1] // kind.get("groups", 1), kernel, kernel) / kernel).to(dtype)
    if last:
        x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    return fn, [x, w, torch.randn(channels).to(dtype)]


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "7x7 strided": layer((1, 3, 24, 48), 24, 7, False, stride=2, padding=3),
    "7x7 strided in channels": layer((2, 3, 24, 32), 16, 7, True, stride=2, padding=3),
    "3x3 strided in channels": layer((1, 3, 32, 32), 32, 3, True, stride=2, padding=1),
    "3x3": layer((1, 3, 16, 24), 16, 3, False, padding=1),
    "no padding, odd sizes in channels": layer((2, 3, 19, 21), 20, 5, True, _F16),
    "pieces in channels": layer((1, 3, 32, 32), 48, 4, True, stride=4),
    "groups": layer((1, 6, 16, 16), 32, 3, False, padding=1, groups=2),
    "dilated lines": layer((1, 4, 16, 16), 16, 3, False, padding=(2, 1), dilation=(2, 1)),
    "many channels": layer((1, 3, 16, 16), 160, 3, True, padding=1),
}


@pytest.mark.parametrize("name", CASES)
def test_taps_of_windows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fn, inputs = CASES[name]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    explained = deplo.explain(fn, *inputs, options=OPTIONS)
    assert any(kernel.schedule.startswith("gpu_taps") for graph in explained.graphs for kernel in graph.kernels)
    torch._dynamo.reset()
    same(Compiler()(fn, OPTIONS)(*inputs), fn(*inputs), exact=fn(*(x.double() for x in inputs)))
    assert is_clean(tmp_path / "judge") and max(bank_ways(tmp_path / "judge").values()) <= _OTHER_WAYS.get(name, _MOST_WAYS)


def test_windows_that_reach_more_than_shared_memory_are_gathered():
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, stride=(2, 512))

    options = read_options(options=OPTIONS)
    (record,) = capture(fn, [torch.randn(1, 3, 40, 4096).to(_BF16), torch.randn(16, 3, 3, 3).to(_BF16)], options=options)
    text = core().lower(record.torch_ir, "tile", options.to_json(record.hints))
    assert "schedule @k0_conv2d: gpu_" in text and "gpu_taps" not in text


@pytest.mark.parametrize("last", [False, True])
def test_neighbours_that_are_no_taps(last: bool):
    """What is beside a window does not reach its sum, be it infinite."""
    _, (x, w, _b) = layer((1, 3, 24, 24), 16, 7, last, stride=2, padding=3)
    x[0, 1, 11, 12] = torch.inf
    x[0, 2, 3, 20] = torch.nan
    reached = F.conv2d((~x.isfinite()).double(), torch.ones(1, 3, 7, 7).double(), stride=2, padding=3) > 0
    found = Compiler()(lambda x, w: F.conv2d(x, w, stride=2, padding=3), OPTIONS)(x, w)
    assert torch.equal(found.isfinite(), ~reached.expand(-1, 16, -1, -1))


@pytest.mark.parametrize("last", [False, True])
def test_taps_of_symbolic_sizes(last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'}")
    layout = torch.channels_last if last else torch.contiguous_format

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, stride=2, padding=1)

    w = (torch.randn(16, 3, 3, 3) / 3).to(_BF16).contiguous(memory_format=layout)
    compiled = torch.compile(fn, backend="deplo", options=OPTIONS)
    for shape in ((2, 3, 24, 26), (3, 3, 19, 22)):
        x = torch.randn(shape).to(_BF16).contiguous(memory_format=layout)
        for dimension in (0, 2, 3):
            torch._dynamo.mark_dynamic(x, dimension)
        same(compiled(x, w), fn(x, w), exact=fn(x.double(), w.double()))
    assert is_clean(tmp_path / "judge")
