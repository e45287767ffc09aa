"""What a graph writes to its inputs: as in eager mode, in place, and without a copy of what stays as it is."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from engines import same

import deplo
from deplo.backend import collect_records
from deplo.errors import FallbackWarning

pytest.importorskip("deplo._C")

pytestmark = pytest.mark.usefixtures("fresh_inference")

HEADS, LENGTH, WIDTH = 4, 256, 32
ROW = HEADS * WIDTH * 4  # bytes of one token


def cache() -> torch.Tensor:
    return torch.randn(1, HEADS, LENGTH, WIDTH)


def token(n: int = 1) -> torch.Tensor:
    return torch.randn(1, HEADS, n, WIDTH)


def at(*places: int) -> torch.Tensor:
    return torch.tensor(places or (7,))


def returning_nothing(update):
    def fn(*inputs):
        update(*inputs)

    return fn


def assign(c, x):
    c[:, :, 7:8] = x


def assign_two(c, x):
    c[:, :, 7:8] = x
    c[:, :, 9:10] = x * 2


def assign_over(c, x):
    c[:, :, 6:9] = 3
    c[:, :, 7:8] = x


def assign_at(c, x, i):
    c[:, :, i : i + 1] = x


def index_assign(c, p, x):
    c[:, :, p] = x


def index_copies(c, p, x):
    for i in range(3):
        c.index_copy_(2, p + i, x * i)


def mixed(c, p, x):
    c.index_copy_(2, p, x)
    c[:, :, 20:21] = x + 1
    c.index_add_(2, p, x)
    c[:, :, :2].zero_()


def read_modify_write(c, p, x):
    c.index_copy_(2, p, c.index_select(2, p) * 0.5 + x)


def write_back(c, p, x):
    c.copy_(torch.index_copy(c, 2, p, x))


def two_caches(k, v, p, x):
    k.index_copy_(2, p, x)
    v.index_copy_(2, p, x * 2)


def layers() -> torch.Tensor:
    return torch.randn(2, 1, HEADS, LENGTH, WIDTH)


def paged(c, p, x):
    c.view(-1, WIDTH)[p] = x.view(-1, WIDTH)


def slot(c, p, x):
    c.squeeze(0)[:, p] = x.squeeze(0)


def layer(c, p, x):
    c[1][:, :, p] = x


def layer_slice(c, x):
    c[1][:, :, 7:8] = x


def layers_in_a_row(c, p, x):
    for n in range(2):
        c[n].index_copy_(2, p, x + n)
        c[n, :, :, 3:4].mul_(2)


# Name -> the update, its inputs, and how many tokens' bytes it may read and write in all.
UPDATES = {
    "index_copy_": (lambda c, p, x: c.index_copy_(2, p, x), lambda: [cache(), at(), token()], 3),
    "index_copy_ of several": (lambda c, p, x: c.index_copy_(2, p, x), lambda: [cache(), at(3, 9, 5), token(3)], 7),
    "index_put_": (index_assign, lambda: [cache(), at(), token()], 3),
    "scatter_": (lambda c, p, x: c.scatter_(2, p.view(1, 1, 1, 1).expand_as(x), x), lambda: [cache(), at(), token()], 3),
    "index_add_": (lambda c, p, x: c.index_add_(2, p, x), lambda: [cache(), at(), token()], 4),
    "slice": (assign, lambda: [cache(), token()], 3),
    "select": (lambda c, x: c.select(2, 7).copy_(x[:, :, 0]), lambda: [cache(), token()], 3),
    "narrow": (lambda c, x: c.narrow(2, 3, 1).copy_(x), lambda: [cache(), token()], 3),
    "slice_scatter": (lambda c, x: c.copy_(torch.slice_scatter(c, x, 2, 7, 8)), lambda: [cache(), token()], 3),
    "add_ to a slice": (lambda c, x: c[:, :, 3:4].add_(x), lambda: [cache(), token()], 6),
    "two slices": (assign_two, lambda: [cache(), token()], 5),
    "a slice over another": (assign_over, lambda: [cache(), token()], 6),
    "index_copy_ in a row": (index_copies, lambda: [cache(), at(), token()], 7),
    "kinds in a row": (mixed, lambda: [cache(), at(), token()], 12),
    "read, modify, write": (read_modify_write, lambda: [cache(), at(), token()], 6),
    "written back": (write_back, lambda: [cache(), at(), token()], 3),
    "two caches": (two_caches, lambda: [cache(), cache(), at(), token()], 6),
    "of a batch": (lambda c, p, x: c[0].index_copy_(1, p, x[0]), lambda: [cache(), at(), token()], 3),
    "of another shape": (lambda c, p, x: c.view(HEADS, LENGTH, WIDTH).index_copy_(1, p, x[0]), lambda: [cache(), at(), token()], 3),
    "of another shape, added": (lambda c, p, x: c.view(HEADS, LENGTH, WIDTH).index_add_(1, p, x[0]), lambda: [cache(), at(), token()], 4),
    "of a transpose": (lambda c, p, x: c.transpose(1, 2).index_copy_(1, p, x.transpose(1, 2)), lambda: [cache(), at(), token()], 3),
    "of a part": (lambda c, p, x: c[:, :, 2:80].index_copy_(2, p, x), lambda: [cache(), at(), token()], 3),
    "of heads": (lambda c, p, x: c.chunk(2, 1)[1].index_copy_(2, p, x[:, :2]), lambda: [cache(), at(), token()], 3),
    "of an unsqueezed one": (lambda c, p, x: c.unsqueeze(0).index_copy_(3, p, x.unsqueeze(0)), lambda: [cache(), at(), token()], 3),
    "of a squeezed one": (slot, lambda: [cache(), at(), token()], 3),
    "of pages": (paged, lambda: [cache(), at(7, 300, 5, 900), token()], 3),
    "of a layer": (layer, lambda: [layers(), at(), token()], 3),
    "of a layer's slice": (layer_slice, lambda: [layers(), token()], 3),
    "of layers in a row": (layers_in_a_row, lambda: [layers(), at(), token()], 20),
    "one head's token": (lambda c: c[0, 1, 5].mul_(2), lambda: [cache()], 3),
    "every fourth token": (lambda c: c[:, :, 4:12:4].zero_(), lambda: [cache()], 6),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_moves_no_more_than_it_changes(name):
    update, make, tokens = UPDATES[name]
    fn = returning_nothing(update)
    torch.manual_seed(0)
    inputs = make()
    others = [x.clone() for x in inputs]
    pointers = [x.data_ptr() for x in inputs]
    with collect_records() as records:
        compiled = torch.compile(fn, backend="deplo", options={"strict": True})
        for _ in range(2):
            compiled(*inputs)
            fn(*others)
            same(inputs, others)
    assert [x.data_ptr() for x in inputs] == pointers
    (record,) = records
    about = json.loads(record.program.describe())
    moved = sum(kernel["bytes"] for kernel in about["kernels"])
    assert moved <= tokens * ROW + 256, [(k["name"], k["bytes"]) for k in about["kernels"]]
    assert about["memory"].get("arena_bytes", 0) <= 4 * ROW and not about["library"]


def test_a_position_that_is_a_number_serves_all_steps():
    inputs = [cache(), token()]
    others = [x.clone() for x in inputs]
    with collect_records() as records:
        compiled = torch.compile(returning_nothing(assign_at), backend="deplo", options={"strict": True}, dynamic=True)
        for i in (5, 6, 100, 255):
            compiled(*inputs, i)
            assign_at(*others, i)
            same(inputs, others)
    (record,) = records
    assert sum(kernel["bytes"] for kernel in json.loads(record.program.describe())["kernels"]) <= 3 * ROW


def attend(q, k, v, keys, values, p):
    keys.index_copy_(2, p, k)
    values.index_copy_(2, p, v)
    return F.scaled_dot_product_attention(q, keys, values)


def test_attention_reads_the_cache_it_wrote():
    keys, values = cache(), cache()
    other_keys, other_values = keys.clone(), values.clone()
    with collect_records() as records:
        compiled = torch.compile(attend, backend="deplo", options={"strict": True})
        for step in range(4):
            q, k, v = token(), token(), token()
            same(compiled(q, k, v, keys, values, at(step)), attend(q, k, v, other_keys, other_values, at(step)), scale=64)
            same((keys, values), (other_keys, other_values))
    (record,) = records
    about = json.loads(record.program.describe())
    size = keys.numel() * 4
    assert about["memory"]["arena_bytes"] < size // 8
    assert sum(kernel["bytes"] for kernel in about["kernels"]) <= 2.2 * size


def old_and_new(c, x):
    old = c.sum()
    c[:, :, 7:8] = x
    return c.sum() - old, c[:, :, 7:8] * 2


def keep_old(c, x):
    old = c.clone()
    c[:, :, 7:8] = x
    return old, c


def swap(a, b):
    t = a.clone()
    a.copy_(b)
    b.copy_(t)
    return a - b


def roll(c, x):
    c.copy_(torch.roll(c, -1, 2))
    c[:, :, -1:] = x
    return c[:, :, -2]


def overlap(c, x):
    c[:, :, 1:].copy_(c[:, :, :-1].clone())
    c[:, :, :1] = x


def flip_in_place(c):
    c.copy_(c.flip(0).t())
    return c + 1


def views(c):
    v = c.view(-1)
    v.add_(1)
    c.t()[0].mul_(3)
    c.diagonal().fill_(2)
    return v, c[1], c


def rows(c):
    c[3].zero_()
    c[1:3].add_(c[0])
    c.masked_fill_(c > 1, 5)
    return c.sum(0)


class Buffers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total.lerp_(x.sum(0), 0.25)
        x.mul_(2)
        return self.total * self.calls


KEEPING = {
    "old and new": (old_and_new, lambda: [cache().mul(8).round(), token().mul(8).round()]),  # whole numbers: sums are exact
    "the old value is returned": (keep_old, lambda: [cache(), token()]),
    "swap": (swap, lambda: [torch.randn(6, 6), torch.randn(6, 6)]),
    "roll": (roll, lambda: [cache(), token()]),
    "shift by one": (overlap, lambda: [cache(), token()]),
    "transposed onto itself": (flip_in_place, lambda: [torch.randn(6, 6)]),
    "views of an input": (views, lambda: [torch.randn(6, 6)]),
    "rows": (rows, lambda: [torch.randn(6, 6)]),
    "an input that is a view": (lambda x: x[:, 1:].mul_(2).sum(), lambda: [torch.randn(12, 12)[::2, 3:9]]),
    "out=": (lambda x: torch.add(x, 1, out=x) * 2, lambda: [torch.randn(6, 6)]),
    ".data": (lambda a, b: (a.data.copy_(b), a + 1), lambda: [torch.randn(6, 6), torch.randn(6, 6)]),
    "returned itself": (lambda x: (x.mul_(2), x), lambda: [torch.randn(6, 6)]),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", KEEPING)
def test_values_are_those_of_eager(name, dynamic):
    fn, make = KEEPING[name]
    torch.manual_seed(0)
    inputs = make()
    others = [x.clone() for x in inputs]
    compiled = torch.compile(fn, backend="deplo", options={"strict": True}, dynamic=dynamic)
    for _ in range(2):
        same(compiled(*inputs), fn(*others), scale=64, strides=False)
        same(inputs, others, strides=False)


def test_buffers_of_a_module():
    model, reference = Buffers(), Buffers()
    compiled = torch.compile(model, backend="deplo", options={"strict": True})
    for _ in range(3):
        x = torch.randn(4, 6)
        y = x.clone()
        same(compiled(x), reference(y))
        same((x, dict(model.named_buffers())), (y, dict(reference.named_buffers())))


def test_the_same_tensor_twice():
    def fn(a, b):
        a.add_(1)
        return a * b

    x = torch.randn(5)
    y = x.clone()
    compiled = torch.compile(fn, backend="deplo")
    same(compiled(x, x), fn(y, y))
    same(x, y)


def test_an_update_whose_base_another_rank_reads():
    def fn(x):
        y = x.tanh()
        column = y.reshape(y.shape[0], -1)
        y[::2].mul_(-1)
        return column @ column.T, y

    x = torch.arange(4.0)
    compiled = torch.compile(fn, backend="deplo", options={"strict": True})
    same(compiled(x), fn(x), exact=fn(x.double()))


def both(make):
    """What `make` gives of twice the input, which is an output too."""

    def fn(x):
        y = x * 2
        return y, make(y)

    return fn


ALIASES = {
    "an input": lambda x: (x, x * 2),
    "an input flattened": lambda x: (x.view(-1), x.sum() * 2),
    "a slice": lambda x: (x[1:3], x * 2),
    "a transpose and a row": lambda x: (x.t(), x[0], x + 1),
    "a view of a view": lambda x: (x[1:].t()[2], x * 2),
    "halves": lambda x: (*x.chunk(2), x.sum()),
    "rows": lambda x: (*x.unbind(0), x * 2),
    "a diagonal": lambda x: (x.diagonal(), x * 2),
    "by strides": lambda x: (x.as_strided((3,), (7,), 1), x * 2),
    "expanded": lambda x: (x[0].expand(4, 6), x * 2),
    "no copies": lambda x: (x.contiguous(), x.to(torch.float32), x * 2),
    "copies": lambda x: (x.clone(), x.t().reshape(-1), x.t().contiguous()),
    "views of what is written": lambda x: (x.detach().mul_(2).sum(), x[1], x.view(-1)),
    "an output twice": both(lambda y: y),
    "a transposed output": both(lambda y: y.t()),
    "a row of an output": both(lambda y: y[3]),
    "the whole of an output": both(lambda y: y[:]),
    "an alias": both(lambda y: torch.ops.aten.alias(y)),
    "detached": both(lambda y: y.detach()),
    "a row detached": both(lambda y: y[1].detach()),
    "a row of what is detached": both(lambda y: y.detach()[1]),
    "parts of a value": lambda x: (lambda y: (y[0], y[1:].t()))(x * 2),
}


def relations(tensors) -> list:
    """Who shares memory with whom and from where on, and what autograd takes for a view of what."""
    pointers = [t.untyped_storage().data_ptr() for t in tensors]
    bases = [None if t._base is None else [t._base is other for other in tensors] for t in tensors]
    gradients = [t.requires_grad for t in tensors]
    return [gradients, [[a == b for a in pointers] for b in pointers], [(t._is_view(), t.storage_offset(), t.stride()) for t in tensors], bases]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", ALIASES)
def test_outputs_share_memory_as_in_eager(name, dynamic, grad):
    fn = ALIASES[name]
    x = torch.randperm(36).view(6, 6) - 17.0  # whole numbers, whose sums are exact
    y = x.clone()
    with torch.set_grad_enabled(grad), collect_records() as records:
        ours = [x, *torch.compile(fn, backend="deplo", options={"strict": True}, dynamic=dynamic)(x.requires_grad_(grad))]
        theirs = [y, *fn(y.requires_grad_(grad))]
    assert records and all(record.program is not None for record in records)
    assert relations(ours) == relations(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if 0 in other.stride():
            continue  # one element may not be written twice
        mine.mul_(3)
        other.mul_(3)
        same(ours, theirs)


def test_what_is_detached_may_be_written_where_eager_allows_it():
    """A view made under no_grad forbids later writes to its base with gradients on; a detached tensor is none."""

    def fn(x):
        y = x * 2
        return y, y.detach()

    for call in (fn, torch.compile(fn, backend="deplo", options={"strict": True})):
        y, detached = call(torch.ones(4))
        with torch.enable_grad():
            y.mul_(torch.ones(4, requires_grad=True))
            same(detached.mul_(3), torch.full((4,), 6.0))
        assert y.requires_grad and not detached.requires_grad and not detached._is_view() and detached._base is None


def _whole(x):
    v = x.narrow(0, 0, x.shape[0] - 0)
    v.add_(2)
    return [v]


def _part(x):
    v = x.narrow(0, 1, x.shape[0] - 2)
    v.mul_(2)
    return v, x.view(x.shape), v.clone()


def _all_then_part(x):
    x.add_(1)
    return x, x[1:], x[x.shape[0] // 2 :], x.clone()


def _end(x):
    x[1:].mul_(3)
    return x[x.shape[0] - 2 :], x * 2


def _copied(x):
    y = x[1 : x.shape[0] - 1]
    y.copy_(y * 2)
    return y.unsqueeze(0), y


def _twice(x):
    x.mul_(2)
    y = x[1 : x.shape[0] - 1]
    y.add_(1)
    return y[1:], x


def _copied_from(x):
    y = x * 2
    x.copy_(y)
    return y[1:], x[1:]


def _rows(x):
    first, second = x.chunk(2, 0)
    second.exp_()
    return second.t() if second.dim() == 2 else second, first


INPUTS = {
    "whole": lambda: (b := torch.arange(99.0).view(9, 11) / 50, b),
    "offset": lambda: (b := torch.arange(40.0) / 9, b[3:14]),
    "strided": lambda: (b := torch.arange(40.0) / 9, b[1::2][:11]),
    "block": lambda: (b := torch.arange(400.0).view(20, 20) / 99, b[2:9, 3:12]),
    "transposed": lambda: (b := torch.arange(400.0).view(20, 20) / 99, b[2:9, 3:12].t()),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("fn", [_whole, _part, _all_then_part, _end, _copied, _twice, _copied_from, _rows], ids=lambda f: f.__name__.strip("_"))
def test_views_of_written_inputs_lie_where_they_lie_in_eager_mode(fn, given, grad, dynamic):
    """AOTAutograd makes such outputs anew, from sizes, strides and offset of what the graph returns."""
    torch._dynamo.reset()
    call = torch.compile(fn, backend="deplo", dynamic=dynamic, options={"strict": True, "allow_library": []})
    with torch.set_grad_enabled(grad):
        (base, x), (other, y) = INPUTS[given](), INPUTS[given]()
        wanted, got = fn(x), call(y)
    torch.testing.assert_close(other, base)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()
        is_view = theirs.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert (mine.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()) == is_view
        assert not is_view or mine.storage_offset() == theirs.storage_offset()


@pytest.mark.parametrize("step", [2, 3, 1], ids=["whole windows", "gaps", "overlaps"])
@pytest.mark.parametrize("inner", [False, True], ids=["input", "intermediate"])
@pytest.mark.parametrize("size", [8, 7])
def test_writes_to_windows(step, inner, size):
    """AOTAutograd would write zeros between windows, where eager mode writes nothing; of overlapping ones eager mode writes none."""

    def fn(x):
        y = x + 1 if inner else x
        y.unfold(0, 2, step).mul_(3)
        return y

    torch._dynamo.reset()
    x, expected = torch.arange(1.0, size + 1), torch.arange(1.0, size + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        compiled = torch.compile(fn, backend="deplo", dynamic=False)
        if step == 1:
            with pytest.raises(RuntimeError, match="overlap"):
                compiled(x)
            return
        assert torch.equal(compiled(x), fn(expected)) and torch.equal(x, expected)
    strict = torch.compile(lambda x: fn(x), backend="deplo", dynamic=False, options={"strict": True})
    if step == 2 and size == 8:
        assert torch.equal(strict(x), fn(expected))
    else:
        with pytest.raises(deplo.UnsupportedError, match="windows"):
            strict(x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("end", ["copy_", "logical_or_"])
def test_two_inputs_that_are_made_of_each_other(end, dynamic):
    def step(tokens, done):
        tokens.masked_fill_(done, 0)
        getattr(done, end)(tokens == 3)

    torch.manual_seed(0)
    inputs = [torch.randint(5, (40,)), torch.rand(40) > 0.5]
    others = [x.clone() for x in inputs]
    compiled = torch.compile(step, backend="deplo", options={"strict": True}, dynamic=dynamic)
    for _ in range(3):
        compiled(*inputs)
        step(*others)
        same(inputs, others)
