"""`python -m deplo bench-llm`: tokens a second of a language model's shape with random weights, beside eager mode and llama.cpp."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .errors import UserError

_QWEN3 = {"vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": True}
_LLAMA = {"head_dim": 64, "num_attention_heads": 32}
# Name: class of transformers (without ForCausalLM) and settings of its config.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": ("Qwen3", {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}),
    "qwen3-1.7b": ("Qwen3", {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}),
    "tinyllama-1.1b": (
        "Llama",
        {**_LLAMA, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
    ),
    "llama-3.2-1b": (
        "Llama",
        {
            **_LLAMA,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
}
QUANTS = ("none", "bf16", "int8", "int4")


def _no_init_weights() -> Any:
    """Leaves parameters as they are when a model is built, in transformers 4 and 5."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from transformers.modeling_utils import no_init_weights
    return no_init_weights()


def build(shape: str, quant: str, layers: int = 0, length: int = 4096) -> Any:
    """A model with seeded random weights: `none` in float32, else in bfloat16, int8 and int4 (in groups of 32) by torchao; `layers` > 0: so many."""
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}: expected one of {', '.join(SHAPES)}")
    if quant not in QUANTS:
        raise UserError(f"--quant {quant}: expected one of {', '.join(QUANTS)}")
    import transformers

    family, settings = SHAPES[shape]
    config = getattr(transformers, f"{family}Config")(
        **{**settings, "max_position_embeddings": length, **({"num_hidden_layers": layers} if layers else {})}
    )
    config.dtype = torch.float32 if quant == "none" else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        with _no_init_weights():
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 0.02, generator=generator)
    model.requires_grad_(False)
    if quant in ("int8", "int4"):
        quantize(model, quant)
    return model


def quantize(model: Any, quant: str) -> None:
    """Weights of all linear layers in int8 (a scale for each row) or int4 (for each 32 of a row), by torchao; the head's own copy, if it was tied."""
    try:
        ao: Any = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise UserError(f"--quant {quant} needs torchao: {error}") from None
    int4: Any = torch.int4  # type: ignore[attr-defined]
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    how = (
        ao.Int8WeightOnlyConfig(set_inductor_config=False)
        if quant == "int8"
        else ao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=ao.PerGroup(32))
    )
    ao.quantize_(model, how)


@dataclasses.dataclass
class Engine:
    """Who takes part: `prefill()` reads the prompt into an empty cache, `decode()` one token after what is there; both wait for their logits."""

    name: str
    prefill: Callable[[], Any]
    decode: Callable[[], Any]
    kept: Any = None  # what must live as long


def of_deplo(model: Any, prompt: torch.Tensor) -> Engine:
    """A prepared model's programs."""
    plans = model.deplo_plans
    cache = plans.cache(prompt.shape[0])
    one = prompt[:, :1].contiguous()
    name = plans.cache_name

    @torch.no_grad()
    def prefill() -> None:
        cache.reset()
        model(input_ids=prompt, logits_to_keep=1, **{name: cache})

    @torch.no_grad()
    def decode() -> None:
        model(input_ids=one, **{name: cache})

    return Engine("deplo", prefill, decode)


def of_eager(model: Any, prompt: torch.Tensor, length: int) -> Engine:
    """The model in eager mode, with a static cache as generate() would have it."""
    from transformers import StaticCache

    plans = model.deplo_plans
    name, forward = plans.cache_name, type(model).forward
    state: dict[str, Any] = {}
    one = prompt[:, :1].contiguous()

    def call(ids: torch.Tensor) -> None:
        at = torch.arange(state["length"], state["length"] + ids.shape[1])
        more = {"cache_position": at} if "cache_position" in plans.accepted else {}
        forward(model, input_ids=ids, position_ids=at[None], logits_to_keep=1, use_cache=True, **{name: state["cache"]}, **more)
        state["length"] += ids.shape[1]

    @torch.no_grad()
    def prefill() -> None:
        state.update(cache=StaticCache(config=model.config, max_cache_len=length), length=0)
        call(prompt)

    @torch.no_grad()
    def decode() -> None:
        call(one)

    return Engine("eager", prefill, decode)


