"""FX graphs as Torch IR text: names, symbols, attributes, kinds, writes, aliases, provenance."""

from __future__ import annotations

import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deplo.capture import capture
from deplo.errors import UnsupportedError


def text_of(fn, *inputs, dynamic=None):
    with torch.no_grad():
        records = capture(fn, inputs, dynamic=dynamic)
    assert len(records) == 1
    return records[0].torch_ir


def without_provenance(text):
    return re.sub(r' (at|in) "[^"]*"', "", text)


def test_softmax_keeps_every_argument():
    assert without_provenance(text_of(lambda x: torch.softmax(x, -1), torch.randn(4, 8))) == (
        "torch @inference(%x: f32[4, 8] strides [8, 1] user)\n"
        "  %_softmax: f32[4, 8] strides [8, 1] = aten._softmax.default(self=%x, dim=-1, half_to_float=false)\n"
        "  return %_softmax\n"
    )


def test_symbolic_sizes_have_ranges_and_hints():
    def fn(x):
        return torch.cat([x, x], 1).sum(1) * x.shape[0]

    with torch.no_grad():
        (record,) = capture(fn, (torch.randn(6, 5),), dynamic=True)
    s, t = re.search(r"%x: f32\[(s\d+), (s\d+)\]", record.torch_ir).groups()
    assert f"f32[{s}, 2*{t}]" in record.torch_ir
    assert f"{s}: sym" in record.torch_ir
    assert f"{s} in 2.." in record.torch_ir
    assert f"other={s})" in record.torch_ir
    assert record.hints == {s: 6, t: 5}


def test_importing_adds_no_guard():
    def fn(x):
        return x.reshape(2, -1).flip(0) * x.shape[0]

    import deplo.backend as backend
    from deplo.capture import _CaptureOnly
    from deplo.options import read_options

    compiles = []

    def compiler(gm, example_inputs):
        compiles.append(gm)
        return backend.compile_with(read_options(options={"strict": True}), gm, example_inputs, _CaptureOnly)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=compiler, dynamic=True)
    with torch.no_grad():
        for n in range(4, 40, 2):
            x = torch.randn(n, 3)
            torch.testing.assert_close(compiled(x), x.reshape(2, -1).flip(0) * n)
    assert len(compiles) == 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.fc(x) + self.shift + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_input_kinds_and_writes():
    text = text_of(Net(), torch.randn(3, 4))
    assert "%fc_weight: f32[4, 4] strides [4, 1] parameter static" in text
    assert "%shift: f32[4] strides [1] buffer static" in text
    assert re.search(r"%calls: f32\[\] strides \[\] buffer[,)]", text)
    assert "constant static" in text
    assert re.search(r"write %\w+ to %calls\n", text)


def test_provenance_names_line_and_module():
    text = text_of(Net(), torch.randn(3, 4))
    assert re.search(r'aten.addmm.default\(.*\) at "test_front_import.py:\d+" in "fc:linear"', text)


def test_provenance_names_what_the_user_called():
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4)])

    def fn(x):
        for layer in layers:
            x = layer(x)
        x = F.scaled_dot_product_attention(x, x, x).softmax(-1)
        x = checkpoint(lambda x: F.gelu(x @ x.mT), x, use_reentrant=False)
        y = x.clone()
        y += 1
        y[0] = 2
        return y, operator.sub(torch.ops.aten.silu.default(y), 1), x.add_(1)

    (forward, backward) = capture(fn, (torch.randn(3, 4, 4),), backward=True)

    def called(record):
        calls = re.findall(r' = aten\.(\w+)\.\w+\(.*?\)(?: at "[^"]*")?(?: in "[^":]*(?::(\w+))?")?$', record.torch_ir, re.MULTILINE)
        return {function or op.lstrip("_") for op, function in calls}

    functions = {"linear", "layer_norm", "rms_norm", "scaled_dot_product_attention", "softmax", "gelu", "matmul", "silu"}
    assert functions | {"add", "sub", "clone", "setitem"} <= called(forward), called(forward)
    assert {f"{function}_backward" for function in functions} <= called(backward), called(backward)
    assert not {"addmm", "pow", "bmm", "fill", "iadd"} & called(forward), called(forward)


def test_training_gives_forward_and_backward():
    net = Net()
    forward, backward = capture(net, (torch.randn(3, 4),), backward=True)
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert "%tangents_1" in backward.torch_ir
    assert 'in "fc:linear_backward"' in backward.torch_ir


