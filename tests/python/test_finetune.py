"""options={"tune": "background"}: a program serves calls by heuristics, and by what a search finds as soon as that is there. Events, no times."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import deplo
from deplo import tune
from deplo.records import collect_records

SEARCHED = {"tune": "background", "strict": True}


class Gate:
    """In place of the runner: programs are texts of schedules, of which the usual ones are slow; races wait for the gate."""

    def __init__(self):
        self.opened = threading.Event()
        self.begun = threading.Event()
        self.tasks = []
        self.slow = set()

    def __call__(self, task):
        self.tasks.append(task.kernel)
        self.slow.add(task.usual)
        return self

    def make(self, schedules):
        self.begun.set()
        return list(schedules)

    def race(self, programs, patient=False):
        self.opened.wait()
        return [2.0 if program in self.slow else 1.0 for program in programs]


@pytest.fixture
def gate(tmp_path, monkeypatch):
    monkeypatch.setenv("DEPLO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DEPLO_TUNE", "auto")
    torch._dynamo.reset()
    gc.collect()
    gate = Gate()
    monkeypatch.setattr(tune, "make_runner", gate)
    monkeypatch.setattr(tune, "figures_of", lambda imported, options: "")
    torch.manual_seed(0)
    yield gate
    gate.opened.set()
    assert deplo.wait_tuned()
    torch._dynamo.reset()


def schedules(record):
    return [kernel["schedule"] for kernel in json.loads(record.program.describe())["kernels"]]


def test_calls_go_to_what_was_found_when_it_is_there(gate):
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Softmax(-1)), torch.randn(40, 64)
    compiled = torch.compile(model, backend="deplo", options=SEARCHED)
    direct = deplo.jit(model, guards="inputs", options=SEARCHED)
    with torch.no_grad(), collect_records() as records:
        for run in (compiled, compiled, direct, direct):
            torch.testing.assert_close(run(x), model(x))
        assert gate.begun.wait(60) and not deplo.wait_tuned(0) and deplo.wait_compiled(0)
        usual = [schedules(record) for record in records]
        gate.opened.set()
        assert deplo.wait_tuned()
        for run in (compiled, direct):
            torch.testing.assert_close(run(x), model(x))
    for record, before in zip(records, usual, strict=True):
        assert schedules(record) != before
        assert record.search.improved and "of them faster since" in record.search.describe()
    # Another process begins with it, as this one does when it compiles again, and searches nothing.
    gate.tasks.clear()
    torch._dynamo.reset()
    with torch.no_grad(), collect_records() as records:
        torch.compile(model, backend="deplo", options=SEARCHED)(x)
        assert schedules(records[0]) not in usual
        assert deplo.wait_tuned() and not gate.tasks


def test_weights_are_packed_before_calls_change_over(gate):
    model, x = torch.nn.Linear(512, 512).requires_grad_(False), torch.randn(64, 512)
    compiled = torch.compile(model, backend="deplo", options={**SEARCHED, "weights": "pack"})
    with torch.no_grad(), collect_records() as records:
        compiled(x)
        usual = schedules(records[0])
        gate.opened.set()
        assert deplo.wait_tuned()
        about = json.loads(records[0].program.describe())
        # Nobody called it since, and what it packs is there.
        assert schedules(records[0]) != usual and about["memory"]["packed_bytes"] > 0
        torch.testing.assert_close(compiled(x), model(x))
        model.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))


def test_training_and_calls_of_many_threads_meanwhile(gate):
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.LayerNorm(48))
    x, weights = torch.randn(24, 32), torch.randn(24, 48)
    (model(x) * weights).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    compiled = torch.compile(model, backend="deplo", options=SEARCHED)
    model.zero_grad()
    (compiled(x) * weights).sum().backward()
    failures = []
    go_on = True

    def serve():
        try:
            with torch.no_grad():
                want = model(x)
                while go_on:
                    torch.testing.assert_close(served(x), want)
        except BaseException as failure:
            failures.append(failure)

    with torch.no_grad():
        served = torch.compile(lambda x: model(x) + 0, backend="deplo", options=SEARCHED)
        served(x)
    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    gate.opened.set()
    assert deplo.wait_tuned()
    go_on = False
    for thread in threads:
        thread.join()
    assert not failures
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
    model.zero_grad()
    (compiled(x) * weights).sum().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_what_is_to_compile_comes_first_and_nobodys_program_is_left(gate):
    with torch.no_grad():
        torch.compile(torch.nn.Softmax(-1), backend="deplo", options=SEARCHED)(torch.randn(64, 100))
        assert gate.begun.wait(60)
        other = torch.compile(lambda x: torch.exp(x) + 1, backend="deplo", options={"tier": "background", "strict": True})
        other(torch.ones(5))
        gate.opened.set()
        assert deplo.wait_compiled() and deplo.wait_tuned()
        gate.opened.clear()
        gate.begun.clear()
        with collect_records() as records:
            torch.compile(torch.nn.LogSoftmax(-1), backend="deplo", options=SEARCHED)(torch.randn(64, 100))
        assert gate.begun.wait(60)
        search = records[-1].search
        program = weakref.ref(records.pop().program)
        records.clear()
        torch._dynamo.reset()
        gc.collect()
        assert program() is None and not search.is_needed()
        gate.opened.set()
        assert deplo.wait_tuned()


def test_a_kernel_that_cannot_be_searched_holds_up_no_other(gate, monkeypatch):
    def make(task):
        if "softmax" in task.kernel:
            raise MemoryError("no room for inputs")
        return gate(task)

    monkeypatch.setattr(tune, "make_runner", make)
    gate.opened.set()
    model, x = torch.nn.Sequential(torch.nn.Softmax(-1), torch.nn.Linear(64, 96)), torch.randn(40, 64)
    with torch.no_grad(), collect_records() as records:
        compiled = torch.compile(model, backend="deplo", options=SEARCHED)
        compiled(x)
        usual = schedules(records[0])
        assert deplo.wait_tuned() and schedules(records[0]) != usual and records[0].search.improved == 1
        torch.testing.assert_close(compiled(x), model(x))
        assert records[0].program.take_example() is None


@pytest.mark.parametrize("how", ["exit", "fork"])
def test_a_search_holds_up_no_exit_and_no_fork(tmp_path, how):
    script = """
import os, sys, torch, deplo
x = torch.randn(256, 512)
model = torch.nn.Sequential(*(torch.nn.Linear(512 + 64 * k, 576 + 64 * k) for k in range(6)))
with torch.no_grad():
    compiled = torch.compile(model, backend="deplo", options={"tune": "background"})
    compiled(x)
    if sys.argv[1] == "fork":
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            compiled(x)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
print("done", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, how],
        env={**os.environ, "DEPLO_CACHE_DIR": str(tmp_path), "DEPLO_TUNE": "auto"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr


def test_explain_waits_and_says_it(gate):
    gate.opened.set()
    with torch.no_grad():
        about = deplo.explain(torch.nn.Softmax(-1), torch.randn(64, 100), options={"tune": "background"})
    assert "1 kernels searched in the background, 1 of them faster" in str(about)
