"""The table of ATen overloads, and docs/ops.md made from it."""

from __future__ import annotations

import math
import pathlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from engines import equal, feature_sets, needs_core, same

import deplo
from deplo.operators import MISSING, PARTLY, left_in_samples

pytestmark = needs_core


@pytest.fixture(scope="module")
def table():
    from deplo.operators import operators

    return operators()


def test_docs_are_up_to_date(table):
    from deplo.operators import markdown

    written = pathlib.Path(__file__).parents[2] / "docs" / "ops.md"
    assert written.read_text() == markdown(table), "run: python -m deplo ops --markdown > docs/ops.md"


def test_each_rule_and_each_core_overload_has_one_row(table):
    from deplo.core import core

    names = [op.name for op in table]
    assert len(set(names)) == len(names)
    assert {name for name, _ in core().overload_files() if name.startswith("aten.")} <= set(names)
    assert "aten.add.Tensor" in names and torch.Tag.core in torch.ops.aten.add.Tensor.tags


def test_most_core_overloads_are_generated(table):
    from deplo.operators import core_share

    made, meant = core_share(table)
    assert made >= 0.95 * meant, [op for op in table if op.is_core and op.kind in (PARTLY, MISSING)]


def test_what_samples_leave_to_aten_is_in_the_table(table):
    """sample.json, which tests/python/test_opinfo.py holds to what it says, names no overload that the table says to be generated."""
    from opinfo.overloads import generated_in_part
    from opinfo.sample import expected

    held = [{"unit": title.split(" by ")[0], **held} for title, held in expected().items() if title.endswith(" by deplo")]
    partly = {op.name for op in table if op.kind == PARTLY}
    assert generated_in_part(table, held).keys() <= partly
    assert partly == left_in_samples().keys()


def test_library_operands_lie_as_eager_lays_them():
    """Some ATen kernels read their operands as contiguous without a look at the strides."""
    from deplo.core import core

    head = "torch @g(%x: i64[5] strides [2] user)\n"
    copy = "  %c: i64[5] strides [1] = aten.clone.default(self=%x, memory_format=contiguous_format)\n"
    sort = "  %v: i64[5] strides [1], %i: i64[5] strides [1] = aten.sort.default(self=%{}, dim=0, descending=false)\n  return %v, %i\n"
    assert "operands [1] strides" in core().lower(head + copy + sort.format("c"), "tensor")
    assert "x_copy: i64[5]\n" in core().lower(head + copy + sort.format("c"), "loop")
    assert "operands" not in core().lower(head + sort.format("x"), "tensor")
    assert "copy" not in core().lower(head + sort.format("x"), "loop")


def test_wrong_sizes_of_results_that_nobody_reads_do_no_harm():
    import json

    from deplo.core import core
    from deplo.options import read_options

    text = """torch @g(%x: f32[3] user)
  %v: f32[3], %i: i64[7] = aten.sort.default(self=%x, dim=0, descending=false)
  return %v
"""
    program = core().compile(text, read_options().to_json())
    assert json.loads(program.describe())["library"]
    torch.testing.assert_close(program.run([torch.tensor([3.0, 1.0, 2.0])])[0], torch.tensor([1.0, 2.0, 3.0]))


