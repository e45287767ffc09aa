"""Symbolic sizes: one graph for all lengths without guards of deplo's own, strides, exported programs, nested subgraphs, sizes of data."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from engines import Compiler, feature_sets, same
from torch import nn

import deplo
from deplo import backend
from deplo.errors import FallbackWarning

_C = pytest.importorskip("deplo._C")

LENGTHS = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 511, 1000, 1023, 1025, 2047, 2049, 4095, 4096)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def guards_added(monkeypatch):
    """How many guards each import and compile of a graph added to its ShapeEnv."""
    counts = []
    program = backend.Compilation._program

    def counted(self, record, gm, static):
        values = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
        symbols = [v for v in values if isinstance(v, torch.SymInt)]
        symbols += [size for v in values if isinstance(v, torch.Tensor) for size in v.shape if isinstance(size, torch.SymInt)]
        before = len(symbols[0].node.shape_env.guards) if symbols else 0
        result = program(self, record, gm, static)
        counts.append((len(symbols[0].node.shape_env.guards) if symbols else 0) - before)
        return result

    monkeypatch.setattr(backend.Compilation, "_program", counted)
    return counts


def exact(fn, *inputs):
    return fn(*(x.double() if x.is_floating_point() else x for x in inputs))


def check(got, eager, wanted):
    """As near to float64 as eager mode is, and 8 ulp of the largest value."""
    error, theirs = ((x.double() - wanted).abs().max() if x.numel() else torch.zeros(()) for x in (got, eager))
    assert got.shape == eager.shape and got.dtype == eager.dtype
    assert error <= theirs + 8 * torch.finfo(got.dtype).eps * (wanted.abs().max() if wanted.numel() else 1), f"{error} for {theirs}"


FUNCTIONS = {
    "softmax": lambda x: torch.softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "sum of rows and columns": lambda x: x.sum(0) + x.sum(1, keepdim=True),
    "transposed": lambda x: (x.t() * 2).contiguous().flatten().cumsum(0),
    "product": lambda x: x @ x.t(),
    "stencil": lambda x: x[:, 1:] - x[:, :-1],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lengths_from_2_to_4096_are_one_graph(name, guards_added):
    fn = FUNCTIONS[name]
    compiler = Compiler()
    compiled = compiler(fn, dynamic=True)
    with torch.no_grad():
        # PyTorch specialises the one difference of a row of 2, and squares if the first input is one; products of long rows take their time.
        for length in {"stencil": LENGTHS[2:], "product": LENGTHS[::3]}.get(name, LENGTHS):
            x = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
            check(compiled(x), fn(x), exact(fn, x))
        assert compiler.graphs == 1
        for length in (1, 0) if name != "layer norm" else (1,):
            x = torch.randn(3, length)
            check(compiled(x), fn(x), exact(fn, x))
        assert compiler.graphs <= 3
    assert guards_added == [0] * len(guards_added) and guards_added


def test_automatic_dynamic_after_the_second_length():
    compiler = Compiler()
    linear = nn.Linear(16, 24)
    compiled = compiler(lambda x: F.gelu(linear(x)).softmax(-1))
    with torch.no_grad():
        for length in (5, 9, 2, 17, 100, 33):
            x = torch.randn(length, 16)
            same(compiled(x), F.gelu(linear(x)).softmax(-1), scale=64)
    assert compiler.graphs == 2


def test_products_have_versions_for_few_rows_and_for_many():
    torch.manual_seed(0)
    weight = torch.randn(128, 96)
    compiled = torch.compile(F.linear, backend="deplo", dynamic=True, options={"strict": True})
    for rows in (2, 300, 3, 2, 64):
        x = torch.randn(rows, 96)
        check(compiled(x, weight), F.linear(x, weight), F.linear(x.double(), weight.double()))
    for rows in (2, 300):
        (graph,) = deplo.explain(F.linear, torch.randn(rows, 96), weight, dynamic=True).graphs
        assert all(k.flops == 2 * rows * 128 * 96 for k in graph.kernels if k.calls)
        calls = {k.name: k.calls for k in graph.kernels}
        assert sorted(name.endswith("_small") for name in calls) == [False, True], calls
        assert all((count > 0) == (name.endswith("_small") == (rows <= 2)) for name, count in calls.items()), calls


def test_a_layer_of_any_length_is_one_kernel():
    """Whole register blocks and those at the end of a tile, for all lengths around them."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 72)
    wide = nn.Linear(64, 72).double()
    wide.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, backend="deplo", dynamic=True, options={"strict": True})
    with torch.no_grad():
        for rows in (*range(2, 35), 83, 84, 85, 88, 97, 98, 99, 112):
            x = torch.randn(rows, 64)
            check(compiled(x), layer(x), wide(x.double()))
        (graph,) = deplo.explain(layer, torch.randn(7, 64), dynamic=True).graphs
    assert [k.calls for k in graph.kernels if not k.once] == [1]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_gradients_of_any_batch_and_length():
    torch.manual_seed(0)
    layer, wide = Attention(), Attention().double()
    wide.load_state_dict(layer.state_dict())
    compiler = Compiler()
    compiled = compiler(layer, dynamic=True)
    first = 0
    for batch, length in ((3, 5), (4, 17), (7, 33), (6, 9)):
        x = torch.randn(batch, length, 16)
        gradients = []
        for fn, module in ((compiled, layer), (layer, layer), (wide, wide)):
            loss = fn(x.to(module.out.weight.dtype)).square().sum()
            gradients.append(torch.autograd.grad(loss, list(module.parameters())))
        largest = max(g.abs().max() for g in gradients[2])
        for got, eager, true in zip(*gradients, strict=True):
            assert (got - true).abs().max() <= (eager - true).abs().max() + 32 * torch.finfo(torch.float32).eps * largest
        first = first or compiler.graphs
    assert compiler.graphs == first


