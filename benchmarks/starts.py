"""How soon a model answers in a new process when everything was compiled before: seconds from nothing but its module and `import torch, deplo` to the
first answer, medians of processes in turns. What Dynamo alone takes is `dynamo` without `eager`.

    python benchmarks/starts.py [--models bert-base,resnet-50] [--rounds 5] [--size real|tiny] [--threads 2] [--json FILE]

`eager` is the module's first call, `dynamo` that of torch.compile's backend eager, `cache` deplo's with a hit in PyTorch's cache, `package` is
deplo.load and a call, `loaded` torch.compiler.load_compiled_function and a call; `training` are a forward and a backward pass. `compiled` and
`imported` count the kernels and graphs of deplo that had to be made all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
import zoo

import deplo

ENGINES = ("eager", "dynamo", "cache", "package", "loaded", "training eager", "training dynamo", "training cache")
STRICT = {"strict": True}


def _starts(engine: str, model: torch.nn.Module, given: dict[str, Any], folder: str) -> Callable[[], Any]:
    """What makes the callable of an engine and calls it."""
    if engine == "package":
        return lambda: deplo.load(os.path.join(folder, "package"))(**given)
    if engine == "loaded":
        return lambda: _loaded(folder)(model, **given)
    kind = engine.removeprefix("training ")
    if kind == "eager":
        return lambda: model(**given)
    keywords: dict[str, Any] = {"backend": "eager"} if kind == "dynamo" else {"backend": "deplo", "options": STRICT}
    return lambda: torch.compile(model, **keywords)(**given)


def _loaded(folder: str) -> Callable[..., Any]:
    with open(os.path.join(folder, "loaded"), "rb") as file:
        function: Callable[..., Any] = torch.compiler.load_compiled_function(file)
    return function


def child(engine: str, name: str, size: str, folder: str) -> dict[str, Any]:
    """The figures of one start, in this process."""
    from deplo.backend import collect_records

    warnings.filterwarnings("ignore")
    case = zoo.build(name, size)
    given = case.inputs(0)
    training = engine.startswith("training")
    case.model.train(training)
    start = _starts(engine, case.model, given, folder)
    with torch.set_grad_enabled(training), collect_records() as records:
        wall, cpu = time.perf_counter(), time.process_time()
        result = start()
        if training:
            result.sum().backward()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "s": wall,
        "CPU s": cpu,
        "compiled": sum(json.loads(r.program.describe())["cache"]["compiled"] for r in records),
        "imported": sum(not r.restored for r in records),
        "programs": len(records),
    }


def fill(name: str, size: str, folder: str) -> None:
    """Compiles everything that the children find."""
    case = zoo.build(name, size)
    given = case.inputs(0)
    case.model.eval()
    with torch.no_grad():
        torch.compile(case.model, backend="deplo", options=STRICT)(**given)
        deplo.export(case.model, (), given, path=os.path.join(folder, "package"))
        torch._dynamo.reset()
        # Modules of transformers hold what PyTorch cannot write down as a guard.
        guards = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        compiled: Any = torch.compile(case.model.forward, backend="deplo", options={**STRICT, **guards}, fullgraph=True)
        compiled.aot_compile(((), given)).save_compiled_function(os.path.join(folder, "loaded"))
    torch._dynamo.reset()
    case.model.train()
    torch.compile(case.model, backend="deplo", options=STRICT)(**given).sum().backward()


def measure(name: str, engines: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of a model, a process for each start."""
    with tempfile.TemporaryDirectory(prefix="deplo-starts-") as folder:
        _run(["--fill", name], arguments, folder)
        found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
        for k in range(arguments.rounds):
            for engine in engines[k % len(engines) :] + engines[: k % len(engines)]:
                found[engine].append(json.loads(_run(["--child", engine, name], arguments, folder)))
    return [{"case": f"{name} {engine}", **{key: statistics.median(row[key] for row in rows) for key in rows[0]}} for engine, rows in found.items()]


def _run(what: list[str], arguments: argparse.Namespace, folder: str) -> str:
    folders = {"DEPLO_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "torch")}
    command = [sys.executable, os.path.abspath(__file__), *what, "--size", arguments.size, "--threads", str(arguments.threads), "--folder", folder]
    # Programs that are verified after each pass are never kept in PyTorch's cache.
    others = {name: value for name, value in os.environ.items() if name != "DEPLO_VERIFY"}
    done = subprocess.run(command, env={**others, **folders}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-3000:])
    return done.stdout.splitlines()[-1] if done.stdout else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bert-base,resnet-50")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--fill", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        print(json.dumps(child(*arguments.child, arguments.size, arguments.folder)))
        return 0
    if arguments.fill:
        fill(arguments.fill, arguments.size, arguments.folder)
        return 0
    rows = [row for name in arguments.models.split(",") for row in measure(name, arguments.engines.split(","), arguments)]
    harness.show(rows, f"starts, {arguments.threads} threads")
    harness.write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
