"""PyTorch's caches and packages: AOTAutogradCache, the mega-cache, aot_compile, and code that compiles a repeated block once."""

import inspect
import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import deplo
from deplo.artifacts import KIND
from deplo.backend import collect_records
from deplo.core import core

_DEFAULTS = torch._inductor.config.get_config_copy()  # of when tests are collected


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Empty folders for PyTorch's caches and deplo's, and nothing compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setenv("DEPLO_CACHE_DIR", str(tmp_path / "deplo"))
    monkeypatch.setenv("DEPLO_VERIFY", "0")
    torch._dynamo.reset()
    # As in a new process: torchao sets these, and Inductor's options, where it quantises.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    with torch._inductor.config.patch(_DEFAULTS), torch._functorch.config.patch(strict_autograd_cache=True):  # what PyTorch does not keep is an error
        yield tmp_path
    torch._dynamo.reset()


def run(fn, *args, options=None, dynamic=None):
    """A compilation as a new process would do it: the result, the records, and what AOTAutogradCache did."""
    torch._dynamo.reset()
    counters.clear()
    with collect_records() as records:
        result = torch.compile(fn, backend="deplo", options={"strict": True, **(options or {})}, dynamic=dynamic)(*args)
    return result, records, did()


def did():
    return {name.removeprefix("autograd_cache_"): count for name, count in counters["aot_autograd"].items() if name.startswith("autograd_cache_")}


def layer(x, w):
    return torch.relu(torch.nn.functional.layer_norm(x, (x.shape[-1],)) @ w)


SAVED, HIT = {"miss": 1, "saved": 1}, {"hit": 1}


def test_a_hit_imports_and_compiles_nothing_and_is_explained():
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    first, (made,), what = run(layer, x, w)
    assert what == SAVED and not made.restored
    again, (found,), what = run(layer, x, w)
    assert what == HIT and torch.equal(first, again) and found.restored
    assert found.torch_ir == made.torch_ir and found.program.text() == made.program.text()
    was, now = (json.loads(record.program.describe()) for record in (made, found))
    assert now["cache"]["compiled"] == 0 and now["kernels"] == was["kernels"] and was["kernels"]
    report = deplo.explain(layer, x, w, options={"strict": True})
    assert report.graphs[0].kernels and "restored from PyTorch's cache" in str(report)


