"""The target cuda by torch.compile: on a GPU where there is one, else on a driver that emulates it. NVRTC compiles each kernel for GPUs, too."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from devices import EMULATED, Driver, Gpu, fetched, is_clean
from devices import device as device
from devices import driver as driver
from engines import Compiler, same
from program_cases import CASES, Case
from test_cases import CONCATENATIONS, Layer, check, each

import deplo
from deplo.capture import unwrapped_errors
from deplo.cli import main
from deplo.errors import FallbackWarning, UnsupportedError, UserError
from deplo.fx_import import import_graph
from deplo.numerics import exact_value, functions
from deplo.targets import find_target, packaged

pytestmark = pytest.mark.usefixtures("fresh_inference")

_C = pytest.importorskip("deplo._C")
ARCHS = ("sm_80", "sm_90")
EMULATOR = {"target": "cuda", "cuda_driver": EMULATED, "nvrtc": EMULATED}
NO_DRIVER = {"target": "cuda", "cuda_driver": "/nonexistent/libcuda.so.1"}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@functools.cache
def gpu() -> dict[str, Any]:
    """Options for this machine's GPU; without one for the emulator."""
    try:
        _C.device(json.dumps({"target": "cuda"}))
    except UnsupportedError:
        return EMULATOR
    return {"target": "cuda"}


def compiled_for_gpu(fn: Callable[..., Any], options: dict[str, Any] | None = None, **keywords: Any) -> Any:
    return Compiler()(fn, {**gpu(), **(options or {})}, **keywords)


def check_for_gpus(folder: Path) -> int:
    """NVRTC compiles what a graph dumped there, for every architecture; how many texts there are."""
    assert (nvrtc := packaged(find_target("cuda").packages["nvrtc"])), "NVRTC is missing: install requirements-dev.txt"
    texts = [path.read_text() for path in folder.glob("*/*_kernels.cu")]
    for text in texts:
        for arch in ("sm_90a",) if "wgmma" in text else ARCHS:  # which no other architecture has
            assert _C.assemble(text, json.dumps({"target": "cuda", "arch": arch, "nvrtc": nvrtc}))
    return len(texts)


def run_case(case: Case, symbolic: bool, folder: Path, device: Gpu | None) -> None:
    """On tensors of the `device`, or of the CPU, which calls copy there."""
    dims = case.sizes[0] if symbolic else case.small
    assert dims is not None
    options = gpu() if device is None else device.options
    compiled = Compiler()(case.fn, {**options, "dump_dir": str(folder)}, dynamic=True if symbolic else None)
    inputs = case.inputs(dims) if device is None else device.put(case.inputs(dims))
    got = compiled(*inputs)
    check(case, fetched(got), fetched(inputs), dims)
    assert check_for_gpus(folder) or case.kernels == 0


@pytest.mark.gpu
@each([case for case in CASES if case.small is not None])
def test_cases(case: Case, tmp_path: Path, device: Gpu):
    run_case(case, False, tmp_path, device)


@each([case for case in CASES if case.small is not None and case.sizes])
def test_cases_of_symbolic_sizes(case: Case, tmp_path: Path):
    run_case(case, True, tmp_path, None)


