"""Packages: what deplo.export writes, deplo.load and the C++ runtime run as eager mode does, and files that they refuse."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import struct
import subprocess
import sys
import typing

import pytest
import torch
from engines import feature_sets, needs_core, packed_by_others
from torch import nn

import deplo
from deplo.cli import main
from deplo.packages import read_manifest
from deplo.packaging import HEADER

pytestmark = needs_core


class Point(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


torch.utils._pytree._register_namedtuple(Point, serialized_type_name="test_packages.Point")


class Unnamed(typing.NamedTuple):
    x: torch.Tensor


class Layers(nn.Module):
    """Weights that schedules pack, and one that they read as it lies."""

    def __init__(self, width: int = 96, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(width, 3 * width, dtype=dtype)
        self.second = nn.Linear(3 * width, width, dtype=dtype)
        self.scale = nn.Parameter(torch.rand(width, dtype=dtype))

    def forward(self, x):
        return torch.relu(self.second(torch.nn.functional.gelu(self.first(x)))) * self.scale


class Counter(nn.Module):
    """Writes a buffer of its own, one of a submodule, and its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x, out):
        self.count.add_(1)
        y = self.norm(x)
        out.copy_(y.sum(0))
        return y, self.count, self.norm.running_mean


class Swap(nn.Module):
    """Buffers that become each other, and are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(4.0))
        self.register_buffer("b", torch.ones(4))

    def forward(self, x):
        before = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(before + x)
        return self.a, self.b, self.a + self.b


class Views(nn.Module):
    """Outputs that share memory with each other, with weights, with an argument that is written through views; an argument that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("left_out", torch.randn(4), persistent=False)

    def forward(self, x, unused, none=None):
        x[1:].add_(1)
        x.t()[0].mul_(2)
        z = x * 2 + self.left_out
        return z, z.T, z, x.T, self.w, self.w.T, x, torch.arange(3) + torch.tensor([1, 2, 3])


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x.long().abs()))


class Structures(nn.Module):
    def forward(self, pairs, *, scale: float, flag: bool = True):
        first, second = pairs
        total = first["a"] + second
        return {"sum": total * scale, "parts": (total[1:], [total.mT, None]), "same": second, "point": Point(total, first["a"] * 2), "number": 3}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "model.deplo")


def close(actual, wanted, dtype=torch.float32):
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """A package of Layers for every set of features that this CPU has, with a symbolic number of rows."""
    torch.manual_seed(0)
    model, path = Layers(), str(tmp_path_factory.mktemp("packages") / "layers.deplo")
    deplo.export(model, (torch.randn(8, 96),), dynamic_shapes={"x": {0: torch.export.Dim("rows", max=64)}}, path=path, features=feature_sets())
    return model, path


@pytest.mark.parametrize("features", feature_sets())
def test_each_set_of_features_runs_its_own_code_at_all_sizes(layers, features):
    model, path = layers
    loaded = deplo.load(path, options={"features": features})
    assert loaded.features == features
    for rows in (0, 1, 2, 8, 33, 64):
        x = torch.randn(rows, 96)
        close(loaded(x), model(x).detach())


def test_loading_neither_packs_nor_compiles(layers):
    from deplo.core import core

    _, path = layers
    manifest = read_manifest(path)
    packed = [tensor for tensor in manifest["tensors"] if tensor["name"].startswith("packed")]
    assert packed and all(tensor["offset"] % 4096 == 0 for tensor in packed if tensor["bytes"] >= 4096)
    before = packed_by_others()
    loaded = deplo.load(path)
    loaded(torch.randn(4, 96))
    assert core().packed_bytes() == before


def test_buffers_and_arguments_are_written(path):
    torch.manual_seed(0)
    model = Counter().train()
    x, out = torch.randn(12, 16), torch.zeros(16)
    deplo.export(copy.deepcopy(model), (x, out), path=path)
    loaded, other = deplo.load(path), deplo.load(path)
    for _ in range(3):
        mine, theirs = torch.zeros(16), torch.zeros(16)
        close(loaded(x, mine), tuple(t.detach().clone() for t in model(x, theirs)))
        close(mine, theirs.detach())
    close(loaded.buffers["norm.running_var"], model.norm.running_var)
    assert loaded.buffers["count"] == 3 and other.buffers["count"] == 0  # a model's own
    assert deplo.load(path).buffers["count"] == 0  # the file stays as it was


@pytest.mark.parametrize("model", [Swap, Views, Tied])
def test_memory_that_is_shared_or_written(path, model):
    torch.manual_seed(0)
    model = model()
    rest = (torch.randn(3),) if isinstance(model, Views) else ()
    deplo.export(copy.deepcopy(model), (torch.randn(4, 4) if rest else torch.randn(4), *rest), path=path)
    loaded = deplo.load(path)
    for _ in range(3):
        x = torch.randn(4, 4) if rest else torch.randn(4)
        mine, theirs = x.clone(), x.clone()
        outputs = loaded(mine, *rest)
        with torch.no_grad():
            close(outputs, model(theirs, *rest))
        close(mine, theirs)
        if rest:
            assert outputs[0] is outputs[2]


