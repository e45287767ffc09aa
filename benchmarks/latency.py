"""What a call costs besides its work: tiny functions, models of small work, serving from threads, first calls, and memory.

    python benchmarks/latency.py [--tables calls,serving,first,import] [--models bert-base] [--no-inductor] [--onnx] [--threads 2] [--json FILE]

`deplo` is torch.compile's own way (Dynamo's guards, AOTAutograd's wrappers, the program), `direct` deplo.jit(guards="inputs"), `entry` the
program alone, called with the list that AOTAutograd gives it. First calls run in processes of their own, with empty and then with filled caches.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import harness
import serving
import torch
import zoo
from torch import nn

import deplo


class DecoderLayer(nn.Module):
    """Attention over a cache that the layer writes in place, and a gated MLP: one token at a time."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((width, 2 * width), (width, 2 * width), (2 * width, width)))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, width // heads))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(1, 1, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = (torch.arange(self.keys.shape[2]) <= position)[None]
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A Llama of `layers` narrow layers: the time of a step is that of its calls."""

    def __init__(self, layers: int = 28, width: int = 64, heads: int = 4, length: int = 64, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([DecoderLayer(width, heads, length) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.tokens(token)
        for layer in self.layers:
            x = layer(x, position)
        return self.head(x)


class Images(nn.Module):
    """MobileNetV2 of one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.model = zoo.build("mobilenet-v2").model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=x)


def tiny(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + 1) * 2