@pytest.mark.parametrize("name", ["bert-base", "llama-block-s32", "resnet-50"])
def test_models(name: str, tmp_path: Path):
    case = zoo.build(name, "tiny")
    inputs = case.inputs(0)

    def answers(model: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        if case.reset is not None:
            case.reset()
        return [model(**inputs).clone(), *(tensor.clone() for tensor in case.state())]

    case.model(**inputs)
    eager = answers(case.model)
    result = answers(compiled_for_gpu(case.model, {"dump_dir": str(tmp_path), "allow_library": []}, fullgraph=True))
    output, state = zoo.reference_and_state(name, "tiny", torch.float32)
    same(result, eager, exact=[output, *state])
    assert check_for_gpus(tmp_path) == 1


CUDA_LACKS = (
    "sigmoid",
    "softplus",
    "logsigmoid",
    "silu",
    "mish",
    "gelu",
    "gelu_tanh",
    "logit",
    "sinc",
    "special_entr",
    "xlogy",
    "logaddexp",
    "logaddexp2",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CUDA_LACKS)
def test_functions_that_cuda_lacks(name: str, dtype: torch.dtype, tmp_path: Path):
    """Within 8 ulp of mpmath's values, far below 0, too, and eager mode's at infinities and NaN; GELU by tanh of float64 within its losses."""
    row = next(fn for fn in functions() if fn.name == name)
    fn = row.torch if row.arity == 1 else lambda x: row.torch(x, x.abs())
    special = [0.0, -0.0, 1.0, 0.25, 0.5, 0.75, 20.5, -39.0, -41.0, -60.0, -200.0, 1e30, -1e30, math.inf, -math.inf, math.nan]
    x = torch.cat([torch.linspace(-12, 12, 500, dtype=torch.float64), torch.linspace(0, 1, 100, dtype=torch.float64), torch.tensor(special).double()])
    x = x.to(dtype)
    got = compiled_for_gpu(fn, {"dump_dir": str(tmp_path), "allow_library": []}, fullgraph=True)(x).tolist()
    info = torch.finfo(dtype)
    for v, mine, theirs in zip(x.tolist(), got, fn(x.double()).tolist(), strict=True):
        exact = exact_value(row, (v, abs(v))[: row.arity])
        want = float(exact) if exact is not None else theirs
        if name == "gelu" and v == math.inf:
            want = math.inf  # eager's vectors make NaN of it
        inner = 3 * abs(1.596 * v + 0.0714 * v**3) if name == "gelu_tanh" and dtype == torch.float64 and abs(v) < 20 else 0  # three roundings of it
        allowed = (8 + inner) * info.eps * abs(want) + 4 * info.smallest_normal * info.eps if math.isfinite(want) else 0
        assert mine == want or (math.isnan(mine) and math.isnan(want)) or abs(mine - want) <= allowed, (v, mine, want)
    assert check_for_gpus(tmp_path) == 1


# Contract


def test_writes_reach_inputs_and_leave_what_lies_between_their_elements():
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        y.add_(x)
        return x + y

    compiled = compiled_for_gpu(fn)
    for rows in (3, 3, 5):
        mine, theirs = (torch.arange(rows * 8.0).reshape(rows, 8) for _ in range(2))
        got, wanted = compiled(mine[:, :3], mine[:, 4:7]), fn(theirs[:, :3], theirs[:, 4:7])
        same((got, mine), (wanted, theirs))


def test_views_and_inputs_that_are_returned_alias_as_in_eager_mode():
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        return y, y.t(), x, x[1:], torch.arange(3)

    x = torch.randn(4, 6)
    results = compiled_for_gpu(fn)(x)
    same(results, fn(x))
    assert results[1].data_ptr() == results[0].data_ptr()
    assert results[2] is x or results[2].data_ptr() == x.data_ptr()


def test_library_calls_between_kernels():
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = torch.sort(x.exp() + 1, dim=-1)
        return values.log(), places * 2, torch.sort(values.sum(0))[0]

    compiled = compiled_for_gpu(fn, dynamic=True)
    for n in (7, 12):
        x = torch.randn(n, 9)
        same(compiled(x), fn(x))


def test_what_follows_from_weights_alone_is_made_again_when_they_change():
    layer = torch.nn.Linear(6, 5)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.exp().t() + layer.bias.sigmoid()

    compiled = compiled_for_gpu(fn)
    x = torch.randn(4, 6)
    for _ in range(3):
        same(compiled(x), fn(x))
        with torch.no_grad():
            layer.weight.mul_(0.5)


def test_training():
    def gradients(step: Callable[..., torch.Tensor], layer: torch.nn.Module) -> list[torch.Tensor]:
        dtype = next(layer.parameters()).dtype
        x, weights = torch.linspace(-1, 1, 24, dtype=dtype).reshape(4, 6), torch.arange(20, dtype=dtype).reshape(4, 5)
        layer.zero_grad()
        (step(x) * weights).sum().backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    layer = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.LayerNorm(5))
    exact = copy.deepcopy(layer).double()
    with torch.enable_grad():
        same(gradients(compiled_for_gpu(layer), layer), gradients(layer, layer), exact=gradients(exact, exact))


def test_errors_of_kernels_are_eagers():
    table = torch.randn(5, 3)
    embed = compiled_for_gpu(lambda i: torch.nn.functional.embedding(i, table) * 2)
    same(embed(torch.tensor([0, 4])), table[[0, 4]] * 2)
    with pytest.raises(IndexError, match="index out of range in self"):
        embed(torch.tensor([0, 5]))
    divide = compiled_for_gpu(lambda x, y: torch.div(x, y, rounding_mode="floor"))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        divide(torch.tensor([1, 2]), torch.tensor([1, 0]))
    same(divide(torch.tensor([7, -7]), torch.tensor([2, 2])), torch.tensor([3, -4]))


def test_an_input_is_not_written_when_a_kernel_fails():
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.sort()[0][i]

    compiled = compiled_for_gpu(fn)
    x = torch.zeros(4)
    with pytest.raises((IndexError, RuntimeError)):
        compiled(x, torch.tensor([9]))
    same(compiled(torch.zeros(4), torch.tensor([3])), torch.ones(1))


def test_many_threads_call_one_program():
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.copy_(torch.softmax(x, -1))
        return x @ x.t()

    compiled = compiled_for_gpu(fn, dynamic=True)
    compiled(torch.randn(3, 5), torch.empty(3, 5))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for n in (3, 4, 70):
                x, y = torch.randn(n, 5, generator=generator), torch.empty(n, 5)
                same((compiled(x, y), y), (x @ x.t(), torch.softmax(x, -1)))
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


# The driver: what it is asked, and what it refuses


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", CONCATENATIONS)
def test_parts_of_a_concatenation(name: str, dynamic: bool):
    """Kernels store into parts of a result that no other one has written before."""
    layer = Layer(CONCATENATIONS[name][1], [torch.randn(48, 64), torch.randn(80, 64)])
    x = torch.randn(2, 7, 64)
    same(compiled_for_gpu(layer, dynamic=dynamic)(x), layer(x), exact=layer.double()(x.double()))