def test_structures_of_arguments_and_outputs(path):
    torch.manual_seed(0)
    model = Structures()
    args, kwargs = (({"a": torch.randn(4, 6)}, torch.randn(4, 6)),), {"scale": 1.5, "flag": True}
    deplo.export(model, args, kwargs, path=path)
    loaded = deplo.load(path)
    actual, wanted = loaded(*args, flag=True, scale=1.5), model(*args, **kwargs)
    assert type(actual["point"]) is Point and actual["same"] is args[0][1] and actual["number"] == 3
    close(actual, wanted)
    with pytest.raises(deplo.UserError, match="argument 2 is 2.5, but the model was exported with 1.5"):
        loaded(*args, scale=2.5, flag=True)
    with pytest.raises(deplo.UserError, match=r"the arguments are \(\*, \*\), scale=\*, flag=\*, but the model was exported with"):
        loaded((args[0][1], args[0][1]), scale=1.5, flag=True)


def test_an_exported_program_in_bfloat16(path):
    torch.manual_seed(0)
    model = Layers(64, torch.bfloat16)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    program = torch.export.export(model, (x,))
    deplo.export(program, path=path)
    close(deplo.load(path)(x), model(x).detach(), torch.bfloat16)
    with pytest.raises(deplo.UserError, match="an ExportedProgram has its arguments"):
        deplo.export(program, (x,), path=path)


def test_weights_quantized_by_torchao(path):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    for config in (Int8WeightOnlyConfig(set_inductor_config=False), Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).eval()
        quantize_(model, config)
        x = torch.randn(16, 128)
        deplo.export(model, (x,), path=path)
        manifest = read_manifest(path)
        used = {argument["tensor"] for argument in manifest["variants"][0]["arguments"] if "tensor" in argument}
        weights = [manifest["tensors"][place] for place in used if manifest["tensors"][place]["bytes"] >= 128 * 256]
        assert sum(tensor["bytes"] for tensor in weights) < 3 * 2 * 128 * 256, weights  # bytes, not floats
        close(deplo.load(path)(x), model(x).detach(), torch.bfloat16)


def test_files_hold_what_is_packed_without_the_weights(path):
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    model, x = Layers(512).eval(), torch.randn(8, 512)
    deplo.export(model, (x,), path=path, features=["native"])
    assert sum(tensor["bytes"] for tensor in read_manifest(path)["tensors"]) < 1.02 * sum(p.nbytes for p in model.parameters())
    close(deplo.load(path)(x), model(x).detach())
    layer = nn.Sequential(nn.Linear(1024, 512, bias=False)).bfloat16()
    quantize_(layer, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    x = torch.randn(4, 1024, dtype=torch.bfloat16)
    deplo.export(layer, (x,), path=path, features=["native"])
    tensors = read_manifest(path)["tensors"]
    assert sum(tensor["bytes"] for tensor in tensors) < 0.75 * 1024 * 512, tensors  # codes of four bits, scales and zero points of 32 each
    close(deplo.load(path)(x), layer(x).detach(), torch.bfloat16)


def test_sizes_are_symbols_with_ranges(path):
    class Shifted(nn.Module):
        def forward(self, x, n: int):
            return x.view(-1, 4).sum(0) + n, x.shape[0] * n

    rows = torch.export.Dim("rows", max=9)
    deplo.export(Shifted(), (torch.randn(8, 6), 5), dynamic_shapes={"x": {0: 2 * rows}, "n": torch.export.Dim.DYNAMIC}, path=path)
    loaded = deplo.load(path)
    x = torch.randn(6, 6)
    close(loaded(x, 7), Shifted()(x, 7))
    for bad, why in (
        (lambda: loaded(torch.randn(5, 6), 7), "input x: size 5 of dimension 0 is not of the form"),
        (lambda: loaded(torch.randn(20, 6), 7), r"is 10, outside the range 2..9"),
        (lambda: loaded(x.double(), 7), "input x: expected f32 .* got f64"),
        (lambda: loaded(x, x), "input n is a Tensor, expected n: an integer"),
        (lambda: loaded(x), r"the arguments are \*, but the model was exported with \*, \*"),
    ):
        with pytest.raises(deplo.UserError, match=f"{path}: .*{why}"):
            bad()


def test_composite_calls_become_kernels_as_under_torch_compile(path):
    torch.manual_seed(0)

    class Composite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x):
            y = nn.functional.interpolate(self.norm(self.conv(x)), size=(4, 4), mode="bilinear")
            z = nn.functional.interpolate(y, scale_factor=1.5)
            return self.layer(y.flatten(2)), nn.functional.pad(z, (1, 1, 1, 1), mode="reflect"), nn.functional.max_pool2d(y, 2)

    model, x = Composite().eval(), torch.randn(2, 4, 9, 9)
    for _ in range(2):  # what PyTorch's own export finds out before stands in the way of neither
        deplo.export(model, (x,), path=path, options={"allow_library": []})
        with torch.no_grad():
            close(deplo.load(path)(x), model(x))
        torch.export.export(model, (x,)).run_decompositions()


