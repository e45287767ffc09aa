"""Calls a second of one compiled model from several Python threads: python benchmarks/serving.py [--inductor] [--seconds 1] [--rows 13]."""

from __future__ import annotations

import argparse
import resource
import threading
import time
from collections.abc import Callable

import torch

import deplo

CLIENTS = (1, 2, 4, 8, 16)


def models() -> dict[str, tuple[torch.nn.Module, int]]:
    """Modules and the length of a row of their input."""
    nn = torch.nn
    return {
        "mlp 1024-4096-1024": (nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)), 1024),
        "mlp 256-1024-256": (nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), 256),
        "mlp 64-256-64": (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), 64),
    }


def serve(call: Callable[[torch.Tensor], torch.Tensor], inputs: list[torch.Tensor], clients: int, seconds: float) -> tuple[float, float]:
    """Calls a second from `clients` threads that each call without a pause, and processors that were busy meanwhile (in cores)."""
    counts = [0] * clients
    ready = threading.Barrier(clients + 1)
    end = [float("inf")]

    def client(k: int) -> None:
        with torch.no_grad():
            for x in inputs:
                call(x)
            ready.wait()
            while time.perf_counter() < end[0]:
                call(inputs[counts[k] % len(inputs)])
                counts[k] += 1

    threads = [threading.Thread(target=client, args=(k,)) for k in range(clients)]
    for thread in threads:
        thread.start()
    ready.wait()
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    end[0] = start + seconds
    for thread in threads:
        thread.join()
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return sum(counts) / elapsed, busy / elapsed


def main() -> None:
    torch._dynamo.config.recompile_limit = 64
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inductor", action="store_true", help="measure torch.compile's own backend as well")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rows", type=int, default=13, help="inputs have 1 to this many rows")
    parser.add_argument("--only", default="", help="models whose name holds this")
    arguments = parser.parse_args()
    print(f"{'calls a second (cores busy)':36}" + "".join(f"{f'{n} clients':>18}" for n in CLIENTS))
    for name, (module, length) in models().items():
        if arguments.only not in name:
            continue
        inputs = [torch.randn(rows, length) for rows in range(1, arguments.rows + 1)]
        engines: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"deplo": torch.compile(module, backend="deplo", dynamic=True), "eager": module}
        engines["direct"] = deplo.jit(module, guards="inputs", dynamic=True)
        if arguments.inductor:
            engines["inductor"] = torch.compile(module, dynamic=True)
        for engine, call in engines.items():
            with torch.no_grad():
                for x in inputs * 2:
                    call(x)
            cells = [serve(call, inputs, clients, arguments.seconds) for clients in CLIENTS]
            print(f"{name + ' ' + engine:36}" + "".join(f"{f'{calls:.0f} ({busy:.1f})':>18}" for calls, busy in cells), flush=True)


if __name__ == "__main__":
    main()