def test_a_graph_is_compiled_once(driver: Driver, tmp_path: Path):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    compiled = Compiler()(fn, {**EMULATOR, "cache_dir": str(tmp_path / "kernels")})  # where no earlier run left any
    x, y = torch.randn(3, 8), torch.randn(5, 8)
    same(compiled(x), fn(x))
    first = driver.calls()
    assert first["nvrtcCompileProgram"] == first["cuModuleLoadData"] == first["cuLaunchKernel"] == 1
    same(compiled(x + 1), fn(x + 1))
    again = driver.calls()
    assert again["cuLaunchKernel"] == again["cuMemAlloc_v2"] == again["cuMemFree_v2"] == 1
    assert not {call for call in again if call.startswith("nvrtc")} | {"cuModuleLoadData"} & set(again)
    same(compiled(y), fn(y))  # Dynamo traces once more, with symbolic sizes
    assert driver.calls()["nvrtcCompileProgram"] == 1
    same(compiled(y[:4]), fn(y[:4]))
    assert driver.calls()["nvrtcCompileProgram"] == 0


def test_what_the_driver_refuses_in_a_call_is_raised(driver: Driver):
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.exp()

    compiled = Compiler()(fn, {**EMULATOR, "strict": False})
    compiled(torch.zeros(3))
    for call in ("cuMemAlloc", "cuMemcpyHtoD", "cuLaunchKernel", "cuCtxSynchronize", "cuMemcpyDtoH"):
        entry = call + ("_v2" if call.startswith("cuMem") else "")
        driver.behave(f"fail={entry}:719")
        x = torch.zeros(3)
        with pytest.raises(RuntimeError, match=rf"the CUDA driver failed in {call}: CUDA_ERROR_LAUNCH_FAILED \(unspecified launch failure\)"):
            compiled(x)
        assert x.eq(0).all()
    driver.behave("fail=cuMemAlloc_v2:2")
    with pytest.raises(UserError, match=r"emulated GPU has no \d+ bytes of memory left"):
        compiled(torch.zeros(3))
    driver.behave("")
    same(compiled(torch.zeros(3)), torch.ones(3).exp())


# Machines without a GPU


