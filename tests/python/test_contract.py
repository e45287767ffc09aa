"""What torch.compile promises for any backend, and what other backends got wrong."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import threading

import pytest
import torch
from engines import same
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import deplo
from deplo.capture import capture
from deplo.errors import FallbackWarning, UnsupportedError
from deplo.executable import Executable

_C = pytest.importorskip("deplo._C")
STRICT = {"strict": True}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def compiled(fn, options=STRICT, **keywords):
    return torch.compile(fn, backend="deplo", options=options, **keywords)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return torch.relu(self.linear(x)) + self.calls


@pytest.mark.parametrize(("first", "second"), list(itertools.product(MODES, MODES)))
def test_modes_of_compiling_and_running(first, second):
    model = Layer()
    reference = copy.deepcopy(model)
    fn = compiled(model)
    x = torch.randn(3, 8)
    for mode in (first, second, first):
        with MODES[mode]():
            got, wanted = fn(x), reference(x)
            same(got, wanted)
            assert got.requires_grad == wanted.requires_grad and got.is_inference() == wanted.is_inference()
        if got.requires_grad:
            got.sum().backward()
            wanted.sum().backward()
            same(model.linear.weight.grad, reference.linear.weight.grad, scale=32)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_goes_backward_twice(dynamic):
    """Also if the backward graph was compiled in a call that keeps nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2), torch.nn.Softmax(-1))
    compiled = torch.compile(model, backend="deplo", dynamic=dynamic)
    x = torch.randn(3, 4)
    compiled(x).pow(2).sum().backward()
    loss = compiled(x).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for _ in range(3):
        model(x).pow(2).sum().backward()
    for mine, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad)


def test_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[0].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    model[0].weight.register_hook(lambda g: g * 5)
    results = []
    for call in (model, torch.compile(model, backend="deplo")):
        model.zero_grad()
        x = torch.arange(8.0).view(2, 4).div(8).requires_grad_()
        y = call(x)
        y.sum().backward()
        results.append((y, x.grad, model[0].weight.grad.clone()))
    same(results[1], results[0], scale=32)


def test_hooks_of_tensors_and_of_what_is_saved():
    def fn(x):
        y = x.exp() * 2
        y.register_hook(lambda g: g * 7)
        return (y * y.sin()).sum()

    grads = []
    for call in (fn, torch.compile(fn, backend="deplo")):
        x = torch.linspace(-1, 1, 5).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            call(x).backward()
        grads.append(x.grad)
    same(grads[1], grads[0], scale=32)


def transforms():
    x, w = torch.randn(5, 4), torch.randn(4, 4)
    linear = nn.Linear(4, 4)
    parameters = dict(linear.named_parameters())
    return {
        "vmap": (lambda x, w: vmap(lambda r: torch.softmax(w @ r, 0))(x), (x, w)),
        "grad": (lambda x, w: grad(lambda w: (x @ w).tanh().sum())(w), (x, w)),
        "vmap of grad": (lambda x, w: vmap(grad(lambda r: (w @ r).sin().sum()))(x), (x, w)),
        "jacrev": (lambda x, w: jacrev(lambda r: (w @ r).exp())(x[0]), (x, w)),
        "hessian": (lambda x: hessian(lambda r: (r**3).sum())(x[0]), (x,)),
        "vjp": (lambda x, w: vjp(lambda r: r @ w, x)[1](torch.ones(5, 4)), (x, w)),
        "jvp": (lambda x, w: jvp(lambda r: (r @ w).exp(), (x,), (torch.ones_like(x),)), (x, w)),
        "functional_call": (lambda p, x: grad(lambda p: functional_call(linear, p, (x,)).square().sum())(p), (parameters, x)),
    }


@pytest.mark.parametrize("name", transforms())
def test_function_transforms(name):
    torch.manual_seed(0)
    fn, inputs = transforms()[name]
    same(compiled(fn)(*inputs), fn(*inputs), scale=64, strides=False)


def test_copies_and_pickles_of_models_that_own_compiled_code():
    model = Layer()
    model.compile(backend="deplo", options=STRICT)
    x = torch.randn(3, 8)
    with torch.no_grad():
        model(x)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model.linear.weight.zero_()
        same(copies[0](x), copies[1](x))
        wrapped = compiled(copies[0])
        wrapped(x)
        again = copy.deepcopy(wrapped)
        same(again(x), copy.deepcopy(wrapped._orig_mod)(x))