def test_several_results_and_none():
    text = without_provenance(text_of(lambda x: torch.max(x, 1), torch.randn(4, 8)))
    assert re.search(r"%getitem: f32\[4\] strides \[1\], %getitem_1: i64\[4\] strides \[1\] = aten.max.dim\(self=%x, dim=1\)", text)


def test_attribute_spellings():
    def fn(x):
        y = torch.full_like(x, float("-inf"), dtype=torch.float64, memory_format=torch.contiguous_format)
        z = torch.div(x, 2.0, rounding_mode="floor")
        return y, z, F.gelu(x, approximate="tanh"), x.to(torch.bfloat16), torch.cat([x, x], dim=-1), x.clamp(min=0)

    text = text_of(fn, torch.randn(2, 2))
    for part in ("fill_value=-inf", "dtype=f64", "memory_format=contiguous_format", 'rounding_mode="floor"', 'approximate="tanh"'):
        assert part in text
    assert "tensors=[%x, %x], dim=-1" in text
    assert "_to_copy.default(self=%x, dtype=bf16" in text


def test_aliasing_outputs_come_from_one_result():
    def fn(x):
        y = x + 1
        return y, y.view(-1), y[1:]

    text = text_of(fn, torch.randn(4, 8))
    assert re.search(r"return %add\n", text)
    x = torch.randn(4, 8)
    with torch.no_grad():
        y, flat, tail = torch.compile(fn, backend="aot_eager")(x)
    assert flat.data_ptr() == y.data_ptr() and tail.storage_offset() == 8


@pytest.mark.parametrize(
    ("fn", "inputs", "reason"),
    [
        (lambda x: x * 2, (torch.randn(3, dtype=torch.complex64),), "complex64"),
        (lambda x: torch.view_as_complex(x).abs(), (torch.randn(3, 2),), "complex64"),
        (lambda x: x.to(torch.float8_e5m2), (torch.randn(3),), "float8_e5m2"),
    ],
)
def test_what_torch_ir_cannot_say_is_refused(fn, inputs, reason):
    with pytest.raises(UnsupportedError, match=reason):
        text_of(fn, *inputs)


def test_sizes_that_depend_on_data_are_refused():
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(UnsupportedError, match="depends on the values"),
    ):
        text_of(lambda x: x.nonzero() * 2, torch.randn(4))


def test_a_symbol_may_follow_from_a_product():
    import sympy

    from deplo import sizes

    s, t, u = sympy.symbols("s0 s1 u0", integer=True, positive=True)
    assert sizes.unbound([s, t], set(), [2 * s, s * t]) == []
    assert sizes.unbound([s, t, u], set(), [s * t]) == ["s0", "s1", "u0"]


def test_expressions_of_sizes_read_back_with_the_same_value():
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod

    from deplo import sizes

    s, t = sympy.symbols("s0 s1", integer=True, positive=True)
    exprs = [
        FloorDiv(s * t + 1, 2 * t),
        ModularIndexing(s, 3, 4) * -2 + t**2,
        Max(1, s - t) + Min(s, t, 5),
        PythonMod(s + t, 3) * FloorDiv(s, 2) - Mod(t, 2),
        -s * FloorDiv(t + 1, 2),
    ]
    for a in range(2, 9):
        for b in range(2, 9):
            assert list(sizes.evaluator(["s0", "s1"], exprs)(a, b)) == [int(e.subs({s: a, t: b})) for e in exprs]


def test_as_strided_reads_the_value_that_owns_the_storage():
    def fn(x):
        y = x + 1
        return y[2:].as_strided((2, 2), (1, 3), 1) * 2

    text = text_of(fn, torch.randn(4, 3))
    assert "aten.as_strided.default(self=%add, size=[2, 2], stride=[1, 3], storage_offset=1)" in text
    text = text_of(lambda x: x.as_strided((2, 2), (1, 3), 4) * 2, torch.randn(4, 3)[1:])
    assert "aten.as_strided.default(self=%x, size=[2, 2], stride=[1, 3], storage_offset=1)" in text
    with pytest.raises(UnsupportedError, match="memory that its source does not show"):
        text_of(lambda x: x.as_strided((2, 2), (1, 3), 1) * 2, torch.randn(4, 3)[1:])
