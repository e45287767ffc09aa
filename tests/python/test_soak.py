"""A short `make soak`, and that its judges notice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from soak.__main__ import ALLOWED, MB, growth_of
from soak.__main__ import run as run_process
from soak.subjects import SUBJECTS, WrongValue, build, doubled, in_double, judge

ROOT = Path(__file__).resolve().parents[2]
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "python")])}


def test_everything_at_once_is_clean():
    """For some seconds, of which the machine decides how much happens in them; `make soak` goes on for ten minutes."""
    few = ["--seconds", "6", "--clients", "2", "--seed", "1", "--calls", "400", "--recompilations", "0", "--loads", "12"]
    done = subprocess.run([sys.executable, "-m", "soak", *few], env=os.environ | PATHS, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("400 calls: resident memory", "12 loads: resident memory", "SIGUSR1", "seed 1: clean"):
        assert text in done.stdout, done.stdout


@pytest.mark.parametrize("name", SUBJECTS)
def test_wrong_values_are_noticed(name):
    fn, inputs = build(name, 1), SUBJECTS[name][1](random.Random(1))
    with torch.no_grad():
        exact, eager = in_double(fn)(*doubled(inputs)), fn(*inputs)
    results = [eager] if isinstance(eager, torch.Tensor) else list(eager)
    judge(name, SUBJECTS[name][2], results, eager, exact)
    results[-1] = results[-1].clone()
    results[-1].view(-1)[-1] += 0.01 * results[-1].abs().max()
    with pytest.raises(WrongValue, match="off float64"):
        judge(name, SUBJECTS[name][2], results, eager, exact)


def test_growth_is_noticed():
    level = [[500 * MB + k % 2 * MB, 0] for k in range(12)]
    assert growth_of(level)[0] <= MB
    grown, allowed = growth_of([[size + k * 12 * MB, 0] for k, (size, _) in enumerate(level)])
    assert grown > allowed == ALLOWED


HANGS = """
import threading, time
from soak.watch import Beats
with Beats(0.5) as beats:
    beats.beat("client 1", "waits for Godot")
    threading.Event().wait()
"""


def test_hangs_and_crashes_are_noticed(monkeypatch, tmp_path, capfd):
    done = subprocess.run([sys.executable, "-c", HANGS], env=os.environ | PATHS, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "HANG: client 1 is at 'waits for Godot'" in done.stderr and "Thread 0x" in done.stderr
    (tmp_path / "crashes.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "stays.py").write_text("import faulthandler, time\nfaulthandler.enable()\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_process(["crashes"], 60, None) == (-signal.SIGSEGV, {})
    assert run_process(["stays"], 1, None) == (-signal.SIGABRT, {})
    assert "HANG" in capfd.readouterr().err
