"""deplo under vLLM: the parts that need no vLLM, calls of operators that nobody sees through, and engines where vLLM is installed."""

from __future__ import annotations

import copy
import enum
import gc
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch
from engines import needs_core, same

from deplo import vllm_layers, vllm_plugin
from deplo.backend import collect_records
from deplo.core import core
from deplo.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_entry_point_names_the_plugin():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = groups["vllm.general_plugins"]["deplo"].partition(":")
    assert getattr(importlib.import_module(module), name) is vllm_plugin.register


def test_variable():
    assert vllm_plugin.is_default({"DEPLO_VLLM": "1"})
    assert not vllm_plugin.is_default({}) and not vllm_plugin.is_default({"DEPLO_VLLM": "0"})
    with pytest.raises(UserError, match="DEPLO_VLLM='yes'"):
        vllm_plugin.is_default({"DEPLO_VLLM": "yes"})


BOUND = """
import os, signal, torch
from deplo.core import core
core()

def in_child(work):
    if os.fork() == 0:
        signal.alarm(60)  # instead of hanging
        work()
        os._exit(0)
    assert os.wait()[1] == 0

def parallel():
    x = torch.randn(4000, 1000)
    (x + x).sum()

def narrowed():
    os.sched_setaffinity(0, {max(allowed)})
    print("narrowed", core().env(""), flush=True)

allowed = set(map(int, os.environ["ALLOWED"].split(",")))
print("bound", len(os.sched_getaffinity(0)), core().env(""), flush=True)
in_child(parallel)
in_child(narrowed)
"""


