"""Schedules as data: what is printed can be edited and given back."""

import json
import re

import pytest
import torch
from engines import feature_sets

import deplo
from deplo.cli import main
from deplo.core import core
from deplo.errors import UserError

EXPRESSION = "r(64, 96) @ r(96, 80)"


def _compile(capsys, *arguments):
    status = main(["compile", "-c", EXPRESSION, *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def _schedule(capsys):
    status, text, _ = _compile(capsys, "--ir", "tile")
    assert not status
    (line,) = re.findall(r"^schedule @\w+: contraction .*$", text, re.MULTILINE)
    return line


def _edited(line):
    edited = re.sub(r"unroll\(([^=]+)=\d+\)", r"unroll(\1=2)", line)
    edited = re.sub(r"work=\d+", "work=1000", edited)
    assert edited != line
    return edited


def test_the_printed_schedule_changes_nothing(capsys):
    _, before, _ = _compile(capsys, "--ir", "asm")
    _, after, _ = _compile(capsys, "--ir", "asm", "--schedule", _schedule(capsys))
    assert after == before


def test_an_edited_schedule_changes_the_machine_code(capsys, tmp_path):
    edited = _edited(_schedule(capsys))
    _, before, _ = _compile(capsys, "--ir", "asm")
    path = tmp_path / "schedule.txt"
    path.write_text(edited)
    status, after, _ = _compile(capsys, "--ir", "asm", "--schedule", str(path))
    assert not status and after != before
    _, tile, _ = _compile(capsys, "--ir", "tile", "--schedule", str(path))
    assert edited in tile


def test_an_edited_schedule_gives_the_same_numbers(capsys):
    line = _edited(_schedule(capsys))
    name, text = re.fullmatch(r"schedule @(\w+): (.*)", line).groups()
    x, y = torch.randn(64, 96), torch.randn(96, 80)
    wanted = x.double() @ y.double()
    for given in (line, {name: text}):
        torch._dynamo.reset()
        got = torch.compile(lambda a, b: a @ b, backend="deplo", options={"strict": True, "schedule": given})(x, y)
        assert (got - wanted).abs().max() <= 96 * torch.finfo(torch.float32).eps * (x.abs().double() @ y.abs().double()).max()


@pytest.mark.parametrize("strict", [True, False])
def test_schedules_that_do_not_fit_are_refused(strict):
    x = torch.randn(8, 8)
    for given, message in (({"k9": "nest parallel(i)"}, "kernel k9"), ("schedule @k9: nest", "kernel k9"), ("nest parallel(i)", "names no kernel")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message) as raised:
            torch.compile(lambda a: a + 1, backend="deplo", options={"strict": strict, "schedule": given})(x)
        error = raised.value
        causes = (error, getattr(error, "inner_exception", None), error.__cause__)
        assert any(isinstance(cause, UserError) for cause in causes)


def test_the_command_line_names_what_is_wrong(capsys):
    status, _, error = _compile(capsys, "--schedule", "schedule @k9: nest parallel(i)")
    assert status == 1 and "kernel k9" in error
    status, _, error = _compile(capsys, "--schedule", "no/such/file")
    assert status == 1 and "expected a file or text" in error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packed_weights_take_no_more_memory_than_the_weights(dtype):
    layer = torch.nn.Linear(256, 512, bias=False).to(dtype)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    # In three parts, for a matrix unit, float32 takes half as much again.
    options = {"strict": True, "features": feature_sets()[0] if dtype == torch.float32 else "native"}
    with torch.no_grad():
        (graph,) = deplo.explain(layer, x, options=options).graphs
        wanted = x.double() @ layer.weight.double().T
        error, eager = ((y.double() - wanted).abs().max() for y in (torch.compile(layer, backend="deplo", options=options)(x), layer(x)))
    assert error <= eager + 2 * torch.finfo(dtype).eps * wanted.abs().max()
    assert graph.description["memory"]["packed_bytes"] == layer.weight.nbytes


def test_layers_of_bf16_use_the_dot_products_of_the_cpu(capsys):
    found = json.loads(core().env(""))["cpu features"]
    pairs = "avx512bf16" in found
    unit = "amx-bf16" in found
    sets = {"native": (pairs and not unit, unit), "avx2": (False, False)} | ({"avx512": (pairs, False)} if "avx512f" in found else {})
    for features, (uses_pairs, uses_unit) in sets.items():
        texts = {}
        for level in ("tile", "asm"):
            expression = "nn.Linear(256, 96).bfloat16()(r(40, 256).bfloat16())"
            assert not main(["compile", "-c", expression, "--ir", level, "--option", f"features={features}"])
            texts[level] = capsys.readouterr().out
        assert ("dot(r0.k0=2)" in texts["tile"]) == uses_pairs
        assert ("dot(r0.k0=32)" in texts["tile"]) == uses_unit
        assert ("vdpbf16ps" in texts["asm"]) == uses_pairs
        assert ("tdpbf16ps" in texts["asm"]) == uses_unit


@pytest.mark.parametrize("features", ["native", "avx512", "avx2", "sse"])
def test_pairs_of_bf16_are_as_exact_as_eager(features):
    if features == "avx512" and "avx512f" not in json.loads(core().env(""))["cpu features"]:
        features = "native"  # a CPU without them has no pairs to leave out
    layer = torch.nn.Linear(256, 96).bfloat16().requires_grad_(False)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad():
        torch._dynamo.reset()
        got = torch.compile(layer, backend="deplo", options={"strict": True, "features": features})(x)
        eager = layer(x)
    error, allowed = ((y.double() - wanted).abs().max() for y in (got, eager))
    assert error <= allowed + torch.finfo(torch.bfloat16).eps * wanted.abs().max() / 2


@pytest.mark.parametrize("rows", [8, 17, 33, 130])
@pytest.mark.parametrize(("depth", "lanes"), [(32, 1), (96, 40), (544, 300), (1056, 65), (70, 64)])
def test_layers_of_bf16_of_any_size_are_as_exact_as_eager(rows, depth, lanes):
    generator = torch.Generator().manual_seed(rows)
    layer = torch.nn.Linear(depth, lanes).bfloat16().requires_grad_(False)
    x = torch.randn(rows, 2 * depth, generator=generator).bfloat16()[:, ::2]
    wanted = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad():
        got = torch.compile(layer, backend="deplo", options={"strict": True, "guard": True}, dynamic=False)(x)
        error, allowed = ((y.double() - wanted).abs().max() for y in (got, layer(x)))
    assert error <= allowed + torch.finfo(torch.bfloat16).eps * wanted.abs().max() / 2


@pytest.mark.parametrize("rows", [48, 65, 130])
@pytest.mark.parametrize(("depth", "lanes"), [(64, 1), (96, 40), (544, 300), (1056, 65)])
def test_layers_of_float32_of_any_size_are_as_exact_as_eager(rows, depth, lanes):
    generator = torch.Generator().manual_seed(rows)
    layer = torch.nn.Linear(depth, lanes).requires_grad_(False)
    x = torch.randn(rows, 2 * depth, generator=generator)[:, ::2]
    wanted = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(layer, backend="deplo", dynamic=False, options={"strict": True})(x)
        error, allowed = ((y.double() - wanted).abs().max() for y in (got, layer(x)))
    assert error <= allowed + 2 * torch.finfo(torch.float32).eps * wanted.abs().max()


def test_layers_of_float32_use_the_matrix_unit(capsys):
    unit = {"amx-bf16", "avx512bf16"} <= set(json.loads(core().env(""))["cpu features"])
    for features, uses_unit in (("native", unit), ("avx2", False)):
        assert not main(["compile", "-c", "nn.Linear(256, 96)(r(64, 256))", "--ir", "tile", "--option", f"features={features}"])
        assert ("dot(r0.k0=32, parts=3)" in capsys.readouterr().out) == uses_unit


def test_long_sums_of_layers_are_as_exact_with_any_features():
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(16384, 64, bias=False).requires_grad_(False)
    layer.weight.abs_()
    x = torch.rand(48, 16384, generator=generator)
    wanted = x.double() @ layer.weight.double().T
    errors = []
    for features in ("native", "avx2"):
        torch._dynamo.reset()
        got = torch.compile(layer, backend="deplo", options={"strict": True, "features": features})(x)
        errors.append((got.double() - wanted).square().mean().sqrt())
    assert errors[0] <= 1.5 * errors[1]


def test_layers_of_whole_numbers_are_exact():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**12), 2**12, (64, 96), generator=generator).float()
    weight = torch.randint(-(2**5), 2**5, (40, 96), generator=generator).float()
    layer = torch.nn.Linear(96, 40, bias=False).requires_grad_(False)
    layer.weight.copy_(weight)
    for y in (x, x * 2.0**-9, x / 2**12):
        assert torch.equal(torch.compile(layer, backend="deplo", options={"strict": True})(y).double(), y.double() @ weight.double().T)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("in_weight", [False, True])
