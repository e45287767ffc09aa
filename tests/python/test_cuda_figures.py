"""Kernels' figures without a GPU (benchmarks/sass.py), and the schedules that they chose, run on the emulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sass
import torch
import torch.nn.functional as F
from devices import EMULATED, is_clean
from engines import Compiler, same
from torch import nn

import deplo

pytestmark = pytest.mark.usefixtures("fresh_inference")
pytest.importorskip("deplo._C")
OPTIONS = {"target": "cuda", "cuda_driver": EMULATED, "nvrtc": EMULATED}


def index_copied(x: torch.Tensor, places: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.index_copy(1, places, y)


def gathered(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows = F.embedding(ids, weight)
    return torch.autograd.grad(rows.square().sum(), weight)[0]


CASES: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "group norm": (lambda x, w, b: F.group_norm(x, 4, w, b), ((2, 24, 8, 8), (24,), (24,)), "keep(registers)"),
    "group norm, ragged": (lambda x, w, b: F.group_norm(x, 4, w, b), ((2, 20, 9, 7), (20,), (20,)), "vectorize"),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), ((8, 3, 20, 20),), "gpu_rows"),
    "batch norm, long": (lambda x: F.batch_norm(x, None, None, training=True), ((6, 2, 96, 64),), "gpu_rows"),
    "contraction cut along k": (lambda x, w: F.relu(F.linear(x, w)), ((32, 4096), (48, 4096)), "gpu_contraction"),
    "convolution cut along channels": (lambda x, w: F.conv2d(x, w, padding=1), ((1, 512, 5, 5), (32, 512, 3, 3)), "gpu_contraction"),
    "pooling": (lambda x: F.max_pool2d(x, 3, 2, 1), ((2, 3, 16, 16),), "gpu_stencil"),
    "running sums": (lambda x: torch.relu(x).cumsum(-1) * 2, ((3, 700),), "gpu_rows"),
    "running sums of a softmax": (lambda x: torch.softmax(x, -1).cumsum(-1), ((6, 301),), "keep(registers)"),
    "running sums backwards": (lambda x: x.flip(-1).cumsum(-1).flip(-1), ((3, 260),), "gpu_rows"),
    "running products": (lambda x: (x.abs() + 0.2).cumprod(-1), ((3, 300),), "gpu_rows"),
    "running extremes": (lambda x: x.cummax(-1), ((3, 300),), "gpu_rows"),
    "running sums of columns": (lambda x: x.cumsum(0), ((130, 20),), "split(32)"),
    "running sums of exponentials": (lambda x: x.logcumsumexp(1), ((2, 70, 12),), "split(32)"),
    "rows too long for registers": (lambda x: torch.softmax(x, -1) * 2, ((2, 33_001),), "gpu_rows threads(1024) vectorize(by=4)"),
    "batch norm of channels that lie last": (
        lambda x: F.batch_norm(x.permute(0, 3, 1, 2), None, None, training=True),
        ((4, 40, 40, 8),),
        "split(32)",
    ),
    "rows of odd size": (lambda x: torch.softmax(x, -1), ((5, 301),), "vectorize(by=4)"),
    "rows two short of vectors": (lambda x: x.sum(-1), ((5, 254),), "keep(registers)"),
    "norms two short of vectors": (lambda x: F.layer_norm(x, (510,)), ((4, 510),), "keep(registers)"),
    "running sums two short of vectors": (lambda x: x.cumsum(-1), ((5, 254),), "keep(registers)"),
    "running sums that are read again": (lambda x: (x.cumsum(0), x.cumsum(0).amax(0)), ((100, 24),), "gpu_"),
    "taps far apart": (lambda x, w: F.conv2d(x, w, padding=56, dilation=56, groups=2), ((1, 2, 120, 120), (2, 1, 3, 3)), "gpu_points"),
    "points of odd number": (lambda x: torch.relu(x) + 1, ((13, 21),), "by=4"),
    "a transpose": (lambda x: torch.relu(x.t() + x), ((70, 70),), "gpu_transpose"),
    "slices": (lambda x: x[:, 1:-1] * 2 + x[:, 2:], ((64, 65),), "gpu_points"),
}


@pytest.mark.parametrize("name", CASES)
def test_schedules_by_figures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fn, shapes, word = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'}")
    explained = deplo.explain(fn, *inputs, options=OPTIONS)
    assert any(word in kernel.schedule for graph in explained.graphs for kernel in graph.kernels)
    torch._dynamo.reset()
    same(Compiler()(fn, OPTIONS)(*inputs), fn(*inputs), exact=fn(*(x.double() for x in inputs)))
    assert is_clean(tmp_path / "judge")


def halves_copied(x: torch.Tensor, places: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two stores side by side for each point."""
    half = y.shape[-1] // 2
    return x.index_copy(1, places, torch.cat([-y[..., half:], y[..., :half]], -1))