def test_integer_division_inside_of_a_concatenation():
    """Inlined into one kernel with the rest, it is evaluated only where its own elements are."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y, z: torch.cat([x // y, z, x % y]), backend="deplo")
    x, y = torch.arange(5), torch.arange(5) + 1
    torch.testing.assert_close(compiled(x, y, x), torch.cat([x // y, x, x % y]))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(x, y - 1, x)


def test_rows_of_embeddings_that_are_too_long_are_scaled_once():
    def fn(weight, indices):
        weight = weight.clone()
        return torch.nn.functional.embedding(indices, weight, max_norm=1.0), weight

    weight, indices = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)) * 2, torch.tensor([1, 2, 2, 9])
    compiled = torch.compile(fn, backend="deplo", options={"strict": True, "allow_library": []})
    same(compiled(weight, indices), fn(weight, indices), exact=fn(weight.double(), indices))
    with pytest.raises(IndexError):
        compiled(weight, torch.tensor([1, 2, 2, 10]))


def test_segments_are_reduced_and_their_lengths_checked():
    data = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    allowed = {"strict": True, "allow_library": ["aten._assert_async"]}
    for reduce, initial in (("sum", None), ("mean", None), ("mean", 2.0), ("max", None), ("min", 0.5), ("prod", None)):

        def fn(data, lengths, reduce=reduce, initial=initial):
            return torch.segment_reduce(data, reduce, lengths=lengths, axis=0, initial=initial)

        compiled = torch.compile(fn, backend="deplo", options=allowed)
        lengths = torch.tensor([3, 0, 2, 5])
        same(compiled(data, lengths), fn(data, lengths), exact=fn(data.double(), lengths))
    for lengths, message in ((torch.tensor([3, 0, 2, 4]), "to sum to data.size"), (torch.tensor([3, -1, 3, 5]), "negative value")):
        with pytest.raises(RuntimeError, match=message):
            compiled(data, lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 33])
def test_searches_find_the_places_of_eager_mode(dtype, length):
    torch.manual_seed(length)
    ends = (torch.rand(length) * 20).to(dtype).sort()[0]
    x = torch.cat([(torch.rand(3 * 17) * 25 - 2).clamp(0).to(dtype), ends, ends])
    if dtype.is_floating_point:
        x = torch.cat([x, torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)])
    rows = torch.stack([ends, ends.flip(0)])
    order = rows.sort(-1)[1]
    allowed = {"strict": True, "allow_library": []}
    for right, int32 in ((False, False), (True, True)):
        for fn, args in (
            (lambda x, ends, right=right, int32=int32: torch.bucketize(x, ends, out_int32=int32, right=right), (x, ends)),
            (lambda x, ends, right=right: torch.bucketize(x[:20].view(4, 5).t(), ends, right=right), (x, ends)),
            (lambda x, ends, right=right: torch.bucketize(x[0], ends[:0], right=right), (x, ends)),
            (lambda x, ends, right=right: torch.searchsorted(ends, x.unflatten(0, (-1, 1)), side="right" if right else "left"), (x, ends)),
            (lambda x, ends, order, right=right: torch.searchsorted(ends, x, right=right, sorter=order), (x[:20].view(2, 10), rows, order)),
        ):
            got, expected = torch.compile(fn, backend="deplo", dynamic=False, options=allowed)(*args), fn(*args)
            assert torch.equal(got, expected) and got.dtype == expected.dtype and got.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_16_bits_in_one_place_are_rounded_once(dtype):
    """A thousand times -4 or -12: rounded after each, bfloat16 stays at -1024 and float16 ends at -13264."""
    index = torch.zeros(1000, dtype=torch.int64)
    base, source = torch.zeros(2, 3, dtype=dtype), torch.full((1000, 3), -4.0 if dtype == torch.bfloat16 else -12.0, dtype=dtype)
    exact = source.double().sum(0).to(dtype)
    allowed = {"strict": True, "allow_library": []}
    for fn in (
        lambda base, source, index: base.index_add(0, index, source),
        lambda base, source, index: base.scatter_add(0, index[:, None].expand(1000, 3), source),
        lambda base, source, index: base.index_put((index,), source, accumulate=True),
        lambda base, source, index: base.scatter_reduce(0, index[:, None].expand(1000, 3), source, "sum"),
    ):
        got = torch.compile(fn, backend="deplo", dynamic=False, options=allowed)(base, source, index)
        assert torch.equal(got[0], exact) and not got[1].any()
    # One row meets no other: it is added in place.
    added = torch.compile(lambda base, source, index: base.index_add_(0, index, source), backend="deplo", options=allowed)(
        base, source[:1], index[:1]
    )
    assert torch.equal(added, base) and torch.equal(base[0], source[0])


def test_gradients_of_distances_between_no_rows():
    x, y = torch.randn(0, 4, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    compiled = torch.compile(lambda x, y: torch.cdist(x, y, p=1.0), backend="deplo", dynamic=False, options={"strict": True, "allow_library": []})
    for got, expected in zip(torch.autograd.grad(compiled(x, y).sum(), (x, y)), (x, y), strict=True):
        assert torch.equal(got, torch.zeros_like(expected))


@pytest.mark.parametrize("wide", [torch.float64, torch.int64, torch.float16, torch.uint8], ids=str)
def test_searches_of_two_dtypes_compare_in_eager_mode_s(wide):
    ends = torch.tensor([0.0, 1, 2, 100, 2**24, 2**24 + 2])
    allowed = {"strict": True, "allow_library": []}
    values = torch.tensor([0, 1, 3, 99] if wide == torch.uint8 else [0, 1, 3, 2**11 + 1] if wide == torch.float16 else [1, 2**24 + 1]).to(wide)
    for x in (values, values[-1]):
        for fn in (lambda x, ends: torch.bucketize(x, ends), lambda x, ends: torch.bucketize(ends[:4], x.reshape(-1), right=True)):
            assert torch.equal(torch.compile(fn, backend="deplo", dynamic=False, options=allowed)(x, ends), fn(x, ends))


@pytest.mark.parametrize("value", [0, 2, 2.5, 0.1, float("nan"), -1.5, 100])
def test_a_number_is_searched_in_the_dtype_that_it_makes_of_the_sequence(value):
    from torch.fx.experimental.proxy_tensor import make_fx

    from deplo.decompositions import decompositions

    aten = torch.ops.aten
    for sequence in (torch.tensor([1, 2, 2, 3]), torch.tensor([0.1, 0.5, 2.5]).bfloat16(), torch.tensor([0.1, 0.5, 2.5]), torch.tensor([])):
        for fn in (lambda s: aten.searchsorted.Scalar(s, value, right=True), lambda s: aten.bucketize.Scalar(value, s)):
            traced = make_fx(fn, decomposition_table=decompositions())(sequence)
            assert "searchsorted" not in traced.code and "bucketize" not in traced.code
            assert torch.equal(traced(sequence), fn(sequence))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_additions_are_rounded_once_as_in_eager_mode(dtype):
    x, y = torch.randn(2, 512, 8, dtype=dtype, generator=torch.Generator().manual_seed(0)).unbind()
    calls = (torch.add, torch.sub, torch.rsub)

    def scaled(x, y):
        return [call(x, y, alpha=alpha) for call in calls for alpha in (-3.125, 0.3)]

    for got, wanted in zip(torch.compile(scaled, backend="deplo", options={"strict": True})(x, y), scaled(x, y), strict=True):
        assert torch.equal(got, wanted)


def test_a_bool_alpha_is_refused_as_in_eager_mode():
    def fn(x, y):
        return torch.add(x, y, alpha=True)

    x = torch.randn(3)
    for call in (fn, torch.compile(fn, backend="deplo")):
        with pytest.raises(RuntimeError, match="Boolean alpha only supported for Boolean results"):
            call(x, x)


@pytest.mark.parametrize("shape", [(1,), (2, 1), (1, 3, 1)])
def test_a_number_that_is_expanded_has_the_strides_of_eager_mode(shape):
    def fn(x):
        return x.sum().expand(shape)

    x = torch.randn(4, requires_grad=True)
    compiled = torch.compile(fn, backend="deplo", dynamic=False)
    assert compiled(x.detach()).stride() == fn(x.detach()).stride()
    total = torch.compile(lambda t: t.view(2, 1, 2).sum(), backend="deplo", dynamic=False)
    (got,), (wanted,) = (torch.autograd.grad(call(x), x) for call in (total, lambda t: t.view(2, 1, 2).sum()))
    assert got.stride() == wanted.stride()


@pytest.mark.parametrize("function", ["pow", "atan2", "fmod", "hypot", "remainder", "copysign", "nextafter"])
@pytest.mark.parametrize("value", [2.0, 0.5, 10.0, 1.0, 3.0])
def test_functions_of_whole_numbers_and_constants_need_no_other_function(function, value):
    """LLVM makes a call of libm's pow(2, n) one of ldexp, of pow(10, n) one of exp10."""
    take = getattr(torch, function)

    def fn(n):
        x = n.to(torch.float64)
        constant = torch.full((), value, dtype=torch.float64)
        return take(constant, x), take(x, constant)

    n = torch.arange(-5, 6)
    for got, wanted in zip(torch.compile(fn, backend="deplo", options={"strict": True})(n), fn(n), strict=True):
        torch.testing.assert_close(got, wanted, rtol=4e-16, atol=0, equal_nan=True)


