"""The backend as PyTorch meets it: calls, mutation, aliases, threads, modes, training, dynamic sizes, fallback."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_ir_eager
from engines import Compiler, compiler, needs_core, same
from torch import nn

import deplo
from deplo import backend, executable
from deplo.backend import collect_records
from deplo.capture import unwrapped_errors
from deplo.errors import FallbackWarning, InternalError, UnsupportedError, UserError

__all__ = ["compiler"]


def test_grad_modes(compiler):
    fn = compiler(lambda x: torch.softmax(x * 2, -1))
    x = torch.randn(4, 8)
    expected = torch.softmax(x * 2, -1)
    same(fn(x), expected)
    with torch.no_grad():
        same(fn(x), expected)
    with torch.inference_mode():
        y = fn(x)
        same(y, expected)
        assert y.is_inference()
        same(fn(x.clone()), expected)


def test_outputs_survive_the_next_call(compiler):
    fn = compiler(lambda x: x + 1)
    with torch.no_grad():
        first = fn(torch.zeros(100))
        second = fn(torch.ones(100))
    assert first.data_ptr() != second.data_ptr()
    same(first, torch.ones(100))


def test_mutation_of_inputs_and_buffers(compiler):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(3))

        def forward(self, x):
            self.calls.add_(x.sum(0))
            x.mul_(2)
            return x + self.calls

    model, reference = Counter(), Counter()
    fn = compiler(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 3)
            y = x.clone()
            same(fn(x), reference(y))
            same(x, y)
            same(model.calls, reference.calls)


def test_mutation_of_a_view_of_an_input(compiler):
    def fn(x):
        x[:, 0].add_(1)
        return x.sum(1)

    x = torch.randn(4, 3)
    y = x.clone()
    with torch.no_grad():
        same(compiler(fn)(x), fn(y))
    same(x, y)


def add_to_first(x, y):
    x.add_(1)
    return x + y


def aliased(rows: int, first: int, second: int, size: int):
    """Two windows of one tensor, and the tensor."""
    base = torch.arange(float(size))
    return base[first : first + rows], base[second : second + rows], base


ALIASES = {
    "windows": lambda: aliased(6, 0, 2, 8),
    "windows that meet": lambda: aliased(6, 0, 6, 20),
    "rows": lambda: (base := torch.randn(5, 6), base[:4], base[1:])[::-1],
    "columns": lambda: (base := torch.randn(5, 6).t(), base[:4], base[1:5])[::-1],
    "blocks": lambda: (base := torch.randn(5, 6), base[:, :3], base[:, 2:5])[::-1],
    "permuted": lambda: (base := torch.randn(2, 3, 4).permute(2, 0, 1), base[:2], base[2:])[::-1],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ALIASES)
def test_inputs_that_alias(compiler, name, dynamic):
    compiled = compiler(add_to_first, dynamic=dynamic)
    for seed in range(2):
        torch.manual_seed(seed)
        x, y, base = ALIASES[name]()
        torch.manual_seed(seed)
        u, v, other = ALIASES[name]()
        with torch.no_grad():
            same(compiled(x, y), add_to_first(u, v))
        same(base, other)


@needs_core
def test_inputs_that_alias_at_other_places():
    """AOTAutograd writes the places of the first call into its graph, and nothing guards them."""
    compiled = torch.compile(add_to_first, backend=deplo.deplo, dynamic=False)
    with torch.no_grad():
        for places in ((0, 2, 9), (1, 3, 9), (0, 2, 9), (0, 2, 30)):
            (x, y, base), (u, v, other) = aliased(6, *places), aliased(6, *places)
            moved = places[0] > 0
            with pytest.warns(FallbackWarning, match="lies elsewhere") if moved else contextlib.nullcontext():
                same(compiled(x, y), add_to_first(u, v))
            same(base, other)
    moving = Compiler()(add_to_first, dynamic=True)
    with torch.no_grad():
        for rows, second, size in ((6, 2, 9), (7, 4, 30), (5, 6, 11)):  # the second place is a symbol
            (x, y, base), (u, v, other) = aliased(rows, 0, second, size), aliased(rows, 0, second, size)
            same(moving(x, y), add_to_first(u, v))
            same(base, other)
    strict = torch.compile(add_to_first, backend=deplo.deplo, dynamic=False, options={"strict": True})
    with torch.no_grad():
        strict(*aliased(6, 0, 2, 9)[:2])
        with pytest.raises(UnsupportedError, match="lies elsewhere"):
            strict(*aliased(6, 1, 3, 9)[:2])


def add_by_strides(x):
    x.as_strided((2, 2), (1, 2), 1).add_(1)
    return x.as_strided((3, 2), (2, 1), 1) * 2


@pytest.mark.parametrize("start", [0, 1])
def test_as_strided_of_inputs(compiler, start):
    """The view counts from the start of the storage: an input that starts elsewhere runs in ATen."""
    compiled = compiler(add_by_strides)
    with torch.no_grad():
        for _ in range(2):
            x, y = torch.arange(20.0)[start : start + 8], torch.arange(20.0)[start : start + 8]
            same(compiled(x), add_by_strides(y))
            same(x, y)
    compiled = torch.compile(lambda x: x.as_strided((2, 2), (1, 2), 1) * 2, backend=deplo.deplo, dynamic=False)
    base = torch.arange(20.0)
    with torch.no_grad():
        same(compiled(base[start:8]), base.as_strided((2, 2), (1, 2), 1) * 2)
        with pytest.warns(FallbackWarning, match="starts at 3 of its storage"):
            same(compiled(base[3 : 11 - start]), base.as_strided((2, 2), (1, 2), 1) * 2)


VIEWS = {
    "permuted": (lambda x: x.as_strided((3, 4), (4, 1)) * 2, lambda n: torch.randn(3, 4).t()),
    "flat": (lambda x: x.as_strided((x.numel(),), (1,)) * 2, lambda n: torch.randn(3, n).t()),
    "windows": (lambda x: x.as_strided((x.shape[0] - 2, 3), (1, 1)) * 2, lambda n: torch.randn(n)),
    "of a view of a sum": (lambda x: (x + 1)[2:].as_strided((2, 2), (1, 3)) * 2, lambda n: torch.randn(n, 3)),
    "copied": (lambda x: torch.as_strided_copy(x, (2, x.shape[0] - 1), (1, 1), 0), lambda n: torch.randn(n)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_by_strides(compiler, name, dynamic):
    fn, make = VIEWS[name]
    compiled = compiler(fn, dynamic=dynamic)
    with torch.no_grad():
        for n in (5, 9, 17):
            x = make(n)
            same(compiled(x), fn(x))


def test_as_strided_of_memory_that_an_input_does_not_show():
    x = torch.randn(4, 6)[:, :3]
    with torch.no_grad(), pytest.warns(FallbackWarning, match="gaps between its elements"):
        same(torch.compile(lambda x: x.as_strided((4, 6), (6, 1)) * 2 + 1, backend=deplo.deplo)(x), x.as_strided((4, 6), (6, 1)) * 2 + 1)
    x = torch.randn(20)[:8]
    with torch.no_grad(), pytest.warns(FallbackWarning, match="its source does not show"):
        same(torch.compile(lambda x: x.as_strided((12,), (1,)) * 2 + 1, backend=deplo.deplo)(x), x.as_strided((12,), (1,)) * 2 + 1)


def test_as_strided_of_memory_that_a_part_made():
    """Beside a call that splits the graph: what a part returns has a storage of its own, which a view by strides must not see."""

    def fn(x):
        y = x + 1
        z = torch.view_as_real(torch.fft.fft(x.flatten()))
        return y[1:].as_strided((2, 2), (1, 3), 0) * z[0, 0]

    x = torch.randn(4, 3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        same(torch.compile(fn, backend=deplo.deplo)(x), fn(x))


def test_outputs_alias_as_in_eager(compiler):
    def fn(x):
        y = x + 1
        return y, y.view(-1), y[1:].t(), x.t(), y

    x = torch.randn(4, 8)
    with torch.no_grad():
        y, flat, tail, turned, again = compiler(fn)(x)
        same((y, flat, tail, turned, again), fn(x))
    assert flat.data_ptr() == y.data_ptr() and tail.data_ptr() == y[1:].data_ptr()
    assert turned.data_ptr() == x.data_ptr()


def test_outputs_alias_with_symbolic_sizes(compiler):
    def fn(x):
        y = x + 1
        return y, y[1:].t(), y[:, 2:], x.shape[0] * 2

    fn_compiled = compiler(fn, dynamic=True)
    with torch.no_grad():
        for n in (4, 7, 12):
            x = torch.randn(n, n + 3)
            results = fn_compiled(x)
            same(results, fn(x))
            assert results[1].data_ptr() == results[0][1:].data_ptr()
    assert compiler.graphs == 1


def test_unused_none_and_constant_outputs(compiler):
    def fn(x, unused):
        return x * 2, None, 7, {"a": x, "b": [x - 1]}

    x = torch.randn(3)
    with torch.no_grad():
        same(compiler(fn)(x, torch.ones(2)), fn(x, None))


def test_strides_of_outputs_are_those_of_eager(compiler):
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for fn in (lambda x: x + 1, lambda x: x.permute(0, 2, 1, 3) * 2, lambda x: x.sum(1), lambda x: torch.empty_like(x).fill_(3)):
        with torch.no_grad():
            same(compiler(fn)(x), fn(x))


def test_one_graph_for_all_lengths(compiler):
    weight = torch.randn(16, 16)

    def fn(x):
        return torch.softmax(x @ weight, -1).sum(1)

    compiled = compiler(fn)
    with torch.no_grad():
        for length in range(2, 22):
            x = torch.randn(1, length, 16)
            same(compiled(x), fn(x), exact=torch.softmax(x.double() @ weight.double(), -1).sum(1))
    assert compiler.graphs <= 2


def test_training_step(compiler):
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    exact = copy.deepcopy(reference).double()
    fn = compiler(model)
    inputs = torch.randn(5, 8), torch.randn(5, 4)
    for net, call in ((model, fn), (reference, reference), (exact, exact)):
        x, target = (value.to(next(net.parameters()).dtype) for value in inputs)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(call(x), target).backward()
            optimizer.step()
    for parts in zip(model.parameters(), reference.parameters(), exact.parameters(), strict=True):
        same(*parts[:2], exact=parts[2])
        same(*(part.grad for part in parts[:2]), exact=parts[2].grad)


def test_backward_twice_and_non_contiguous_tangents(compiler):
    def fn(x):
        return (x.t() * 2).exp()

    x = torch.randn(3, 4, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    compiled = compiler(fn)
    for tangent in (torch.randn(4, 3), torch.randn(3, 4).t(), torch.ones(()).expand(4, 3)):
        grads = [torch.autograd.grad(f(v), v, tangent)[0] for f, v in ((compiled, x), (fn, y))]
        same(*grads, strides=False)


def test_two_threads_call_one_function(compiler):
    fn = compiler(lambda x: torch.softmax(x, -1) * x.shape[0], dynamic=True)
    with torch.no_grad():
        fn(torch.randn(4, 8))
    errors = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad():
                for step in range(50):
                    x = torch.randn(2 + (step + seed) % 7, 8, generator=generator)
                    same(fn(x), torch.softmax(x, -1) * x.shape[0])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_weight_changed_in_place(compiler):
    model = nn.Linear(16, 8)
    fn = compiler(model)
    x = torch.randn(4, 16)

    def judge():
        return copy.deepcopy(model).double()(x.double())

    with torch.no_grad():
        same(fn(x), model(x), exact=judge())
        model.weight.mul_(2)
        same(fn(x), model(x), exact=judge())
        model.weight = nn.Parameter(torch.randn(8, 16))
        same(fn(x), model(x), exact=judge())


@pytest.mark.parametrize("fullgraph", [True, False])
def test_jit_forms(compiler, fullgraph):
    @deplo.jit
    def plain(x):
        return x + 1

    @deplo.jit(options={"strict": True}, mode="max-autotune", fullgraph=fullgraph)
    def with_arguments(x):
        return x + 2

    module = deplo.jit(nn.ReLU())
    x = torch.randn(5)
    with torch.no_grad():
        same((plain(x), with_arguments(x), module(x)), (x + 1, x + 2, x.relu()))
    with pytest.raises(UserError, match="did you mean 'strict'"):
        deplo.jit(options={"strikt": True})


def test_options_through_torch_compile(compiler):
    fn = torch.compile(lambda x: x + 1, backend=deplo.deplo, options={"threads": 1})
    same(fn(torch.zeros(3)), torch.ones(3))
    bad = torch.compile(lambda x: x + 3, backend=deplo.deplo, options={"thread": 1})
    with pytest.raises(Exception, match="unknown option 'thread'; did you mean 'threads'"):
        bad(torch.zeros(3))


def plain(x):
    return x.values() if x.is_nested else x.coalesce().to_dense() if x.layout is torch.sparse_coo else x


REFUSED = [
    pytest.param(lambda x: x * 2, lambda: torch.randn(3, dtype=torch.complex64), "complex64", id="complex"),
    pytest.param(lambda x: torch.view_as_complex(x).abs(), lambda: torch.randn(3, 2), "complex64", id="complex inside"),
    pytest.param(lambda x: x * 2, lambda: torch.eye(3).to_sparse(), "sparse", id="sparse"),
    pytest.param(lambda x: x[x > 0] * 2, lambda: torch.arange(-3.0, 3.0), "depends on the values", id="nonzero"),
    pytest.param(lambda x: x.int_repr() * 2, lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quint8", id="quantised"),
    pytest.param(lambda x: x * 2, lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "", id="nested"),
    pytest.param(lambda x: x * 2, lambda: torch.ones(3, device="meta"), "meta", id="meta device"),
    pytest.param(lambda x: x.to(torch.float32) * 2, lambda: torch.ones(3).to(torch.float8_e5m2), "float8", id="float8"),
]


@pytest.mark.parametrize(("fn", "make", "reason"), REFUSED)
def test_what_is_refused_runs_in_eager_with_one_warning(monkeypatch, fn, make, reason):
    monkeypatch.setattr(backend, "core", lambda: torch_ir_eager.Core)
    torch._dynamo.reset()
    x = make()
    with torch.no_grad():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled = torch.compile(fn, backend=deplo.deplo)
            results = [compiled(x), compiled(x)]
        relevant = [w for w in caught if issubclass(w.category, FallbackWarning)]
        for result in results:
            if not result.is_meta:
                torch.testing.assert_close(plain(result), plain(fn(x)))
        assert len(relevant) <= 1
        if relevant:
            assert reason in str(relevant[0].message)


@pytest.mark.parametrize(("fn", "make", "reason"), REFUSED[:2])
def test_strict_raises(fn, make, reason):
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=reason):
        torch.compile(fn, backend=deplo.deplo, options={"strict": True})(make())


class _Broken:
    """A core whose programs fail, at compile time or when run."""

    def __init__(self, at):
        self.at = at

    def compile(self, text, options):
        if self.at == "compile":
            raise InternalError("[loop] fuse_loops: broken for the test")
        if self.at == "crash":
            raise IndexError("vector::_M_range_check")
        return self

    def missing(self):
        return ""

    def images(self):
        return {}

    def run(self, arguments, holders=0):
        raise InternalError("[runtime] broken for the test")


@pytest.mark.parametrize("at", ["compile", "crash", "run"])
def test_internal_errors_fall_back_once_or_raise(monkeypatch, at):
    monkeypatch.setattr(backend, "core", lambda: _Broken(at))
    torch._dynamo.reset()
    x = torch.randn(4)
    with torch.no_grad():
        with pytest.warns(FallbackWarning, match="deplo has a bug there") as caught:
            fn = torch.compile(lambda x: x + 1, backend=deplo.deplo)
            same(fn(x), x + 1)
            same(fn(x), x + 1)
        assert len([w for w in caught if w.category is FallbackWarning]) == 1
        torch._dynamo.reset()
        with pytest.raises(Exception, match="broken for the test|_M_range_check"):
            torch.compile(lambda x: x + 1, backend=deplo.deplo, options={"strict": True})(x)


def test_a_failed_run_with_mutations_is_not_repeated(monkeypatch):
    monkeypatch.setattr(backend, "core", lambda: _Broken("run"))
    torch._dynamo.reset()

    def fn(x):
        x.add_(1)
        return x * 2

    x = torch.zeros(4)
    with torch.no_grad(), pytest.warns(FallbackWarning):
        compiled = torch.compile(fn, backend=deplo.deplo)
        with pytest.raises(InternalError):
            compiled(x)
        same(x, torch.zeros(4))
        same(compiled(x), torch.full((4,), 2.0))


def test_replay_file_is_named_and_parses(monkeypatch):
    monkeypatch.setattr(backend, "core", lambda: _Broken("compile"))
    with pytest.raises(InternalError, match=r"replay with: python -m deplo compile (\S+\.ir)") as caught:
        backend.compile_text(_imported("torch @f(%x: f32[2] user)\n  return %x\n"), deplo.read_options())
    path = str(caught.value).split("compile ")[1].split()[0]
    assert Path(path).read_text().startswith("torch @f")


def _imported(text):
    from deplo.imported import Imported

    return Imported(text, 1, [], [], [], {}, {}, False)


def test_boxed_calls_clear_their_list():
    class Identity:
        def run(self, arguments, holders=0):
            return list(arguments)

    imported = _imported("")
    imported.arguments = [0]
    call = executable.Executable(Identity(), imported, lambda arguments: [], "inference").boxed()
    arguments = [torch.ones(2)]
    call(arguments)
    assert arguments == [] and call._boxed_call


def _out_of_range():
    x, i, j, ones = torch.randn(4, 5), torch.tensor([[7, 1], [0, 2]]), torch.tensor([9]), torch.ones(2, 2)
    yield "gather", lambda: torch.gather(x, 1, i)
    yield "gather, negative", lambda: torch.gather(x, 1, i - 8)
    yield "scatter", lambda: x.scatter(1, i, ones)
    yield "scatter_value", lambda: x.scatter(1, i, 2.0)
    yield "scatter_add", lambda: x.scatter_add(0, i, ones)
    yield "scatter_reduce", lambda: x.scatter_reduce(1, i, ones, "amax")
    yield "index_select", lambda: x.index_select(1, j)
    yield "index_add", lambda: x.index_add(1, j, torch.ones(4, 1))
    yield "index_copy", lambda: x.index_copy(1, j, torch.ones(4, 1))
    yield "index_fill", lambda: x.index_fill(1, j, 2.0)
    yield "index", lambda: x[:, j]
    yield "index_put", lambda: x.index_put((j,), torch.ones(5))
    yield "take", lambda: x.take(j + 30)
    yield "embedding", lambda: F.embedding(j, x)
    yield "cross_entropy", lambda: F.cross_entropy(x, torch.tensor([1, 9, 2, 3]))
    yield "embedding_bag", lambda: F.embedding_bag(j[None], x)
    yield "max_unpool", lambda: F.max_unpool1d(x[None, :2, :2], i[None], 2)


@needs_core
@pytest.mark.parametrize("name", [name for name, _ in _out_of_range()])
def test_an_index_out_of_range_is_eagers_error(name):
    fn = dict(_out_of_range())[name]
    with pytest.raises((IndexError, RuntimeError)) as eagers:
        fn()
    with pytest.raises((IndexError, RuntimeError)) as caught, warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        torch.compile(fn, backend=deplo.deplo, options={"strict": name < "h"})()
    assert caught.type is eagers.type
    if name == "max_unpool":  # a scatter in each image
        assert str(caught.value) == "index 7 is out of bounds for dimension 2 with size 4"
    else:
        assert str(caught.value) == str(eagers.value)


@needs_core
def test_an_index_out_of_range_writes_nothing_and_draws_nothing_in_eager_mode():
    def fn(x, i):
        x.add_(1)
        return torch.rand(3)[i], x

    x = torch.zeros(3)
    compiled = torch.compile(fn, backend=deplo.deplo)
    torch.manual_seed(0)
    with pytest.raises(IndexError, match="index 5 is out of bounds for dimension 0 with size 3"):
        compiled(x, torch.tensor([5]))
    after = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(3)
    assert not x.any() and torch.equal(after, torch.rand(1))


@needs_core
@pytest.mark.parametrize("dynamic", [False, True])
def test_rolls_and_unpooling_keep_the_order_in_memory(dynamic):
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    y, places = F.max_pool2d(x, 2, return_indices=True)
    for fn, args in (
        (lambda x: torch.roll(x, 1, 2), (x,)),
        (lambda x: torch.roll(x, (13, -2), (2, -3)), (x,)),
        (lambda x: torch.roll(x, (0, 1), (1, 1)), (x.contiguous(),)),
        (lambda x: torch.roll(x, 5), (x,)),
        (lambda x: torch.roll(x, 1, 0), (torch.zeros(0, 3),)),
        (lambda x: torch.roll(x, 1, 1), (x[0, 0].t(),)),
        (lambda y, places: F.max_unpool2d(y, places, 2), (y, places)),
        (lambda y, places: F.max_unpool2d(y, places, 2), (y[0].contiguous(), places[0].contiguous())),
        (lambda y, places: F.max_unpool3d(y, places, 2), F.max_pool3d(torch.randn(2, 3, 4, 4, 6), 2, return_indices=True)),
    ):
        torch._dynamo.reset()
        got, expected = torch.compile(fn, backend=deplo.deplo, dynamic=dynamic, options={"strict": True, "allow_library": []})(*args), fn(*args)
        assert torch.equal(got, expected) and got.stride() == expected.stride()


@needs_core
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "fn, call",
    [
        (lambda a: torch.linalg.inv(torch.linalg.inv(a) + 1) * 2, "aten.linalg_inv_ex.default"),
        (lambda a: torch.linalg.cholesky(a) - 1, "aten.linalg_cholesky_ex.default"),
        (lambda a: torch.linalg.solve(a, a[..., 0]) * 2, "aten._linalg_solve_ex.default"),
    ],
    ids=["inv", "cholesky", "solve"],
)
def test_checks_of_factorisations_belong_to_the_program(fn, call, dynamic):
    torch.manual_seed(0)
    m = torch.randn(5, 4, 4)
    a = (m @ m.mT + torch.eye(4)).requires_grad_()
    allowed = [call, "aten._linalg_check_errors.default"]
    with torch.no_grad(), collect_records() as records:
        compiled = torch.compile(fn, backend="deplo", dynamic=dynamic, options={"strict": True, "allow_library": allowed})
        assert torch.equal(compiled(a.detach()), fn(a))
        with pytest.raises(torch.linalg.LinAlgError) as error:
            compiled(torch.zeros(5, 4, 4))
        with pytest.raises(torch.linalg.LinAlgError) as expected:
            fn(torch.zeros(5, 4, 4))
        assert str(error.value) == str(expected.value)
    assert len(records) == 1
    trained = torch.compile(fn, backend="deplo", dynamic=dynamic, options={"strict": True})
    torch.testing.assert_close(torch.autograd.grad(trained(a).sum(), a), torch.autograd.grad(fn(a).sum(), a))


@needs_core
def test_strict_may_name_the_library_calls_it_allows():
    def fn(x):
        return torch.sort(x * 2)[0]

    x = torch.randn(8)
    with torch.no_grad():
        for allowed in (["aten.sort"], ["aten.sort.default"]):
            torch._dynamo.reset()
            same(torch.compile(fn, backend=deplo.deplo, options={"strict": True, "allow_library": allowed})(x), fn(x))
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"aten.sort.default stays in ATen"):
            torch.compile(fn, backend=deplo.deplo, options={"strict": True, "allow_library": []})(x)
        for unknown, remedy in (
            ("aten.sorrt", "did you mean aten.sort"),
            ("aten.sort.stabel", "did you mean aten.sort.stable"),
            ("?", "such as aten.sort"),
        ):
            torch._dynamo.reset()
            with pytest.raises(UserError, match=re.escape(repr(unknown)) + f".*{remedy}"), unwrapped_errors():
                torch.compile(fn, backend=deplo.deplo, options={"strict": True, "allow_library": [unknown]})(x)


def test_unsupported_error_is_an_error_of_deplo():
    assert issubclass(UnsupportedError, deplo.Error)