@pytest.mark.parametrize(
    "options, settings, missing",
    [
        (NO_DRIVER, "", "the CUDA driver could not be opened .*/nonexistent/libcuda.so.1.*: install NVIDIA's driver"),
        ({**EMULATOR, "nvrtc": "/nonexistent/libnvrtc.so"}, "", "NVRTC could not be opened .*: install the package nvidia-cuda-nvrtc"),
        (EMULATOR, "devices=0", "the CUDA driver finds no device"),
        (EMULATOR, "fail=cuDevicePrimaryCtxRetain:2", r"failed in cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"),
        (EMULATOR, "capability=70", "the device is sm_70"),
    ],
)
def test_without_a_gpu_graphs_run_in_eager_mode_and_say_why(options: dict[str, Any], settings: str, missing: str, tmp_path: Path, driver: Driver):
    driver.behave(settings)

    def fn(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.softmax(x, -1)

    with pytest.raises(UnsupportedError, match=f"its kernels for cuda cannot run here: .*{missing}"), unwrapped_errors():
        Compiler()(fn, options)(torch.randn(2, 3))
    torch._dynamo.reset()
    x = torch.randn(2, 3)
    wanted = fn(x.clone())
    with pytest.warns(FallbackWarning, match=f"the inference graph runs in eager mode, .*{missing}.*without the option 'target'") as seen:
        compiled = torch.compile(fn, backend="deplo", options={**options, "dump_dir": str(tmp_path)})
        same(compiled(x), wanted)
        same(compiled(x), torch.softmax(x, -1))
    assert len(seen) == 1
    (text,) = [path.read_text() for path in tmp_path.glob("*/*_kernels.cu")]
    assert text.count("__global__ void") == 2


def test_explain_lists_kernels_with_and_without_a_gpu():
    x = torch.randn(4, 6)
    about = deplo.explain(lambda x: torch.softmax(x, -1), x, options=gpu())
    assert "1 kernel and 0 library calls" in str(about) and "device: " in str(about)
    assert about.graphs[0].kernels[0].seconds > 0 and "of limit" not in str(about)
    with pytest.warns(FallbackWarning, match="install NVIDIA's driver"):
        about = deplo.explain(lambda x: torch.softmax(x, -1), x, options=NO_DRIVER)
    assert about.graphs[0].kernels[0].schedule and "became 1 kernel, but it runs in eager mode: its kernels for cuda cannot run here" in str(about)
    same(about.result, torch.softmax(x, -1))


def test_dumps_show_the_kernels_text(capfd: pytest.CaptureFixture[str]):
    x = torch.randn(4, 6)
    compiled_for_gpu(torch.exp, {"dump": "cuda"})(x)
    assert capfd.readouterr().err.startswith("# cuda\n")
    compiled_for_gpu(torch.exp, {"dump": "all", "stop_after": "tile"})(x)
    shown = capfd.readouterr().err
    assert "# tile/" in shown and "# cuda" not in shown


def test_values_of_stores_that_later_ones_cover_are_checked():
    def fn(x: torch.Tensor, i: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[i] = table[rows]
        return x

    compiled, x, table = compiled_for_gpu(fn), torch.randn(10, 64), torch.randn(5, 64)
    i, rows = torch.tensor([3, 1, 3, -1, 9, 3]), torch.tensor([4, 0, 1, 2, 3, 4])
    assert torch.equal(compiled(x, i, table, rows), fn(x, i, table, rows))
    rows[0] = 77  # of a row that the last one covers
    with pytest.raises(IndexError, match="index 77 is out of bounds for dimension 0 with size 5"):
        compiled(x, i, table, rows)

    def at_places(x: torch.Tensor, places: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[places[i]] = y
        return x

    compiled, places, y = compiled_for_gpu(at_places), torch.tensor([4, 0, 2, 1, 3, 5, 6, 7, 8, 9]), torch.randn(4, 64)
    i = torch.tensor([0, 1, 2, 0])
    assert torch.equal(compiled(x, places, i, y), at_places(x, places, i, y))
    i[0] = 77  # what is read there instead is the place of another one
    with pytest.raises(IndexError, match="index 77 is out of bounds for dimension 0 with size 10"):
        compiled(x, places, i, y)


def test_a_graph_of_views_alone_needs_no_gpu():
    x = torch.randn(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(torch.compile(lambda x: x.t(), backend="deplo", options=NO_DRIVER)(x), x.t())


def test_the_command_line_runs_on_the_same_libraries(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    if gpu() is EMULATOR:
        monkeypatch.setenv("DEPLO_CUDA_DRIVER", EMULATED)
        monkeypatch.setenv("DEPLO_NVRTC", EMULATED)
    command = ["-c", "torch.relu(r(4, 8))", "--option", "target=cuda"]
    assert main(["run", *command]) == 0
    assert main(["explain", *command]) == 0
    assert "device: " in capsys.readouterr().out
    monkeypatch.setenv("DEPLO_CUDA_DRIVER", "/nonexistent/libcuda.so.1")
    with pytest.warns(FallbackWarning, match="install NVIDIA's driver"):
        assert main(["run", *command]) == 0
    assert main(["run", *command, "--option", "strict=1"]) == 1
    assert "install NVIDIA's driver" in capsys.readouterr().err


# Tensors on GPUs, without one: what is imported (test_resident.py runs it)


def graph_on_gpu(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> torch.fx.GraphModule:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode() as mode, mode:
        return make_fx(fn, tracing_mode="fake")(*[torch.empty(shape, device="cuda") for shape in shapes])


def test_the_tensors_of_a_graph_choose_its_target():
    gm = graph_on_gpu(lambda x: x + torch.ones(3, device=x.device), (2, 3))
    imported = import_graph(gm, "inference")
    assert "cuda" not in imported.text and (imported.target, imported.device) == ("cuda", 0)
    assert _C.level_of(imported.text) == "torch"
    with pytest.raises(UnsupportedError, match="its tensors are on cuda:0, the target is cpu"):
        import_graph(gm, "inference", target="cpu")
    with pytest.raises(UnsupportedError, match="gives a tensor on another device than cuda:0"):
        import_graph(graph_on_gpu(lambda x: (x + 1).cpu(), (2, 3)), "inference")
    numbers = import_graph(graph_on_gpu(lambda x: x * torch.full((), 2.0).exp(), (2, 3)), "inference")
    assert numbers.device == 0 and "aten.exp" in numbers.text
    with pytest.raises(UnsupportedError, match="gives a tensor on another device"):  # who calls the graph gets it
        import_graph(graph_on_gpu(lambda x: (x + 1, torch.full((), 2.0)), (2, 3)), "inference")


def test_ptx_and_sass_of_an_expression(capsys):
    command = ["compile", "-c", "torch.relu(r(64, 64) + 1)"]
    assert main([*command, "--ir", "ptx", "--arch", "sm_90a"]) == 0
    assert ".target sm_90a" in capsys.readouterr().out
    assert main([*command, "--ir", "sass"]) == 0
    listing = capsys.readouterr().out
    assert ".target\tsm_80" in listing and "LDG.E.128" in listing and "STG.E.128" in listing
    assert main([*command, "--ir", "cuda", "--arch", "sm_90a"]) == 1
    assert "only --ir ptx and --ir sass have an architecture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fn", "shapes", "dtype", "dynamic"),
    [
        (lambda a, b, c, d: F.gelu(F.linear(a, b, c)) + d, [(40, 64), (72, 64), (72,), (40, 72)], torch.float16, False),
        (lambda a, b, c: F.silu(F.linear(a, b)) * F.linear(a, c), [(40, 64), (72, 64), (72, 64)], torch.bfloat16, False),
        (lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2).transpose(2, 3), [(2, 40, 3, 64), (2, 48, 3, 64)], torch.bfloat16, True),
        (lambda a, b: F.linear(a[1:].view(34, 64), b), [(34 * 64 + 1,), (40, 64)], torch.bfloat16, False),
        (lambda a, b: (a * 2) @ b, [(39, 61), (61, 70)], torch.bfloat16, False),
        (lambda a, b: (a.t() @ b).float(), [(96, 37), (96, 50)], torch.float16, True),
    ],
    ids=["epilogue", "gated", "heads", "unaligned", "prologue", "edges"],
)
def test_products_of_16_bits(fn: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype, dynamic: bool):
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    got, eager, exact = compiled_for_gpu(fn, dynamic=dynamic)(*inputs), fn(*inputs), fn(*(x.double() for x in inputs))
    assert got.dtype == eager.dtype
    assert (got.double() - exact).norm() <= 1.1 * (eager.double() - exact).norm()
    assert any("gpu_matrix" in kernel.schedule for kernel in deplo.explain(fn, *inputs, options=gpu()).graphs[0].kernels)


@pytest.mark.parametrize(
    ("fn", "shapes", "dtype", "dynamic"),
    [
        (lambda a, b, c, d: F.gelu(F.linear(a, b, c)) + d, [(150, 136), (72, 136), (72,), (150, 72)], torch.float16, False),
        (lambda a, b, c: F.silu(F.linear(a, b)) * F.linear(a, c), [(70, 328), (72, 328), (72, 328)], torch.bfloat16, False),
        (lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2), [(1, 72, 2, 64), (1, 64, 2, 48)], torch.bfloat16, False),
        (lambda a, b: (a.t() @ b).float(), [(96, 72), (96, 56)], torch.float16, False),
    ],
    ids=["epilogue", "gated", "heads", "turned"],
)
def test_products_of_tiles(fn: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype, dynamic: bool, tmp_path: Path, monkeypatch):
    """Tiles come by maps, and groups of threads multiply them, on a GPU of sm_90."""
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    kernels = deplo.explain(fn, *inputs, options=gpu()).graphs[0].kernels
    if gpu() == EMULATOR:
        assert any(kernel.schedule.startswith("gpu_tiles") for kernel in kernels)
    torch._dynamo.reset()
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    got, eager, exact = compiled_for_gpu(fn, dynamic=dynamic)(*inputs), fn(*inputs), fn(*(x.double() for x in inputs))
    assert got.dtype == eager.dtype
    assert (got.double() - exact).norm() <= 1.1 * (eager.double() - exact).norm()
    if gpu() == EMULATOR:
        assert is_clean(tmp_path / "judge")


@pytest.mark.parametrize(
    ("shape", "weight", "window", "last", "dtype"),
    [
        ((2, 16, 9, 9), (24, 16, 3, 3), {"padding": 1}, True, torch.bfloat16),
        ((2, 16, 9, 10), (24, 16, 3, 3), {"padding": 1, "stride": 2}, False, torch.bfloat16),
        ((1, 64, 7, 6), (32, 32, 3, 2), {"padding": 2, "dilation": 2, "groups": 2}, True, torch.float16),
        ((2, 3, 14, 14), (16, 3, 7, 7), {"padding": 3, "stride": 2}, False, torch.bfloat16),
        ((1, 24, 7, 7), (16, 24, 1, 1), {}, False, torch.float16),
        ((1, 24, 12, 14), (16, 24, 1, 1), {}, False, torch.bfloat16),
    ],
    ids=["channels last", "strided", "grouped and dilated", "three channels", "odd points", "points over rows"],
)
def test_convolutions_of_16_bits(
    shape: tuple[int, ...], weight: tuple[int, ...], window: dict[str, int], last: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch
):
    """Products of windows on matrix units, with what is computed from their sums, whichever way channels lie."""
    layout = torch.channels_last if last else torch.contiguous_format
    inputs = [torch.randn(s).to(dtype).to(memory_format=layout) for s in (shape, weight)] + [torch.randn(weight[0]).to(dtype)]

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, w, b, **window)
        return F.silu(y) + y

    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    got = compiled_for_gpu(fn, {"dump_dir": str(tmp_path)})(*inputs)
    eager, exact = fn(*inputs), fn(*(x.double() for x in inputs))
    assert got.dtype == eager.dtype and got.stride() == eager.stride()
    assert (got.double() - exact).norm() <= 1.2 * (eager.double() - exact).norm()
    text = next(tmp_path.glob("*/*_kernels.cu")).read_text()
    assert re.search("deplo_(mma|group_multiply)_", text) and ("deplo_copy_async_first" in text or not last)
    if gpu() == EMULATOR:
        judged = (tmp_path / "judge").read_text().splitlines()
        assert judged and all(" races=0 unwritten=0" in line for line in judged)


causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q @ k.transpose(-1, -2) * 0.2).float(), -1).to(q.dtype) @ v


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    ahead = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(ahead >= 0) & (ahead < 50))