def test_infinity_and_nan_in_layers_are_eager_modes(in_weight, dynamic):
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(96, 40).requires_grad_(False)
    x = torch.randn(65, 96, generator=generator)
    largest = torch.finfo(torch.float32).max
    layer.weight[0] = 2.0**-9  # the largest numbers do not overflow there
    layer.weight[1, :50] = 0
    x[5] = 2.0**-9
    x[6, :50] = 0
    values = [float("inf"), -float("inf"), float("nan"), largest, -largest, torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32).item()]
    target = layer.weight if in_weight else x
    for i, value in enumerate(values):
        target[10 + i, 3 * i] = value
    target[20, 1], target[20, 2] = float("inf"), -float("inf")
    target[21, 1], target[21, 2] = float("inf"), float("inf")
    torch._dynamo.reset()
    with torch.no_grad():
        got, eager = torch.compile(layer, backend="deplo", dynamic=dynamic)(x), layer(x)
    wanted = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    assert torch.equal(got.isnan(), eager.isnan())
    finite = wanted.abs() < largest / 2
    torch.testing.assert_close(got[finite].double(), wanted[finite], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[eager.isinf()], eager[eager.isinf()])


def test_codes_of_four_bits_are_for_versions_that_look_at_the_weights():
    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.register_buffer("weight", torch.randint(-8, 8, (512, 256), dtype=torch.int8))
    layer.register_buffer("zero", torch.randint(-8, 8, (512, 8), dtype=torch.int8))
    layer.register_buffer("scale", torch.rand(512, 8))

    def forward(x):
        whole = (layer.weight.reshape(512, 8, 32).float() - layer.zero[:, :, None].float()) * layer.scale[:, :, None]
        return torch.nn.functional.linear(x, whole.reshape(512, 256))

    layer.forward = forward
    x = torch.randn(1, 256)
    kernels = {k.name: k.schedule for k in deplo.explain(layer, x, options={"strict": True}).graphs[0].kernels}
    (main_kernel,) = [name for name in kernels if name + "_few_bits" in kernels and not name.startswith("pack_")]
    few, centered = kernels[main_kernel + "_few_bits"], kernels[main_kernel + "_few_bits_centered"]
    for given in ({main_kernel: few}, {main_kernel: kernels[main_kernel], main_kernel + "_few_bits": centered}):
        torch._dynamo.reset()
        with pytest.raises(UserError, match="where weights allow it"):
            torch.compile(layer, backend="deplo", options={"strict": True, "schedule": given})(x)
    torch._dynamo.reset()
    given = {main_kernel: kernels[main_kernel], main_kernel + "_few_bits": few}
    whole = (layer.weight.double().reshape(512, 8, 32) - layer.zero.double()[:, :, None]) * layer.scale.double()[:, :, None]
    exact = x.double() @ whole.reshape(512, 256).T
    got = torch.compile(layer, backend="deplo", options={"strict": True, "schedule": given})(x)
    error, theirs = ((y.double() - exact).abs().max() for y in (got, forward(x)))
    assert error <= theirs + 2 * torch.finfo(torch.float32).eps * exact.abs().max()
