"""Points that reach neighbours (depthwise convolutions, pooling, blurs), from windows in shared memory; eager mode and float64 judge the numbers,
the emulator races, reads of what nobody wrote, and conflicts of banks."""

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

pytestmark = pytest.mark.usefixtures("fresh_inference")
pytest.importorskip("deplo._C")
OPTIONS = {"target": "cuda", "cuda_driver": EMULATED, "nvrtc": EMULATED}
_MOST_WAYS = 2.0  # images are small


def image(*shape: int, last: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(shape).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def depthwise(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, **kind: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.conv2d(x, w, b, stride, padding, dilation, groups=x.shape[1]))

    dtype = kind.get("dtype", torch.float32)
    return fn, [image(2, 24, 15, 20, **kind), torch.randn(24, 1, kernel, kernel).to(dtype), torch.randn(24).to(dtype)]


def blur(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :-2] + 2 * x[:, 1:-1] + x[:, 2:]) / 4


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "depthwise 3x3": depthwise(3, padding=1),
    "depthwise 7x7": depthwise(7, padding=3),
    "depthwise 7x7 in channels": depthwise(7, padding=3, last=True),
    "depthwise strided": depthwise(3, stride=2, padding=1),
    "depthwise strided in channels": depthwise(5, stride=2, padding=2, last=True),
    "depthwise dilated": depthwise(3, padding=2, dilation=2),
    "depthwise of bf16 in channels": depthwise(3, padding=1, last=True, dtype=torch.bfloat16),
    "max pooling": (lambda x: F.max_pool2d(x, 3, 2, 1), [image(2, 5, 17, 32)]),
    "average pooling": (lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), [image(1, 3, 20, 33)]),
    "pooling of three dimensions": (lambda x: F.max_pool3d(x, 2, 1), [torch.randn(1, 2, 5, 6, 18)]),
    "blur of odd rows": (blur, [torch.randn(33, 21)]),
    "into channels": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=32).permute(0, 2, 3, 1).contiguous(),
        [image(1, 32, 12, 12), torch.randn(32, 1, 3, 3)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_windows_in_shared_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fn, inputs = CASES[name]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    explained = deplo.explain(fn, *inputs, options=OPTIONS)
    assert any(kernel.schedule.startswith("gpu_stencil") for graph in explained.graphs for kernel in graph.kernels)
    torch._dynamo.reset()
    same(Compiler()(fn, OPTIONS)(*inputs), fn(*inputs), exact=fn(*(x.double() for x in inputs)))
    assert is_clean(tmp_path / "judge") and max(bank_ways(tmp_path / "judge").values()) <= _MOST_WAYS


@pytest.mark.parametrize("last", [False, True])
def test_windows_of_symbolic_sizes(last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'}")
    w = torch.randn(8, 1, 3, 3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.max_pool2d(x, 3, 1, 1), w, padding=1, groups=8)

    compiled = Compiler()(fn, OPTIONS, dynamic=True)
    for height, width in ((9, 16), (14, 5), (20, 20)):
        x = image(1, 8, height, width, last=last)
        same(compiled(x), fn(x), exact=F.conv2d(F.max_pool2d(x.double(), 3, 1, 1), w.double(), padding=1, groups=8))
    assert is_clean(tmp_path / "judge")


def twice_depthwise(kernel: int = 3, stride: int = 1, **kind: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        between = F.relu(F.conv2d(x, w, b, padding=kernel // 2, groups=x.shape[1]))
        return F.conv2d(between, v, None, stride, padding=1, groups=x.shape[1])

    dtype = kind.get("dtype", torch.float32)
    weights = [torch.randn(16, 1, kernel, kernel), torch.randn(16), torch.randn(16, 1, 3, 3)]
    return fn, [image(2, 16, 13, 20, **kind), *(w.to(dtype) for w in weights)]


def edges(x: torch.Tensor) -> torch.Tensor:
    t = F.avg_pool2d(x, 3, 1, 1)
    across, down = t[..., 1:-1, 2:] - t[..., 1:-1, :-2], t[..., 2:, 1:-1] - t[..., :-2, 1:-1]
    return across * across + down * down


def beside_itself(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    t = F.avg_pool2d(x, 3, 1, 1)
    return t + F.conv2d(t, w, padding=1, groups=8)


CHAINS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "pooling of pooling": (lambda x: F.max_pool2d(F.max_pool2d(x, 3, 2, 1), 3, 2, 1), [image(2, 3, 33, 64)]),
    "three in a row": (lambda x: F.avg_pool2d(F.max_pool2d(F.avg_pool2d(x, 3, 1, 1), 3, 1, 1), 5, 1, 2), [image(1, 2, 40, 66)]),
    "depthwise": twice_depthwise(),
    "depthwise of 5, then strided": twice_depthwise(5, stride=2),
    "depthwise of bf16": twice_depthwise(dtype=torch.bfloat16),
    "depthwise in channels": twice_depthwise(last=True),
    "edges of a blur": (edges, [image(1, 3, 34, 50)]),
    "points beside their neighbours": (beside_itself, [image(1, 8, 19, 32), torch.randn(8, 1, 3, 3)]),
    "of three dimensions": (lambda x: F.avg_pool3d(F.max_pool3d(x, 2, 1), 2, 1), [torch.randn(1, 2, 5, 6, 18)]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_neighbours_of_neighbours_are_one_kernel(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fn, inputs = CHAINS[name]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    explained = deplo.explain(fn, *inputs, options=OPTIONS)
    schedules = [kernel.schedule for graph in explained.graphs for kernel in graph.kernels]
    assert len(schedules) == 1 and schedules[0].startswith("gpu_stencils")
    torch._dynamo.reset()
    same(Compiler()(fn, OPTIONS)(*inputs), fn(*inputs), exact=fn(*(x.double() for x in inputs)))
    assert is_clean(tmp_path / "judge") and max(bank_ways(tmp_path / "judge").values()) <= _MOST_WAYS


def test_a_chain_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tiles that divide nothing, several points a thread, and more turns than one."""
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1")
    x = image(1, 2, 19, 30)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.avg_pool2d(x, 3, 1, 1), 3, 2, 1)

    (kernel,) = deplo.explain(fn, x, options=OPTIONS).graphs[0].kernels
    torch._dynamo.reset()
    rows, columns = kernel.schedule.split("tile(")[-2].split("=")[0], kernel.schedule.split("tile(")[-1].split("=")[0]
    schedule = f"gpu_stencils tile({rows}=6) tile({columns}=7) threads(32) vectorize({columns}, by=1) register_block({rows}=3)"
    same(Compiler()(fn, {**OPTIONS, "schedule": {kernel.name: schedule}})(x), fn(x), exact=fn(x.double()))
    assert is_clean(tmp_path / "judge")


def test_what_others_read_is_no_part_of_a_chain():
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = F.avg_pool2d(x, 3, 1, 1)
        return t, F.avg_pool2d(t, 3, 1, 1)

    explained = deplo.explain(fn, image(1, 2, 12, 16), options=OPTIONS)
    assert all(not kernel.schedule.startswith("gpu_stencils") for graph in explained.graphs for kernel in graph.kernels)
