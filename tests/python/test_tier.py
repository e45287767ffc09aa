"""options={"tier": "background"}: calls give what eager mode gives while a graph compiles, and go to its program from then on. Events, no times."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import deplo
import deplo.backend
from deplo.core import core
from deplo.records import collect_records

BACKGROUND = {"tier": "background"}


class Gate:
    """Compilations in the background: each begins when it is let through."""

    def __init__(self, compile_text):
        self.opened = threading.Event()
        self.begun = threading.Event()
        self.compiled = []
        self.failure = None
        self._compile_text = compile_text

    def __call__(self, imported, options):
        if threading.current_thread().name == "deplo-compile":
            self.begun.set()
            self.opened.wait()
        self.compiled.append(imported.text.split("(")[0])
        if self.failure is not None:
            raise self.failure
        return self._compile_text(imported, options)

    def open(self):
        self.opened.set()
        return deplo.wait_compiled()


@pytest.fixture
def gate(monkeypatch):
    torch._dynamo.reset()
    gc.collect()
    gate = Gate(deplo.backend.compile_text)
    monkeypatch.setattr(deplo.backend, "compile_text", gate)
    with torch._functorch.config.patch("enable_autograd_cache", False):
        yield gate
    gate.opened.set()
    torch._dynamo.reset()
    gc.collect()
    assert deplo.wait_compiled()


def compiled_by(fn, **options):
    return torch.compile(fn, backend="deplo", options={**BACKGROUND, **options})


def test_calls_switch_to_a_program_whose_weights_are_packed(gate):
    model = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.ReLU(), torch.nn.Linear(160, 64)).eval()
    x = torch.randn(8, 96)
    with torch.no_grad(), collect_records() as records:
        compiled = compiled_by(model, weights="pack")
        for _ in range(3):
            assert torch.equal(compiled(x), model(x))
        (record,) = records
        assert record.background.state == "compiling" and record.background.eager_calls == 3 and record.program is None
        assert not deplo.wait_compiled(0)
        before = core().packed_bytes()
        assert gate.open()
        packed = core().packed_bytes()
        assert packed >= before + 4 * (96 * 160 + 160 * 64)
        torch.testing.assert_close(compiled(x), model(x))
        assert core().packed_bytes() == packed
        assert record.background.state == "compiled" and record.background.eager_calls == 3
        with torch.no_grad():
            model[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))


def test_random_numbers_are_those_of_eager_mode(gate):
    def f(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    x = torch.randn(64, 64)
    compiled = compiled_by(f)
    for turn in range(4):
        torch.manual_seed(turn)
        expected, state = f(x), None
        state = torch.get_rng_state()
        torch.manual_seed(turn)
        torch.testing.assert_close(compiled(x), expected)
        assert torch.equal(torch.get_rng_state(), state)
        if turn == 1:
            gate.open()


def test_written_inputs_and_views(gate):
    def f(x, count):
        count.add_(1)
        x.mul_(2)
        return x[1:], x.sum() + count

    compiled = compiled_by(f)
    x, count = torch.ones(4, 3), torch.zeros(())
    for turn in range(4):
        view, total = compiled(x, count)
        assert view._base is x and view.data_ptr() == x[1:].data_ptr()
        assert count.item() == turn + 1 and total.item() == 12 * 2 ** (turn + 1) + turn + 1
        if turn == 1:
            gate.open()


def test_training_whichever_of_both_graphs_is_compiled(gate):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.GELU(), torch.nn.Conv2d(8, 4, 1))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    compiled = compiled_by(model)

    def check(loss):
        model.zero_grad()
        loss.backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-4)

    with collect_records() as records:
        losses = [compiled(x).square().sum() for _ in range(3)]
        check(losses.pop())
        forward, backward = (record.background for record in records)
        assert (forward.state, backward.state) == ("compiling", "compiling")
        gate.open()
        check(losses.pop())  # of a forward graph in eager mode
        check(losses.pop())
        assert backward.state == "compiled" and backward.eager_calls == 1
        check(compiled(x).square().sum())
    assert gate.compiled == ["torch @forward", "torch @backward"]
    assert model[1].num_batches_tracked.item() == 5


def test_sizes_that_change(gate):
    def f(x):
        return torch.softmax(x, -1) * x.shape[0]

    compiled = torch.compile(f, backend="deplo", dynamic=True, options=BACKGROUND)
    for turn, rows in enumerate((3, 5, 8, 13, 21)):
        x = torch.randn(rows, 2 * rows)
        torch.testing.assert_close(compiled(x), f(x))
        if turn == 2:
            gate.open()
    assert len(gate.compiled) == 1


def test_calls_that_stay_in_aten_between_parts(gate):
    def f(x):
        return torch.linalg.eigvals(x.relu() + 1).abs().sin()

    x = torch.randn(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deplo.FallbackWarning)
        compiled = compiled_by(f)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), f(x))
        gate.open()
        torch.testing.assert_close(compiled(x), f(x))


def test_a_bug_is_one_warning_at_the_next_call(gate):
    def f(x):
        return x.sin() + 1

    x = torch.randn(5)
    gate.failure = deplo.InternalError("[fuse_nests] a bug")
    compiled = compiled_by(f)
    compiled(x)
    gate.opened.set()
    with collect_records(), pytest.warns(deplo.FallbackWarning, match="the inference graph runs in eager mode.*a bug"):
        assert deplo.wait_compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x), f(x)) and torch.equal(compiled(x), f(x))


@pytest.mark.parametrize(
    ("strict", "failure"),
    [(True, deplo.InternalError("[fuse_nests] a bug")), (True, deplo.UnsupportedError("no")), (False, deplo.UserError("memory_limit"))],
)
def test_an_error_is_raised_by_each_call(gate, strict, failure):
    gate.failure = failure
    compiled = compiled_by(lambda x: x.sin() + 1, strict=strict)
    x = torch.randn(5)
    assert torch.equal(compiled(x), x.sin() + 1)
    gate.opened.set()
    with pytest.raises(type(failure), match=str(failure).rpartition("]")[2].strip()):
        deplo.wait_compiled()
    for _ in range(2):
        with pytest.raises(type(failure), match=str(failure).rpartition("]")[2].strip()):
            compiled(x)


def test_threads_call_while_it_switches(gate):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh()).eval()
    compiled = compiled_by(model)
    inputs = [torch.randn(4, 32) for _ in range(4)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        compiled(inputs[0])
    passed = threading.Barrier(5)
    wrong = []

    def serve(k):
        with torch.no_grad():
            for turn in range(20):
                if turn == 5:
                    passed.wait()
                if not torch.allclose(compiled(inputs[k]), expected[k], atol=1e-5):
                    wrong.append((k, turn))

    threads = [threading.Thread(target=serve, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    passed.wait()
    gate.open()
    for thread in threads:
        thread.join()
    assert not wrong


def test_graphs_that_were_dropped_are_not_compiled(gate):
    x = torch.randn(6)
    first, second = compiled_by(lambda x: x + 1), compiled_by(lambda x: x * 3)
    first(x)
    gate.begun.wait()
    second(x)
    torch._dynamo.reset()
    del first, second
    gc.collect()
    assert gate.open()
    assert len(gate.compiled) == 1


def test_calls_without_dynamo_keep_the_program(gate):
    compiled = deplo.jit(lambda x: torch.relu(x) + 1, guards="inputs", options=BACKGROUND)
    x = torch.randn(7)
    for _ in range(3):
        compiled(x)
    report = deplo.call_report(compiled)
    assert report.direct == 0 and report.refused == {"its graph compiles in the background": 3}
    gate.open()
    compiled(x)
    assert torch.equal(compiled(x), torch.relu(x) + 1)
    report = deplo.call_report(compiled)
    assert report.direct == 1 and report.bare == 1 and not report.reason


def test_explain_says_so():
    text = str(deplo.explain(lambda x: torch.relu(x) + 1, torch.randn(9), options=BACKGROUND))
    assert "became 1 kernel" in text and "compiled in the background, after" in text


_ENDING = """
import os, threading, torch, deplo, deplo.backend
compile_text = deplo.backend.compile_text
main, begun = threading.main_thread(), threading.Event()
x = torch.randn(8, 8)
relu, exp, sin, cos = [torch.compile(f, backend="deplo", options={"tier": "background"}) for f in (torch.relu, torch.exp, torch.sin, torch.cos)]
relu(x)
assert deplo.wait_compiled()
with deplo.tier._worker.changed:  # keeps the thread from the second graph until the child is there
    assert torch.equal(exp(x), x.exp())
    child = os.fork()
if child == 0:
    assert torch.allclose(exp(x), x.exp()) and deplo.wait_compiled()
    assert torch.allclose(exp(x), x.exp()) and torch.equal(relu(x), x.relu())
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert deplo.wait_compiled() and torch.allclose(exp(x), x.exp())
def after_the_end(*given):
    begun.set()
    main.join()
    program = compile_text(*given)
    print("compiled", flush=True)
    return program
deplo.backend.compile_text = after_the_end
sin(x), cos(x)
begun.wait()
"""


def test_an_interpreter_that_forks_and_ends_meanwhile(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(deplo.__file__)), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr  # the first of two
    assert "Error" not in done.stderr