def test_a_prompt_of_any_length_fills_a_static_cache():
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    torch.manual_seed(0)
    config = LlamaConfig(64, 32, 48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    model = LlamaForCausalLM(config).eval()
    wide = copy.deepcopy(model).double()

    def prefill(fn, ids, dtype=torch.float32):
        """Logits, keys and values. The cache is there before the first call, as between prompts."""
        cache = StaticCache(config, 64)
        cache.early_initialization(2, 2, 8, dtype, torch.device("cpu"))
        logits = fn(input_ids=ids, past_key_values=cache, cache_position=torch.arange(ids.shape[1]), use_cache=True).logits
        return [logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))]

    compiler = Compiler()
    compiled = compiler(model)
    with torch.no_grad(), backend.collect_records() as records:
        for length in (9, 33, 2, 64, *range(3, 61, 4), 63):
            ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length))
            same(prefill(compiled, ids), prefill(model, ids), exact=prefill(wide, ids, torch.float64))
    assert 1 <= len(records) <= compiler.graphs <= 2 and all(record.program is not None for record in records)


def test_strides_are_symbols_too():
    fn = lambda x: (x * 2).sum(-1) + x[:, 0]  # noqa: E731
    compiler = Compiler()
    compiled = compiler(fn, dynamic=True)
    with torch.no_grad():
        for rows, columns, wide in ((4, 6, 11), (5, 9, 30), (17, 33, 64), (3, 8, 10)):
            x = torch.randn(rows, wide)[:, 1 : columns + 1]
            check(compiled(x), fn(x), exact(fn, x))
    assert compiler.graphs == 1


def test_mark_dynamic_and_a_range():
    compiler = Compiler()
    compiled = compiler(lambda x: torch.softmax(x, 0))
    with torch.no_grad():
        for length in (6, 2, 64, 31):
            x = torch.randn(length, 5)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
            same(compiled(x), torch.softmax(x, 0))
    assert compiler.graphs == 1


def test_exported_programs_with_dynamic_sizes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, y):
            return torch.cat([self.linear(x), y], 0).softmax(0)

    net = Net()
    rows, more = torch.export.Dim("rows", min=2, max=512), torch.export.Dim("more", min=2, max=512)
    exported = torch.export.export(net, (torch.randn(4, 8), torch.randn(3, 8)), dynamic_shapes={"x": {0: rows}, "y": {0: more}})
    compiler = Compiler()
    compiled = compiler(exported.module(), dynamic=True)
    with torch.no_grad():
        for n, m in ((4, 3), (9, 2), (100, 77)):
            x, y = torch.randn(n, 8), torch.randn(m, 8)
            same(compiled(x, y), net(x, y), scale=64)
    assert compiler.graphs == 1


