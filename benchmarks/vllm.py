"""Offline throughput of vLLM on the CPU: deplo beside vLLM's own Inductor mode, in engines that take turns, and eager mode's tokens.

python benchmarks/vllm.py [--dtype float32] [--layers 4] [--requests 16] [--repeat 3] [--engines eager,inductor,deplo]: dummy weights of the shape
of Qwen3-0.6B, made here without a network; prompts and answers of mixed lengths, greedy, all handed in at once; tokens compared with eager's.
Eager mode's engine runs first and ends; the others are there at once, and each round of runs begins with another of them.
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


def resident() -> int:
    """Bytes of memory of the largest process among this one and those that it started, which holds the model (with its share of what others map)."""
    import psutil

    this = psutil.Process()
    return max(process.memory_full_info().pss for process in (this, *this.children(recursive=True)))


def serve(engine: str, folder: str, dtype: str, count: int, results: Any) -> None:
    """In a process of its own: writes a line of JSON to `results` with the seconds that the engine took to build; then for each line of input runs
    the requests once, and writes seconds, those of processors, bytes of memory and tokens."""
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

    def tell(**what: Any) -> None:
        results.write(json.dumps(what) + "\n")
        results.flush()

    tell(built=time.perf_counter() - start)
    prompts, lengths = requests(count)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths]
    for _ in sys.stdin:
        start, start_processor = time.perf_counter(), processor_time()
        outputs = llm.generate(given, sampling, use_tqdm=False)
        seconds, processor = time.perf_counter() - start, processor_time() - start_processor
        tell(seconds=seconds, processor=processor, memory=resident(), tokens=[list(output.outputs[0].token_ids) for output in outputs])


class Engine:
    """An engine in a process of its own, built and run once: `built` is seconds, `runs` what later runs told."""

    def __init__(self, name: str, folder: str, arguments: argparse.Namespace) -> None:
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        self.name = name
        self.runs: list[dict[str, Any]] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until the engine ends)
        reading, writing = os.pipe()
        command = [sys.executable, __file__, "--child", name, "--folder", folder, "--results", str(writing)]
        command += ["--dtype", arguments.dtype, "--requests", str(arguments.requests)]
        said = None if arguments.verbose else self._errors
        environment = {**settings, "HF_HUB_OFFLINE": "1", **os.environ}
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=said, stderr=said, text=True, pass_fds=(writing,))
        os.close(writing)
        self._results = os.fdopen(reading)
        self.built: float = self._next()["built"]
        self.run()
        self.runs.clear()

    def run(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        self.runs.append(self._next())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._results.close()
        self._errors.close()

    def median(self, what: str) -> float:
        found: float = statistics.median(run[what] for run in self.runs)
        return found

    def _next(self) -> dict[str, Any]:
        if not (line := self._results.readline()):
            self._errors.seek(0)
            raise SystemExit(f"{self.name} failed:\n{self._errors.read()[-4000:]}")
        found: dict[str, Any] = json.loads(line)
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
    parser.add_argument("--results", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        with os.fdopen(arguments.results, "w") as results:
            serve(arguments.child, arguments.folder, arguments.dtype, arguments.requests, results)
        return
    prompts, lengths = requests(arguments.requests)
    given, wanted = sum(map(len, prompts)), sum(lengths)
    print(f"{arguments.requests} requests of {given} tokens, {wanted} to generate, {arguments.dtype}, {arguments.layers} layers", flush=True)
    names = arguments.engines.split(",")
    expected = None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": arguments.layers, "dtype": arguments.dtype}))
        if "eager" in names:
            eager = Engine("eager", folder, arguments)
            for _ in range(arguments.repeat):
                eager.run()
            eager.end()
            expected = eager.runs[-1]["tokens"]
            tell_of(eager, wanted, None)
        engines = [Engine(name, folder, arguments) for name in names if name != "eager"]
        for turn in range(arguments.repeat if engines else 0):
            first = turn % len(engines)
            for engine in engines[first:] + engines[:first]:
                engine.run()
        for engine in engines:
            tell_of(engine, wanted, expected)
            engine.end()
    seconds = {engine.name: [run["seconds"] for run in engine.runs] for engine in engines}
    if {"inductor", "deplo"} <= set(seconds):
        ratio = statistics.median(theirs / ours for theirs, ours in zip(seconds["inductor"], seconds["deplo"], strict=True))
        print(f"deplo / inductor, median of {arguments.repeat} turns: {ratio:.2f}")


def tell_of(engine: Engine, wanted: int, expected: list[list[int]] | None) -> None:
    """Prints the medians of an engine that was to generate `wanted` tokens, and how many answers are the `expected` ones."""
    same = ""
    if expected is not None:
        equal = sum(a == b for a, b in zip(engine.runs[-1]["tokens"], expected, strict=True))
        same = f", tokens equal eager's in {equal} of {len(expected)} answers"
    speed = f"{wanted / engine.median('seconds'):7.1f} tokens/s generated, {engine.median('processor'):6.2f} s of processors"
    print(f"{engine.name:9} {speed}, {engine.median('memory') / 1e9:.2f} GB, engine ready after {engine.built:5.1f} s{same}", flush=True)


if __name__ == "__main__":
    main()