def test_reset_forgets_and_compiles_again():
    fn = compiled(lambda x: torch.tanh(x) + 1)
    x = torch.randn(4)
    first = fn(x)
    for reset in (torch._dynamo.reset, torch.compiler.reset):
        reset()
        same(fn(x), first)


# Threads, processes, memory


def test_threads_compile_and_call_one_function():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    fn = compiled(model, dynamic=True)
    errors = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            for step in range(20):
                x = torch.randn(2 + (step + seed) % 9, 64, generator=generator)
                with torch.set_grad_enabled(step % 3 == 0):
                    same(fn(x), model(x), scale=64)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def _calls_after_fork(fn, x, expected, queue):
    torch.set_num_threads(1)  # ATen's own pool does not survive a fork
    other = compiled(lambda x: (x * 3).sum(1))
    same(other(x), (x * 3).sum(1), exact=(x.double() * 3).sum(1))
    queue.put(bool(torch.equal(fn(x), expected)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_calls_what_was_compiled_and_compiles():
    fn = compiled(lambda x: torch.softmax(x @ x.t(), -1))
    x = torch.randn(60, 60)
    with torch.no_grad():
        expected = fn(x)
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_calls_after_fork, args=(fn, x, expected, queue))
        child.start()
        child.join(120)
    assert child.exitcode == 0 and queue.get()


_DDP = """
import copy, os, sys, torch, torch.distributed as dist
from torch import nn
from deplo.backend import collect_records

class Net(nn.Module):  # Dynamo captures none of a bare nn.Sequential
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.narrow(nn.functional.gelu(self.wide(x)))

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
rank = dist.get_rank()
torch.manual_seed(0)
model = Net()
reference, judge = (nn.parallel.DistributedDataParallel(m) for m in (copy.deepcopy(model), copy.deepcopy(model).double()))
ddp = torch.compile(nn.parallel.DistributedDataParallel(model), backend="deplo", options={"strict": True})
with collect_records() as records:
    for net in (ddp, reference, judge):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            net(x.to(next(net.parameters()).dtype)).square().mean().backward()
            optimizer.step()
kinds = {record.kind for record in records if record.program is not None and not record.fallback}
assert kinds == {"forward", "backward"}, records
for p, q, r in zip(model.parameters(), reference.parameters(), judge.parameters(), strict=True):
    for got, eager, exact in ((p, q, r), (p.grad, q.grad, r.grad)):
        error, of_eager = ((t - exact).abs().max() for t in (got, eager))
        assert error <= of_eager + 6 * torch.finfo(got.dtype).eps * exact.abs().max(), (error, of_eager)
mine = torch.cat([p.detach().flatten() for p in model.parameters()])
first = mine.clone()
dist.broadcast(first, 0)
assert torch.equal(mine, first), "the ranks have gone apart"
dist.destroy_process_group()
"""


def test_distributed_data_parallel(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(deplo.__file__))}
    commands = [[sys.executable, "-c", _DDP, str(tmp_path / "store"), str(rank)] for rank in range(2)]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


def test_dynamo_frees_programs_that_it_drops():
    def count() -> int:
        gc.collect()
        return sum(isinstance(thing, Executable) for thing in gc.get_objects())

    before = count()
    for k in range(20):
        compiled(lambda x, k=k: torch.tanh(x) * k)(torch.randn(4))
        torch._dynamo.reset()
    assert count() <= before + 1


def test_thousands_of_compilations_do_not_grow_memory():
    text = "torch @f(%x: f32[{n}] user)\n  %y: f32[{n}] = aten.mul.Tensor(self=%x, other={n}.5)\n  return %y\n"
    options = json.dumps({"cache_dir": ""})

    def compile_many(start: int, count: int) -> int:
        for n in range(start, start + count):
            assert _C.compile(text.format(n=n), options).run([torch.ones(n)])[0][0] == n + 0.5
        gc.collect()
        return resident_kilobytes()

    first = compile_many(1, 200)
    grown = compile_many(1000, 1000) - compile_many(2000, 1000)
    assert -grown <= 16 * 1024 and resident_kilobytes() - first <= 128 * 1024


COMPILE_MANY = """
import gc, resource, torch

def resident_kilobytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024

def compile_many(backend, start, count):
    for k in range(start, start + count):
        torch._dynamo.reset()
        fn = torch.compile(lambda x, k=k: torch.softmax(x * (k + 0.5), -1) + k, backend=backend)
        torch.testing.assert_close(fn(x), torch.softmax(x * (k + 0.5), -1) + k)
    gc.collect()
    return resident_kilobytes()

x = torch.randn(8, 32)
for backend in ("aot_eager", "deplo"):
    before = compile_many(backend, 0, 50)  # modules are loaded, and arenas of memory made
    print(compile_many(backend, 100, 150) - before)
"""