def test_windows_may_be_broadcast_over_a_batch_when_they_are_added_up():
    def fn(v):
        return torch.ops.aten.unfold_backward(v, [2, 52], 1, 16, 4)

    v = torch.randn(1, 10, 16)
    same(torch.compile(fn, backend="deplo", options={"strict": True})(v), fn(v), exact=fn(v.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_next_number_of_every_number_of_16_bits(dtype):
    compiled = torch.compile(torch.nextafter, backend="deplo", dynamic=False, options={"strict": True})
    x = torch.arange(1 << 16).to(torch.int16).view(torch.float16 if dtype == torch.float16 else torch.bfloat16).to(dtype)
    for y in (x.flip(0), x, -x, *(torch.full_like(x, end) for end in (0.0, -0.0, float("inf"), float("-inf"), float("nan")))):
        equal(compiled, torch.nextafter, x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_ldexp_is_rounded_once_over_the_whole_range(dtype):
    compiled = torch.compile(torch.ldexp, backend="deplo", dynamic=False, options={"strict": True})
    torch.manual_seed(0)
    wide = torch.randint(-(1 << 63), (1 << 63) - 1, (20000,)).view(torch.float64)
    narrow = torch.randint(-(1 << 31), 1 << 31, (20000,)).to(torch.int32).view(torch.float32)
    x = wide if dtype == torch.float64 else narrow.to(dtype)
    for span in (40, 300, 2300):
        equal(compiled, torch.ldexp, x, torch.randint(-span, span, x.shape))
    torch._dynamo.reset()
    equal(compiled, torch.ldexp, torch.tensor([0.0, -0.0, 1e-38, float("inf"), float("nan")]).to(dtype), torch.tensor(130))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_margin_losses(reduction, dynamic):
    """Lists of targets end at the first -1, and NaN exceeds no margin: PyTorch's tracer has formulas that know neither."""
    torch.manual_seed(0)
    nan = float("nan")
    lists = torch.tensor([[3, 0, -1, 1, 2, 2], [5, 5, 1, -1, 0, 0], [0, 1, 2, 3, 4, 5], [-1, -1, 2, 2, 1, 0]])
    weight = torch.rand(6)
    cases = [
        (lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), torch.randn(4, 6), lists),
        (lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), torch.randn(6), lists[0]),
        (lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), torch.tensor([[1.0, nan, 0.5]]), torch.tensor([[2, -1, 1]])),
        (lambda x, t: F.multi_margin_loss(x, t, margin=0.7, reduction=reduction), torch.randn(7, 6), torch.randint(0, 6, (7,))),
        (lambda x, t: F.multi_margin_loss(x, t, p=2, weight=weight, reduction=reduction), torch.randn(7, 6), torch.randint(0, 6, (7,))),
        (lambda x, t: F.multi_margin_loss(x, t, reduction=reduction), torch.tensor([[1.0, nan, 0.5]]), torch.tensor([0])),
        (lambda x, t: F.multi_margin_loss(x, t, reduction=reduction), torch.randn(6), torch.tensor(2)),
    ]
    for f, x, target in cases:
        torch._dynamo.reset()
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        got, wanted = torch.compile(f, backend="deplo", dynamic=dynamic, options={"strict": True})(ours, target), f(theirs, target)
        torch.testing.assert_close(got, wanted, equal_nan=True)
        got.sum().backward()
        wanted.sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


