"""llama.cpp beside deplo, where llama-cpp-python and gguf are installed: the same shape with random weights, by its C interface."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llm_bench import Engine

# Of torchao's and of llama.cpp's formats those that keep as many bits.
_TYPES = {"none": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


def is_here() -> bool:
    """Whether llama-cpp-python and gguf are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))


def engine(config: Any, quant: str, prompt: list[int], length: int) -> Engine | None:
    """llama.cpp with as many threads as torch; None where it is not installed."""
    if not is_here():
        return None
    import torch

    from .llm_bench import Engine

    lib: Any = importlib.import_module("llama_cpp")
    folder = tempfile.TemporaryDirectory(prefix="deplo-gguf-")
    path = os.path.join(folder.name, "model.gguf")
    write_model(path, config, quant)
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = max(length, 256), max(length, 512), 512
    settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
    context = lib.llama_init_from_model(model, settings)
    if not model or not context:
        raise RuntimeError("llama.cpp does not load the model that was written for it")
    tokens = (lib.llama_token * len(prompt))(*prompt)
    one = (lib.llama_token * 1)(prompt[0])

    def run(given: Any, count: int) -> None:
        if status := lib.llama_decode(context, lib.llama_batch_get_one(given, count)):
            raise RuntimeError(f"llama_decode gives {status}")
        lib.llama_get_logits_ith(context, -1)

    def prefill() -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        run(tokens, len(prompt))

    return Engine("llama.cpp", prefill, lambda: run(one, 1), (folder, quiet, model))


def write_model(path: str, config: Any, quant: str) -> None:
    """A GGUF file of the config's shape (Llama, Qwen3) with random weights and no vocabulary."""
    import numpy

    gguf: Any = importlib.import_module("gguf")
    name = config.model_type
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    width, inner = config.hidden_size, config.intermediate_size
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(width)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6 if name == "qwen3" else 1e4)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    random = numpy.random.default_rng(0)

    def matrix(tensor: str, rows: int, columns: int) -> None:
        kind = getattr(gguf.GGMLQuantizationType, _TYPES[quant])
        data: Any
        if quant == "none":
            data = random.standard_normal((rows, columns), dtype=numpy.float32) * 0.02
        elif quant == "bf16":
            bits = (random.standard_normal((rows, columns), dtype=numpy.float32) * 0.02).view(numpy.uint32) >> 16
            data = bits.astype(numpy.uint16).view(numpy.uint8)
        else:  # blocks of 32: a scale in float16, then codes
            data = random.integers(0, 256, (rows, columns // 32, 34 if quant == "int8" else 18), dtype=numpy.uint8)
            scale = numpy.array([0.02 / (74 if quant == "int8" else 4.6)], numpy.float16)
            data[:, :, :2] = scale.view(numpy.uint8)
            data = data.reshape(rows, -1)
        writer.add_tensor(tensor, data, raw_dtype=kind)

    def vector(tensor: str, count: int) -> None:
        writer.add_tensor(tensor, numpy.ones(count, numpy.float32))

    matrix("token_embd.weight", config.vocab_size, width)
    vector("output_norm.weight", width)
    if not config.tie_word_embeddings:
        matrix("output.weight", config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        start = f"blk.{layer}."
        for part in ("attn_norm", "ffn_norm"):
            vector(f"{start}{part}.weight", width)
        if name == "qwen3":
            for part in ("attn_q_norm", "attn_k_norm"):
                vector(f"{start}{part}.weight", size)
        matrix(f"{start}attn_q.weight", heads * size, width)
        matrix(f"{start}attn_k.weight", groups * size, width)
        matrix(f"{start}attn_v.weight", groups * size, width)
        matrix(f"{start}attn_output.weight", width, heads * size)
        matrix(f"{start}ffn_gate.weight", inner, width)
        matrix(f"{start}ffn_up.weight", inner, width)
        matrix(f"{start}ffn_down.weight", width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
