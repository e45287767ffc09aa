"""The models that deplo is measured and tested on, built from their configs with seeded random weights.

`build(name, size)` gives a Case; size is "tiny" (tests) or "real" (benchmarks). Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Case:
    """A model with a function that makes fresh inputs.

    `inputs(seed)` returns keyword arguments whose tensors change with the seed; `reset` (may be None) brings
    mutable state (a KV cache) back before a call that is compared.
    """

    name: str
    model: nn.Module
    inputs: Callable[[int], dict[str, Any]]
    reset: Callable[[], None] | None = None
    state: Callable[[], list[torch.Tensor]] = list  # the tensors that `reset` sets
    notes: str = ""
    tags: set[str] = field(default_factory=set)


class _FirstTensor(nn.Module):
    """Calls a transformers model and returns its first output tensor, so that cases compare alike."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> torch.Tensor:
        return self.model(**kwargs, return_dict=False)[0]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def _tokens(vocab: int, length: int, batch: int = 1) -> Callable[[int], dict[str, Any]]:
    return lambda seed: {"input_ids": torch.randint(0, vocab, (batch, length), generator=_generator(seed))}


def _images(size: int, batch: int = 1, channels: int = 3) -> Callable[[int], dict[str, Any]]:
    return lambda seed: {"pixel_values": torch.randn(batch, channels, size, size, generator=_generator(seed))}


def _bert(tiny: bool) -> Case:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=200) if tiny else BertConfig()
    return Case("bert-base", _FirstTensor(BertModel(config)), _tokens(config.vocab_size, 16 if tiny else 128))


def _gpt2(tiny: bool) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=200, n_positions=64) if tiny else GPT2Config()
    model = GPT2LMHeadModel(config)
    model.config.use_cache = False
    return Case("gpt2", _FirstTensor(model), _tokens(config.vocab_size, 16 if tiny else 128))


def _decoder_block(family: str, length: int, tiny: bool) -> Case:
    """One decoder layer with rotary positions, causal mask and a static KV cache that already holds `past` tokens."""
    from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model, StaticCache

    if family == "llama":
        sizes: dict[str, Any] = (
            {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
            if tiny
            else {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
        )
        config = LlamaConfig(num_hidden_layers=1, vocab_size=64, max_position_embeddings=2048, **sizes)
        model: nn.Module = LlamaModel(config)
    else:
        sizes = (
            {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
            if tiny
            else {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        )
        config = Qwen3Config(num_hidden_layers=1, vocab_size=64, max_position_embeddings=2048, **sizes)
        model = Qwen3Model(config)
    past = 8 if length == 1 else 0
    capacity = max(16 if tiny else 64, length + past)
    cache = StaticCache(config=config, max_cache_len=capacity)
    position = torch.arange(past, past + length)

    def inputs(seed: int) -> dict[str, Any]:
        dtype = next(model.parameters()).dtype
        embeds = torch.randn(1, length, config.hidden_size, generator=_generator(seed)).to(dtype)
        return {"inputs_embeds": embeds, "past_key_values": cache, "cache_position": position, "use_cache": True}

    def state() -> list[torch.Tensor]:
        tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
        return [tensor for tensor in tensors if tensor is not None]

    def reset() -> None:
        for tensor in state():
            tensor.copy_(torch.linspace(-1, 1, tensor.numel(), dtype=torch.float32).view_as(tensor))

    return Case(f"{family}-block-s{length}", _FirstTensor(model), inputs, reset, state, "static KV cache")


def _t5(tiny: bool) -> Case:
    from transformers import T5Config, T5Model

    config = (
        T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=200)
        if tiny
        else T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8)
    )
    config.use_cache = False
    length = 12 if tiny else 128

    def inputs(seed: int) -> dict[str, Any]:
        ids = _tokens(config.vocab_size, length)(seed)["input_ids"]
        return {"input_ids": ids, "decoder_input_ids": ids[:, : length // 2].contiguous(), "use_cache": False}

    return Case("t5-small", _FirstTensor(T5Model(config)), inputs)


def _vit(tiny: bool) -> Case:
    from transformers import ViTConfig, ViTModel

    config = (
        ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8)
        if tiny
        else ViTConfig()
    )
    return Case("vit-base", _FirstTensor(ViTModel(config)), _images(config.image_size))


def _resnet(tiny: bool) -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1]) if tiny else ResNetConfig(num_labels=1000)
    return Case("resnet-50", _FirstTensor(ResNetForImageClassification(config)), _images(64 if tiny else 224), tags={"conv"})


def _mobilenet(tiny: bool) -> Case:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(depth_multiplier=0.25, image_size=32) if tiny else MobileNetV2Config(num_labels=1000)
    return Case("mobilenet-v2", _FirstTensor(MobileNetV2ForImageClassification(config)), _images(32 if tiny else 224), tags={"conv"})


def _convnext(tiny: bool) -> Case:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]) if tiny else ConvNextConfig(num_labels=1000)
    return Case("convnext-tiny", _FirstTensor(ConvNextForImageClassification(config)), _images(64 if tiny else 224), tags={"conv"})


def _swin(tiny: bool) -> Case:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4) if tiny else SwinConfig()
    return Case("swin-tiny", _FirstTensor(SwinModel(config)), _images(config.image_size))


_BUILDERS: dict[str, Callable[[bool], Case]] = {
    "bert-base": _bert,
    "gpt2": _gpt2,
    **{
        f"{family}-block-s{length}": (lambda tiny, family=family, length=length: _decoder_block(family, length, tiny))
        for family in ("llama", "qwen3")
        for length in (1, 32, 128, 512)
    },
    "t5-small": _t5,
    "vit-base": _vit,
    "resnet-50": _resnet,
    "mobilenet-v2": _mobilenet,
    "convnext-tiny": _convnext,
    "swin-tiny": _swin,
}

NAMES = list(_BUILDERS)


def build(name: str, size: str = "real", dtype: torch.dtype = torch.float32) -> Case:
    """A Case with weights of a fixed seed, in eval mode. Raises KeyError naming the known models."""
    if name not in _BUILDERS:
        raise KeyError(f"unknown model {name!r}; known: {', '.join(NAMES)}")
    torch.manual_seed(0)
    case = _BUILDERS[name](size == "tiny")
    case.model.eval().to(dtype)
    # Norm weights of one and biases of zero would hide mistakes.
    with torch.no_grad():
        for parameter in case.model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=_generator(parameter.numel())).to(dtype) * 0.05)
        for key, buffer in case.model.named_buffers():
            if key.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=_generator(1)) + 0.5)
            elif key.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=_generator(2)) * 0.1)
    inner = case.inputs

    def cast(seed: int) -> dict[str, Any]:
        return {
            key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value for key, value in inner(seed).items()
        }

    case.inputs = cast
    return case


def reference(name: str, size: str = "real", dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The output of the same (rounded) weights and inputs in float64, with a KV cache of its own: the judge of a case."""
    return reference_and_state(name, size, dtype, seed)[0]


def reference_and_state(name: str, size: str, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`reference`, and what the KV cache holds after that call."""
    case = build(name, size, dtype)
    case.model.double()
    inputs = {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for key, value in case.inputs(seed).items()
    }
    if case.reset is not None:
        case.model(**inputs)
        case.reset()
    output: torch.Tensor = case.model(**inputs)
    return output, case.state()
