"""The disk cache across processes: hits, misses for entries that are not what they should be, and processes that write at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engines import feature_sets, needs_core

ROOT = Path(__file__).resolve().parents[2]
RESNET = """
import json, sys, torch
sys.path.insert(0, "benchmarks")
import harness, zoo
from deplo.backend import collect_records
case = zoo.build("resnet-50", "tiny")
inputs = case.inputs(0)
with torch.no_grad(), collect_records() as records:
    result = torch.compile(case.model, backend="deplo", options={"strict": True})(**inputs)
    eager, exact = case.model(**inputs), case.model.double()(**{key: x.double() for key, x in inputs.items()})
    error, allowed = harness.max_error(result, exact), harness.allowed_error(harness.max_error(eager, exact), torch.finfo(torch.float32).eps)
caches = [json.loads(record.program.describe())["cache"] for record in records]
print(json.dumps([sum(c["compiled"] for c in caches), sum(c["disk_hits"] for c in caches), error, allowed]))
"""
MANY_KERNELS = """
import json, os, threading, time, torch
from deplo.capture import capture
from deplo.core import core
from deplo.options import read_options
options = read_options(options={"cache_dir": "off"}).to_json()
text = capture(lambda x: [torch.softmax(x[:n, :n] @ x[:n, : n + 3], -1) for n in range(9, 33, 2)], [torch.randn(40, 40)])[0].torch_ir
seen, done = {}, threading.Event()

def spent(thread):
    try:
        fields = open(f"/proc/self/task/{thread}/stat").read().rsplit(")", 1)[1].split()
    except OSError:  # it has ended
        return 0
    return int(fields[11]) + int(fields[12])

def watch():
    while not done.is_set():
        for thread in os.listdir("/proc/self/task"):
            seen[thread] = max(seen.get(thread, 0), spent(thread))
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
time.sleep(0.05)
before = dict(seen)
program = core().compile(text, options)
done.set()
watcher.join()
new = [ticks for thread, ticks in seen.items() if thread not in before]
print(json.dumps([json.loads(program.describe())["cache"]["compiled"], sum(ticks > 0 for ticks in new), len(new)]))
"""
SOFTMAX = """
import json, torch
from deplo.core import core
text = "torch @f(%x: f32[4, 8])\\n  %y: f32[4, 8] = aten._softmax.default(self=%x, dim=-1, half_to_float=false)\\n  return %y\\n"
from deplo.options import read_options
program = core().compile(text, read_options().to_json())
x = torch.randn(4, 8)
assert (program.run([x])[0].double() - x.double().softmax(-1)).abs().max() <= 8 * torch.finfo(x.dtype).eps
cache = json.loads(program.describe())["cache"]
print(json.dumps([cache["compiled"], cache["disk_hits"]]))
"""


def start(code: str, folder: Path | str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    environment = os.environ | {"DEPLO_CACHE_DIR": str(folder), "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> list[float]:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@needs_core
def test_a_second_process_runs_a_resnet_without_compiling(tmp_path):
    first = outcome(start(RESNET, tmp_path))
    second = outcome(start(RESNET, tmp_path))
    assert first[0] > 0 and first[1] == 0
    assert second[0] == 0 and second[1] == first[0]
    assert second[2] == first[2] <= first[3]


def _shorten(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-100])


def _flip(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[-200] ^= 1
    entry.write_bytes(data)


def _other_symbol(entry: Path) -> None:
    magic, key, symbol, rest = entry.read_bytes().split(b"\n", 3)
    entry.write_bytes(b"\n".join([magic, key, symbol[:-1] + b"x", rest]))


def _empty(entry: Path) -> None:
    entry.write_bytes(b"")


def _foreign(entry: Path) -> None:
    entry.write_bytes(b"\x7fELF" + bytes(500))


def _other_format(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes().replace(b"deplo-kernel-", b"deplo-kernel-9", 1))


def _writable_by_others(entry: Path) -> None:
    entry.chmod(0o666)


def _link(entry: Path) -> None:
    real = entry.with_name("real")
    entry.rename(real)
    entry.symlink_to(real)


def _folder(entry: Path) -> None:
    entry.unlink()
    entry.mkdir()


def _other_key(entry: Path) -> None:
    """What another CPU, LLVM or deplo version wrote has another key, even if it lies under this name."""
    key = entry.stem.encode()
    entry.write_bytes(entry.read_bytes().replace(key, key[::-1], 1))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that a process has filled and another has used."""
    folder = tmp_path_factory.mktemp("filled")
    assert outcome(start(SOFTMAX, folder)) == [1, 0]
    assert outcome(start(SOFTMAX, folder)) == [0, 1]
    return folder