def cond(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def scan(x):
    from torch._higher_order_ops.scan import scan as torch_scan

    return torch_scan(lambda carry, row: (carry + row, carry * row), torch.zeros_like(x[0]), x)[1]


def flex(x):
    from torch.nn.attention.flex_attention import flex_attention

    q = x[None, None].expand(1, 2, -1, -1)
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -float("inf")))


def checkpointed(x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: torch.tanh(x).softmax(-1), x, use_reentrant=False) * 2


@pytest.mark.parametrize("fn", [cond, scan, flex, checkpointed])
def test_nested_subgraphs(fn):
    """Generated, or run by ATen with the reason in one warning; the numbers are eager mode's."""
    compiled = torch.compile(fn, backend=deplo.deplo, dynamic=True)
    for length in (5, 9):
        x = torch.randn(length, 16) + (length - 7)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = compiled(x)
        texts = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
        assert all("deplo does not compile that" in text and "getitem" not in text for text in texts) and len(texts) <= 1, texts
        eager = fn(x)
        assert (got - eager).abs().max() <= 64 * torch.finfo(x.dtype).eps * eager.abs().max()


def region(x):
    step = torch.compiler.nested_compile_region(lambda x: torch.tanh(x) * x)
    return step(step(x))


def checkpointed_branch(x):
    return torch.cond(x.sum() > 0, checkpointed, lambda x: x.cos(), (x,))


@pytest.mark.parametrize("nested", [cond, scan, region, checkpointed, checkpointed_branch])
def test_gradients_through_nested_subgraphs(nested):
    """What stays in eager mode says why; what is around it is generated."""

    def fn(x, w):
        return (nested(x @ w) * w[0]).softmax(-1)

    def gradients(call, dtype, *inputs):
        x, w, along = (t.to(dtype, copy=True) for t in inputs)
        y = call(x.requires_grad_(), w.requires_grad_())
        return y, *torch.autograd.grad(y, (x, w), along)

    compiled = torch.compile(fn, backend="deplo", dynamic=True)
    with warnings.catch_warnings(record=True) as caught, backend.collect_records() as records:
        warnings.simplefilter("always")
        for length, shift in ((5, -1), (9, 1)):  # the one branch and the other
            generator = torch.Generator().manual_seed(length)
            x, along = torch.randn(length, 16, generator=generator), torch.randn(length, 16, generator=generator)
            w = torch.randn(16, 16, generator=generator).abs() / 16 * shift
            got, eager, exact = (
                gradients(f, dtype, x.abs(), w, along) for f, dtype in ((compiled, torch.float32), (fn, torch.float32), (fn, torch.float64))
            )
            same(got, eager, exact=exact)
    assert {record.kind for record in records} == {"forward", "backward"} and any(record.program is not None for record in records)
    texts = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
    reason = {cond: "cond", scan: "scan", checkpointed_branch: "cond"}.get(nested)
    assert bool(texts) == (reason is not None) and all(f"deplo does not compile that: {reason} is not an ATen overload" in text for text in texts), (
        texts
    )


def test_checkpoint_with_gradients_is_generated():
    compiler = Compiler()
    compiled = compiler(checkpointed, dynamic=True)
    for length in (5, 9, 33):
        x = torch.randn(length, 16, requires_grad=True)
        along = torch.randn(length, 16)
        gradients = [torch.autograd.grad(f(x), x, along)[0] for f in (compiled, checkpointed)]
        same(*gradients, scale=64)
    assert compiler.graphs == 1


DATA_SIZED = {
    "boolean mask": lambda x: (x * 2)[x > 0].exp(),
    "nonzero": lambda x: (x > 0).nonzero() * 3,
    "repeat by counts": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long() + 1, 0) * 2,
    "item as a size": lambda x: torch.ones(int((x > 0).sum().item()) + 2).cumsum(0),
    "unique": lambda x: torch.unique((x * 2).round()) + 1,
}