def test_what_calls_aten_runs_in_python_alone(path, capsys):
    class Sorted(nn.Module):
        def forward(self, x):
            return tuple(torch.sort(x + 1, stable=True))

    x = torch.randn(4, 50)
    deplo.export(Sorted(), (x,), path=path)
    close(deplo.load(path)(x), Sorted()(x))
    assert main(["inspect", path]) == 0
    assert "aten.sort" in capsys.readouterr().out
    with pytest.raises(deplo.UnsupportedError, match="allow_library"):
        deplo.export(Sorted(), (x,), path=path, options={"allow_library": []})


def rewritten(content: bytes, **changes: int) -> bytes:
    """The file with fields of its header changed, and the header's checksum right."""
    fields = dict(zip(("magic", "format", "reserved", "bytes", "offset", "size", "sha"), HEADER.unpack(content[: HEADER.size]), strict=True))
    header = HEADER.pack(*{**fields, **changes}.values())
    return header + hashlib.sha256(header).hexdigest().encode() + content[HEADER.size + 64 :]


def test_other_files_are_refused_by_name(layers, tmp_path):
    _, path = layers
    with open(path, "rb") as file:
        content = file.read()
    manifest = read_manifest(path)
    variant = next(v for v in manifest["variants"] if v["name"] == deplo.load(path).features)
    used = [manifest["tensors"][argument["tensor"]] for argument in variant["arguments"] if "tensor" in argument]

    def flipped(at: int) -> bytes:
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    cases = {
        "no package of deplo: it is empty": b"",
        "no package of deplo: it begins with other bytes": b"PK\x03\x04" + content[4:],
        "truncated: it has 20 bytes": content[:20],
        f"truncated: it has {len(content) - 1} bytes of {len(content)}": content[:-1],
        "damaged: it has .* bytes, not": content + b"\0",
        "of format 2, and this deplo reads format 1: a newer one wrote it": rewritten(content, format=2),
        "of format 0, and this deplo reads format 1: export it again": rewritten(content, format=0),
        "damaged: its header has another checksum": flipped(20),
        "damaged: its manifest has another checksum": flipped(len(content) - 20),
        "damaged: its manifest lies outside of it": rewritten(content, size=1 << 40),
        "damaged: its program has another checksum": flipped(variant["program"]["offset"] + 5),
        "damaged: its machine code has another checksum": flipped(variant["code"]["offset"] + 70),
    } | {f"damaged: the constant {tensor['name']} has another checksum": flipped(tensor["offset"] + tensor["bytes"] - 1) for tensor in used}
    bad = str(tmp_path / "bad.deplo")
    for why, bytes_ in cases.items():
        with open(bad, "wb") as file:
            file.write(bytes_)
        for check in ("quick", "full"):
            with pytest.raises(deplo.UserError, match=f"^{bad} is {why}"):
                deplo.load(bad, check=check)
    with pytest.raises(deplo.UserError, match="cannot be opened: No such file"):
        deplo.load(str(tmp_path / "none.deplo"))
    with pytest.raises(deplo.UserError, match="is no file"):
        deplo.load(str(tmp_path))


def with_manifest(content: bytes, change: typing.Callable[[dict], None]) -> bytes:
    """The file with another manifest, all checksums of it right."""
    offset, size = struct.unpack_from("<QQ", content, 32)
    manifest = json.loads(content[offset : offset + size])
    change(manifest)
    text = json.dumps(manifest).encode()
    made = content[:offset] + text
    return rewritten(made, bytes=len(made), size=len(text), sha=hashlib.sha256(text).hexdigest().encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["variants"][0]["entries"].__setitem__(0, m["variants"][0]["text_bytes"]),
        lambda m: m["variants"][0]["entries"].__setitem__(0, -1),
        lambda m: m["variants"][0]["entries"].pop(),
        lambda m: m["variants"][0]["code"].__setitem__("bytes", 1 << 60),
        lambda m: m["variants"][0].__setitem__("text_bytes", 100),
        lambda m: m["variants"][0]["arguments"].pop(),
        lambda m: m["variants"][0]["arguments"].__setitem__(0, {"tensor": 1 << 40}),
        lambda m: m["tensors"][0].__setitem__("offset", -64),
        lambda m: m["tensors"][0]["sizes"].__setitem__(0, 1 << 50),
        lambda m: m["tensors"][0]["strides"].__setitem__(0, 1 << 30),
        lambda m: m["tensors"][0].__setitem__("dtype", "f33"),
        lambda m: m["outputs"][0].__setitem__("index", 7),
        lambda m: m.pop("variants"),
    ],
)
def test_a_manifest_that_points_elsewhere_is_refused(layers, tmp_path, change):
    with open(layers[1], "rb") as file:
        content = file.read()
    bad = tmp_path / "bad.deplo"
    bad.write_bytes(with_manifest(content, change))
    with pytest.raises(deplo.UserError, match=f"^{bad} is damaged: "):
        deplo.load(bad)