def test_the_gradient_of_a_large_difference_is_finite():
    x = torch.tensor([2.5e38] + [1.0] * 9, requires_grad=True)
    torch.compile(lambda x: F.mse_loss(x, torch.zeros(10)), backend="deplo", options={"strict": True})(x).backward()
    torch.testing.assert_close(x.grad, torch.tensor([5e37] + [0.2] * 9))


NORMS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8, 8), w[:, None].expand(8, 8), b[:, None].expand(8, 8)),
    "group_norm": lambda x, w, b: F.group_norm(x, 4, w, b),
    "group_norm of images": lambda x, w, b: F.group_norm(x.view(4, 8, 4, 2), 4, w, b),
    "without weights": lambda x, w, b: F.group_norm(x, 2) * w[:, None],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e15, 3e18, 1e20, 1e25])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_large_numbers_are_those_of_float64(name, scale, dtype):
    torch.manual_seed(0)
    x = (torch.randn(4, 8, 8) * scale).to(dtype)
    w, b = torch.rand(8).add(0.5).to(dtype), torch.randn(8).to(dtype)
    norm = NORMS[name]
    expected = norm(x.double(), w.double(), b.double())
    for training in (False, True):
        torch._dynamo.reset()
        y = torch.compile(norm, backend="deplo", dynamic=False, options={"strict": True})(x.clone().requires_grad_(training), w, b)
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps * expected.abs().max().item())


@pytest.mark.parametrize("training", [False, True])
def test_norms_whose_variance_no_float_holds_are_no_numbers_or_right(training):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 3e37
    y = torch.compile(lambda x: F.layer_norm(x, (64,)), backend="deplo", dynamic=False)(x.requires_grad_(training))
    if training:
        torch.testing.assert_close(y, F.layer_norm(x.double(), (64,)).float())
    else:
        assert y.isnan().all()


REFUSED = {
    "clamp": lambda x: x.clamp(-3000, 3000),
    "clamp_max": lambda x: x.clamp_max(3000),
    "pow": lambda x: x**300,
    "hardtanh": lambda x: F.hardtanh(x, -3000, 3000),
    "threshold": lambda x: F.threshold(x, 300, 400),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=300),
    "alpha": lambda x: torch.add(x, x, alpha=300),
    "pad": lambda x: F.pad(x, (1, 1), value=300),
}