@pytest.mark.parametrize("captured", [True, False], ids=["unbacked symbols", "graph break"])
@pytest.mark.parametrize("name", DATA_SIZED)
def test_sizes_of_data(name, captured):
    fn = DATA_SIZED[name]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=captured, capture_scalar_outputs=captured), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        compiled = torch.compile(fn, backend=deplo.deplo, dynamic=True)
        with torch.no_grad():
            for rows in (4, 9, 33):
                x = torch.randn(rows, 5)
                same(compiled(x), fn(x))


def padded_windows(x):
    """Windows of 4 of an image that is padded to a multiple of 4, and back, as in Swin: sizes are equal by arithmetic of remainders alone."""
    batch, height, width, channels = x.shape
    padded = F.pad(x, (0, 0, 0, (4 - width % 4) % 4, 0, (4 - height % 4) % 4))
    tall, wide = padded.shape[1:3]
    windows = padded.view(batch, tall // 4, 4, wide // 4, 4, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels)
    windows = windows.softmax(1) + torch.arange(16.0)[:, None]
    back = windows.view(batch, tall // 4, wide // 4, 4, 4, channels).permute(0, 1, 3, 2, 4, 5).reshape(batch, tall, wide, channels)
    return (back[:, :height, :width] * x).reshape(batch, height * width, channels)


def test_padded_windows_are_generated():
    compiler = Compiler()
    compiled = compiler(padded_windows, {"allow_library": []}, dynamic=True)
    with torch.no_grad():
        for height, width in ((5, 7), (9, 6), (17, 3), (10, 33)):
            x = torch.randn(3, height, width, 11)
            check(compiled(x), padded_windows(x), exact(padded_windows, x))
    assert compiler.graphs <= 2


def test_equalities_of_guards_reach_torch_ir(guards_added):
    """Dynamo has compared two sizes that no symbol stands for: the product of them is one size below."""
    compiler = Compiler()

    def fn(x, y):
        if x.shape[0] // 2 == y.shape[0] // 3:
            return x[: x.shape[0] // 2 * 2].view(-1, 2).sum(1) + y[: y.shape[0] // 3 * 3].view(-1, 3).sum(1)
        return x.sum()

    compiled = compiler(fn, {"allow_library": []}, dynamic=True)
    with torch.no_grad(), backend.collect_records() as records:
        for n in (4, 7, 20):
            x, y = torch.randn(2 * n + 1), torch.randn(3 * n + 2)
            same(compiled(x, y), fn(x, y), scale=16)
    assert compiler.graphs == 1 and "//" in records[0].torch_ir.split("\n")[0]
    assert " == " in records[0].torch_ir.split("\n")[0], records[0].torch_ir
    assert guards_added == [0]


PARTED = {
    "pairs": (lambda x: (x.reshape(x.shape[0], -1, 2, *x.shape[2:]).sum(2), x * 2), 8),
    "one pixel and a roll": (lambda x: (F.pixel_shuffle(x, 2), x.roll(2, 1)), 4),
    "pixels": (lambda x: (F.pixel_shuffle(x, 2), x * 2), 8),
    "pixels together": (lambda x: (F.pixel_unshuffle(x, 2), x * 2), 3),
    "groups": (lambda x: (F.group_norm(x, 2), F.channel_shuffle(x, 2)), 6),
}


@pytest.mark.parametrize("name", PARTED)
def test_gradients_of_sizes_that_divide(name):
    """Their sizes are equal by several guards together: s0 == 4*(s0 // 4) and s0 // 4 == 1 make s0 == 4."""
    fn, channels = PARTED[name]
    compiled = Compiler()(fn, {"allow_library": []}, dynamic=True)
    for batch, size in ((2, 6), (3, 8)):
        x = torch.randn(batch, channels, size, size)
        y, judge = x.clone().requires_grad_(), x.double().requires_grad_()
        x.requires_grad_()
        for call, t in ((compiled, x), (fn, y), (fn, judge)):
            sum((r.sin() * (k + 1)).sum() for k, r in enumerate(call(t))).backward()
        check(x.grad, y.grad, judge.grad)


NUMBERS = {
    "variance": (lambda x: x.var(1), lambda n: torch.randn(n, n + 3)),
    "standard deviation": (lambda x: x.std((0, 1), correction=2), lambda n: torch.randn(n, n + 3)),
    "layer norm by hand": (lambda x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), lambda n: torch.randn(3, n)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_follow_from_sizes(name, guards_added):
    """PyTorch traces 2 / (n - 1) as a symbolic float."""
    fn, make = NUMBERS[name]
    compiler = Compiler()
    compiled = compiler(fn, {"allow_library": []}, dynamic=True)
    for n in (5, 9, 17):
        x = make(n).requires_grad_()
        y = x.detach().clone().requires_grad_()
        z = x.detach().double().requires_grad_()
        results = [call(t) for call, t in ((compiled, x), (fn, y), (fn, z))]
        for result in results:
            (result * torch.linspace(0, 1, result.numel()).view_as(result)).sum().backward()
        check(results[0].detach(), results[1].detach(), results[2].detach())
        check(x.grad, y.grad, z.grad)
    assert compiler.graphs == 1
    assert guards_added == [0, 0]


RESIZES = {
    "twice as large": {"scale_factor": 2.0, "mode": "nearest"},
    "half as large again": {"scale_factor": 1.5, "mode": "bilinear"},
    "half": {"scale_factor": 0.5, "mode": "bilinear", "align_corners": True},
    "1.7 times": {"scale_factor": 1.7, "mode": "bilinear"},
    "0.3 and 2.3 times": {"scale_factor": (0.3, 2.3), "mode": "nearest"},
}


@pytest.mark.parametrize("name", [*RESIZES, "by a ratio of sizes"])
def test_interpolation_of_any_size(name, guards_added):
    def fn(x):
        return F.interpolate(x, **RESIZES[name]) if name in RESIZES else F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] + 1), mode="bilinear")

    compiler = Compiler()
    compiled = compiler(fn, {"allow_library": []}, dynamic=True)
    with torch.no_grad():
        for height, width in ((8, 10), (7, 13), (16, 5)):
            x = torch.randn(2, 3, height, width)
            check(compiled(x), fn(x), exact(fn, x))
    assert compiler.graphs <= 2  # Dynamo may compare the sizes with those of its first call
    assert set(guards_added) == {0}


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_skip_connection_between_images_of_any_size(mode):
    """The convolution reads points whose indices are computed in floats."""
    torch.manual_seed(0)

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.join = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Conv2d(12, 3, 1)

        def forward(self, x):
            return self.join(torch.cat([x, F.interpolate(self.down(x).relu(), size=x.shape[-2:], mode=mode)], 1))

    model = Skip()
    wide = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="deplo", dynamic=True, options={"strict": True})
    for shape in ((2, 4, 16, 18), (3, 4, 9, 31), (1, 4, 40, 7)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[2]))
        y, z = x.clone(), x.double()
        results = [call(t.requires_grad_()) for call, t in ((compiled, x), (model, y), (wide, z))]
        for result in results:
            result.sum().backward()
        same(results[0], results[1], exact=results[2])
        same(x.grad, y.grad, exact=z.grad)