@needs_core
def test_a_copy_of_a_cache_serves(tmp_path, filled):
    """Below, what makes an entry a miss is the harm, not the copy."""
    assert outcome(start(SOFTMAX, shutil.copytree(filled, tmp_path / "cache"))) == [0, 1]


@needs_core
@pytest.mark.parametrize("harm", [_shorten, _flip, _other_symbol, _empty, _foreign, _other_format, _writable_by_others, _link, _folder, _other_key])
def test_an_entry_that_is_not_right_is_a_miss(tmp_path, filled, harm):
    folder = shutil.copytree(filled, tmp_path / "cache")
    (entry,) = folder.glob("*.o")
    harm(entry)
    assert outcome(start(SOFTMAX, folder)) == [1, 0]


@needs_core
def test_other_features_have_other_entries(tmp_path, monkeypatch):
    assert outcome(start(SOFTMAX, tmp_path)) == [1, 0]
    monkeypatch.setenv("DEPLO_FEATURES", "sse")
    assert outcome(start(SOFTMAX, tmp_path)) == [1, 0]
    assert len(list(tmp_path.glob("*.o"))) == 2


@needs_core
def test_a_folder_that_moves_between_cpus(tmp_path, monkeypatch):
    """As from a machine with AVX-512 to one with AVX2 and back: what is for other features is a miss, and stays for the way back."""
    from deplo.core import core

    names = feature_sets()
    features = [json.loads(core().env(json.dumps({"features": name})))["cpu features"] for name in names]
    kinds = {json.dumps(feature) for feature in features}
    seen = set()
    for name, feature in [*zip(names, features, strict=True)] * 2:
        monkeypatch.setenv("DEPLO_FEATURES", name)
        known = json.dumps(feature) in seen
        assert outcome(start(SOFTMAX, tmp_path)) == ([0, 1] if known else [1, 0]), name
        seen.add(json.dumps(feature))
    assert len(list(tmp_path.glob("*.o"))) == len(kinds) >= 2


@needs_core
def test_processes_write_the_same_entry_at_once(tmp_path):
    assert all(sum(result) == 1 for result in map(outcome, [start(SOFTMAX, tmp_path) for _ in range(4)]))
    assert len(list(tmp_path.iterdir())) == 1
    assert outcome(start(SOFTMAX, tmp_path)) == [0, 1]


@needs_core
def test_a_folder_that_cannot_be_used_costs_only_time(tmp_path):
    (tmp_path / "file").write_text("")
    assert outcome(start(SOFTMAX, tmp_path / "file")) == [1, 0]
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    assert outcome(start(SOFTMAX, tmp_path / "open")) == [1, 0]
    assert not list((tmp_path / "open").iterdir())


@needs_core
def test_off_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    process = start(SOFTMAX, "off", tmp_path)
    assert outcome(process) == [1, 0]
    assert not list(tmp_path.iterdir())


@needs_core
def test_kernels_compile_on_all_cores_at_once():
    """Threads that the compilation starts, and the processor time that the system counts for them."""
    for cores in sorted(os.sched_getaffinity(0)), sorted(os.sched_getaffinity(0))[:1]:
        command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-c", MANY_KERNELS]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "DEPLO_VERIFY": "0"}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        kernels, worked, started = json.loads(done.stdout.splitlines()[-1])
        assert kernels >= 12
        assert started <= min(len(cores), kernels) - 1  # the calling thread compiles too
        assert (worked > 0) == (len(cores) > 1)