def chosen_by_a_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.dtype == torch.float64 or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def with_a_sink(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As gpt-oss writes it: one more score, which has no value."""
    scores = torch.cat([q @ k.transpose(-1, -2), q[..., :1]], -1)
    return torch.softmax(scores - scores.amax(-1, keepdim=True), -1)[..., :-1] @ v


def with_the_greatest(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    return (weights @ v.to(wide) / weights.sum(-1, keepdim=True) + top).to(q.dtype)


@pytest.mark.parametrize(
    ("fn", "shapes", "dtype"),
    [
        (functools.partial(F.scaled_dot_product_attention, is_causal=True), [(1, 2, 200, 64)] * 3, torch.bfloat16),
        (
            functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
            [(1, 4, 70, 128), *[(1, 2, 70, 128)] * 2],
            torch.bfloat16,
        ),
        (F.scaled_dot_product_attention, [(1, 2, 40, 80), (1, 2, 100, 80), (1, 2, 100, 80)], torch.float16),
        (F.scaled_dot_product_attention, [(1, 1, 40, 20), (1, 1, 71, 20), (1, 1, 71, 20), (40, 71)], torch.bfloat16),
        (lambda q, x: F.scaled_dot_product_attention(q, x[0], x[1]), [(2, 2, 40, 32), (2, 2, 2, 71, 32)], torch.bfloat16),
        (attended, [(2, 40, 64), (2, 50, 64), (2, 50, 64)], torch.bfloat16),
        (windowed, [(1, 1, 300, 64)] * 3, torch.bfloat16),
        (chosen_by_a_gpu, [(1, 2, 40, 64)] * 3, torch.bfloat16),
        (with_a_sink, [(1, 2, 70, 64)] * 3, torch.bfloat16),
    ],
    ids=["causal", "grouped", "widths", "unaligned bias", "symbolic", "written out", "window", "chosen by a GPU", "sink"],
)
def test_attention_of_16_bits(fn: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype, tmp_path: Path, monkeypatch):
    """Scores stay in registers; no race, and copies are waited for."""
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    for x in inputs:
        if x.dim() == 5:
            torch._dynamo.mark_dynamic(x, 3)
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    got = compiled_for_gpu(fn, {"dump_dir": str(tmp_path)}, fullgraph=True)(*inputs)
    eager, exact = fn(*inputs), fn(*(x.double() for x in inputs))
    assert got.dtype == eager.dtype
    assert (got.double() - exact).norm() <= 1.2 * (eager.double() - exact).norm()
    texts = [path.read_text() for path in tmp_path.glob("*/*_kernels.cu")]
    assert "deplo_pair_" in texts[0] and texts[0].count("__global__") == 1
    if gpu() == EMULATOR:
        assert is_clean(tmp_path / "judge")
    if len(inputs) == 2:
        assert check_for_gpus(tmp_path) == 1


def test_rows_without_keys_infinities_and_nan_in_attention():
    q, k, v = (torch.randn(1, 40, 32).bfloat16() for _ in range(3))
    mask = torch.rand(40, 40) > 0.4
    mask[7] = False
    q[0, 3, 5], k[0, 1] = math.nan, 100 * q[0, 9]  # and one score far above those of the first keys
    got, eager = (f(F.scaled_dot_product_attention)(q, k, v, attn_mask=mask) for f in (compiled_for_gpu, lambda f: f))
    assert torch.equal(got.isnan(), eager.isnan()) and got[0, 7].count_nonzero() == 0
    assert torch.allclose(got.float(), eager.float(), atol=0.02, rtol=0.02, equal_nan=True)


def test_the_greatest_score_may_be_used_beside_its_weights():
    """Here it grows from block to block of keys. A result in float32 is not made of rounded weights."""
    q, k, v = (torch.randn(1, 2, rows, 32).bfloat16() for rows in (48, 300, 300))
    k *= torch.linspace(0.1, 4, 300)[:, None].bfloat16()
    fn = with_the_greatest
    got, eager, exact = compiled_for_gpu(fn)(q, k, v), fn(q, k, v), fn(*(x.double() for x in (q, k, v)))
    assert (got.double() - exact).norm() <= 1.2 * (eager.double() - exact).norm()
    narrow, wide = (lambda *x: 3 * fn(*x).float()), (lambda *x: F.softmax(x[0].float() @ x[1].float().mT, -1) @ x[2].float())
    for made, rounds in ((fn, True), (narrow, True), (wide, False)):
        kernels = deplo.explain(made, q, k, v, options=gpu()).graphs[0].kernels
        assert kernels[0].schedule.startswith("gpu_online") and ("register_block" not in kernels[0].schedule) == rounds


def attention_of(causal: bool = False, **options: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)


@pytest.mark.parametrize(
    ("fn", "heads", "rows", "keys", "width"),
    [
        (attention_of(causal=True), 2, 70, 70, 32),
        (lambda q, k, v: (with_the_greatest(q, k, v), q), 2, 33, 131, 20),
        (lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2).contiguous(), -1) @ v.mT.contiguous().mT, 2, 17, 50, 72),
        (with_a_sink, 2, 33, 131, 20),
    ],
    ids=["causal", "the greatest", "turned", "sink"],
)
def test_attention_in_float32(fn: Callable[..., Any], heads: int, rows: int, keys: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Many rows a block, and weights that pass through shared memory; a row of NaN stays what it is."""
    torch.manual_seed(0)
    inputs = torch.randn(1, 2, rows, width), torch.randn(1, heads, keys, width), torch.randn(1, heads, keys, width)
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    kernels = deplo.explain(fn, *inputs, options=gpu()).graphs[0].kernels
    assert any("gpu_online" in kernel.schedule and "register_block" in kernel.schedule for kernel in kernels)
    torch._dynamo.reset()
    got, eager, exact = compiled_for_gpu(fn)(*inputs), fn(*inputs), fn(*(x.double() for x in inputs))
    for mine, theirs, best in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, eager, exact)), strict=True):
        assert (mine.double() - best).norm() <= 1.2 * (theirs.double() - best).norm() + 1e-7 * best.norm()
    inputs[0][0, 0, 2] = math.nan
    got, eager = compiled_for_gpu(fn)(*inputs), fn(*inputs)
    for mine, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, eager)), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)
    if gpu() == EMULATOR:
        assert is_clean(tmp_path / "judge")