# Views of a leaf whose elements overlap in memory, among which autograd divides the gradient of as_strided.
OVERLAPPING = {
    "all of it": lambda x: x.reshape(x.shape[0], -1),
    "all of it beside a value": lambda x: (x.reshape(x.shape[0], -1), x.sin()),
    "transposed": lambda x: (x.t(), x.sin()),
    "a part": lambda x: (x[:, 1:], x.sin()),
    "every other": lambda x: x[:, ::2],
    "expanded further": lambda x: (x.unsqueeze(1).expand(-1, 3, -1), x.sin()),
    "of a list": lambda x: (x.chunk(2)[1], x.sin()),
    "a diagonal": lambda x: x.diagonal(),
    "a chain": lambda x: (x.t()[1:].unsqueeze(0).select(2, 1), x.sin()),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_returned_views_of_an_expanded_leaf(name):
    fn = OVERLAPPING[name]
    compiled = torch.compile(fn, backend="deplo", dynamic=True, options={"strict": True})
    for rows, columns in ((4, 5), (7, 3)):
        x = torch.randn(rows, 1, generator=torch.Generator().manual_seed(rows)).expand(rows, columns).detach()
        results = []
        for call in (compiled, fn):
            leaf = x.detach().requires_grad_()
            view = call(leaf)
            view = view[0] if isinstance(view, tuple) else view
            assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            view.backward(torch.randn(view.shape, generator=torch.Generator().manual_seed(columns)))
            results.append((view.detach(), view.stride(), leaf.grad))
        torch.testing.assert_close(*results, rtol=0, atol=0)


# Sizes that are rounded floats of others: Python computes them at each call.
PARTS = {
    "two parts": lambda x: (x[: int(x.shape[0] * 0.8)] * 2).sum(0) + x[int(x.shape[0] * 0.8) :].mean(0),
    "a view": lambda x: x[: int(x.shape[0] * 0.8)],
    "rounded up": lambda x: x[: math.ceil(x.shape[0] * 0.37)] + 1,
    "rounded down": lambda x: x[: math.floor(x.shape[0] / 2.7)].exp(),
    "to the nearest": lambda x: x[: round(x.shape[0] * 0.37)] + 1,
    "of a rounded one": lambda x: x[: int(int(x.shape[0] * 0.8) * 0.7)].sum(1),
    "of both axes": lambda x: x[: int(x.shape[0] * 0.8), : int(x.shape[1] * 0.45)].softmax(0),
    "a padding": lambda x: F.pad(x, (0, int(x.shape[1] * 0.3))).sin(),
    "a product": lambda x: x[: int(x.shape[0] * 0.8)] @ x[: int(x.shape[0] * 0.8)].t(),
    "a new tensor": lambda x: torch.ones(int(x.shape[0] * 1.3), x.shape[1]).cumsum(0).mean(0) + x[0],
    "beside a call of ATen": lambda x: x[: int(x.shape[0] * 0.8)].sort(0).values.cos(),
    "a number": lambda x: x * int(x.shape[0] * 0.7),
}


@pytest.mark.parametrize("name", PARTS)
def test_sizes_that_are_rounded_floats_of_others(name, guards_added):
    fn = PARTS[name]
    compiler = Compiler()
    compiled = compiler(fn, dynamic=True)
    for rows, columns in ((10, 20), (15, 9), (23, 31), (40, 14)):
        x, y, z = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows), dtype=torch.float32) for _ in range(3))
        z = z.double()
        with torch.no_grad():
            same(compiled(x), fn(x), exact=fn(z))
        results = [call(t.requires_grad_()) for call, t in ((compiled, x), (fn, y), (fn, z))]
        # Of near equal numbers, a softmax's gradient would be what rounding leaves of their difference.
        gradient = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(columns))
        for result in results:
            result.backward(gradient.to(result.dtype))
        same(results[0].detach(), results[1].detach(), exact=results[2].detach())
        same(x.grad, y.grad, exact=z.grad)
    assert compiler.graphs == 2  # with and without gradients
    assert set(guards_added) == {0}


