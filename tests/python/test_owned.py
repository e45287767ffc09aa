"""The option `weights="own"`: what a packed copy stands for leaves memory, and everybody who reads or writes it finds what eager mode would."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from engines import feature_sets, same
from torch import nn

import deplo
from deplo.core import core


def own(model: nn.Module, x: torch.Tensor, features: str = "", **options):
    """The compiled model, called once."""
    torch._dynamo.reset()
    gc.collect()
    run = torch.compile(model, backend="deplo", options={"strict": True, "weights": "own", "features": features, **options})
    with torch.no_grad():
        run(x)
    return run


def gone(weight: torch.Tensor) -> bool:
    """Whether the weight has no pages of its own in memory, by the kernel's account."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = -(-weight.data_ptr() // page), (weight.data_ptr() + weight.nbytes) // page
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = file.read(8 * (last - first))
    present = sum(entries[8 * i + 7] >> 7 for i in range(last - first))
    assert present in (0, last - first)
    return present == 0


def layer(dtype: torch.dtype = torch.float32, rows: int = 512, columns: int = 264) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A layer that is packed for 5 rows, a copy of its weight, and an input."""
    model = nn.Linear(columns, rows).to(dtype).requires_grad_(False)
    return model, model.weight.clone(), torch.randn(5, columns).to(dtype)


READERS = {
    "data": lambda m: m.weight.data.clone(),
    "detach": lambda m: m.weight.detach() + 0,
    "index": lambda m: torch.stack([m.weight[i] for i in range(m.weight.shape[0])]),
    "numpy": lambda m: torch.from_numpy(m.weight.numpy().copy()),
    "list": lambda m: torch.tensor(m.weight.tolist()),
    "state_dict": lambda m: m.state_dict()["weight"].clone(),
    "deepcopy": lambda m: copy.deepcopy(m).weight,
    "save": lambda m: torch.load(_saved(m.state_dict()))["weight"],
    "pickle": lambda m: pickle.loads(pickle.dumps(m)).weight,
    "to": lambda m: m.double().float().weight,
    "view": lambda m: m.weight.view(-1).view(torch.int32).clone().view(torch.float32).view_as(m.weight),
    "transposed": lambda m: m.weight.t().contiguous().t(),
    "storage": lambda m: torch.tensor([], dtype=m.weight.dtype).set_(m.weight.untyped_storage().clone()).view_as(m.weight),
    "dlpack": lambda m: torch.from_dlpack(m.weight).clone(),
    "product": lambda m: torch.eye(m.weight.shape[0]) @ m.weight,
}


def _saved(value) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_finds_the_values(reader):
    model, weight, x = layer()
    run = own(model, x)
    assert gone(model.weight)
    assert torch.equal(READERS[reader](model), weight)
    same(run(x), nn.functional.linear(x, weight, model.bias))


BITWISE = [(f, d) for f in feature_sets() for d in (torch.float32, torch.bfloat16)] + [(feature_sets()[0], d) for d in (torch.float16, torch.float64)]


@pytest.mark.parametrize(("features", "dtype"), BITWISE, ids=str)
def test_weights_come_back_bit_by_bit(features, dtype):
    model, _, x = layer(dtype, 520, 1028)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    patterns = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, model.weight.shape, dtype=bits)  # NaNs and subnormals among them
    model.weight.view(bits).copy_(patterns)
    run = own(model, x, features)
    was_gone = gone(model.weight)
    assert torch.equal(model.weight.view(bits), patterns)
    assert was_gone or dtype == torch.float64
    del run


WRITES = {
    "in place": lambda w: w.mul_(2),
    "data": lambda w: w.data.mul_(2),
    "numpy": lambda w: w.numpy().__imul__(2),
    "one element": lambda w: w.data.view(-1).__setitem__(4099, 7.0),
    "copy": lambda w: w.data.copy_(w.clone() + 1),
    "storage": lambda w: w.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read_before", [False, True])
def test_writes_are_seen(write, read_before):
    model, weight, x = layer()
    run = own(model, x, weight_checks="versions")
    if read_before:
        assert torch.equal(model.weight, weight)
    WRITES[write](model.weight)
    WRITES[write](weight)
    with torch.no_grad():
        same(run(x), nn.functional.linear(x, weight, model.bias))
    assert gone(model.weight)
    assert torch.equal(model.weight, weight)


EDGES = {
    "row 0": lambda w: w.data[0].zero_(),
    "element 0": lambda w: w.data.view(-1)[:1].fill_(1000),
    "last row": lambda w: w.numpy().__setitem__(-1, 1),
    "last element": lambda w: w.data.view(-1)[-1:].fill_(1000),
}


@pytest.mark.parametrize("checks", ["sampled", "versions"])
@torch.no_grad()
def test_writes_to_pages_that_a_weight_shares_are_seen(checks):
    model, weight, x = layer()
    run = own(model, x, weight_checks=checks)
    packed = core().packed_bytes()
    for _ in range(2):  # a weight that has been let go twice, too
        for write in EDGES.values():
            assert gone(model.weight)
            write(model.weight)
            write(weight)
            same(run(x), nn.functional.linear(x, weight, model.bias))
            model.weight.data.view(-1)[:1].mul_(0.5)
            weight.view(-1)[:1].mul_(0.5)
            same(run(x), nn.functional.linear(x, weight, model.bias))
    assert torch.equal(model.weight, weight)
    run(x)
    assert core().packed_bytes() == packed


@torch.no_grad()
def test_a_view_of_a_part_is_looked_at_itself():
    model, weight, x = layer()
    part = nn.Linear(264, 256, bias=False).requires_grad_(False)
    part.weight.data = model.weight.data[:256]
    whole = own(model, x)
    run = torch.compile(part, backend="deplo", options={"strict": True, "weights": "pack"})
    for factor in (1, 3):
        model.weight.data.mul_(factor)
        weight.mul_(factor)
        same(run(x), nn.functional.linear(x, weight[:256]))
        same(whole(x), nn.functional.linear(x, weight, model.bias))


@pytest.mark.parametrize("scale", [0, 1])
@torch.no_grad()
def test_what_is_rolled_in_packing_is_not_relied_on(scale):
    weight = torch.randn(1024, 1024) * scale
    expected, x = weight.clone(), torch.randn(5, 1024)
    model = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
    model.weight.data = weight
    model.forward = lambda y: nn.functional.linear(y, torch.roll(model.weight, 1000))  # type: ignore[method-assign]
    run = own(model, x)
    for _ in range(2):
        same(run(x), nn.functional.linear(x, torch.roll(expected, 1000)))
        assert torch.equal(weight, expected)


def _save_safely(weight: torch.Tensor, path: str) -> None:
    pytest.importorskip("safetensors.torch").save_file({"w": weight}, path)


def _load_safely(path: str) -> torch.Tensor:
    return pytest.importorskip("safetensors.torch").load_file(path)["w"]


FILES = {
    "numpy": (lambda w, path: np.save(path, w.numpy()), lambda path: torch.from_numpy(np.load(path)), "written"),
    "legacy": (lambda w, path: torch.save(w, path, _use_new_zipfile_serialization=False), torch.load, "Bad address"),
    "safetensors": (_save_safely, _load_safely, "Bad address"),
}


@pytest.mark.parametrize("kind", FILES)
@torch.no_grad()
def test_system_calls_fail_until_weights_are_restored(kind, tmp_path):
    save, load, message = FILES[kind]
    model, weight, x = layer(columns=1024)
    run = own(model, x)
    path = str(tmp_path / "weight.npy")
    with pytest.raises(Exception, match=message):
        save(model.weight, path)
    run(x)
    assert gone(model.weight)
    deplo.restore_weights()
    assert not gone(model.weight)
    save(model.weight, path)
    assert torch.equal(load(path), weight)
    torch.save(model.state_dict(), path)
    run(x)
    assert gone(model.weight)
    torch.save(model.state_dict(), path)  # looks at what it writes
    assert torch.equal(torch.load(path)["weight"], weight)


def test_optimizers_and_load_state_dict_write_too():
    model, _, x = layer()
    run = own(model, x, weight_checks="versions")
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = copy.deepcopy(model)
    for each in (model, other):
        each.weight.grad = torch.ones_like(each.weight)
    optimizer.step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    with torch.no_grad():
        same(run(x), other(x))
        third = nn.Linear(264, 512)
        model.load_state_dict(third.state_dict())
        same(run(x), third(x))
        assert torch.equal(model.weight, third.weight)


def test_a_weight_that_is_read_leaves_again():
    model, weight, x = layer()
    run = own(model, x)
    assert torch.equal(model.weight, weight)
    assert not gone(model.weight)
    with torch.no_grad():
        run(x)
    assert gone(model.weight)


def test_programs_share_one_copy_and_others_read_the_weight():
    model, weight, x = layer()
    with torch.no_grad():
        first, packed = own(model, x), core().packed_bytes()
        second = torch.compile(lambda y: model(y) + 1, backend="deplo", options={"strict": True, "weights": "own"})
        same(second(x), nn.functional.linear(x, weight, model.bias) + 1)
        assert core().packed_bytes() == packed  # the same layout: one copy
        row = torch.compile(lambda y: model(y).relu(), backend="deplo", options={"strict": True, "weights": "original"})
        for _ in range(3):
            same(row(x[:1]), nn.functional.linear(x[:1], weight, model.bias).relu())
            same(first(x), nn.functional.linear(x, weight, model.bias))
            same(second(x), nn.functional.linear(x, weight, model.bias) + 1)
    assert torch.equal(model.weight, weight)


def test_the_copy_lives_as_long_as_the_weight_needs_it():
    model, weight, x = layer()
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    before = core().packed_bytes(), core().owned_bytes()
    run = own(model, x)
    assert core().packed_bytes() > before[0]
    assert core().owned_bytes() > before[1]
    del run
    torch._dynamo.reset()
    gc.collect()
    assert gone(model.weight)  # nothing else has its values
    assert torch.equal(model.weight, weight)
    own(nn.Linear(4, 4), torch.zeros(1, 4))
    deplo.repack(model)
    model.weight.data.add_(0)
    del model
    gc.collect()
    assert core().owned_bytes() == before[1]


def test_another_layout_takes_the_place_of_one_that_nobody_uses():
    model, weight, x = layer()
    torch._dynamo.reset()
    gc.collect()
    before = core().packed_bytes()
    own(model, x, feature_sets()[0])
    first = core().packed_bytes() - before
    with torch.no_grad():
        run = own(model, x, feature_sets()[-1])  # which lets the other one's program go
        same(run(x), nn.functional.linear(x, weight, model.bias))
        assert core().packed_bytes() - before <= first
        deplo.repack(model)
        same(run(x), nn.functional.linear(x, weight, model.bias))
        assert core().packed_bytes() - before <= first
    assert gone(model.weight)
    assert torch.equal(model.weight, weight)


def test_memory_that_goes_back_is_ordinary_again():
    x = torch.randn(5, 1024)
    for number in range(12):
        model = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
        run = own(model, x)
        assert gone(model.weight)
        if number % 3 == 1:
            assert model.weight.isfinite().all()
        if number % 3 == 2:
            model.weight.data = torch.zeros(1024, 1024)
            assert not run(x).any()
        del model, run
        torch._dynamo.reset()
        gc.collect()
        taken = [torch.ones(1024, 1024) for _ in range(4)]
        assert all(bool((t == 1).all()) for t in taken)


def test_many_threads_read_at_once():
    model, weight, x = layer(rows=2048)
    run = own(model, x)
    expected = nn.functional.linear(x, weight, model.bias)
    wrong: list[str] = []

    def read(number: int) -> None:
        for turn in range(20):
            if number % 2 and not torch.equal(model.weight, weight):
                wrong.append(f"weight in turn {turn}")
            if not torch.allclose(run(x), expected, atol=1e-4):
                wrong.append(f"result in turn {turn}")

    with torch.no_grad():
        threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_fork_reads_and_writes_its_own():
    model, weight, x = layer()
    run = own(model, x)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's workers are not there
        fine = torch.equal(model.weight, weight)
        model.weight.data.zero_()
        os._exit(0 if fine and not model.weight.any() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert gone(model.weight)
    assert torch.equal(model.weight, weight)
    with torch.no_grad():
        same(run(x), nn.functional.linear(x, weight, model.bias))


SCRIPT = """
import faulthandler, sys, ctypes, torch, deplo
from torch import nn
model = nn.Linear(264, 512).requires_grad_(False)
weight = model.weight.clone()
x = torch.randn(5, 264)
run = torch.compile(model, backend="deplo", options={"strict": True, "weights": "own"})
run(x)
faulthandler.enable()
assert torch.equal(model.weight, weight)
model.weight.data.mul_(2)
assert torch.allclose(run(x), nn.functional.linear(x, 2 * weight, model.bias), atol=1e-4)
assert torch.equal(model.weight, 2 * weight)
print("read", flush=True)
ctypes.string_at(8)
"""


RAISED = """
import signal, torch, deplo
from torch import nn
model = nn.Linear(264, 512).requires_grad_(False)
x = torch.randn(5, 264)
run = torch.compile(model, backend="deplo", options={"strict": True, "weights": "own"})
run(x)
model.weight.sum()
run(x)
print("read", flush=True)
signal.raise_signal(signal.SIGSEGV)
print("swallowed", flush=True)
"""


def test_a_raised_signal_ends_the_process():
    done = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, timeout=120)
    assert done.stdout == "read\n", done.stderr
    assert done.returncode == -11


def test_other_faults_end_the_process_as_before():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout == "read\n", done.stderr
    assert done.returncode == -11
    assert "Segmentation fault" in done.stderr


def test_what_is_not_packed_or_not_ours_stays(tmp_path):
    x = torch.randn(5, 512)
    reasons = {}
    torch.randn(512, 512).numpy().tofile(tmp_path / "weight")
    mapped = torch.from_file(str(tmp_path / "weight"), size=512 * 512).view(512, 512)
    shared = torch.randn(512, 512).share_memory_()
    lent = torch.from_numpy(torch.randn(512, 512).numpy().copy())
    for name, weight in {"mapped": mapped, "shared": shared, "lent": lent}.items():
        model = nn.Linear(512, 512, bias=False).requires_grad_(False)
        model.weight.data = weight
        with torch.no_grad():
            report = deplo.explain(model, x, options={"weights": "own"})
        reasons[name] = str(report)
        same(report.result, x @ weight.t())
        assert not gone(model.weight)
    assert all("weights kept twice" in text and "allocator" in text for text in reasons.values())


def test_views_of_one_memory_are_let_go_one_by_one():
    memory = torch.randn(3, 256, 512)
    before = memory.clone()
    model = nn.ModuleList(nn.Linear(512, 256, bias=False) for _ in range(3)).requires_grad_(False)
    for module, part in zip(model, memory, strict=True):
        module.weight.data = part
    x = torch.randn(5, 512)
    both = nn.Sequential()
    both.forward = lambda y: sum(m(y) for m in model)  # type: ignore[method-assign]
    run = torch.compile(both, backend="deplo", options={"strict": True, "weights": "own"})
    with torch.no_grad():
        same(run(x), sum(x @ w.t() for w in before))
        assert gone(model[1].weight)
        assert torch.equal(memory, before)
        memory[2].zero_()
        same(run(x), sum(x @ w.t() for w in before[:2]))
        assert torch.equal(memory[:2], before[:2])


def test_training_keeps_its_weights():
    model, _, x = layer()
    model.requires_grad_(True)
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    run = torch.compile(model, backend="deplo", options={"strict": True, "weights": "own"})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    for _ in range(3):
        for call, optimizer in zip((run, other), optimizers, strict=True):
            optimizer.zero_grad()
            call(x).square().sum().backward()
            optimizer.step()
        assert not gone(model.weight)
    same(model.weight.detach(), other.weight.detach())


@pytest.mark.parametrize("kind", ["conv", "transposed", "channels_last", "depthwise"])
def test_convolutions(kind):
    torch.manual_seed(0)
    conv = {
        "conv": lambda: nn.Conv2d(96, 128, 3, padding=1),
        "channels_last": lambda: nn.Conv2d(96, 128, 3, padding=1).to(memory_format=torch.channels_last),
        "transposed": lambda: nn.ConvTranspose2d(128, 96, 2, stride=2),
        "depthwise": lambda: nn.Conv2d(64, 512, 3, groups=2),
    }[kind]().requires_grad_(False)
    other = copy.deepcopy(conv)
    x = torch.randn(2, conv.in_channels, 14, 14)
    run = own(conv, x)
    usual = torch.compile(other, backend="deplo", options={"strict": True})
    with torch.no_grad():
        assert torch.equal(run(x), usual(x))
        assert torch.equal(conv.weight, other.weight)
        for each in (conv, other):
            each.weight.data[3].zero_()
        deplo.repack(other)
        assert torch.equal(run(x), usual(x))