def test_compilations_through_dynamo_grow_memory_no_more_than_without_deplo():
    """PyTorch itself keeps some 30 KB of each compilation, which the backend aot_eager shows. In a process of its own: others' memory has holes."""
    process = subprocess.run([sys.executable, "-c", COMPILE_MANY], capture_output=True, text=True, check=True)
    without, grown = map(int, process.stdout.split())
    assert grown <= without + 4 * 1024, (grown, without)


def resident_kilobytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


# Weights


def edits():
    def through_numpy(w):
        w.numpy()[:] *= 2

    def through_vector(w):
        torch.nn.utils.vector_to_parameters(torch.randn(w.numel()), [w])

    return {
        "in place": lambda w: w.add_(1),
        "a row": lambda w: w[3].mul_(7),
        "one element": lambda w: w[3, 5].add_(7),
        ".data": lambda w: w.data.mul_(2),
        "a row of .data": lambda w: w.data[37].mul_(-2),
        "a column of .data": lambda w: w.data[:, 61].mul_(-2),
        "a block of .data": lambda w: w.data[16:32, 48:72].mul_(-2),
        "a triangle of .data": lambda w: w.data.tril_(),
        "a mask of .data": lambda w: w.data.mul_(torch.rand(64, 96) > 0.1),
        "numpy": through_numpy,
        "new data": lambda w: setattr(w, "data", torch.randn_like(w)),
        "a vector": through_vector,
    }


@pytest.mark.parametrize("name", edits())
def test_a_weight_that_is_edited_after_packing(name):
    model = nn.Linear(96, 64)
    fn = compiled(model)
    x = torch.randn(8, 96)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same(fn(x), model(x), scale=256)
        with torch.no_grad():
            edits()[name](model.weight)
        with mode():
            same(fn(x), model(x), scale=256)


def test_an_element_of_a_small_weight_that_is_edited_unseen():
    model = nn.Sequential(nn.Linear(32, 32), nn.Conv2d(4, 4, 3, padding=1))
    small = compiled(model)
    x = torch.randn(2, 4, 5, 32)
    with torch.no_grad():
        for edit in (lambda: None, lambda: model[0].weight.data[17, 5].add_(3), lambda: model[1].weight.data[1, 2, 0, 2].add_(3)):
            edit()
            same(small(x), model(x), scale=1024)