def test_a_size_that_is_a_rounded_float_of_data():
    """No input has it as a size: the part of the graph runs in ATen, or the whole."""

    def fn(x):
        kept = x[x > 0]
        return kept[: int(kept.shape[0] * 0.3)].sum()

    torch._dynamo.config.capture_dynamic_output_shape_ops, before = True, torch._dynamo.config.capture_dynamic_output_shape_ops
    try:
        compiled = torch.compile(fn, backend="deplo", dynamic=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for count in (20, 33):
                x = torch.randn(count, generator=torch.Generator().manual_seed(count))
                same(compiled(x), fn(x))
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = before


def test_roots_of_quotients_of_sizes_are_compiled():
    def fn(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    compiled = torch.compile(fn, backend="deplo", dynamic=True, options={"strict": True})
    for shape in ((1, 4, 5), (2, 7, 12)):
        x = torch.randn(shape)
        same(compiled(x), fn(x), exact=fn(x.double()))


def test_a_weight_that_follows_from_no_input_but_its_size():
    """Its values are known, its size is not: it is not packed once for all calls."""

    def fn(x, k):
        y = torch.nn.functional.pad(x, (k % 3, (k // 3) % 3)).clamp(-1, 0.7)
        return torch.nn.functional.linear(y, torch.linspace(-1, 1, y.shape[-1] * 7).reshape(7, -1))

    compiled = torch.compile(fn, backend="deplo", dynamic=True, options={"strict": True})
    for x, k in ((torch.randn(1, 9, 3), 1), (torch.randn(1, 9, 3), 4), (torch.randn(1, 5, 4), 2), (torch.randn(1, 40, 3), 1)):
        torch.testing.assert_close(compiled(x, k), fn(x, k))


NEGATIVE = {
    "arange down": lambda x, s, t: torch.arange(512, -512, s),
    "arange down to a size": lambda x, s, t: torch.arange(t, 0, s) + x[0, 0],
    "arange from a size": lambda x, s, t: torch.arange(x.shape[0], 0, -2),
    "quotient": lambda x, s, t: x + (7 // s) + (-t // s),
    "remainder": lambda x, s, t: x + (7 % s) * 10 + (-t % s),
    "quotient of negatives": lambda x, s, t: x + s // (0 - t) + s % (0 - t),
    "remainder of a size": lambda x, s, t: x + x.shape[0] % -4 + x.shape[0] // -4,
    "slice": lambda x, s, t: x[: max(s // -2, 1)] + x[-1],
    "slice from the end": lambda x, s, t: x[x.shape[0] // -3 :],
    "lengths": lambda x, s, t: x.new_ones(t // s + 40, (0 - t) % s + 12),
    "rows below": lambda x, s, t: torch.arange(x.shape[1])[None] // s + torch.arange(x.shape[0])[:, None] % s,
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_divisors_and_steps_below_zero(name, guards_added):
    function = NEGATIVE[name]
    compiled = torch.compile(function, backend="deplo", options={"strict": True, "guard": True}, dynamic=True)
    for rows, s, t in ((7, -3, 5), (9, -2, 12), (4, -7, 3), (7, -1, 9)):
        x = torch.randn(rows, 6)
        same(compiled(x, s, t), function(x, s, t))
    assert guards_added and not any(guards_added)


def test_a_size_divided_by_zero_fails_as_in_eager_mode():
    compiled = torch.compile(lambda x, y: x.new_ones(12 // (y.shape[0] - 5)) * y.sum(), backend="deplo", options={"strict": True}, dynamic=True)
    x = torch.randn(3)
    assert compiled(x, torch.ones(8)).shape == (4,)
    with pytest.raises((ZeroDivisionError, RuntimeError), match="(?i)division|ZeroDivisionError"):
        compiled(x, torch.ones(5))


DIVIDED = {
    "a number": lambda x, s, t: x + s // (s - t),
    "a number in a product": lambda x, s, t: x * (5 + 3 * max(s % (s - t), -2)),
    "a fill": lambda x, s, t: x.new_full((3,), s // (t - s)),
    "a result": lambda x, s, t: (x + 1, s % (t - s)),
    "a float": lambda x, s, t: x + s / (s - t),
    "a shift": lambda x, s, t: x.roll(s // (s - t), 0),
    "a shift by a remainder": lambda x, s, t: x.roll(s % (s - t), 1).sin(),
    "a slice": lambda x, s, t: x[:, max(s // (s - t), 1) + 7 :] * 2,
    "a bound": lambda x, s, t: torch.arange(s // (s - t) + 9) * 2,
    "a view": lambda x, s, t: x.reshape(-1, 40 if s // (s - t) > -90 else 20),
    "a padding": lambda x, s, t: F.pad(x, (s // (s - t), 1)),
    "a shift of nothing": lambda x, s, t: x[:0].roll(s // (s - t), 1),
}

GUARDED = ("a slice", "a bound", "a view", "a padding")


@pytest.mark.parametrize("name", DIVIDED)
def test_a_number_divided_by_zero_fails_as_in_eager_mode(name):
    fn = DIVIDED[name]
    compiled = torch.compile(fn, backend="deplo", options={"strict": True, "guard": True}, dynamic=True)
    x = torch.randn(3, 40)
    for s, t in ((5, 3), (-7, 9), (4, -4), (-3, -8), (9, 11)):
        same(compiled(x, s, t), fn(x, s, t))
    for both in (6, -4):
        with pytest.raises(ZeroDivisionError) as theirs:
            fn(x, both, both)
        # Where PyTorch guards the quotient, it traces the graph again, and says so around Python's words.
        with pytest.raises((ZeroDivisionError, torch._dynamo.exc.TorchRuntimeError)) as ours:
            compiled(x, both, both)
        assert ours.type is ZeroDivisionError or name in GUARDED
        assert str(theirs.value) in str(ours.value)
    same(compiled(x, 8, 2), fn(x, 8, 2))


def test_a_padding_that_takes_more_than_there_is_fails_as_in_eager_mode():
    def fn(x, s, t):
        return F.pad(x, (s, t)) * 2

    compiled = torch.compile(fn, backend="deplo", options={"strict": True, "guard": True}, dynamic=True)
    x = torch.randn(3, 6)
    for s, t in ((-3, 5), (-5, 2), (-6, 4), (4, -6), (-2, -3)):
        same(compiled(x, s, t), fn(x, s, t))
    for s, t in ((-7, 5), (3, -7), (-3, -4), (-9, 2)):
        for call in (fn, compiled):
            with pytest.raises(RuntimeError, match="negative"):
                call(x, s, t)


def test_layers_that_read_the_same_rows_pack_them_at_sizes_of_either() -> None:
    """Few rows are packed for the wide layer alone: what the narrow one packs there is nothing."""

    def layers(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, a), F.linear(x, b)

    compiled = torch.compile(layers, backend="deplo", options={"strict": True})
    narrow, wide = torch.randn(8, 256), torch.randn(1024, 256)
    for rows in (512, 3, 5):
        x = torch.randn(rows, 256)
        torch._dynamo.mark_dynamic(x, 0)
        for got, wanted in zip(compiled(x, narrow, wide), layers(x.double(), narrow.double(), wide.double()), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_an_epilogue_reads_rows_that_an_index_chooses() -> None:
    layer, table = nn.Linear(256, 128), torch.randn(5, 16, 128)

    def f(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return layer(x) + table[chosen]

    x, chosen = torch.randn(3, 16, 256), torch.tensor([4, 0, 2])
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(f, backend="deplo", options={"strict": True})(x, chosen), f(x, chosen), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", feature_sets())
def test_images_of_any_size(features: str, dtype: torch.dtype):
    """Windows over lines of any length: shorter than a register block, a whole number of them, with a part of one."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(5, 24, (3, 5), (1, 2), 1, (2, 1), bias=False), nn.GELU()).to(dtype)
    judge = copy.deepcopy(layer).double()

    def gradients(x: torch.Tensor, f: Callable[..., torch.Tensor], weights: nn.Module) -> list[torch.Tensor]:
        x = x.detach().requires_grad_(True)
        y = f(x)
        return [y, *torch.autograd.grad((y * y).sum(), [x, *weights.parameters()])]

    compiled = Compiler()(layer, {"features": features, "guard": True}, dynamic=True)
    for batch, height, width in [(2, 20, 40), (3, 7, 4), (2, 9, 27), (5, 30, 61), (2, 5, 130)]:
        x = torch.randn(batch, 5, height, width, dtype=dtype)
        with torch.no_grad():
            same(compiled(x), layer(x), strides=False, exact=judge(x.double()))
        same(gradients(x, compiled, layer), gradients(x, layer, layer), strides=False, exact=gradients(x.double(), judge, judge))


def test_places_of_views_of_views_stay_short():
    """Of sizes that nothing is known of: each turn would multiply how long they are."""

    def shifted(x):
        for _ in range(3):
            batch, heads, rows, columns = x.shape
            x = x.reshape(batch, heads, columns, rows)[:, :, 1:].reshape(batch, heads, rows, columns - 1)
        return x * 2

    x = torch.randn(2, 3, 9, 24)
    torch._dynamo.reset()
    with backend.collect_records() as records:
        assert torch.equal(torch.compile(shifted, backend="deplo", dynamic=True, options={"strict": True})(x), shifted(x))
    assert max(map(len, _C.lower(records[0].torch_ir, "loop", "{}").splitlines())) < 5_000