@pytest.mark.parametrize(
    ("fn", "heads", "keys", "width", "dtype"),
    [
        (attention_of(causal=True), 2, 130, 64, torch.bfloat16),
        (attention_of(enable_gqa=True), 1, 200, 80, torch.float16),
        (attention_of(), 2, 129, 32, torch.bfloat16),
    ],
    ids=["causal", "shared heads", "narrow"],
)
def test_attention_by_groups_of_threads(
    fn: Callable[..., Any], heads: int, keys: int, width: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Scores become the operand of the second product in registers, on a GPU of sm_90."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 130, width), torch.randn(1, heads, keys, width), torch.randn(1, heads, keys, width)
    inputs = [x.to(dtype) for x in (q, k, v)]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    kernels = deplo.explain(fn, *inputs, options=gpu()).graphs[0].kernels
    if gpu() == EMULATOR:
        assert any(kernel.schedule.startswith("gpu_online") and "groups(" in kernel.schedule for kernel in kernels)
    torch._dynamo.reset()
    got, eager, exact = compiled_for_gpu(fn)(*inputs), fn(*inputs), fn(*(x.double() for x in inputs))
    for mine, theirs, best in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, eager, exact)), strict=True):
        assert (mine.double() - best).norm() <= 1.2 * (theirs.double() - best).norm() + 1e-6 * best.norm()
    if gpu() == EMULATOR:
        assert is_clean(tmp_path / "judge")


