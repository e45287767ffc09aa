"""Offline throughput of vLLM on the CPU: deplo beside vLLM's own Inductor mode and eager mode, each in an engine of its own, after each other.

python benchmarks/vllm.py [--dtype float32] [--layers 4] [--requests 16] [--repeat 3] [--engines eager,inductor,deplo]: dummy weights of the shape
of Qwen3-0.6B, made here without a network; prompts and answers of mixed lengths, greedy, all handed in at once; tokens compared with eager's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# This file's own name would hide the package.
sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
MAX_LENGTH = 512


def requests(count: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Prompts of 4 to 119 tokens, and how many tokens to generate for each: 8 to 63."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randrange(4, 120))] for _ in range(count)]
    return prompts, [rng.randrange(8, 64) for _ in range(count)]


def processor_time() -> float:
    """Seconds of processors of this process and those that it started: the engine has one of its own."""
    import psutil

    this = psutil.Process()
    used = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(times.user + times.system for times in used)


def run(engine: str, folder: str, dtype: str, count: int, repeat: int) -> dict[str, Any]:
    """In a process of its own: seconds to build the engine, seconds (and those of processors) of each of `repeat` runs after a first one, and the
    tokens of the last."""
    from vllm import LLM, SamplingParams

    chosen: dict[str, Any] = {"eager": {"enforce_eager": True}, "inductor": {"compilation_config": {"backend": "inductor"}}}.get(
        engine, {"compilation_config": {"backend": "deplo"}}
    )
    start = time.perf_counter()
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=MAX_LENGTH,
        max_num_seqs=count,
        max_num_batched_tokens=MAX_LENGTH,
        enable_prefix_caching=False,  # runs after the first would skip their prompts
        seed=0,
        **chosen,
    )
    built = time.perf_counter() - start
    prompts, lengths = requests(count)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths]
    seconds, processor = [], []
    for _ in range(1 + repeat):
        start, start_processor = time.perf_counter(), processor_time()
        outputs = llm.generate(given, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        processor.append(processor_time() - start_processor)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {"built": built, "seconds": seconds[1:], "processor": processor[1:], "tokens": tokens}


def in_own_process(engine: str, folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, __file__, "--child", engine, "--folder", folder, "--result", result.name]
        command += ["--dtype", arguments.dtype, "--requests", str(arguments.requests), "--repeat", str(arguments.repeat)]
        done = subprocess.run(command, env={**settings, "HF_HUB_OFFLINE": "1", **os.environ}, capture_output=not arguments.verbose, text=True)
        text = result.read()
    if done.returncode or not text:
        raise SystemExit(f"{engine} failed:\n{(done.stderr or '')[-4000:]}")
    found: dict[str, Any] = json.loads(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engines", default="eager,inductor,deplo")
    parser.add_argument("--verbose", action="store_true", help="what vLLM says")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        found = run(arguments.child, arguments.folder, arguments.dtype, arguments.requests, arguments.repeat)
        Path(arguments.result).write_text(json.dumps(found))
        return
    prompts, lengths = requests(arguments.requests)
    given, wanted = sum(map(len, prompts)), sum(lengths)
    print(f"{arguments.requests} requests of {given} tokens, {wanted} to generate, {arguments.dtype}; one engine after the other", flush=True)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": arguments.layers, "dtype": arguments.dtype}))
        for engine in arguments.engines.split(","):
            result = results[engine] = in_own_process(engine, folder, arguments)
            seconds = statistics.median(result["seconds"])
            same = ""
            if engine != "eager" and "eager" in results:
                equal = sum(a == b for a, b in zip(result["tokens"], results["eager"]["tokens"], strict=True))
                same = f", tokens equal eager's in {equal} of {arguments.requests} answers"
            speed = f"{wanted / seconds:7.1f} tokens/s generated, {statistics.median(result['processor']):6.2f} s of processors"
            print(f"{engine:9} {speed}, engine ready after {result['built']:5.1f} s{same}", flush=True)
    if {"inductor", "deplo"} <= set(results):
        ratio = statistics.median(results["inductor"]["seconds"]) / statistics.median(results["deplo"]["seconds"])
        print(f"deplo / inductor: {ratio:.2f}")


if __name__ == "__main__":
    main()
