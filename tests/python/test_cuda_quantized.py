"""Layers of quantised weights on the target cuda: on a GPU where there is one, else on the emulated driver, which judges accesses."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_cuda import EMULATOR, compiled_for_gpu, gpu
from torch import nn

import deplo

pytestmark = pytest.mark.usefixtures("fresh_inference")

N, K = 72, 256  # columns that are no multiple of a tile


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Layer(nn.Module):
    """A layer of codes with a factor for each column, or factors and zero points for each group of k."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        least, most = (-8, 8) if kind == "int4" else (0, 16) if kind == "uint4" else (-128, 128)
        codes = torch.randint(least, most, (N, K), dtype=torch.uint8 if kind == "uint4" else torch.int8)
        self.group = {"int8": K, "float8": K, "int4": 32, "uint4": 128, "int8 in groups": 64}[kind]
        self.register_buffer("weight", torch.randn(N, K).to(torch.float8_e4m3fn) if kind == "float8" else codes)
        self.register_buffer("scale", (torch.rand(N, K // self.group) / 100).bfloat16())
        self.register_buffer("zero", torch.randint(least, most, (N, K // self.group), dtype=codes.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group == K:
            return F.linear(x, self.weight.to(x.dtype)) * self.scale[:, 0]
        whole = self.weight.reshape(N, -1, self.group).to(x.dtype) - self.zero[:, :, None].to(x.dtype)
        return F.silu(F.linear(x, (whole * self.scale[:, :, None]).reshape(N, K)))

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        if self.group == K:
            return x.double() @ self.weight.double().T * self.scale[:, 0].double()
        whole = self.weight.double().reshape(N, -1, self.group) - self.zero[:, :, None].double()
        return F.silu(x.double() @ (whole * self.scale[:, :, None].double()).reshape(N, K).T)


def check_judged(judge: Path) -> None:
    """No launch has a race, reads what nobody wrote, or keeps the banks of shared memory waiting."""
    if gpu() != EMULATOR:
        return
    for line in judge.read_text().splitlines():
        assert " races=0 unwritten=0" in line
        requests, ways = (float(re.search(rf" {name}=([0-9.]+)", line)[1]) for name in ("shared_requests", "shared_ways"))  # type: ignore[index]
        assert ways <= 1.1 * requests


@pytest.mark.parametrize(("kind", "rows"), [("int8", 5), ("float8", 1), ("int8 in groups", 40), ("int4", 1), ("int4", 40), ("uint4", 5)])
def test_weights_of_codes_are_widened_in_registers(kind: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(kind)
    x = torch.randn(rows, K).bfloat16()
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    compiled = compiled_for_gpu(layer, {"strict": True, "dump_dir": str(tmp_path)}, dynamic=False)
    exact = layer.exact(x)
    error, theirs = ((y.double() - exact).abs().max() for y in (compiled(x), layer(x)))
    assert error <= theirs + torch.finfo(torch.bfloat16).eps * exact.abs().max()
    check_judged(tmp_path / "judge")
    text = next(tmp_path.glob("*/*_kernels.cu")).read_text()
    assert "deplo_mma_bf16" in text and "deplo_copy_async" in text
    if kind != "float8":
        assert text.count("_four_bits(") == 1  # what runs where all codes fit


def test_codes_that_stop_to_fit_four_bits_are_read_as_bytes() -> None:
    """What is packed is half a byte each."""
    layer = Layer("int4")
    x = torch.randn(16, K).bfloat16()
    compiled = compiled_for_gpu(layer, {"strict": True}, dynamic=False)
    gc.collect()
    before = deplo._C.packed_bytes()
    compiled(x)
    assert 0 < deplo._C.packed_bytes() - before <= N * K / 2 + 8192
    for code in (-8, 7, 100, 3):
        layer.weight[3, 5] = code
        exact = layer.exact(x)
        error, theirs = ((y.double() - exact).abs().max() for y in (compiled(x), layer(x)))
        assert error <= theirs + torch.finfo(torch.bfloat16).eps * exact.abs().max()


class Dynamic(nn.Module):
    """Rows are quantised in each call; sums are of integers."""

    def __init__(self, codes: torch.dtype, zero: int) -> None:
        super().__init__()
        low, high = (-128, 128) if codes == torch.int8 else (0, 256)
        self.codes, self.zero, self.low, self.high = codes, zero, low, high - 1
        self.register_buffer("weight", torch.randint(-128, 128, (N, K), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(N) / 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127
        quantised = (torch.round(x / step) + self.zero).clamp(self.low, self.high).to(self.codes)
        return F.linear((quantised.float() - self.zero) * step, self.weight.float() * self.scale[:, None])


@pytest.mark.parametrize(
    ("codes", "zero", "rows"), [(torch.int8, 0, 1), (torch.uint8, 128, 20), (torch.int8, 0, 70)], ids=["row", "unsigned", "rows"]
)
def test_sums_of_bytes_are_exact(codes: torch.dtype, zero: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Dynamic(codes, zero)
    x = torch.randn(rows, K)
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    compiled = compiled_for_gpu(layer, {"strict": True, "dump_dir": str(tmp_path)}, dynamic=False)
    step = x.abs().amax(-1, keepdim=True) / 127
    quantised = (torch.round(x / step) + zero).clamp(layer.low, layer.high) - zero
    exact = (quantised.double() @ layer.weight.double().T) * step.double() * layer.scale.double()
    torch.testing.assert_close(compiled(x).double(), exact, rtol=1e-6, atol=1e-6)
    check_judged(tmp_path / "judge")
    text = next(tmp_path.glob("*/*_kernels.cu")).read_text()
    unit = "group_multiply" if rows >= 64 and gpu() == EMULATOR else "mma"
    assert f"deplo_{unit}_{'s' if codes == torch.int8 else 'u'}8_s8" in text


def test_codes_that_an_index_chooses_are_read_as_they_lie() -> None:
    weight = torch.randint(-128, 128, (3, N, K), dtype=torch.int8)

    def f(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, weight[chosen].to(x.dtype).transpose(1, 2))

    x, chosen = torch.randn(2, 16, K).bfloat16(), torch.tensor([2, 0])
    exact = x.double() @ weight[chosen].double().transpose(1, 2)
    got = compiled_for_gpu(f, {"strict": True})(x, chosen).double()
    assert (got - exact).abs().max() <= 2 * (f(x, chosen).double() - exact).abs().max()
