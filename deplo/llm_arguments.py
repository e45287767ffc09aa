"""Arguments of `python -m deplo bench-llm`, which benchmarks/llm.py takes too; other commands need not import what measures."""

from __future__ import annotations

import argparse
from typing import Any

_NUMBERS = (
    ("prompt", 128, "tokens of the prompt"),
    ("tokens", 16, "tokens decoded in each round"),
    ("rounds", 5, "rounds, of which the median counts"),
    ("layers", 0, "decoder layers; 0: as many as the shape has"),
    ("length", 0, "tokens that the cache holds; 0: prompt and answer"),
)


def add_arguments(parser: argparse.ArgumentParser, quant: str) -> None:
    """What is measured; `quant` is the default."""
    parser.add_argument("--shape", default="qwen3-0.6b", metavar="NAME", help="qwen3-0.6b (default), qwen3-1.7b, tinyllama-1.1b or llama-3.2-1b")
    parser.add_argument("--quant", default=quant, metavar="KIND", help=f"none (float32), bf16, int8 or int4; several with commas (default: {quant})")
    for name, default, text in _NUMBERS:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--no-eager", action="store_true", help="leave eager mode out")
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp out, which takes part where llama-cpp-python and gguf are installed")


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keywords of llm_bench.measure()."""
    numbers = {name: getattr(arguments, name) for name, _, _ in _NUMBERS}
    return {**numbers, "eager": not arguments.no_eager, "llama": not arguments.no_llama}