@needs_core
def test_processors_of_threads_that_openmp_binds():
    """As vLLM starts its workers: each thread may use one processor, the first one too. Nobody starts OpenMP's pool, which no forked child has; and a
    process that is narrowed on purpose stays so."""
    allowed = sorted(os.sched_getaffinity(0))
    bind = {"OMP_PROC_BIND": "true", "OMP_PLACES": "threads", "OMP_NUM_THREADS": "2", "ALLOWED": ",".join(map(str, allowed))}
    done = subprocess.run([sys.executable, "-c", BOUND], env={**os.environ, **bind}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bound, narrowed = done.stdout.splitlines()
    assert bound.startswith("bound 1 ") and f"of which {len(allowed)} may be used" in bound
    assert narrowed.startswith("narrowed ") and "of which 1 may be used" in narrowed


class Mode(enum.IntEnum):
    NONE = 0
    STOCK = 1
    ONCE = 2
    VLLM = 3


def config(backend="deplo", mode=None, custom_ops=()):
    return types.SimpleNamespace(
        backend=backend,
        mode=mode,
        custom_ops=list(custom_ops),
        ir_enable_torch_wrap=None,
    )


@pytest.mark.parametrize("mode", [None, Mode.VLLM, Mode.ONCE])
def test_configs_that_name_deplo_are_completed(mode):
    chosen = config(mode=mode)
    vllm_plugin.apply_defaults(chosen, Mode.ONCE)
    assert (chosen.mode, chosen.custom_ops, chosen.ir_enable_torch_wrap) == (Mode.ONCE, ["none"], False)


def test_what_the_user_chose_stays():
    chosen = config(mode=Mode.STOCK, custom_ops=["all", "-silu_and_mul"])
    vllm_plugin.apply_defaults(chosen, Mode.ONCE)
    assert (chosen.mode, chosen.custom_ops) == (Mode.STOCK, ["all", "-silu_and_mul"])
    for other in (config("inductor"), config(mode=Mode.NONE)):
        before = json.dumps(vars(other), default=vars)
        vllm_plugin.apply_defaults(other, Mode.ONCE)
        assert json.dumps(vars(other), default=vars) == before


def test_deplo_in_inductors_place():
    for mode, backend in ((None, "deplo"), (Mode.VLLM, "deplo"), (Mode.ONCE, "inductor"), (Mode.NONE, "inductor")):
        chosen = config("inductor", mode)
        vllm_plugin.apply_defaults(chosen, Mode.ONCE, default=True)
        assert chosen.backend == backend
    eager = config("eager")
    vllm_plugin.apply_defaults(eager, Mode.ONCE, default=True)
    assert eager.backend == "eager"


@pytest.fixture(scope="module")
def opaque():
    """Operators that no compiler sees through: one gives a tensor, one writes an argument; both remember by name what they were given."""
    library = torch.library.Library("deplo_test_opaque", "FRAGMENT")
    cache: dict[str, torch.Tensor] = {}

    def keep(x, name):
        cache[name] = x.clone()
        return x + 1

    def fill(x, out, name):
        out.copy_(cache[name] * 2 + x)

    library.define("keep(Tensor x, str name) -> Tensor")
    library.impl("keep", keep, "CPU")
    torch.library.register_fake("deplo_test_opaque::keep", lambda x, name: torch.empty_like(x), lib=library)
    library.define("fill(Tensor x, Tensor(a!) out, str name) -> ()")
    library.impl("fill", fill, "CPU")
    torch.library.register_fake("deplo_test_opaque::fill", lambda x, out, name: None, lib=library)
    yield torch.ops.deplo_test_opaque
    library._destroy()


class Layers(torch.nn.Module):
    """Layers of two linears around an opaque call each."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.linears = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for i in range(0, 4, 2):
            y = self.call(torch.nn.functional.silu(self.linears[i](x)), f"layer{i}")
            x = x + self.linears[i + 1](y)
        return x


def keep_only(opaque):
    return lambda x, name: torch.ops.deplo_test_opaque.keep.default(x, name)  # a package names what a closure holds


def keep_and_fill(opaque):
    def call(x, name):
        out = torch.empty_like(x)
        kept = opaque.keep.default(x, name)
        opaque.fill.default(kept, out, name)
        return out

    return call


@needs_core
def test_opaque_calls_stay_calls_of_one_program(opaque):
    model = Layers(keep_only(opaque))
    compiled = torch.compile(model, backend="deplo", dynamic=True, options={"strict": True})
    with torch.no_grad(), collect_records() as records:
        for rows in (3, 1, 5, 17):
            x = torch.randn(rows, 16)
            same(compiled(x), model(x))
    described = [json.loads(record.program.describe()) for record in records]
    assert described and all([call["op"] for call in about["library"]] == ["deplo_test_opaque.keep.default"] * 2 for about in described)


@needs_core
@pytest.mark.filterwarnings("ignore:.*eager mode")
def test_calls_that_write_stay_between_programs(opaque):
    model = Layers(keep_and_fill(opaque))
    compiled = torch.compile(model, backend="deplo", dynamic=True)
    with torch.no_grad(), collect_records() as records:
        for rows in (3, 1, 5):
            x = torch.randn(rows, 16)
            same(compiled(x), model(x))
    assert not any(record.fallback for record in records)
    assert sum(record.program is not None for record in records) >= 3


@needs_core
def test_opaque_calls_in_packages(opaque, tmp_path):
    model = Layers(keep_only(opaque))
    x = torch.randn(3, 16)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad(), torch._dynamo.config.patch(enable_aot_compile=True):
        package = torch.compile(model.forward, fullgraph=True, backend="deplo").aot_compile(((x,), {}))
        package.save_compiled_function(str(tmp_path / "package"))
        with open(tmp_path / "package", "rb") as file:
            loaded = torch.compiler.load_compiled_function(file, f_globals=model.forward.__globals__)
        for rows in (7, 2):
            x = torch.randn(rows, 16)
            same(loaded(model, x), model(x))


@needs_core
@pytest.mark.parametrize("first", [40, 3])
def test_a_graph_for_all_sizes_has_programs_for_few_rows(first):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16))
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True), collect_records() as records:
        compiled = torch.compile(model, backend="deplo", fullgraph=True, options={"strict": True})
        x = torch.randn(first, 16)
        torch._dynamo.mark_dynamic(x, 0)
        same(compiled(x), model(x))
        for rows in (1, 2, 32, 33, 0, 5, 1, 64):
            x = torch.randn(rows, 16)
            same(compiled(x), model(x))
    ranges = [re.search(r"where s\d+ in (\S+)", record.torch_ir)[1] for record in records]
    assert sorted(ranges) == ["0..2", "3..32", "33.."]


class Block(torch.nn.Module):
    """A normalised projection, heads of which are normalised and rotated, and a linear after them: what lies around attention."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(256, 384, bias=False), torch.nn.Linear(384, 256)
        self.norm, self.heads = torch.nn.RMSNorm(256), torch.nn.RMSNorm(64)
        self.register_buffer("table", torch.randn(100, 64))

    def forward(self, x, positions):
        heads = self.heads(self.first(self.norm(x)).view(-1, 6, 64))
        cosine, sine = self.table.index_select(0, positions).unsqueeze(-2).chunk(2, -1)
        a, b = heads.chunk(2, -1)
        return x + self.second(torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).flatten(1))


@needs_core
def test_programs_for_any_number_of_rows_share_one_copy_of_weights():
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = Block().bfloat16().requires_grad_(False)
    exact = copy.deepcopy(model).double()
    before = core().packed_bytes()
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):
        compiled = torch.compile(model, backend="deplo", fullgraph=True, options={"strict": True})
        for rows in (389, 1, 2, 4, 8, 16, 32, 33, 64, 128, 512):
            x, positions = torch.randn(rows, 256).bfloat16(), torch.randint(0, 100, (rows,))
            if rows == 389:
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(positions, 0)
            wanted = exact(x.double(), positions)
            error, theirs = ((y.double() - wanted).abs().max() for y in (compiled(x, positions), model(x, positions)))
            assert error <= theirs + 2 * torch.finfo(torch.bfloat16).eps * wanted.abs().max(), rows
    assert 0 < core().packed_bytes() - before <= 1.1 * sum(2 * p.numel() for p in model.parameters())


