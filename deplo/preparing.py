"""`deplo.prepare`: a language model of transformers whose generate() uses two programs that are ready before the first call."""

from __future__ import annotations

import gc
import json
import linecache
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .core import core
from .errors import Error, UnsupportedError, UserError
from .options import read_options


def prepare(
    model: Any,
    *,
    max_length: int,
    batch: int | Sequence[int] = 1,
    weights: str = "",
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Any:
    """Makes `model.generate(...)`, with no further options, run compiled: one program for prompts of any length, one a batch size for single tokens.

    `model` is one of transformers that generates, in eval mode, on the CPU; it is changed in place and returned. `max_length` is the most
    tokens of a text, prompt and answer together; a cache for it is allocated for each batch size. `batch` is the most sequences at once (beams
    count), or several sizes, of which a call takes the smallest that holds it. `weights` is the option of that name: by default `"original"` (both
    programs read the model's own weights), and `"own"` where these are int4 in bytes (packed copies of half their size take their place; `"auto"`
    keeps both).
    `options` are those of the backend; what they leave open is `strict`, `weights`, and `weight_checks="versions"` (after writes through .data to
    weights that are packed call `deplo.repack`). Compiles, packs what must be packed and runs both once, with a
    progress bar on a terminal; prints what memory it takes and what tokens a second the memory's bandwidth allows, unless `quiet`.

    Calls that the programs do not serve (gradients, hidden states, another cache) run as before. Raises UserError for what is no such model, for
    sizes that do not fit it, and later for a generate() that needs more tokens or sequences; UnsupportedError for models that keep another state than
    keys and values of each token, or that Dynamo makes no single graph of.
    """
    from .llm_roofline import has_short_codes

    sizes = _checked_sizes(model, max_length, batch)
    if weights and "weights" in (options or {}):
        raise UserError("weights is given twice: by itself and among the options")
    # Codes of four bits that lie in a byte each are read in half the time once they are packed; beside the copies they would take twice as much.
    usual = "own" if has_short_codes(model) else "original"
    given = {"strict": True, "weights": weights or usual, "weight_checks": "versions", **(options or {})}
    read_options(options=given)
    from torch._dynamo.exc import TorchDynamoException

    from .llm_plans import plans_for
    from .progress import Bar
    from .records import collect_records

    start = time.perf_counter()
    lines = set(linecache.cache)
    # Schedules are those for the first one.
    lengths = [n for n in (min(128, max_length - 1), 2) if 2 <= n < max_length]
    lengths = list(dict.fromkeys(lengths))
    with collect_records() as records:
        plans = plans_for(model)(model, max_length, sizes, given)
        plans.install()
        try:
            with Bar("preparing", plans.warm_up_steps(lengths)) as bar:
                plans.warm_up(lengths, bar)
        except BaseException as error:
            plans.remove()
            if isinstance(error, TorchDynamoException) and not isinstance(error, Error):
                why = next((line.strip() for line in str(error).splitlines() if line.strip()), "it does not say why")
                raise UnsupportedError(f"Dynamo makes no single graph of {type(model).__name__}: {why}") from error
            if isinstance(error, UnsupportedError) and type(model).__name__ not in str(error):
                raise UnsupportedError(f"{type(model).__name__}: {error}") from error
            raise
    gc.collect()  # what Dynamo leaves of a traced model is a good part of a small model's size
    for path in set(linecache.cache) - lines:  # sources that tracebacks of traced calls named; read again when wanted
        if os.path.exists(path):
            linecache.cache.pop(path, None)
    core().trim_memory()
    if not quiet:
        print(_summary(plans, time.perf_counter() - start, records))
    return model


def _checked_sizes(model: Any, max_length: int, batch: int | Sequence[int]) -> tuple[int, ...]:
    """The batch sizes, each once, ascending; raises UserError for what is wrong with any argument."""
    import torch

    try:
        from transformers import GenerationMixin
    except ImportError as error:
        raise UserError(f"prepare is for models of transformers, which is not installed: {error}") from None
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"prepare takes a model of transformers, not {type(model).__name__}")
    if "_orig_mod" in dict(model.named_children()) or ("forward" in model.__dict__ and not hasattr(model, "deplo_plans")):
        raise UserError("the model is compiled already, or its forward was replaced: prepare takes it as it was built")
    if hasattr(model, "deplo_plans"):
        raise UserError("the model is prepared already: build it anew, or deplo.prepare a copy of the original, for other sizes")
    generator: Any = model
    if not isinstance(model, GenerationMixin) or not generator.can_generate():
        raise UserError(
            f"{type(model).__name__} does not generate text: prepare takes models of transformers with generate(), as AutoModelForCausalLM"
        )
    config: Any = model.config
    if model.training:
        raise UserError("the model is in training mode: call model.eval() first")
    places = {x.device.type for x in (*model.parameters(), *model.buffers())}
    if places - {"cpu"}:
        raise UserError(f"prepare is for models on the CPU, this one has tensors on {', '.join(sorted(places - {'cpu'}))}")
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise UserError(f"max_length is {max_length!r}, expected the number of tokens of a prompt and its answer, at least 2")
    known = config.get_text_config(decoder=True).to_dict()
    for name in ("max_position_embeddings", "max_target_positions"):
        if isinstance(known.get(name), int) and max_length > known[name]:
            raise UserError(f"max_length is {max_length}, but the model knows positions up to {known[name]} ({name})")
    sizes = [batch] if isinstance(batch, int) else list(batch) if isinstance(batch, Sequence) and not isinstance(batch, str) else []
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise UserError(f"batch is {batch!r}, expected a number of sequences from 1 on, or several such numbers")
    return tuple(sorted(set(sizes)))


def _summary(plans: Any, seconds: float, records: list[Any]) -> str:
    """What `prepare` prints."""
    from .llm_roofline import Reads, bytes_of, read_bandwidth, weights_of, weights_read
    from .terminal import quantity

    sizes = " and ".join(map(str, plans.batches))
    kept = sum(layer.bytes_of_token() for layer in plans.layers)
    packed = max((json.loads(r.program.describe()).get("memory", {}).get("packed_bytes", 0) for r in records if r.program is not None), default=0)
    reads = Reads(weights_read(plans.model), kept)
    bandwidth = read_bandwidth()
    dtypes = {str(x.dtype).removeprefix("torch."): bytes_of(x) for x in plans.model.parameters()}
    dtype = max(dtypes, key=lambda name: dtypes[name])
    lines = [
        f"{type(plans.model).__name__} prepared in {seconds:.1f} s for {sizes} sequences of {plans.length} tokens",
        f"memory: weights {quantity(weights_of(plans.model), 'B')} ({dtype}), "
        f"packed copies {quantity(packed, 'B')}, cache {quantity(plans.cache_memory(), 'B')}",
    ]
    for size in plans.batches:
        empty, full = (reads.tokens_a_second(bandwidth, cached, size) for cached in (0, plans.length))
        lines.append(
            f"decode, {size} at once: a step reads {quantity(reads.weights, 'B')} of weights; at {quantity(bandwidth, 'B')}/s, "
            f"as this machine reads now, at most {empty:.4g} tokens/s, {full:.4g} with a full cache"
        )
    return "\n".join(lines)
