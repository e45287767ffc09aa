"""Graphs of tensors on a GPU: on this machine's, else on a device that stands in for one, whose driver is emulated."""

from __future__ import annotations

import collections
import copy
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import EMULATED, IS_REAL, Driver, Gpu, fetched
from devices import device as device
from devices import driver as driver
from engines import Compiler, same

import deplo
from deplo.backend import collect_records
from deplo.core import core
from deplo.errors import FallbackWarning, UnsupportedError

pytestmark = pytest.mark.usefixtures("fresh_inference")
pytest.importorskip("deplo._C")
stand_in = pytest.mark.skipif(IS_REAL, reason="asks the device that stands in what was done")


def on(device: Gpu, fn: Callable[..., Any], options: dict[str, Any] | None = None, **keywords: Any) -> Any:
    return Compiler()(fn, {**device.options, **(options or {})}, **keywords)


@pytest.mark.gpu
@pytest.mark.skipif("llvm" not in json.loads(core().env(""))["codegen"], reason="this deplo compiles nothing for CPUs")
def test_tensors_choose_the_target(device: Gpu):
    """Of two graphs in one process each runs where its tensors are, without an option."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1) + 1

    x = torch.randn(3, 8)
    compiled = on(device, fn)
    with collect_records() as records:
        here, there = compiled(x), compiled(device.put(x))
    same((here, fetched(there)), (fn(x), fn(x)))
    assert here.device.type == "cpu" and there.device.type == "cuda"
    assert ['"target":"cpu"' in record.program.describe() for record in records] == [True, False]


@stand_in
def test_a_call_copies_nothing_and_waits_for_nothing(device: Gpu, driver: Driver):
    layer = device.put(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32)))

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y.add_(1)
        values, places = torch.sort(layer(x), -1)
        return values.exp() * y.sum(), places + 1

    x, y = device.put([torch.randn(4, 16), torch.randn(4)])
    compiled = on(device, fn, dynamic=True)
    compiled(x, y)
    driver.calls(), device.counts()
    before = device.count("live_bytes")
    z = y.clone()
    device.counts()
    got = compiled(x, y)
    asked, done = driver.calls(), device.counts()
    want = fn(x, z)
    same(fetched((got, y)), fetched((want, z)))
    assert done["copies"] == done["waits"] == 0
    assert asked["cuLaunchKernel"] > 2 and asked.keys() <= {"cuLaunchKernel", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"}, asked
    del got, want, z
    assert device.count("live_bytes") <= before + 64  # `places` of ATen's are gone, too


@stand_in
def test_work_goes_to_the_current_stream(device: Gpu):
    """What is packed for one stream is waited for by others, and not given away while they use it."""
    layer = device.put(torch.nn.Linear(6, 5))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.exp().t()

    compiled = on(device, fn)
    x = device.put(torch.randn(4, 6))
    with collect_records() as records:
        same(fetched(compiled(x)), fetched(fn(x)))
    packs = '"once":true' in records[0].program.describe()
    device.counts()
    device.library.fake_set_stream(3)
    try:
        same(fetched(compiled(x)), fetched(fn(x)))
        done = device.counts()
        assert packs and done["stream_waits"] == done["recorded"] == 1
    finally:
        device.library.fake_set_stream(0)
    compiled(x)
    assert device.count("stream_waits") == 0


@pytest.mark.gpu
def test_what_follows_from_weights_is_on_the_device_once_and_follows_them(device: Gpu):
    layer = device.put(torch.nn.Linear(6, 5))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.exp().t() + layer.bias.sigmoid()

    first, second = on(device, fn), on(device, lambda x: fn(x) * 2)
    x = device.put(torch.randn(4, 6))
    for _ in range(3):
        same(fetched((first(x), second(x))), fetched((fn(x), fn(x) * 2)))
        with torch.no_grad():
            layer.weight.mul_(0.5)
    about = deplo.explain(fn, x, options={**device.options, "strict": True})
    memory = about.graphs[0].description["memory"]
    assert memory["packed_bytes"] > 0 and "to which every call copies" not in str(about)


@pytest.mark.gpu
def test_numbers_of_the_host_take_part(device: Gpu):
    number = torch.tensor(2.5, dtype=torch.float64)

    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x * n, torch.full((), -1.0)) + number

    x = device.put(torch.randn(3, 5))
    compiled = on(device, fn)
    for n in (torch.tensor(3), torch.tensor(4)):
        same(fetched(compiled(x, n)), fetched(fn(x, n)))


@pytest.mark.gpu
def test_calls_between_devices_stay_in_eager_mode(device: Gpu):
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = (x.exp() + 1).cpu() * y
        return z, z.to(x.device).relu() + x

    x, y = device.put(torch.randn(3, 5)), torch.randn(5)
    with pytest.warns(FallbackWarning, match="calls of the inference graph run in eager mode, .*is on cpu, other tensors of the graph on cuda:0"):
        compiled = torch.compile(fn, backend="deplo", options=device.options)
        got = compiled(x, y)
    want = fn(x, y)
    assert [t.device for t in got] == [t.device for t in want]
    same(fetched(got), fetched(want))


@pytest.mark.gpu
def test_random_numbers_are_the_devices(device: Gpu):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.rand(x.shape, device=x.device).sqrt() + torch.rand_like(x)

    x = device.put(torch.zeros(3, 5))
    compiled = on(device, fn)
    compiled(x)
    results = []
    for run in (compiled, fn):
        torch.manual_seed(3)
        results.append(fetched(run(x)))
    same(results[0], results[1])


@pytest.mark.gpu
def test_an_index_out_of_range_is_raised_later(device: Gpu):
    table = device.put(torch.randn(5, 3))

    def fn(i: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(i, table) * 2

    embed = on(device, fn)
    good, bad = device.put([torch.tensor([0, 4]), torch.tensor([0, 5])])
    same(fetched(embed(good)), fetched(fn(good)))
    embed(bad)
    if IS_REAL:
        torch.cuda.synchronize()
    with pytest.raises(IndexError, match=r"index out of range in self \(in k0_embedding\w*: embedding.*, in an earlier call\)"):
        embed(good)
    same(fetched(embed(good)), fetched(fn(good)))
    embed(bad)
    with pytest.raises(IndexError):
        deplo.synchronize()
    deplo.synchronize()


@stand_in
def test_errors_name_the_kernel_and_leave_nothing_behind(device: Gpu, driver: Driver):
    compiled = on(device, lambda x: torch.softmax(x + 1, -1) @ x)
    x = device.put(torch.randn(8, 8))
    want = compiled(x)
    before = device.count("live_bytes")
    driver.behave("fail=cuLaunchKernel:700")
    with pytest.raises(
        RuntimeError, match=r"kernel k0_\w+ \(.*softmax.*\) could not be started: the CUDA driver failed in cuLaunchKernel: error 700"
    ):
        compiled(x)
    driver.behave("")
    assert device.count("live_bytes") == before
    device.library.fake_set_limit(before + 100)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            compiled(x)
    finally:
        device.library.fake_set_limit(-1)
    assert device.count("live_bytes") == before
    same(fetched(compiled(x)), fetched(want))


@stand_in
@pytest.mark.parametrize(
    "options, settings, missing",
    [
        ({"cuda_driver": "/nonexistent/libcuda.so.1"}, "", "install NVIDIA's driver"),
        ({"cuda_driver": "libdl.so.2"}, "", "this libcuda has no cuInit: install a driver of CUDA 11.4 or later"),
        ({"nvrtc": "/nonexistent/libnvrtc.so"}, "", "NVRTC could not be opened"),
        ({}, "devices=0", "finds no device"),
    ],
)
def test_what_is_missing_is_told_once(device: Gpu, driver: Driver, options: dict[str, Any], settings: str, missing: str):
    driver.behave(settings)
    x = device.put(torch.randn(2, 3))
    with pytest.warns(FallbackWarning, match=f"runs in eager mode, its kernels for cuda cannot run here: .*{missing}") as seen:
        compiled = torch.compile(lambda x: x.exp() + 1, backend="deplo", options={**device.options, **options})
        same(fetched(compiled(x)), fetched(x.exp() + 1))
        compiled(x)
    assert len(seen) == 1 and "without the option" not in str(seen[0].message)


@stand_in
def test_inputs_that_do_not_fit_are_refused(device: Gpu):
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2

    x, y = device.put([torch.zeros(4), torch.ones(4)])
    with collect_records() as records:
        on(device, fn)(x, y)
    program = records[0].program
    with pytest.raises(deplo.UserError, match="shares memory with"):
        program.run([x, x])
    with pytest.raises(UnsupportedError, match="is on the host, the program on device 0"):
        program.run([x, y.cpu()])


@pytest.mark.gpu
def test_many_threads_call_one_program(device: Gpu):
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.copy_(torch.softmax(x, -1))
        return x @ x.t()

    compiled = on(device, fn, dynamic=True)
    compiled(*device.put([torch.randn(3, 5), torch.empty(3, 5)]))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for n in (3, 4, 70):
                x = torch.randn(n, 5, generator=generator)
                given, y = device.put([x, torch.empty(n, 5)])
                same(fetched((compiled(given, y), y)), (x @ x.t(), torch.softmax(x, -1)))
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


@stand_in
def test_equal_kernels_compile_once_and_stay_on_disk(device: Gpu, driver: Driver, tmp_path: Path):
    weights = device.put([torch.randn(6, 6) for _ in range(3)])

    def fn(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.softmax(x @ weight, -1)
        return x.sum(0)

    x = device.put(torch.randn(4, 6))

    def compile() -> tuple[Any, collections.Counter[str], dict[str, int]]:
        torch._dynamo.reset()
        gc.collect()
        driver.calls()
        with collect_records() as records:
            same(fetched(on(device, fn, {"cache_dir": str(tmp_path / "kernels")})(x)), fetched(fn(x)))
        return records[0].program, driver.calls(), json.loads(records[0].program.describe())["cache"]

    program, calls, cache = compile()
    compiled = calls["nvrtcCompileProgram"]
    assert calls["cuLaunchKernel"] > compiled == calls["cuModuleLoadData"] == cache["compiled"]
    again, calls, cache = compile()  # while the first program holds its kernels
    assert calls["nvrtcCompileProgram"] == calls["cuModuleLoadData"] == 0 and cache["memory_hits"] == compiled
    del program, again
    program, calls, cache = compile()
    assert calls["nvrtcCompileProgram"] == 0 and calls["cuModuleLoadData"] == cache["disk_hits"] == compiled


# Launches that are recorded: mode reduce-overhead


def steps(x: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(x, -1)
    return (torch.sort(y @ x.t(), -1)[0] @ x).sum(0).tanh()


@pytest.mark.gpu
def test_recorded_launches_follow_sizes_and_addresses(device: Gpu):
    compiled = on(device, steps, {"replay": True}, dynamic=True)
    kept = []
    for n in (5, 5, 6, 5, 7, 6, 5, 5):
        x = device.put(torch.randn(n, 8))
        kept.append((x, compiled(x)))
    for x, got in kept:  # no call wrote over the results of another
        same(fetched(got), fetched(steps(x)))


@stand_in
def test_a_graph_is_recorded_once_and_launched_whole(device: Gpu, driver: Driver):
    compiled = on(device, steps, {"replay": True})
    x = device.put(torch.randn(5, 8))
    compiled(x)
    first = driver.calls()
    assert first["cuGraphCreate"] == 0 and first["cuLaunchKernel"] > 3
    compiled(x)
    second = driver.calls()
    assert second["cuGraphInstantiateWithFlags"] == second["cuGraphLaunch"] >= 1
    same(fetched(compiled(x)), fetched(steps(x)))
    third = driver.calls()
    assert third["cuGraphLaunch"] == second["cuGraphLaunch"] and third["cuGraphCreate"] == 0
    assert third["cuLaunchKernel"] == second["cuLaunchKernel"] < first["cuLaunchKernel"]
    driver.behave("capturing=1")
    same(fetched(compiled(x)), fetched(steps(x)))
    assert driver.calls()["cuLaunchKernel"] == first["cuLaunchKernel"]
    for call in ("cuGraphLaunch", "cuGraphExecKernelNodeSetParams"):
        driver.behave(f"fail={call}:719")
        y = device.put(torch.randn(5, 8))
        with pytest.raises(RuntimeError, match=f"the graph of .* launches from kernel k.* could not be started: the CUDA driver failed in {call}"):
            compiled(y)
        driver.behave("")
        for _ in range(3):
            same(fetched(compiled(y)), fetched(steps(y)))


@stand_in
def test_the_mode_reduces_overhead(device: Gpu, driver: Driver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEPLO_CUDA_DRIVER", EMULATED)
    monkeypatch.setenv("DEPLO_NVRTC", EMULATED)
    compiled = torch.compile(steps, backend="deplo", mode="reduce-overhead")
    x = device.put(torch.randn(5, 8))
    for _ in range(3):
        same(fetched(compiled(x)), fetched(steps(x)))
    assert driver.calls()["cuGraphLaunch"] > 0


TRAINING = """
import ctypes, importlib.util, os, sys
root = os.path.join(os.path.dirname(importlib.util.find_spec("torch").origin), "lib")
ctypes.CDLL(os.path.join(root, "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1])  # before torch, whose engine of autograd asks early whether there is a device
import torch
torch.cuda._lazy_init = lambda: None
from engines import Compiler, same
torch.manual_seed(0)
layer = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.LayerNorm(5)).cuda()
x = torch.linspace(-1, 1, 24).reshape(4, 6).cuda()
weights = torch.arange(20.0).reshape(4, 5).cuda()
gradients = []
for run in (Compiler()(layer, {"cuda_driver": sys.argv[2], "nvrtc": sys.argv[2]}), layer):
    layer.zero_grad()
    (run(x) * weights).sum().backward()
    assert all(p.grad.is_cuda for p in layer.parameters())
    gradients.append([p.grad.cpu() for p in layer.parameters()])
same(*gradients, scale=64)
print("same gradients")

count = ctypes.CDLL(sys.argv[1]).fake_count
count.restype = ctypes.c_int64
matrices = [torch.randn(16, 16).cuda() / 4 for _ in range(4)]
def chain(x):
    for matrix in matrices:
        x = (x @ matrix).sigmoid()
    return x.square().sum()
x = torch.randn(4200, 16).cuda().requires_grad_()
compiled = Compiler()(chain, {"cuda_driver": sys.argv[2], "nvrtc": sys.argv[2]})
wanted = torch.autograd.grad(chain(x), x)[0]
most = {}
for retained in (False, True, False):
    loss = compiled(x)
    before = count(b"live_bytes")
    count(b"peak_bytes")
    got = torch.autograd.grad(loss, x, retain_graph=retained)[0]
    most[retained] = count(b"peak_bytes") - before
    same(got.cpu(), wanted.cpu(), scale=64)
    del got, loss
print("at most", most[False], "instead of", most[True], file=sys.stderr)
assert most[False] <= most[True] - 2 * x.nbytes
print("less memory")
"""


@stand_in
def test_training(device: Gpu):
    paths = [str(Path(EMULATED).parent / "libdeplo_fake_device.so"), EMULATED]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", TRAINING, *paths], capture_output=True, text=True, env=environment)
    assert done.stdout == "same gradients\nless memory\n", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not IS_REAL, reason="the stand-in's gradients are tested in a process of their own")
def test_training_on_a_gpu(device: Gpu):
    layer = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.LayerNorm(5))
    exact = copy.deepcopy(layer).double()
    device.put(layer)

    def gradients(run: Callable[..., torch.Tensor], layer: torch.nn.Module) -> list[torch.Tensor]:
        first = next(layer.parameters())
        x = torch.linspace(-1, 1, 24, dtype=first.dtype, device=first.device).reshape(4, 6)
        layer.zero_grad()
        (run(x) * torch.arange(20, dtype=first.dtype, device=first.device).reshape(4, 5)).sum().backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    with torch.enable_grad():
        same(fetched(gradients(on(device, layer), layer)), fetched(gradients(layer, layer)), exact=gradients(exact, exact))