def test_a_function_that_deplo_lacks_and_a_cpu_that_lacks_features_are_named(layers, tmp_path):
    with open(layers[1], "rb") as file:
        content = file.read()
    bad = tmp_path / "bad.deplo"
    bad.write_bytes(with_manifest(content, lambda m: m["variants"][0]["externals"].append("system")))
    with pytest.raises(deplo.UserError, match="calls system, which this deplo does not have"):
        deplo.load(bad)
    bad.write_bytes(with_manifest(content, lambda m: [v["features"].append("avx999") for v in m["variants"]]))
    with pytest.raises(deplo.UserError, match="holds no code for this CPU: .* this CPU lacks avx999"):
        deplo.load(bad)


def test_exports_that_fail_leave_the_file_before(path):
    class Holds(nn.Module):
        def forward(self, x):
            return x + x.item()

    class Named(nn.Module):
        def forward(self, x):
            return Unnamed(x + 1)

    with open(path, "w") as file:
        file.write("before")
    for args, options, kind, why in (
        ((Layers(), (torch.randn(2, 96),)), {"features": ["avx9"]}, deplo.UserError, "features has 'avx9'"),
        ((Layers(), torch.randn(2, 96)), {}, deplo.UserError, "args is a Tensor"),
        ((lambda x: x, ()), {}, deplo.UserError, "export takes a torch.nn.Module"),
        ((Holds(), (torch.tensor(2.0),)), {}, deplo.UnsupportedError, "the symbolic number"),
        ((Named(), (torch.ones(2),)), {}, deplo.UnsupportedError, "structure without a name: .* namedtuple class .*Unnamed"),
        ((Layers(), (torch.randn(2, 96),)), {"options": {"target": "cuda"}}, deplo.UserError, "packages hold programs for CPUs"),
    ):
        with pytest.raises(kind, match=why):
            deplo.export(*args, path=path, **options)
    with open(path) as file:
        assert file.read() == "before"
    assert os.listdir(os.path.dirname(path)) == ["model.deplo"]
    with pytest.raises(deplo.UserError, match="none/m.deplo cannot be written: No such file"):
        deplo.export(Layers(), (torch.randn(2, 96),), path=os.path.join(os.path.dirname(path), "none/m.deplo"))


LOAD = """
import sys, time, torch
from deplo.packages import load
start = time.perf_counter()
model = load(sys.argv[1])
y = model(torch.ones(3, 96))
print(f"loaded and called in {time.perf_counter() - start:.3f} s", file=sys.stderr)
shared = [line.split()[1] for line in open("/proc/self/maps") if line.rstrip().endswith(sys.argv[1])]
compilers = {"torch._dynamo", "torch._inductor", "deplo.backend", "deplo.fx_import"}
print(y.double().sum().item(), *shared, *compilers.intersection(sys.modules))
sys.stdin.read()
"""


def test_processes_share_a_mapping_and_trace_nothing(layers):
    model, path = layers
    start = [sys.executable, "-c", LOAD, path]
    processes = [subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [process.stdout.readline().split() for process in processes]  # both have it open
    for process in processes:
        process.communicate()
    wanted = model(torch.ones(3, 96)).double().sum().item()
    for total, *rest in lines:
        assert abs(float(total) - wanted) < 1e-2
        assert rest and set(rest) == {"r--s"}, rest  # neither Dynamo nor what compiles is imported


def test_inspect_prints_the_manifest(layers, capsys):
    _, path = layers
    assert main(["inspect", path]) == 0
    shown = capsys.readouterr().out
    assert "input              x: f32[" in shown and "0..64" in shown
    for features in feature_sets():
        assert f"code for {features}" in shown
    assert main(["inspect", "--json", path]) == 0
    assert json.loads(capsys.readouterr().out) == read_manifest(path)
    assert main(["inspect", __file__]) == 1
    assert "is no package of deplo" in capsys.readouterr().err