def test_a_weight_that_an_optimizer_moves():
    model = nn.Linear(64, 64)
    fn = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 64)
    for _ in range(3):
        optimizer.zero_grad()
        fn(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            same(fn(x), model(x), scale=256)


# What others get wrong


NEGATED = {
    "imag of conj": (lambda z: z.conj().imag * 2, lambda: torch.randn(4, dtype=torch.complex64)),
    "a negated input": (lambda x: x * 2 + 1, lambda: torch.randn(4, dtype=torch.complex64).conj().imag),
    "a negated view": (lambda x: x.sum(0) + x.t()[0], lambda: torch._neg_view(torch.randn(4, 4))),
    "a conjugated input": (lambda z: (z * 2).real, lambda: torch.randn(4, dtype=torch.complex64).conj()),
    "returned as it is": (lambda x: (x, x + 1), lambda: torch._neg_view(torch.randn(4))),
    "negated inside": (lambda x: torch._neg_view(x) * 3, lambda: torch.randn(4)),
    "written": (lambda x: x.add_(1) * 2, lambda: torch._neg_view(torch.randn(4))),
}


@pytest.mark.filterwarnings("ignore::deplo.errors.FallbackWarning")
@pytest.mark.parametrize("name", NEGATED)
def test_lazily_negated_and_conjugated_tensors(name):
    fn, make = NEGATED[name]
    with torch.no_grad():
        torch.manual_seed(0)
        x = make()
        y = x.clone()
        got, wanted = torch.compile(fn, backend="deplo")(x), fn(y)
        for a, b in zip(torch.utils._pytree.tree_leaves((got, x)), torch.utils._pytree.tree_leaves((wanted, y)), strict=True):
            assert torch.equal(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())


def test_a_function_compiled_for_plain_tensors_takes_negated_ones():
    fn = torch.compile(lambda x: x * 2 + 1, backend="deplo")
    x = torch.randn(4)
    with torch.no_grad(), pytest.warns(FallbackWarning, match="lazily negated"):
        fn(x)
        assert torch.equal(fn(torch._neg_view(x)), 1 - x * 2)


CASTS = {
    "bfloat16 and back": lambda x: (x.bfloat16() * 3 + 1).float().sub(1),
    "float16": lambda x: (x.half() + x.half() * 2).float() * 2,
    "both halves": lambda x: x.bfloat16().float() + x.half().float(),
    "int32": lambda x: (x * 10).to(torch.int32).float() / 3,
    "uint8 by int64": lambda x: (x * 100).to(torch.int64).to(torch.uint8).float(),
    "int8": lambda x: (x * 100).to(torch.int32).to(torch.int8) + 1,
    "bool": lambda x: x.to(torch.int32).bool().float() + x,
    "float64": lambda x: (x.double() * 1.1).float(),
    "float64 to bfloat16": lambda x: (x.double() * 1.0001).bfloat16(),
    "float64 to float16": lambda x: (x.double() * 1.0001).half(),
    "functions of bfloat16": lambda x: x.bfloat16().exp().log().float(),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_inside_a_chain_round(name):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    with torch.no_grad():
        assert torch.equal(compiled(CASTS[name])(x), CASTS[name](x))


@pytest.mark.parametrize("threads", [1, 2])
def test_mean_of_large_tensors(threads):
    x = torch.rand(10_000_001, generator=torch.Generator().manual_seed(0)) + 100
    columns = x[:9_999_999].view(-1, 3)
    for fn, given, wanted in (
        (torch.mean, x, x.double().mean()),
        (lambda x: x.mean(0), columns, columns.double().mean(0)),
        (lambda x: x.mean(-1), x[:10_000_000].view(4, -1), x[:10_000_000].view(4, -1).double().mean(-1)),
    ):
        with torch.no_grad():
            got = compiled(fn, {**STRICT, "threads": threads})(given)
        # As of pairwise sums: a few roundings, however many the terms.
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=0)


def chain(n):
    return lambda x, y: functional(x, lambda x, i: (x * 1.01 + y).sin() if i % 2 else torch.relu(x - y), n // 2)


def residual(n):
    return lambda x, y: functional(x, lambda x, i: x + torch.relu(x) * y, n // 3)


def norms(n):
    return lambda x, y: functional(x, lambda x, i: x + torch.nn.functional.layer_norm(x, (64,)) * y, n // 3)


def siblings(n):
    return lambda x, y: [torch.softmax(x * i + y, -1) for i in range(n // 3)]


def concatenations(n):
    return lambda x, y: functional(x, lambda x, i: torch.cat([x[:, 8:], y[:, :8] * i], 1), n // 4)


def products(n):
    return lambda x, y: functional(x, lambda x, i: torch.tanh(x @ x.t() @ y), n // 4)


def row_writes(n):
    def fn(x, y):
        x = x.clone()
        for i in range(n // 4):
            x[i % 8] = y[i % 8] * i
        return x

    return fn


def functional(x, step, times):
    for i in range(times):
        x = step(x, i)
    return x


def slice_sums(calls):
    """Parts that overlap, changed in place one after another."""

    def fn(x, y):
        x = x.clone()
        for i in range(calls // 4):
            x[:, i % 32 : i % 32 + 8] += y[:, :8] * i
        return x

    return fn


@pytest.mark.parametrize("graph", [chain, residual, norms, siblings, concatenations, products, row_writes, slice_sums], ids=lambda f: f.__name__)
def test_code_of_large_graphs_grows_with_their_calls(graph):
    """`python benchmarks/growth.py` measures the time."""
    inputs = [torch.randn(8, 64), torch.randn(8, 64)]
    sizes = []
    for calls in (300, 600):
        with torch.no_grad():
            (record,) = capture(graph(calls), inputs)
        sizes.append(len(_C.lower(record.torch_ir, "kernel", json.dumps({"verify": False}))))
    assert sizes[1] <= 2.3 * sizes[0], sizes


@pytest.mark.parametrize("graph", [norms, siblings, chain], ids=lambda f: f.__name__)
def test_kernels_of_large_graphs_stay_of_a_size(graph):
    """Fusion puts up to 1024 statements into one kernel, among them loads and stores that are none any more in what it returns."""
    inputs = [torch.randn(8, 64), torch.randn(8, 64)]
    fn = graph(1200)
    with torch.no_grad():
        (record,) = capture(fn, inputs)
        kernels = _C.lower(record.torch_ir, "loop", json.dumps({"verify": False})).split("\nloop ")[1:]
        assert max(kernel.count("\n") for kernel in kernels) <= 1024
        assert len(kernels) <= 400 / 20, "about thirty rows or more share a kernel"
        same(compiled(fn)(*inputs), fn(*inputs), exact=fn(*[x.double() for x in inputs]))


# Forward-mode differentiation, memory


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
def test_tangents_are_left_to_eager(before):
    """A program knows no tangents: a call whose inputs carry some says so and runs in eager mode, which does."""

    def fn(x):
        return x.sin() * 2

    x = torch.randn(3)
    for options in ({}, STRICT):
        torch._dynamo.reset()
        fast = compiled(fn, options)
        if before:
            fast(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones(3))
            if options:
                with pytest.raises(UnsupportedError, match="tangent"):
                    fast(dual)
                continue
            with pytest.warns(FallbackWarning, match="tangent"):
                result = fast(dual)
            assert torch.equal(forward_ad.unpack_dual(result).tangent, 2 * x.cos())
            same(fast(x), fn(x))


def test_running_out_of_memory_is_eagers_error():
    """No machine has the 400 TB of these tensors; afterwards the program runs as before."""
    x = torch.ones(10_000_000)
    for fn in (lambda x: x[:, None] * x[None] + 1, lambda x: (x[:, None] * x[None] + 1).sort()[0]):
        fast = compiled(fn, dynamic=True)
        with pytest.raises(RuntimeError, match="can't allocate memory.* 400000000000000 bytes"):
            fast(x)
        same(fast(x[:5]), fn(x[:5]))


# Registration, caches and autocast


def in_fresh_process(lines: str, **environment: str) -> str:
    """What a process prints that starts without deplo in it."""
    given = os.environ | {"PYTHONPATH": ":".join(path for path in sys.path if path)} | environment
    done = subprocess.run([sys.executable, "-c", lines], env=given, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_entry_point_is_found_in_a_fresh_process():
    lines = (
        "import sys, torch\n"
        "assert 'deplo._C' not in sys.modules and 'deplo.backend' not in sys.modules\n"
        "f = torch.compile(lambda x: torch.softmax(x, -1), backend='deplo', options={'strict': True, 'allow_library': []})\n"
        "assert 'deplo' in torch._dynamo.list_backends()\n"
        "x = torch.randn(4, 8)\n"
        "torch.testing.assert_close(f(x), torch.softmax(x, -1))\n"
        "print('deplo._C' in sys.modules)"
    )
    assert in_fresh_process(lines) == "True"


def test_inductor_and_deplo_share_a_cache_folder(tmp_path):
    lines = (
        "import glob, os, torch\n"
        "folder, x = os.environ['DEPLO_CACHE_DIR'], torch.randn(4, 8)\n"
        "fn = lambda x: torch.softmax(x * 2, -1) + 1\n"
        "for backend in ('deplo', 'inductor', 'deplo', 'inductor'):\n"
        "    torch._dynamo.reset()\n"
        "    torch.testing.assert_close(torch.compile(fn, backend=backend)(x), fn(x))\n"
        "theirs = lambda: sorted(p for p in glob.glob(folder + '/**', recursive=True) if not p.startswith(folder + '/') or not p.endswith('.o'))\n"
        "from deplo import cache\n"
        "before, mine = theirs(), len(cache.entries(folder))\n"
        "assert cache.clear(folder) == mine == 1 and theirs() == before\n"
        "print(len(before) > 3)"
    )
    assert in_fresh_process(lines, DEPLO_CACHE_DIR=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) == "True"


def test_autocast_switched_between_calls():
    """Outside, in bfloat16, in float16, and back: each call computes in the types that eager mode would use."""
    layer = nn.Linear(16, 8)
    fn = compiled(lambda x: (layer(x).relu(), x.softmax(-1)))
    x = torch.randn(4, 16)
    with torch.no_grad():
        for dtype in (None, torch.bfloat16, torch.float16, None, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                got, wanted = fn(x), (layer(x).relu(), x.softmax(-1))
            exact = torch.relu(layer.weight.double() @ x.double().t() + layer.bias.double()[:, None]).t()
            assert [y.dtype for y in got] == [y.dtype for y in wanted] == [dtype or torch.float32, torch.float32]
            eps = torch.finfo(wanted[0].dtype).eps
            assert (got[0] - exact).abs().max() <= (wanted[0] - exact).abs().max() + 2 * eps * exact.abs().max()
            same(got[1], wanted[1])