@pytest.mark.parametrize(
    ("fn", "shapes", "dtype"),
    [
        (lambda a, b: F.linear(F.silu(a), b), [(71, 136), (72, 136)], torch.bfloat16),
        (lambda a, b: a.t() @ (b * 2), [(136, 80), (136, 40)], torch.float16),
        (lambda x, w: F.conv2d(x, w, stride=2, padding=1).relu(), [(1, 64, 18, 18), (40, 64, 3, 3)], torch.bfloat16),
    ],
    ids=["activation", "turned", "window"],
)
def test_computed_operands_of_groups(
    fn: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What no map describes is put where groups of threads multiply it, on a GPU of sm_90."""
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    if len(shapes[0]) == 4:
        inputs = [x.contiguous(memory_format=torch.channels_last) for x in inputs]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    kernels = deplo.explain(fn, *inputs, options=gpu()).graphs[0].kernels
    if gpu() == EMULATOR:
        assert any(kernel.schedule.startswith("gpu_groups") for kernel in kernels)
    torch._dynamo.reset()
    got, eager, exact = compiled_for_gpu(fn)(*inputs), fn(*inputs), fn(*(x.double() for x in inputs))
    assert (got.double() - exact).norm() <= 1.1 * (eager.double() - exact).norm()
    if gpu() == EMULATOR:
        assert is_clean(tmp_path / "judge")


def test_bytes_of_groups():
    """Sums of bytes in int32, of which none is rounded."""
    a, b = torch.randint(-128, 128, (70, 160), dtype=torch.int8), torch.randint(-128, 128, (160, 48), dtype=torch.int8)
    fn = torch._int_mm
    kernels = deplo.explain(fn, a, b, options=gpu()).graphs[0].kernels
    if gpu() == EMULATOR:
        assert any(kernel.schedule.startswith("gpu_groups") for kernel in kernels)
    torch._dynamo.reset()
    assert torch.equal(compiled_for_gpu(fn)(a, b), fn(a, b))


def decoded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(k.shape[-2]) <= position[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(
    ("fn", "heads", "rows", "keys"),
    [
        (functools.partial(F.scaled_dot_product_attention, enable_gqa=True), (8, 2), 1, 640),
        (decoded, (8, 2), 1, 640),
        (attended, (2, 2), 3, 515),
    ],
    ids=["grouped", "position", "written out"],
)
def test_few_rows_of_attention_over_many_keys(fn: Callable[..., Any], heads: tuple[int, int], rows: int, keys: int, tmp_path: Path, monkeypatch):
    """Parts of the keys have blocks of their own; a second kernel combines what they give."""
    q = torch.randn(2, heads[0], rows, 64).bfloat16()
    k, v = (torch.randn(2, heads[1], keys, 64).bfloat16() for _ in range(2))
    inputs = [q, k, v, *([torch.tensor([80, keys - 1])] if fn is decoded else [])]
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    monkeypatch.setenv("DEPLO_FAKE_CUDA", f"judge={tmp_path / 'judge'},late=1,reversed=1")
    got, eager, exact = compiled_for_gpu(fn, {"dump_dir": str(tmp_path)}, fullgraph=True)(*inputs), fn(*inputs), fn(*wide)
    assert got.dtype == eager.dtype
    assert (got.double() - exact).norm() <= 1.2 * (eager.double() - exact).norm()
    text = next(tmp_path.glob("*/*_kernels.cu")).read_text()
    assert "deplo_pair_" in text and text.count("__global__") == 2
    if gpu() == EMULATOR:
        assert is_clean(tmp_path / "judge")


@pytest.mark.parametrize(
    ("fn", "shape"),
    [(torch.sum, (200_003,)), (lambda x: x.sum(0), (1024, 1024)), (lambda x: x.norm(dim=1), (3, 70_000)), (lambda x: x.var(0), (70_001, 8))],
    ids=["all", "columns", "norms", "variances"],
)
def test_long_reductions_have_two_phases(fn: Callable[..., Any], shape: tuple[int, ...], monkeypatch):
    x = torch.randn(shape) + 1
    got = compiled_for_gpu(fn)(x)
    assert torch.allclose(got.double(), fn(x.double()), rtol=1e-6, atol=1e-3 if shape == (200_003,) else 1e-4)
    kernels = 4 if shape == (70_001, 8) else 2  # of means, then of what differs from them
    assert len(deplo.explain(fn, x, options=gpu()).graphs[0].kernels) == kernels
    torch._dynamo.reset()
    monkeypatch.setenv("DEPLO_FAKE_CUDA", "reversed=1")
    assert torch.equal(compiled_for_gpu(fn)(x), got)


def convolution(dtype: str) -> str:
    """One of ResNet's, with channels last."""
    x = f"r(16, 56, 56, 64, dtype={dtype}).permute(0, 3, 1, 2)"
    return f"F.relu(F.conv2d({x}, r(64, 3, 3, 64, dtype={dtype}).permute(0, 3, 1, 2), padding=1))"


ATTENTION = f"F.scaled_dot_product_attention({', '.join(['r(4, 16, 512, 128, dtype=torch.bfloat16)'] * 3)})"


@pytest.mark.parametrize(
    ("expression", "least_of_main_loop"),
    [
        ("torch.relu(r(4096, 4096) + r(4096, 1))", {}),
        ("torch.softmax(r(4096, 1024), -1)", {}),
        ("F.layer_norm(r(4096, 4096), (4096,), r(4096), r(4096))", {}),
        ("F.rms_norm(r(512, 16384).bfloat16(), (16384,))", {}),
        ("r(4096, 4096).sum(0)", {}),
        ("r(2048, 2048) @ r(2048, 2048)", {"FFMA": 0.8}),
        ("F.linear(r(2048, 2048), r(2048, 2048))", {"FFMA": 0.8}),
        (
            "F.gelu(F.linear(r(2048, 2048, dtype=torch.bfloat16), r(2048, 2048, dtype=torch.bfloat16), r(2048, dtype=torch.bfloat16)))",
            {"HGMMA": 0.05},
        ),
        (ATTENTION, {"HGMMA": 0.025}),
        (convolution("torch.bfloat16"), {"HGMMA": 0.03}),
        (convolution("torch.float32"), {"FFMA": 0.8}),
    ],
)
def test_kernels_judged_for_a_device(capsys, expression: str, least_of_main_loop: dict[str, float]):
    check_judged(capsys, expression, least_of_main_loop, "h100", "sm_90a")


@pytest.mark.parametrize(("expression", "share"), [(ATTENTION, 0.25), (convolution("torch.bfloat16"), 0.3)], ids=["attention", "convolution"])
def test_matrix_units_judged_for_an_older_device(capsys, expression: str, share: float):
    check_judged(capsys, expression, {"HMMA": share}, "a100", "sm_80")


def check_judged(capsys, expression: str, least_of_main_loop: dict[str, float], device: str, arch: str) -> None:
    assert main(["explain", "-c", expression, "--device", device, "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["device"]["arch"] == arch and judged["kernels"]
    for kernel in judged["kernels"]:
        assert kernel["spills"] == 0 and kernel["stack_bytes"] == 0 and kernel["complete"]
        assert kernel["bytes"] <= 1.1 * kernel["least_bytes"]
        assert kernel["sectors_per_request"] <= 1.1 * kernel["least_sectors_per_request"] and kernel["bank_ways"] <= 1.1
        for name, share in least_of_main_loop.items():
            assert kernel["where"] == "loop" and kernel["mix"][name] >= share * kernel["instructions"]


def test_what_judging_needs_is_named(capsys, monkeypatch):
    command = ["explain", "-c", "torch.relu(r(4, 4))", "--device"]
    assert main([*command, "h1000"]) == 1
    assert "--device h1000: expected one of a100, h100" in capsys.readouterr().err
    monkeypatch.setattr("deplo.machine_code.DISASSEMBLER", ())
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main([*command, "l4"]) == 1
    assert "install the package nvidia-cuda-nvdisasm" in capsys.readouterr().err
