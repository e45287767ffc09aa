"""Language models: prefill and decode of deplo, eager mode and llama.cpp, by turns in one process.

    python benchmarks/llm.py [--shape qwen3-0.6b] [--quant none,bf16,int8,int4] [--prompt 128] [--length N] [--layers N] [--lock FILE] [--json FILE]

Weights are random and seeded; int8 and int4 are torchao's weight-only formats for eager mode and deplo, q8_0 and q4_0 for llama.cpp, which takes part
where llama-cpp-python and gguf are installed. `of bandwidth` is the share of the read bandwidth, measured in the same run, that a decoded token
reaches over all bytes of weights and cache that it needs.
--lock takes a lock on a file while it times, and only then.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import sys
from collections.abc import Iterator
from typing import Any

import harness
import torch

from deplo.errors import UserError
from deplo.llm_arguments import add_arguments, settings_of
from deplo.llm_bench import QUANTS, measure, show


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Nobody else with a lock on the file runs meanwhile."""
    if not path:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, quant=",".join(QUANTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pause", type=float, default=harness.PAUSE)
    parser.add_argument("--lock", default="")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    failed = 0
    for quant in arguments.quant.split(","):
        gc.collect()
        torch._dynamo.reset()
        try:
            more = {"pause": arguments.pause, "during": lambda: locked(arguments.lock)}
            found = measure(arguments.shape, quant, **settings_of(arguments), **more)
        except UserError as error:
            print(f"{quant}: {error}", file=sys.stderr)
            failed = 1
            continue
        ours = found[0]
        for row in found[1:]:
            for what in ("prefill", "decode"):
                row[f"deplo's {what} over it"] = ours[f"{what} tokens/s"] / row[f"{what} tokens/s"]
        rows += found
    show(rows)
    harness.show([row for row in rows if row["engine"] != "deplo"], "deplo beside others", hide=("decode ms", "of bandwidth"))
    harness.write_json(arguments.json, rows)
    return failed


if __name__ == "__main__":
    sys.exit(main())