def test_steps_of_two_dtypes_are_refused_as_in_eager_mode():
    with warnings.catch_warnings(record=True) as caught, pytest.raises(RuntimeError, match="different dtypes"):
        warnings.simplefilter("always")
        torch.compile(torch.heaviside, backend="deplo")(torch.randn(4).double(), torch.tensor(0.5))
    assert not any("bug" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_a_dtype_does_not_hold_are_refused_as_in_eager_mode(name):
    x = torch.tensor([1, -2, 100], dtype=torch.int8)
    with pytest.raises(RuntimeError, match="without overflow"):
        REFUSED[name](x)
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.compile(REFUSED[name], backend="deplo")(x)


MOST = {torch.bfloat16: 3e38, torch.float16: 65504.0, torch.float32: 1e300, torch.float64: 1e300}


@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_exponents_are_refused_where_eager_mode_refuses_them(dtype):
    most = MOST[dtype]
    x = torch.tensor([0.5, 1.0, 2.0], dtype=dtype)
    equal(torch.compile(lambda x: x**most, backend="deplo"), lambda x: x**most, x)
    if dtype.itemsize == 2:
        for power in (lambda x: x**1e39, torch.compile(lambda x: x**1e39, backend="deplo")):
            with pytest.raises(RuntimeError, match="without overflow"):
                power(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_maxima_of_bags_pass_over_nan_but_in_front(dynamic):
    torch.manual_seed(0)
    bags = [
        (torch.randint(0, 6, (4, 3)), {}),
        (torch.randint(0, 6, (9,)), {"offsets": torch.tensor([0, 0, 3, 4, 9])}),
        (torch.randint(0, 6, (9,)), {"offsets": torch.tensor([0, 2, 3, 4]), "padding_idx": 2}),
        (torch.empty(0, dtype=torch.int64), {"offsets": torch.tensor([0, 0])}),
    ]
    for indices, keywords in bags:
        torch._dynamo.reset()

        def f(indices, table, keywords=keywords):
            return F.embedding_bag(indices, table, mode="max", **keywords)

        compiled = torch.compile(f, backend="deplo", dynamic=dynamic, options={"guard": True})
        for _ in range(4):
            table = torch.randn(6, 3)
            for value, share in ((float("nan"), 0.3), (-float("inf"), 0.2), (float("inf"), 0.1)):
                table[torch.rand(6, 3) < share] = value
            ours, theirs = (table.clone().requires_grad_() for _ in range(2))
            got, wanted = compiled(indices, ours), f(indices, theirs)
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
            got.nan_to_num(1, 1, 1).sum().backward()
            wanted.nan_to_num(1, 1, 1).sum().backward()
            torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_bags_whose_last_offset_is_not_the_end(dtype, dynamic):
    """ATen's fast path leaves out the indices after it, other paths take them into the last bag. In gradients of sums on the fast path ATen reads
    beyond its memory for them: they count for nothing."""
    torch.manual_seed(0)
    indices, offsets = torch.tensor([0, 2, 2, 3, 4, 1, 5]), torch.tensor([0, 2, 2, 4])
    table, scales = torch.randn(6, 3).to(dtype), torch.randn(7).to(dtype)
    cases = [(mode, pad, turned, None) for mode in ("sum", "mean", "max") for pad in (None, 2) for turned in (False, True)]
    cases += [("sum", None, False, scales), ("sum", None, False, torch.stack([scales, scales], 1)[:, 0]), ("sum", 2, False, scales)]
    for mode, pad, turned, scale in cases:
        torch._dynamo.reset()

        def f(indices, offsets, table, scale, mode=mode, pad=pad):
            return F.embedding_bag(indices, table, offsets, mode=mode, padding_idx=pad, include_last_offset=True, per_sample_weights=scale)

        compiled = torch.compile(f, backend="deplo", dynamic=dynamic, options={"strict": True, "guard": True})
        leaves = [(table.t().contiguous().t() if turned else table).detach().requires_grad_() for _ in range(2)]
        got, wanted = (g(indices, offsets, leaf, scale) for g, leaf in zip((compiled, f), leaves, strict=True))
        torch.testing.assert_close(got, wanted)
        fast = mode == "sum" and dtype != torch.float64 and pad is None and not turned and (scale is None or scale.stride(0) == 1)
        got.sum().backward()
        if fast:
            whole = f(indices[:4], offsets, theirs := table.clone().requires_grad_(), None if scale is None else scale[:4])
            whole.sum().backward()
            torch.testing.assert_close(leaves[0].grad, theirs.grad)
        else:
            wanted.sum().backward()
            torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_bool_seen_as_bytes():
    x = torch.randn(45)
    for f in (lambda x: (x > 0).view(torch.uint8) * 2, lambda x: (x > 0).view(torch.int8).sum()):
        assert torch.equal(torch.compile(f, backend="deplo", options={"strict": True})(x), f(x))
    bits = torch.arange(9).to(torch.uint8)
    assert torch.equal(torch.compile(lambda x: ~(x & 1).view(torch.bool), backend="deplo")(bits), ~(bits & 1).view(torch.bool))


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_of_aten_that_lie_otherwise_than_traced(dynamic):
    """PyTorch's shape rules say other strides of angle() than its kernel gives: what follows was compiled for the traced ones."""
    x = torch.randn(3, 4, dtype=torch.complex64)
    forms = [lambda x: x.T.angle() + 1, lambda x: x.T.angle() * x.T.angle().sin(), lambda x: torch.stack([x, x]).transpose(0, 2).angle().cos()]
    for f in forms:
        torch._dynamo.reset()
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        with pytest.warns(deplo.FallbackWarning):
            got = torch.compile(f, backend="deplo", dynamic=dynamic)(ours)
        wanted = f(theirs)
        torch.testing.assert_close(got, wanted)
        got.sum().backward()
        wanted.sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


def wild(*shape):
    """Numbers among which NaN, infinities, zeros of both signs and a subnormal stand often."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 0.5, 2.5, -3.0])
    return torch.where(torch.rand(shape) < 0.3, values[torch.randint(0, len(values), shape)], torch.rand(shape))


SPECIAL = {
    "isin few": lambda: (torch.isin, wild(7), wild(5)),
    "isin many": lambda: (torch.isin, wild(7), wild(50)),
    "not in": lambda: (lambda x, y: torch.isin(x, y, invert=True), wild(7), wild(50)),
    "integers": lambda: (torch.isin, torch.randint(0, 50, (9,)), torch.randint(0, 50, (40,))),
    "searchsorted": lambda: (torch.searchsorted, wild(20).sort().values, wild(9)),
    "searchsorted right": lambda: (lambda s, x: torch.searchsorted(s, x, right=True), wild(3, 20).sort(-1).values, wild(3, 9)),
    "out of order": lambda: (torch.searchsorted, wild(21), wild(9)),
    "bucketize": lambda: (torch.bucketize, wild(9), wild(6)),
    **{f"cdist {p}": lambda p=p: (lambda x, y: torch.cdist(x, y, p=p), wild(4, 5), wild(3, 5)) for p in (0.0, 1.0, 2.0, 3.0, float("inf"))},
    **{f"pdist {p}": lambda p=p: (lambda x: F.pdist(x, p=p), wild(4, 5)) for p in (0.0, 1.0, 2.0, 3.0, float("inf"))},
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_are_found_and_measured_as_in_eager_mode(name):
    torch.manual_seed(0)
    f = SPECIAL[name]()[0]
    compiled = torch.compile(f, backend="deplo", dynamic=False)
    for _ in range(20):
        _, *inputs = SPECIAL[name]()
        torch.testing.assert_close(compiled(*inputs), f(*inputs), equal_nan=True)


@pytest.mark.parametrize("decimals", [-3, -1, 1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decimals_of_16_bits_are_rounded_in_float32(dtype, decimals):
    x = torch.linspace(-50000, 50000, 4001).to(dtype)
    got = torch.compile(lambda x: torch.round(x, decimals=decimals), backend="deplo", options={"strict": True, "allow_library": []})(x)
    assert torch.equal(got, torch.round(x, decimals=decimals))
    assert torch.equal(got, torch.round(x.double(), decimals=decimals).to(dtype))


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_a_product_times_zero_is_read_where_eager_mode_reads_it(dtype, size):
    """BLAS does not, ATen's own loops do: infinities times zero are NaN there."""
    a = torch.full((2, size, size), math.inf if dtype.is_floating_point else 7).to(dtype)
    b, c = torch.ones(2, size, 3, dtype=dtype), torch.arange(3 * size).view(size, 3).to(dtype)

    def fn(a, b, c):
        products = torch.addmm(c, a[0], b[0], alpha=0), torch.addmv(c[:, 0], a[0], b[0, :, 0], alpha=0), torch.addr(c, a[0, 0], b[0, 0], alpha=0)
        return *products, torch.addbmm(c, a, b, alpha=0, beta=2), torch.baddbmm(c, a, b, alpha=0)

    torch._dynamo.reset()
    got = torch.compile(fn, backend="deplo", dynamic=False, options={"strict": True, "allow_library": []})(a, b, c)
    for mine, theirs in zip(got, fn(a, b, c), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_gates_of_complex_numbers_are_left_to_aten_beside_a_gradient():
    """Where a backward graph follows, formulas in Python take silu apart: of complex numbers they would lose the imaginary part."""
    torch.manual_seed(0)
    z, w = torch.randn(7, dtype=torch.complex64), torch.randn(7, requires_grad=True)

    def fn(z, w):
        return torch.ops.aten.silu_backward(z, z * 2), F.silu(z), F.silu(w)

    for mine, theirs in zip(torch.compile(fn, backend="deplo")(z, w), fn(z, w), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_of_distances_that_are_not_finite(value, p):
    """NaN differences have NaN gradients; a row has no part in itself."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64)
    x[1, 2] = value
    x[3] = x[2]
    for fn in (lambda x: F.pdist(x, p=p), lambda x: torch.cdist(x, x * 2, p=p)):
        gradients = []
        torch._dynamo.reset()
        for run in (torch.compile(fn, backend="deplo", dynamic=False), fn):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            gradients.append(torch.autograd.grad(y, leaf, torch.ones_like(y))[0])
        torch.testing.assert_close(*gradients, equal_nan=True)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 0, 3), (3, 0, 0)], ids=str)
def test_reductions_of_empty_constants(shape):
    def fn(x):
        empty = x.new_ones(shape)
        return empty.sum() + x, empty.mean() + x, (empty * 2).prod() + x, empty.any() | (x > 0), F.mse_loss(empty, empty, reduction="sum") + x

    x = torch.arange(3.0)
    torch._dynamo.reset()
    fast = torch.compile(fn, backend="deplo", options={"strict": True}, dynamic=False)
    torch.testing.assert_close(fast(x), fn(x), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x, target", [(-0.5, 0.5), (1.5, 1.0), (math.nan, 0.0), (0.5, 3.0), (0.5, -0.1), (0.5, math.nan)])
def test_probabilities_out_of_range_are_refused(x, target, dtype):
    def fn(x, y):
        return F.binary_cross_entropy(x.exp().log(), y)

    torch._dynamo.reset()
    fast = torch.compile(fn, backend="deplo", options={"strict": True})
    good = torch.tensor([0.25, 0.5, 0.75] * 5, dtype=dtype)
    torch.testing.assert_close(fast(good, good), fn(good, good))
    for place in (0, 14):
        bad = [good.clone(), good.clone()]
        bad[0][place], bad[1][place] = x, target
        with pytest.raises(RuntimeError, match="between 0 and 1|outside of the range"):
            F.binary_cross_entropy(*bad)
        with pytest.raises(RuntimeError, match="between 0 and 1|outside of the range"):
            torch.compile(F.binary_cross_entropy, backend="deplo", options={"strict": True})(*bad)
    torch.testing.assert_close(fast(good, good), fn(good, good))


@pytest.mark.parametrize("features", feature_sets())
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32, torch.int32, torch.bfloat16], ids=str)
def test_parts_that_reach_a_few_lanes(features, dtype):
    """Loads under masks of which some lanes are known to be off, whose vectors take one register or several."""
    x, y, rows = torch.arange(1, 4).to(dtype), torch.arange(1, 3).to(dtype), torch.arange(1, 31).to(dtype)
    for fn, args in (
        (lambda x, y: torch.stack([F.pad(x, (5, 0)), F.pad(y, (6, 0))]), (x, y)),
        (lambda x, y: torch.cat([F.pad(x, (4, 1)), F.pad(y, (7, 9))]), (x, y)),
        (lambda x, y: torch.block_diag(x[None], y[None]), (rows[:5], rows[10:15])),
        (lambda x, i: F.pad(x.take(i)[None], (1, 2, 2, 2)), (rows, torch.tensor([29, 2, 4]))),
        (lambda x, y: torch.stack([x.roll(5, 1)[0], F.pad(y[0], (5, -5))]), (rows.view(3, 10), rows.view(3, 10))),
    ):
        torch._dynamo.reset()
        step = torch.compile(fn, backend="deplo", dynamic=False, options={"strict": True, "features": features, "allow_library": []})
        assert torch.equal(step(*args), fn(*args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "div", "fmod", "remainder", "pow", "maximum", "eq", "hypot", "rsub", "floor_divide", "addcmul"]
)
def test_what_is_promoted_to_16_bits_is_rounded_first(name, dtype):
    """257 and 2051 are no numbers of bfloat16 and float16. A last factor or divisor of one element keeps its digits, as in eager mode."""
    x = torch.tensor([1.0, 2.0, 3.5, 256.0, 100.0, -7.25], dtype=dtype)
    fn = getattr(torch, name)
    call = (lambda a, b: fn(a, b, b)) if name == "addcmul" else fn
    fast = torch.compile(call, backend="deplo", dynamic=False, options={"strict": True})
    for number in (torch.tensor(257 if dtype == torch.bfloat16 else 2051), torch.tensor(2.0020531), torch.tensor(2.0020531, dtype=torch.float64)):
        others = [number, number.reshape(1), number.repeat(6)] if number.dtype == torch.int64 else [number]
        for other in others:
            for args in ((x, other), (other, x)):
                torch._dynamo.reset()
                expected = call(*args)
                got = fast(*args)
                assert got.dtype == expected.dtype and torch.equal(
                    *(y.nan_to_num(nan=12345.0) if y.is_floating_point() else y for y in (got, expected))
                ), args


@pytest.mark.parametrize("dynamic", [False, True])
def test_empty_batches_in_training(dynamic):
    """Some of ATen's kernels give empty tensors of another dtype than they are traced with."""
    layer = torch.ones(4, 4)

    def network(x):
        return F.dropout(F.linear(x, layer), 0.5).relu()

    def pools(x):
        image = x.reshape(-1, 1, 2, 2).repeat(1, 1, 2, 2)
        return F.fractional_max_pool2d(image, 2, output_size=2), F.fractional_max_pool3d(image[:, None].repeat(1, 1, 4, 1, 1), 2, output_size=2)

    def margin(x):
        target = torch.zeros(x.shape[0], dtype=torch.int64)
        return F.multi_margin_loss(x, target), F.multi_margin_loss(x, target, reduction="none")

    for fn in (network, pools, margin):
        torch._dynamo.reset()
        fast = torch.compile(fn, backend="deplo", dynamic=dynamic, options={"strict": True})
        for rows in (5, 0) if dynamic else (0,):
            x = torch.ones(rows, 4, requires_grad=True)
            results = [y if isinstance(y, tuple) else (y,) for y in (fast(x), fn(x))]
            (gradient,) = torch.autograd.grad([y.sum() for y in results[0]], x)
            assert [y.shape for y in results[0]] == [y.shape for y in results[1]]
            assert gradient.shape == x.shape and gradient.dtype == x.dtype


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradient_of_multi_margin_loss(p, reduction, dtype):
    x = torch.randn(6, 5, dtype=dtype, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, 4, 0])
    weight = torch.rand(5, dtype=dtype)

    def loss(x):
        return F.multi_margin_loss(x, target, p, 1.0, weight, reduction=reduction).sum()

    torch._dynamo.reset()
    (gradient,) = torch.autograd.grad(torch.compile(loss, backend="deplo", options={"strict": True})(x), x)
    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(gradient, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


@needs_core
@pytest.mark.parametrize("dynamic", [False, True])
def test_convolution_of_constants(dynamic):
    """An operand that reads nothing, in a contraction that is a phase of a block of rows."""

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = F.conv1d(-torch.zeros_like(x), weight, padding=1)
        y[..., 0].add_(2)
        return y

    x, weight = torch.randn(3, 3, 3), torch.randn(8, 3, 3)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="deplo", dynamic=dynamic, fullgraph=True, options={"strict": True, "allow_library": []})
    assert torch.equal(compiled(x, weight), fn(x, weight))


EMPTY = {
    "avg1d": (lambda x: F.adaptive_avg_pool1d(x[0], 0), (2, 3, 4, 5)),
    "avg2d": (lambda x: F.adaptive_avg_pool2d(x, (0, 2)), (2, 3, 4, 5)),
    "avg3d of no batch": (lambda x: F.adaptive_avg_pool3d(x[:, None], (2, 0, 0)), (0, 3, 4, 5)),
    "max2d": (lambda x: F.adaptive_max_pool2d(x, (0, 0), return_indices=True)[0], (2, 3, 4, 5)),
    "max3d": (lambda x: F.adaptive_max_pool3d(x, (1, 0, 2)), (2, 3, 4, 5)),
    "group norm of no channels": (lambda x: F.group_norm(x, 2), (2, 0, 4, 5)),
    "group norm of no pixels": (lambda x: F.group_norm(x, 2), (2, 4, 0, 5)),
    "a view of nothing": (lambda x: x.as_strided((2, 0), (0, 1)) + 1, (2, 0, 4, 5)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_is_divided_into_nothing(name):
    function, shape = EMPTY[name]
    x = torch.rand(shape, requires_grad="group" in name)  # pools refuse an empty gradient
    y = x.detach().clone().requires_grad_(x.requires_grad)
    wanted = function(x)
    made = torch.compile(function, backend="deplo", options={"strict": True})(y)
    same(made, wanted)
    if x.requires_grad:
        wanted.sum().backward()
        made.sum().backward()
        same(y.grad, x.grad)


@pytest.mark.parametrize("name", ["_embedding_bag", "_embedding_bag_forward_only"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags_tell_what_eager_mode_s_tell(mode, dtype, name):
    """The bag of each index, how many each bag has and which row won: in sums ATen counts nothing, and looks for no bags on its fast path."""
    table = torch.arange(12.0).reshape(6, 2).to(dtype)
    indices, offsets = torch.tensor([1, 2, 2, 4, 5, 1, 3]), torch.tensor([0, 3, 3, 5, 7])
    op = getattr(torch.ops.aten, name)

    def bags(table, indices, offsets):
        return [op(table, indices, offsets, False, mode, False, None, last, padding) for last in (False, True) for padding in (-1, 2)]

    made = torch.compile(bags, backend="deplo", options={"strict": True})(table, indices, offsets)
    for ours, theirs in zip(made, bags(table, indices, offsets), strict=True):
        assert [v.tolist() for v in ours[1:]] == [v.tolist() for v in theirs[1:]]
        torch.testing.assert_close(ours[0], theirs[0])
