"""deplo.jit(..., guards="inputs"): calls that leave Dynamo out give what eager mode gives, and go through Dynamo where anything differs."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections import namedtuple

import pytest
import torch

import deplo
from deplo.core import core

SCALE = 3.0
WEIGHT = torch.arange(8.0)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


def jit(fn, **more):
    return deplo.jit(fn, guards="inputs", options={"strict": True}, **more)


def direct(compiled, *args, **kwargs):
    """Calls twice; the result of the second call, which must have gone past Dynamo."""
    compiled(*args, **kwargs)
    before = deplo.call_report(compiled).direct
    result = compiled(*args, **kwargs)
    report = deplo.call_report(compiled)
    assert report.direct == before + 1, str(report)
    return result


def misses(compiled, *args, **kwargs):
    """Calls; the result, of which the call must have gone through Dynamo."""
    before = deplo.call_report(compiled).through_dynamo
    result = compiled(*args, **kwargs)
    assert deplo.call_report(compiled).through_dynamo == before + 1, str(deplo.call_report(compiled))
    return result


def test_tensors_are_told_apart_by_what_they_are():
    def f(x, y):
        return torch.relu(x + 1) * y, x.shape[0]

    g = jit(f)
    variants = [
        (torch.randn(4, 6), torch.randn(4, 6)),
        (torch.randn(6, 4).t(), torch.randn(4, 6)),  # strides
        (torch.randn(5, 6), torch.randn(5, 6)),
        (torch.randn(9, 6), torch.randn(9, 6)),  # with symbolic sizes by now
        (torch.randn(9, 6), torch.randn(1, 6)),
        (torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6)),
        (torch.randn(4, 6), torch.randn(4, 6, requires_grad=True)),
        (torch.randn(2, 4, 6), torch.randn(4, 6)),
        (torch.nn.Parameter(torch.randn(4, 6)), torch.randn(4, 6)),
        (torch.randn(4, 12)[:, ::2], torch.randn(4, 6)),
        (torch.randn(0, 6), torch.randn(0, 6)),
    ]
    for x, y in variants + variants[::-1]:
        for _ in range(2):
            result, wanted = g(x, y), f(x, y)
            torch.testing.assert_close(result[0], wanted[0])
            assert result[1] == wanted[1] and type(result) is tuple and result[0].requires_grad == wanted[0].requires_grad
    report = deplo.call_report(g)
    assert report.direct >= 3 * len(variants) and not report.reason


def test_scalars_strings_and_structures_by_value():
    Pair = namedtuple("Pair", "left right")

    def f(tree, n=2, *, kind="add", flag=None):
        a, b = tree["ab"]
        c = a + b.left * n if kind == "add" else a - b.right
        return {"c": c, "n": [n, None, "x"], "in": a} if flag is None else (c,)

    g = jit(f)
    a, left, right = torch.randn(3), torch.randn(3), torch.randn(3)
    for given, kwargs in [
        (({"ab": (a, Pair(left, right))},), {}),
        (({"ab": [a, Pair(left, right)]}, 3), {}),
        (({"ab": (a, Pair(left, right))}, 2.5), {}),
        (({"ab": (a, Pair(left, right))}, True), {"kind": "sub"}),
        (({"ab": (a, Pair(left, right))},), {"flag": False, "kind": "".join(["su", "b"])}),
        (({"ab": (a, Pair(left, right)), "more": 1},), {"flag": ()}),
    ]:
        for _ in range(3):
            result, wanted = g(*given, **kwargs), f(*given, **kwargs)
            assert type(result) is type(wanted)
            if type(wanted) is tuple:
                torch.testing.assert_close(result[0], wanted[0])
            else:
                torch.testing.assert_close(result["c"], wanted["c"])
                assert result["n"] == wanted["n"] and result["in"] is a and list(result) == list(wanted)
    assert deplo.call_report(g).direct >= 6


def test_numbers_that_differ_only_by_type_or_sign():
    def f(x, n):
        return x / n

    g = jit(f)
    x = torch.randn(4)
    for n in (1, 1.0, True, -1.0, 0.0, -0.0, 2, 2, 3, 3, 0.0, -0.0):
        assert torch.equal(g(x, n), f(x, n)), n


def test_modes_of_pytorch_make_other_calls():
    model = torch.nn.Linear(8, 8)
    g = jit(model)
    x = torch.randn(4, 8)
    wanted = model(x).detach()
    assert direct(g, x).requires_grad
    with torch.no_grad():
        assert not direct(g, x).requires_grad
    with torch.inference_mode():
        assert direct(g, x).is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert direct(g, x).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert direct(g, x).dtype == torch.float16
    assert direct(g, x).requires_grad
    torch.testing.assert_close(g(x).detach(), wanted)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        torch.testing.assert_close(misses(g, x).detach(), wanted)
        torch.use_deterministic_algorithms(True)
        torch.testing.assert_close(misses(g, x).detach(), wanted)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def test_default_dtype_stance_and_function_modes():
    def f(x):
        return x + torch.ones(3)

    g = jit(f)
    x = torch.randn(3)
    direct(g, x)
    torch.set_default_dtype(torch.float64)
    try:
        assert misses(g, x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert g(x).dtype == torch.float32
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(misses(g, x), f(x))

    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.ones else result

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.seen += 1
            return func(*args, **(kwargs or {}))

    with Doubling():
        assert torch.equal(g(x), f(x))
    with Counting():
        assert torch.equal(misses(g, x), f(x))
    assert Counting.seen > 1
    assert torch.equal(direct(g, x), f(x))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(8))
        self.scale = 2

    def forward(self, x, *, twice=False):
        y = self.drop(torch.relu(self.first(x) + self.shift)) * self.scale
        return self.first(y) if twice else y


def test_modes_that_the_function_enters_itself():
    """As transformers does where it makes masks: the stack of modes is as empty afterwards as it is before a direct call."""

    class Doubled(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return 2 * result if func is torch.relu else result

    def f(x):
        with Doubled():
            y = torch.relu(x)
        return y + torch.relu(x)

    x = torch.randn(5)
    g = jit(f)
    torch.testing.assert_close(direct(g, x), f(x))
    with Doubled():
        torch.testing.assert_close(misses(g, x), f(x))
    torch.testing.assert_close(direct(g, x), f(x))


def test_modules_are_watched():
    model = Tied().eval()
    g = jit(model)
    x = torch.randn(4, 8)

    def check(same):
        with torch.no_grad():
            result = g(x) if same else misses(g, x)
            torch.testing.assert_close(result, model(x))
            torch.testing.assert_close(direct(g, x), model(x))

    check(False)
    with torch.no_grad():
        model.first.weight.mul_(2)  # in place: a version
    check(True)
    model.first.weight.data = torch.randn(8, 8)
    check(True)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    check(True)
    model.first.weight = torch.nn.Parameter(torch.randn(8, 8))
    check(False)
    model.shift = torch.zeros(8)
    check(False)
    model.first = torch.nn.Linear(8, 8)
    check(False)
    model.scale = 5
    check(False)
    model.first.bias.data = model.first.bias.data.double()[::1].float()
    check(True)
    model.first.weight.requires_grad_(False)
    check(False)
    model.unrelated = "x"
    check(False)
    g.train()
    assert model.training
    with torch.no_grad():
        assert not torch.equal(g(x), g(x))  # drops
    g.eval()
    check(False)
    torch.testing.assert_close(copy.deepcopy(g)(x), model(x))
    model.double()
    with pytest.raises((RuntimeError, deplo.Error)):
        g(x)
    with torch.no_grad():
        torch.testing.assert_close(direct(g, x.double()), model(x.double()))


def test_training_accumulates_what_eager_mode_does():
    model, reference = Tied().eval(), None
    reference = copy.deepcopy(model)
    g = jit(model)
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(6, 8)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        g(a, twice=True).pow(2).mean().backward()
        reference(b, twice=True).pow(2).mean().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        for step, parts in ((optimizer, model), (other, reference)):
            step.step()
            step.zero_grad(set_to_none=bool(seed % 2))
            del parts
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert deplo.call_report(g).direct >= 4


def test_inputs_that_are_written_viewed_or_the_same():
    def writes(x, y):
        x.add_(y)
        return x[1:], x.t(), y

    g = jit(writes)
    for make in (lambda: (torch.ones(3, 3), torch.randn(3, 3)), lambda: (torch.ones(4, 4), torch.randn(4, 4)), lambda: (torch.zeros(3, 3),) * 2):
        for _ in range(3):
            x, y = make()
            a, b = (x.clone(), y.clone()) if x is not y else (x.clone(),) * 2
            version = x._version
            result, wanted = g(x, y), writes(a, b)
            assert torch.equal(x, a) and torch.equal(y, b) and x._version > version
            for r, w in zip(result, wanted, strict=True):
                assert torch.equal(r, w) and r.stride() == w.stride()
            assert result[0]._base is x and result[2] is y
    overlapping = torch.ones(4, 3)
    g(overlapping[1:], torch.ones(3, 3))
    with pytest.raises(deplo.UnsupportedError, match="shares memory"):  # strict; else op by op
        g(overlapping[1:], overlapping[:3])


def test_globals_and_closures_are_looked_up():
    global SCALE, WEIGHT
    inner = torch.ones(8)

    def f(x):
        return x * SCALE + WEIGHT + inner

    g = jit(f)
    x = torch.randn(8)
    try:
        assert torch.equal(direct(g, x), f(x))
        SCALE = 4.0
        assert torch.equal(misses(g, x), f(x))
        WEIGHT = torch.zeros(8)
        assert torch.equal(misses(g, x), f(x))
        inner = torch.zeros(8)
        assert torch.equal(misses(g, x), f(x))
        WEIGHT.fill_(3)
        assert torch.equal(direct(g, x), f(x))
    finally:
        SCALE, WEIGHT = 3.0, torch.arange(8.0)


class Counting(torch.nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.calls


class Named:
    def __init__(self, value):
        self.value = value


SETTINGS = {"scale": 2}
KEPT: list[int] = []


@pytest.mark.parametrize(
    ("fn", "make", "words"),
    [
        (lambda: Counting(), lambda: (torch.randn(3),), "side effects"),
        (lambda: lambda x: (print(end=""), torch.relu(x))[1] + 1, lambda: (torch.randn(3),), "single graph"),
        (lambda: lambda x, o: x + o.value, lambda: (torch.randn(3), Named(2)), "may change unseen"),
        (lambda: lambda x: x.sum().item() + 1, lambda: (torch.arange(3.0) + len(KEPT),), "calls of Python"),
        (lambda: lambda x: (x + 1, KEPT), lambda: (torch.randn(3),), "others have"),
        (lambda: lambda x: Named(x + 1).value * 2, lambda: (torch.randn(3),), ""),
        (lambda: lambda x, kept: (x + 1, kept), lambda: (torch.randn(3), [1]), "others have"),
        (lambda: lambda x: 3, lambda: (torch.randn(3),), "0 graphs"),
    ],
    ids=["counter", "print", "object", "item", "global_list", "made_object", "given_list", "no_graph"],
)
def test_what_direct_calls_cannot_do_goes_through_dynamo(fn, make, words):
    wanted, function = fn(), fn()
    g = deplo.jit(function, guards="inputs")
    for _ in range(3):
        args = make()
        result, expected = g(*args), wanted(*args)
        assert repr(result) == repr(expected)
    report = deplo.call_report(g)
    assert words in " ".join([report.reason, *report.refused]), str(report)
    assert (report.direct == 0) == bool(words)


def test_what_is_not_checked_is_named():
    def f(x):
        return x * SETTINGS["scale"]

    g = jit(f)
    direct(g, torch.randn(3))
    assert any("SETTINGS" in name for name in deplo.call_report(g).unchecked)
    assert "SETTINGS" in str(deplo.call_report(g))


def test_methods_threads_nesting_and_words():
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4))

        @deplo.jit(guards="inputs")
        def forward(self, x):
            return x * self.weight

    one, two = Holder(), Holder()
    x = torch.randn(4)
    for holder in (one, two, one, two):
        torch.testing.assert_close(holder(x), x * holder.weight)
    assert deplo.call_report(Holder.forward).direct >= 1
    results: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: results.extend(one(x) for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200 and all(torch.equal(r, results[0]) for r in results)
    outer = torch.compile(lambda x: one(x) + 1, backend="deplo", fullgraph=True)
    torch.testing.assert_close(outer(x), x * one.weight + 1)
    assert torch.equal(torch.func.vmap(one)(x[:, None].expand(4, 4)), torch.func.vmap(lambda v: v * one.weight)(x[:, None].expand(4, 4)))
    with pytest.raises(deplo.UserError, match="guards is 'input'"):
        deplo.jit(lambda x: x, guards="input")
    with pytest.raises(deplo.UserError, match="deplo.jit"):
        torch.compile(lambda x: x + 1, backend="deplo", options={"guards": "inputs"})(x)
    with pytest.raises(deplo.UserError, match="call_report"):
        deplo.call_report(torch.relu)


def test_what_entries_hold_may_call_when_it_goes():
    keys, calls = [], []

    def missed(key, *rest):
        keys.append(key)
        return "missed"

    class Last:
        def __del__(self):
            calls.append(dispatcher(1))

    def entry(*named):
        return core().Entry([], None, lambda: (), ("constant", "direct"), list(named), lambda: True, [], [], [])

    dispatcher = core().Dispatcher(missed)
    assert (dispatcher(1), dispatcher(2)) == ("missed", "missed")
    core().add_entry(dispatcher, keys[0], entry(Last()), 1)
    assert dispatcher(1) == "direct" and not calls
    core().add_entry(dispatcher, keys[1], entry(Last()), 1)  # in the place of all others
    assert calls == ["missed"] and dispatcher(2) == "direct"
    core().call_plainly(dispatcher, lambda x: "plain")
    assert calls == ["missed", "plain"] and dispatcher(2) == "plain"


def test_errors_are_eager_modes():
    table = torch.nn.Embedding(5, 3)
    g = jit(table)
    with torch.no_grad():
        direct(g, torch.tensor([1, 2]))
        with pytest.raises(IndexError):
            g(torch.tensor([1, 7]))
        torch.testing.assert_close(direct(g, torch.tensor([1, 4])), table(torch.tensor([1, 4])))


FIRST_CALLS = """
import threading, torch, deplo
def f(x):
    return torch.relu(x + 1) * 2
model = torch.nn.Linear(8, 8)
calls = [deplo.jit(f, guards="inputs"), torch.compile(f, backend="deplo"), deplo.jit(model, guards="inputs"), torch.compile(model, backend="deplo")]
ready, wrong = threading.Barrier(2 * len(calls)), []
def first(k):
    x = torch.randn(4, 8)
    ready.wait()
    wanted = (model if k % len(calls) >= 2 else f)(x)
    for _ in range(3):
        if not torch.allclose(calls[k % len(calls)](x), wanted, atol=1e-5):
            wrong.append(k)
def guarded(k):
    try:
        first(k)
    except BaseException as error:
        wrong.append(repr(error))
threads = [threading.Thread(target=guarded, args=(k,)) for k in range(2 * len(calls))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(wrong)
"""


def test_threads_that_compile_first_at_once(tmp_path):
    folders = {"DEPLO_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], env={**os.environ, **folders}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr[-3000:]