def small_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[int], tuple[torch.Tensor, ...]]]]:
    """From name to what makes a callable of its own, and its inputs by seed."""

    def copy_of(fn: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: type(fn)(fn.__code__.replace(), fn.__globals__, fn.__name__)

    return {
        "relu(x + 1) * 2, 8 elements": (copy_of(tiny), lambda seed: (torch.full((8,), float(seed)),)),
        "(64, 47) @ (47, 64)": (copy_of(small_matmul), lambda seed: (torch.full((64, 47), 1.0 + seed), torch.ones(47, 64))),
        "MobileNetV2": (Images, lambda seed: (torch.full((1, 3, 224, 224), 0.1 * seed),)),
        "decode step, 28 layers of 64": (lambda: Decoder().eval(), lambda seed: (torch.tensor([[seed]]), torch.tensor([seed]))),
    }


def call_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds of a call, without gradients."""
    rows = []
    for name, (make, inputs) in cases().items():
        if arguments.only not in name:
            continue
        torch._dynamo.reset()
        torch.manual_seed(0)
        given = [inputs(seed) for seed in range(3)]
        contestants: dict[str, Callable[[int], Any]] = {}

        def add(engine: str, call: Callable[..., Any], contestants: dict[str, Callable[[int], Any]] = contestants, given: Any = given) -> None:
            contestants[engine] = lambda k: call(*given[k])

        model = make()
        add("eager", model)
        if not arguments.no_inductor:
            add("inductor", torch.compile(model))
        add("deplo", torch.compile(model, backend="deplo", options={"strict": True}))
        direct = deplo.jit(model, guards="inputs", options={"strict": True})
        add("direct", direct)
        if session := _onnx_session(model, given) if arguments.onnx else None:
            contestants["onnxruntime"] = session
        with torch.no_grad():
            wanted = model(*given[1])
            for engine, call in contestants.items():
                call(1)
                if engine != "onnxruntime" and not torch.allclose(call(1), wanted, rtol=1e-3, atol=1e-4):
                    raise SystemExit(f"{name}: {engine} is wrong")
            pause = 0.0 if "8 elements" in name else harness.PAUSE
            timings = harness.interleave(contestants, rounds=arguments.rounds, min_seconds=arguments.seconds, pause=pause)
        report = deplo.call_report(direct)
        rows.append({"case": name, **{f"{engine} us": timing.median * 1e6 for engine, timing in timings.items()}})
        rows[-1] |= {"direct vs eager": harness.ratio(timings, "eager", "direct"), "deplo - direct us": rows[-1]["deplo us"] - rows[-1]["direct us"]}
        rows[-1]["bare"] = "yes" if report.bare else "no"
    return rows


def _onnx_session(model: Any, given: list[tuple[torch.Tensor, ...]]) -> Callable[[int], Any] | None:
    """ONNX Runtime's call of a module; None where it is not installed, or does not take it."""
    try:
        import onnxruntime

        path = os.path.join(tempfile.mkdtemp(), "model.onnx")
        torch.onnx.export(model, given[0], path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        print(f"ONNX Runtime: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    names = [value.name for value in session.get_inputs()]
    return lambda k: session.run(None, dict(zip(names, (x.numpy() for x in given[k]), strict=True)))


def entry_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds of the program alone for sums of 1 to 65 small tensors: what a call costs, and what one more input does."""
    from deplo.backend import collect_records

    contestants: dict[str, Callable[[int], Any]] = {}
    counts = (1, 17, 65)
    for count in counts:
        torch._dynamo.reset()
        given = [torch.ones(8) for _ in range(count)]
        with torch.no_grad(), collect_records() as records:
            torch.compile(lambda *xs: functools.reduce(torch.add, xs) * 2, backend="deplo", options={"strict": True})(*given)
        contestants[str(count)] = lambda k, run=records[0].program.run, given=given: run(given)
    timings = harness.interleave(contestants, rounds=arguments.rounds, min_seconds=arguments.seconds, pause=0.0)
    row: dict[str, Any] = {"case": "entry, sum of n inputs of 8 elements", **{f"n = {n} us": timings[str(n)].median * 1e6 for n in counts}}
    return [{**row, "one more input ns": (timings["65"].median - timings["17"].median) / 48 * 1e9}]


def serving_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Calls a second (and processors that were busy) by clients: threads that call without a pause."""
    rows = []
    for name, (module, length) in serving.models().items():
        inputs = [torch.randn(rows_, length) for rows_ in range(1, 14)]
        for engine in ("eager", "deplo", "direct"):
            torch._dynamo.reset()
            call: Any = module
            if engine == "deplo":
                call = torch.compile(module, backend="deplo", dynamic=True)
            elif engine == "direct":
                call = deplo.jit(module, guards="inputs", dynamic=True)
            with torch.no_grad():
                for x in inputs * 2:
                    call(x)
            row: dict[str, Any] = {"case": f"{name} {engine}"}
            for clients in serving.CLIENTS:
                time.sleep(harness.PAUSE)
                calls, busy = serving.serve(call, inputs, clients, arguments.serve_seconds)
                row[f"{clients} clients"] = f"{calls:.0f} ({busy:.1f})"
            rows.append(row)
    return rows


def resident_mb() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def child(engine: str, name: str, size: str, path: str) -> dict[str, Any]:
    """Seconds of a model's first call in this process, and its memory after it. `path` is of ONNX Runtime's file."""
    warnings.filterwarnings("ignore")
    given = zoo.build(name, size).inputs(0)
    if engine == "onnxruntime":
        import onnxruntime

        start = time.perf_counter()
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        arrays = {value.name: x.numpy() for value, x in zip(session.get_inputs(), given.values(), strict=True)}
        session.run(None, arrays)
        seconds = time.perf_counter() - start
        for _ in range(5):
            session.run(None, arrays)
    else:
        model = zoo.build(name, size).model
        calls: dict[str, Callable[[], Any]] = {
            "eager": lambda: model,
            "inductor": lambda: torch.compile(model),
            "deplo": lambda: torch.compile(model, backend="deplo"),
            "direct": lambda: deplo.jit(model, guards="inputs"),
            "dynamo": lambda: torch.compile(model, backend="eager"),
        }
        with torch.no_grad():
            start = time.perf_counter()
            call = calls[engine]()
            call(**given)
            seconds = time.perf_counter() - start
            for _ in range(5):
                call(**given)
    return {"first call s": seconds, "RSS MB": resident_mb(), "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def export(name: str, size: str, path: str) -> None:
    """Writes the model for ONNX Runtime, in a process of its own: it takes more memory than the model."""
    case = zoo.build(name, size)
    torch.onnx.export(case.model, (), path, kwargs=case.inputs(0), dynamo=True, verbose=False)


def first_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Models in fresh processes: with cold caches, then with warm ones. `dynamo` is torch.compile's backend eager: what tracing alone takes."""
    rows = []
    peers = ["onnxruntime"] if arguments.onnx else []
    for name in arguments.models.split(","):
        for engine in ["eager", "dynamo", "deplo", "direct"] + ([] if arguments.no_inductor else ["inductor"]) + peers:
            with tempfile.TemporaryDirectory(prefix="deplo-latency-") as folder:
                path = os.path.join(folder, "model.onnx")
                if engine == "onnxruntime":
                    _run_child(["--export", name], arguments, folder, path)
                for cache in ("cold", "warm")[: 2 if engine in ("deplo", "direct", "inductor") else 1]:
                    rows.append({"case": f"{name} {engine}, {cache}", **json.loads(_run_child(["--child", engine, name], arguments, folder, path))})
    return rows


def _run_child(what: list[str], arguments: argparse.Namespace, folder: str, path: str) -> str:
    folders = {"DEPLO_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "torch")}
    command = [sys.executable, __file__, *what, "--size", arguments.size, "--path", path, "--threads", str(arguments.threads)]
    done = subprocess.run(command, env={**os.environ, **folders}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-3000:])
    return done.stdout.splitlines()[-1] if done.stdout else ""


def import_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of imports in fresh processes, the least of three: `import torch` imports deplo's first module by an entry point."""

    def least(what: str, before: str) -> float:
        code = f"import time{before}; start = time.perf_counter(); import {what}; print((time.perf_counter() - start) * 1e3)"
        return min(float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3))

    return [{"case": "import", "deplo ms": least("deplo", ""), "deplo.backend after torch._dynamo ms": least("deplo.backend", ", torch._dynamo")}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="calls,entry,serving,first,import")
    parser.add_argument("--only", default="", help="cases whose name holds this, of the table of calls")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--onnx", action="store_true", help="ONNX Runtime as well, where it is installed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="about the time of a contestant's turn in a round")
    parser.add_argument("--serve-seconds", type=float, default=0.5, help="of each number of clients")
    parser.add_argument("--models", default="mobilenet-v2,bert-base,resnet-50", help="of the table of first calls (benchmarks/zoo.py)")
    parser.add_argument("--size", choices=("real", "tiny"), default="real", help="of these")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--export", help=argparse.SUPPRESS)
    parser.add_argument("--path", default="", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch._dynamo.config.recompile_limit = 64
    if arguments.child:
        print(json.dumps(child(*arguments.child, arguments.size, arguments.path)))
        return 0
    if arguments.export:
        export(arguments.export, arguments.size, arguments.path)
        return 0
    tables = {"calls": call_table, "entry": entry_table, "serving": serving_table, "first": first_table, "import": import_table}
    rows = []
    for name in arguments.tables.split(","):
        found = tables[name](arguments)
        harness.show(found, f"{name}, {arguments.threads} threads")
        rows += found
    harness.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