def take_turns(engines: Sequence[Engine], rounds: int, tokens: int, pause: float) -> dict[str, tuple[float, float]]:
    """Median seconds of a prefill and of a decoded token, by name. In each round every engine reads the prompt twice, the first time uncounted, and
    decodes `tokens` after it; before each turn nothing runs for `pause` seconds, as idle threads spin on."""
    found: dict[str, tuple[list[float], list[float]]] = {engine.name: ([], []) for engine in engines}
    for number in range(rounds):
        for engine in engines if number % 2 else engines[::-1]:
            time.sleep(pause)
            engine.prefill()
            start = time.perf_counter()
            engine.prefill()
            found[engine.name][0].append(time.perf_counter() - start)
            engine.decode()
            start = time.perf_counter()
            for _ in range(tokens):
                engine.decode()
            found[engine.name][1].append((time.perf_counter() - start) / tokens)
    return {name: (statistics.median(prefill), statistics.median(decode)) for name, (prefill, decode) in found.items()}


def measure(
    shape: str,
    quant: str,
    *,
    prompt: int = 128,
    tokens: int = 16,
    rounds: int = 5,
    layers: int = 0,
    pause: float = 0.4,
    eager: bool = True,
    llama: bool = True,
    length: int = 0,
    options: Mapping[str, Any] | None = None,
    during: Callable[[], Any] | None = None,
) -> list[dict[str, Any]]:
    """A row for each engine: tokens a second of a prompt and of decoding, and of the read bandwidth the share that decoding reaches; for deplo also
    `memory`: the weights' bytes, as the model stores them, and what preparing and the first calls added to the process, over the weights' bytes (of
    4-bit values half a byte each).

    `during()` is a context in which the timing, and nothing else, takes place.
    """
    import contextlib

    from . import llm_llama
    from .core import core
    from .llm_roofline import Reads, read_bandwidth, weights_of, weights_read
    from .preparing import prepare

    length = length or prompt + tokens + 8
    if prompt < 2 or tokens < 1 or rounds < 1 or length < prompt + tokens + 2:
        raise UserError(
            f"a prompt of {prompt}, {tokens} tokens, {rounds} rounds and a cache for {length}: the cache must hold prompt, tokens and two more"
        )
    model = build(shape, quant, layers, max(length, 64))
    gc.collect()
    core().trim_memory()  # what building the model left free is not the process's gain
    before = resident()
    prepare(model, max_length=length, options=options)
    ids = torch.randint(0, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(1))
    engines = [of_deplo(model, ids)]
    engines[0].prefill()
    engines[0].decode()
    added = resident() - before
    stored = weights_of(model, as_stored=True)
    if eager:
        engines.append(of_eager(model, ids, length))
    if llama and (other := llm_llama.engine(model.config, quant, ids[0].tolist(), length)):
        engines.append(other)
    with during() if during else contextlib.nullcontext():
        bandwidth = read_bandwidth()
        times = take_turns(engines, rounds, tokens, pause)
    plans = model.deplo_plans
    reads = Reads(weights_read(model), sum(layer.bytes_of_token() for layer in plans.layers))
    weights = weights_of(model)
    rows: list[dict[str, Any]] = []
    for name, (prefill, decode) in times.items():
        share = reads.tokens_a_second(bandwidth, prompt + tokens // 2) * decode
        row = {"engine": name, "quant": quant, "prefill tokens/s": prompt / prefill, "decode tokens/s": 1 / decode, "decode ms": decode * 1e3}
        rows.append({**row, "of bandwidth": 1 / share} if name != "llama.cpp" else row)
    rows[0]["memory"] = (stored + added) / weights
    return rows


def resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows as a table."""
    from .terminal import show_table

    header = ["engine", "quant", "prefill tokens/s", "decode tokens/s", "decode ms", "of bandwidth", "memory"]
    cells = [
        [
            row["engine"],
            row["quant"],
            *(f"{row[name]:.4g}" for name in header[2:5]),
            f"{row['of bandwidth']:.0%}" if "of bandwidth" in row else "",
            f"{row['memory']:.2f}x" if "memory" in row else "",
        ]
        for row in rows
    ]
    show_table("", header, cells, range(2, 7))