@needs_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_any_number_of_rows_are_in_memory_once(dtype):
    """Under the plugin's options; what reads the weights otherwise finds them."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = Block().to(dtype).requires_grad_(False)
    expected = copy.deepcopy(model)
    before = core().owned_bytes(), core().packed_bytes()
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True), vllm_plugin.with_defaults():
        compiled = torch.compile(model, backend="deplo", fullgraph=True, options={"strict": True})
        for rows in (389, 1, 2, 3, 16, 32, 33, 0, 1):
            x, positions = torch.randn(rows, 256).to(dtype), torch.randint(0, 100, (rows,))
            if rows == 389:
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(positions, 0)
            same(compiled(x, positions), expected(x, positions), scale=64)
        linears = sum(layer.weight.nbytes for layer in (model.first, model.second))
        assert core().owned_bytes() - before[0] >= 0.9 * linears and core().packed_bytes() - before[1] <= 1.1 * linears
        assert all(torch.equal(*weights) for weights in zip(model.state_dict().values(), expected.state_dict().values(), strict=True))


@needs_core
def test_head_and_embedding_share_a_weight():
    """The weight stays packed alone while rows of it are looked up."""
    torch._dynamo.reset()
    gc.collect()
    weight = torch.nn.Parameter(torch.randn(1000, 256), requires_grad=False)
    copied = weight.clone()
    before = core().owned_bytes()
    head = vllm_layers.compiled_head(weight)
    vllm_layers._library()
    ids = torch.tensor([[0, 999, 3], [500, 3, 1]])
    with torch.inference_mode():
        for rows in (1, 7, 64, 2):
            x = torch.randn(rows, 256)
            same(head(x, weight, None), torch.nn.functional.linear(x, copied), scale=64)
            assert torch.equal(torch.ops.deplo_vllm.embedding(ids, weight), copied[ids])
            assert core().owned_bytes() > before
        with pytest.raises(IndexError, match="1000"):
            torch.ops.deplo_vllm.embedding(ids + 1, weight)
    weight.data[999] += 1
    assert torch.equal(torch.ops.deplo_vllm.embedding(ids, weight)[0, 1], copied[999] + 1)
    x = torch.randn(5, 256)
    same(head(x, weight, None), torch.nn.functional.linear(x, weight), scale=64)


@needs_core
def test_weights_that_vllm_loads_are_packed_again():
    """A few elements, written through .data in a call that the plugin watches; without it versions alone would not tell."""
    model = torch.nn.Linear(256, 256, bias=False).requires_grad_(False)
    x = torch.randn(8, 256)

    def load_weights(rows):
        model.weight.data[rows, 7] = 3.0

    with torch.no_grad(), vllm_plugin.with_defaults():
        compiled = torch.compile(model, backend="deplo", options={"strict": True, "weights": "pack"})
        first = compiled(x)
        load_weights(slice(0, 9))
        assert torch.equal(compiled(x), first)
        vllm_layers._then_repack(load_weights, model)(slice(20, 22))
        same(compiled(x), model(x), scale=64)


ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
folder, dtype, chosen = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype=dtype, max_model_len=256, max_num_seqs=4,
          max_num_batched_tokens=256, block_size=32, seed=0, **chosen)
shared = [(7 * i) % 500 + 3 for i in range(70)]
prompts = [{"prompt_token_ids": shared[:n] + [n + 3]} for n in (1, 5, 70, 40, 70, 3, 66)]
sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in (9, 3, 12, 1, 7, 15, 4)]
tokens = [[list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)] for _ in range(2)]
assert tokens[0] == tokens[1]  # the second time prompts come from the prefix cache
model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
linears = [m for m in model.modules() if hasattr(m, "cpu_linear")]
print("RESULT", json.dumps({"tokens": tokens[0], "kept": [m.weight.numel() > 0 for m in linears], "backend":
    str(llm.llm_engine.vllm_config.compilation_config.backend)}))
"""
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    about = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512, "tie_word_embeddings": True, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps({**about, **TINY, "rms_norm_eps": 1e-6, "max_position_embeddings": 512}))
    return folder


def engine(folder, cache, dtype, chosen, **variables):
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(cache)}
    environment = {**os.environ, **settings, "OMP_NUM_THREADS": "2", **variables}
    command = [sys.executable, "-c", ENGINE, str(folder), dtype, json.dumps(chosen)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cache)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).removeprefix("RESULT")), done.stdout + done.stderr


def has_vllm():
    return any(name.metadata["Name"] == "vllm-cpu" for name in importlib.metadata.distributions())


@needs_core
@pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed here: make vllm")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_gives_eagers_tokens(model_folder, tmp_path, dtype):
    expected, _ = engine(model_folder, tmp_path, dtype, {"enforce_eager": True}, DEPLO_VLLM="1")
    assert not all(expected["kept"])  # eager mode is vLLM's own
    first, _ = engine(model_folder, tmp_path, dtype, {"compilation_config": {"backend": "deplo"}})
    assert first["backend"] == "deplo" and all(first["kept"])
    assert first["tokens"] == expected["tokens"]
    again, said = engine(model_folder, tmp_path, dtype, {}, DEPLO_VLLM="1")  # by default, and from vLLM's own cache
    assert again["backend"] == "deplo" and again["tokens"] == expected["tokens"]
    assert "Directly load AOT compilation" in said