class Pass(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __call__(self, graph):
        raise AssertionError("a pass of Inductor's")

    def uuid(self):
        return b"a pass"


def test_users_passes_of_inductor_are_not_in_the_key():
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    assert run(layer, x, w)[2] == SAVED
    with torch._inductor.config.patch(pre_grad_custom_pass=Pass(), post_grad_custom_post_pass=Pass()):
        assert run(layer, x, w)[2] == HIT


def test_a_graph_that_compiles_in_the_background_is_looked_for_but_not_kept():
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    background = {"tier": "background"}
    with torch._functorch.config.patch(strict_autograd_cache=False):
        _, (made,), what = run(layer, x, w, options=background)
    assert made.background is not None and what == {"miss": 1, "bypass": 1}
    assert deplo.wait_compiled() and run(layer, x, w)[2] == SAVED
    _, (found,), what = run(layer, x, w, options=background)
    assert what == HIT and found.restored and found.background is None


def test_a_kernel_that_the_disk_has_lost_is_compiled_again(folders):
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    first, _, _ = run(layer, x, w)
    for path in (folders / "deplo").iterdir():
        path.unlink()
    again, _, what = run(layer, x, w)
    assert what == HIT and torch.equal(first, again)


def test_training_keeps_both_graphs_in_one_entry():
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    grads = []
    for wanted in (SAVED, HIT):
        x.grad = w.grad = None
        torch._dynamo.reset()
        counters.clear()
        with collect_records() as records:
            loss = torch.compile(layer, backend="deplo", options={"strict": True})(x, w).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        assert did() == wanted and [record.kind for record in records] == ["forward", "backward"]
        assert [record.restored for record in records] == [wanted is HIT] * 2
        assert not torch._functorch.config.bundled_autograd_cache
        grads.append((x.grad, w.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def views(x, y):
    """Sizes that follow from others, rounded ones, views of an input, of a result, and a number."""
    z = x[: int(x.shape[0] * 0.7)].exp()
    return x[1:].t(), z.unsqueeze(0), (x.shape[0] * 2, y + 1)


def test_symbolic_sizes_and_outputs_that_are_views():
    y = torch.randn(3)
    run(views, torch.randn(10, 4), y, dynamic=True)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(views, backend="deplo", dynamic=True, options={"strict": True})
    for rows in (9, 12, 15):
        x = torch.randn(rows, 4)
        got, wanted = compiled(x, y), views(x, y)
        torch.testing.assert_close(got, wanted)
        assert got[0]._base is x or got[0].data_ptr() == x[1:].data_ptr()
    assert did() == HIT


def scale(x, state):
    state.mul_(2)
    return x + state


def test_a_hit_knows_which_inputs_are_written():
    for wanted in (SAVED, HIT):
        x, state = torch.randn(4, 4), torch.ones(4)
        result, _, what = run(scale, x, state)
        assert what == wanted and torch.equal(state, torch.full((4,), 2.0)) and torch.equal(result, x + 2)
    torch._dynamo.reset()
    compiled = torch.compile(scale, backend="deplo")
    compiled(torch.randn(4, 4), torch.ones(4))
    base = torch.arange(16.0)
    copy = base.clone()
    with pytest.warns(deplo.FallbackWarning, match="shares memory"):
        result = compiled(base.view(4, 4), base[2:6])
    assert torch.equal(result, scale(copy.view(4, 4), copy[2:6])) and torch.equal(base, copy)


def test_a_hit_raises_errors_in_eagers_words():
    def pick(x, i):
        return x[i] * 2

    x = torch.randn(4)
    run(pick, x, torch.tensor([1, 2]))
    torch._dynamo.reset()
    compiled = torch.compile(pick, backend="deplo", options={"strict": True})
    with pytest.raises(IndexError, match="index 7 is out of bounds for dimension 0 with size 4"):
        compiled(x, torch.tensor([1, 7]))


@pytest.mark.parametrize("options", [{"disable": "fuse_nests"}, {"features": "sse"}, {"strict": False}, {"debug": True}], ids=str)
def test_options_are_in_the_key(options):
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    first, _, _ = run(layer, x, w)
    for wanted in (SAVED, HIT):
        result, _, what = run(layer, x, w, options=options)
        assert what == wanted
        torch.testing.assert_close(result, first)


def test_what_inputs_are_and_autocast_are_in_the_key_and_threads_are_not(folders):
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    assert run(layer, x, w)[2] == SAVED
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert run(layer, x, w)[2] == HIT
    finally:
        torch.set_num_threads(threads)
    assert run(layer, x, w, options={"threads": 1, "memory_limit": "1G", "cache_dir": str(folders / "other")})[2] == HIT
    with torch.no_grad():
        assert run(layer, x, torch.nn.Parameter(w))[2] == SAVED
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, _, what = run(layer, x, w)
    assert what == SAVED and result.dtype == torch.bfloat16
    run(layer, x, w, dynamic=True)
    assert run(layer, torch.randn(7, 8), w, dynamic=True)[2] == HIT  # as many bits as before
    assert run(layer, torch.randn(600, 8), w, dynamic=True)[2] == SAVED


def test_other_versions_of_deplo_are_missed(monkeypatch):
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    run(layer, x, w)
    assert len(core().build_id()) == 40
    monkeypatch.setattr("deplo.cache_key._identity", lambda: ["0.0.0", "", ""])
    assert run(layer, x, w)[2] == SAVED


def test_entries_of_other_backends_are_not_deplos_nor_the_other_way_round():
    x, w = torch.randn(6, 8), torch.randn(8, 5)

    def other():
        torch._dynamo.reset()
        counters.clear()
        with torch._functorch.config.patch(force_autograd_cache=True, bundled_autograd_cache=True):
            torch.compile(layer, backend="aot_eager")(x, w)
        return did()

    assert other() == SAVED and other() == HIT
    with torch._functorch.config.patch(force_autograd_cache=True, bundled_autograd_cache=True):
        _, records, what = run(layer, x, w)
    assert what == SAVED and records[0].program is not None
    assert other() == HIT
    torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache.clear()
    run(layer, x, w)
    assert other() == SAVED


@pytest.mark.parametrize("options", [{"cache_dir": "off"}, {"verify": True}, {"guard": True}, {"dump_dir": "dumps"}, {"stop_after": "loop"}], ids=str)
def test_options_that_ask_for_a_compilation_bypass_the_cache(options, folders):
    options = {name: str(folders / value) if name == "dump_dir" else value for name, value in options.items()}
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    run(layer, x, w)
    _, records, what = run(layer, x, w, options=options)
    assert what == {"bypass": 1} and not records[0].restored


def test_inputs_that_share_memory_bypass_the_cache():
    base = torch.randn(12)
    for _ in range(2):
        _, _, what = run(lambda a, b: a.add_(b), base[:6], base[6:], options={"strict": False})
        assert what == {"bypass": 1}


def test_graphs_of_which_calls_stay_in_eager_mode_are_not_kept():
    def f(x):
        return torch.relu(torch.view_as_real(torch.fft.fft(x.exp()) * torch.view_as_complex(x.new_ones(4, 2))))

    with warnings.catch_warnings(), torch._functorch.config.patch(strict_autograd_cache=False):
        warnings.simplefilter("ignore", deplo.FallbackWarning)
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            torch.testing.assert_close(torch.compile(f, backend="deplo")(torch.ones(4)), f(torch.ones(4)))
            assert did() == {"miss": 1, "bypass": 1}


def test_a_registered_backend_may_be_registered_again():
    """As each of several threads does that find it missing."""
    from torch._dynamo.backends import registry

    backend = registry.lookup_backend("deplo")
    assert backend is deplo.deplo and "deplo" in registry.list_backends()
    assert registry.register_backend(backend, name="deplo") is backend
    with pytest.raises(AssertionError, match="duplicate name"):
        registry.register_backend(backend, name="eager")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return torch.nn.functional.layer_norm(torch.relu(self.linear(x)), (16,)) + x


class Blocks(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * 2


def test_nested_regions_are_a_part_of_their_graph():
    torch.manual_seed(0)  # norms of few positive numbers can have any error
    x = torch.randn(3, 16)
    model = Blocks(5)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(model(x).square().mean(), parameters)
    for cache in (SAVED, HIT):
        torch._dynamo.reset()
        counters.clear()
        with collect_records() as records:
            loss = torch.compile(model, backend="deplo", options={"strict": True}, fullgraph=True)(x).square().mean()
            torch.testing.assert_close(torch.autograd.grad(loss, parameters), wanted)
        assert did() == cache and len(records) == 2
    with torch.no_grad():
        few, many = (run(Blocks(count), x)[1][0].program for count in (3, 7))
    assert few.images().keys() == many.images().keys()  # more blocks, no more kernels to compile


def test_a_block_compiled_in_place_is_one_graph():
    torch.manual_seed(0)
    model = Blocks(4)
    x = torch.randn(3, 16)
    wanted = model(x)
    for block in model.blocks:
        block.compile(backend="deplo", fullgraph=True, options={"strict": True})
    with torch.no_grad(), collect_records() as records:
        torch.testing.assert_close(model(x), wanted)
    assert len(records) == 1


def test_stances():
    x = torch.randn(4, 4)
    compiled = torch.compile(layer, backend="deplo", options={"strict": True})
    with collect_records() as records:
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(compiled(x, x), layer(x, x))
        with torch.compiler.set_stance("default", force_backend="deplo"):
            torch.compile(layer, backend="eager")(x, x)
        assert len(records) == 1
        compiled(x, x)
        with torch.compiler.set_stance("eager_on_recompile"):
            torch.testing.assert_close(compiled(x[:2], x), layer(x[:2], x))
        count = len(records)
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
            compiled(x[:3], x)
        assert len(records) == count


CHILD = """
    import json, sys
    import torch
    from torch._dynamo.utils import counters

    from deplo.artifacts import register

    register()  # what the entry point does
    torch._functorch.config.strict_autograd_cache = True
    folder = sys.argv[1]
    torch.manual_seed(0)
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    with open(folder + "/mega", "rb") as file:
        loaded = torch.compiler.load_cache_artifacts(file.read())
    assert loaded.artifacts["deplo_kernels"] and loaded.aot_autograd_artifacts

    from deplo.backend import collect_records

    sys.path.insert(0, folder)
    from functions import layer, scale

    with collect_records() as records:
        result = torch.compile(layer, backend="deplo", options={"strict": True})(x, w)
        with open(folder + "/package", "rb") as file:
            package = torch.compiler.load_compiled_function(file)
        with open(folder + "/writes", "rb") as file:
            writes = torch.compiler.load_compiled_function(file)
    with torch.no_grad():
        for rows in (3, 6, 9):
            rows = torch.randn(rows, 8)
            torch.testing.assert_close(package(rows, w), layer(rows, w))
        base = torch.arange(16.0)
        copy = base.clone()
        torch.testing.assert_close(writes(base.view(4, 4), base[2:6]), scale(copy.view(4, 4), copy[2:6]))
    print(json.dumps({
        "right": torch.allclose(result, layer(x, w), atol=1e-5),
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "restored": [record.restored for record in records],
        "compiled": [json.loads(record.program.describe())["cache"]["compiled"] for record in records],
    }))
"""


def test_the_mega_cache_and_packages_serve_a_new_process(folders, monkeypatch):
    """On a machine with empty folders."""
    source = "import torch\n\n\n" + "\n\n".join(map(inspect.getsource, (layer, scale)))
    for name in ("custom_backend_passes", "custom_backend_codegen_configs"):  # as where Inductor has not been at work
        monkeypatch.setattr(torch._inductor.codecache, name, {})
    (folders / "functions.py").write_text(source)
    monkeypatch.syspath_prepend(str(folders))
    import functions

    x, w = torch.randn(6, 8), torch.randn(8, 5)
    run(functions.layer, x, w)
    manager = torch.compiler._cache.CacheArtifactManager
    with manager.with_fresh_cache():
        assert run(functions.layer, x, w)[2] == HIT  # hits are recorded, too
        data, info = torch.compiler.save_cache_artifacts()
    assert info.artifacts[KIND] and info.aot_autograd_artifacts
    (folders / "mega").write_bytes(data)
    with torch.no_grad():
        for name, fn, args, dynamic in (
            ("package", functions.layer, (x, w), True),
            ("writes", functions.scale, (torch.ones(4, 4), torch.ones(4)), False),
        ):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend="deplo", fullgraph=True, dynamic=dynamic).aot_compile((args, {}))
            compiled.save_compiled_function(str(folders / name))
    root = str(Path(deplo.__file__).parents[1])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folders / "torch2"), "DEPLO_CACHE_DIR": str(folders / "deplo2"), "PYTHONPATH": root}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"right": True, "hits": 1, "restored": [True] * 3, "compiled": [0] * 3}
    assert "shares memory" in done.stderr