@pytest.mark.parametrize(
    ("fn", "word"),
    [(index_copied, "last("), (halves_copied, "last("), (lambda x, places, y: x.index_add(1, places, y), "atomic(")],
    ids=["copies", "halves", "sums"],
)
def test_stores_that_may_meet_run_on_many_threads(fn: Any, word: str, monkeypatch: pytest.MonkeyPatch):
    x, y, places = torch.randn(2, 16, 24), torch.randn(2, 5, 24), torch.tensor([3, 9, 3, 0, 15])
    apart = [fn(x, places[k : k + 1], y[:, k : k + 1]) - x for k in range(5)]
    expected = x.clone()
    for k, place in enumerate(places.tolist()):  # the last one stays
        expected[:, place] = (expected if word == "atomic(" else x)[:, place] + apart[k][:, place]
    explained = deplo.explain(fn, x, places, y, options=OPTIONS)
    assert any(word in kernel.schedule for graph in explained.graphs for kernel in graph.kernels)
    for order in ("", "reversed=1"):
        torch._dynamo.reset()
        monkeypatch.setenv("DEPLO_FAKE_CUDA", order)
        assert torch.allclose(Compiler()(fn, OPTIONS)(x, places, y), expected, atol=1e-6)


def test_a_linear_layer_and_a_norm_are_two_kernels():
    """Blocks multiply tiles; a kernel of rows would multiply element by element."""
    model = nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64)).bfloat16().eval()
    with torch.no_grad():
        explained = deplo.explain(model, torch.randn(64, 128).bfloat16(), options=OPTIONS)
    assert any(kernel.schedule.startswith(("gpu_matrix", "gpu_tiles")) for graph in explained.graphs for kernel in graph.kernels)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sass, "CACHE", tmp_path / "codes")
    path = tmp_path / "rows.json"
    arguments = ["--devices", "a100,h100", "--size", "tiny", "--suites", "cases", "--match", "rms norm", "--train", "", "--all", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["sass.py", *arguments])
    assert sass.main() == 0
    rows = json.loads(path.read_text())
    assert {row["device"] for row in rows} == {"a100", "h100"} and all(row["kernel"]["spills"] == 0 for row in rows)
    assert "a100: 0 kernels" in capsys.readouterr().out  # it is small
    assert len(list((tmp_path / "codes").glob("*.json"))) == 2  # one for each architecture


def test_a_neighbour_that_is_better_is_named():
    schedule = "gpu_matrix tile(i0=16) tile(r0.k0=64) warps(i0=1, i1=2) stages(3) raster(8)"
    near = sass.neighbours(schedule)
    assert schedule.replace("(i0=16)", "(i0=32)") in near and schedule.replace("k0=64", "k0=32") in near and schedule.replace("(3)", "(4)") in near
    assert len(near) == 9 and not sass.neighbours("gpu_points threads(256)")
    values = {**dict.fromkeys(sass.Judgement.__annotations__, 0), "name": "k0", "schedule": schedule, "seconds": 2.0}
    times = {near[0]: (1.95, 0), near[1]: (1.0, 1), near[2]: (1.5, 0), near[3]: (1.8, 0)}

    def again(schedules: dict[str, str]) -> list[sass.Judgement]:
        if schedules["k0"] not in times:
            raise deplo.UserError("it does not fit")
        seconds, spills = times[schedules["k0"]]
        return [sass.Judgement(**{**values, "seconds": seconds, "spills": spills})]

    assert sass.beaten(sass.Judgement(**values), again) == near[2]


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"spills": 1}, ["spills"]),
        ({"bytes": 1.2e6}, ["bytes"]),
        ({"sectors_per_request": 20.0}, ["sectors"]),
        ({"wide_share": 0.5}, ["wide"]),
        ({"work": "contraction", "bank_ways": 1.2, "limits": {"arithmetic": 0.0, "memory": 1.0}}, ["banks"]),
        ({"work": "contraction", "limits": {"arithmetic": 2.0, "memory": 1.0}, "mix": {"FFMA": 70}}, ["units"]),
        ({"work": "contraction", "limits": {"arithmetic": 2.0, "memory": 1.0}, "mix": {"HGMMA": 4, "shared": 1}}, ["units"]),
        ({"work": "contraction", "limits": {"arithmetic": 2.0, "memory": 1.0}, "mix": {"HGMMA": 4}}, []),
        ({"work": "attention"}, ["scores"]),
        ({"work": "attention", "schedule": "gpu_online", "mix": {"HMMA": 4, "shared store": 1}}, ["scores"]),
        ({"schedule": "gpu_serial threads(1)"}, ["serial"]),
    ],
)
def test_limits(changes: dict[str, Any], broken: list[str]):
    values = dict.fromkeys(sass.Judgement.__annotations__, 0)
    values |= {"work": "points", "schedule": "gpu_points", "bytes": 1e6, "least_bytes": 1e6, "sectors_per_request": 16.0, "where": "loop"}
    values |= {"least_sectors_per_request": 16.0, "wide_share": 1.0, "bank_ways": 1.0, "instructions": 100, "mix": {}, "limits": {}}
    assert sass.broken_limits(sass.Judgement(**{**values, **changes}), "sm_90a") == broken
