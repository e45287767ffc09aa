"""Architectures of transformers with tiny configs and seeded random weights; nothing is downloaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import families
import torch
from torch import nn

_TEXT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_DECODER = {**_TEXT, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_SEQ2SEQ = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16, "patch_size": 4}


@dataclasses.dataclass(frozen=True)
class Architecture(families.Configured):
    """`kind` says what the model takes: text (input_ids), decoder (the same, and it generates), seq2seq, image, speech."""

    kind: str

    def build(self) -> nn.Module:
        model = super().build()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():  # norm weights of one and biases of zero would hide mistakes
                if parameter.ndim == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        return model

    def inputs(self, length: int, seed: int = 0) -> dict[str, Any]:
        """Inputs of about `length` tokens, pixels or samples."""
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "image":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
        if self.kind == "speech":
            return {"input_values": torch.randn(1, 64 * length, generator=generator)}
        ids = torch.randint(3, 96, (2, length), generator=generator)
        if self.kind == "seq2seq":
            return {"input_ids": ids, "decoder_input_ids": ids[:, : length // 2 + 1].contiguous(), "use_cache": False}
        return {"input_ids": ids, "use_cache": False} if self.kind == "decoder" else {"input_ids": ids}


def _text(name: str, **more: Any) -> Architecture:
    return Architecture(f"{name}Model", f"{name}Config", {**_TEXT, **more}, "text")


def _decoder(name: str, grouped: bool = True, **more: Any) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", {**(_GROUPED if grouped else _DECODER), **more}, "decoder")


def _old_decoder(model: str, config: str, **settings: Any) -> Architecture:
    return Architecture(model, config, {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, **settings}, "decoder")


ARCHITECTURES: dict[str, Architecture] = {
    "bert": _text("Bert"),
    "roberta": _text("Roberta", max_position_embeddings=64),
    "electra": _text("Electra", embedding_size=16),
    "albert": _text("Albert", embedding_size=16, num_hidden_groups=1),
    "mpnet": _text("MPNet", max_position_embeddings=64),
    "deberta-v2": _text("DebertaV2", relative_attention=True, max_position_embeddings=64, pos_att_type=["c2p", "p2c"]),
    "distilbert": Architecture(
        "DistilBertModel", "DistilBertConfig", {"vocab_size": 96, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}, "text"
    ),
    "gpt2": _old_decoder("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt-neo": _old_decoder(
        "GPTNeoForCausalLM", "GPTNeoConfig", hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]], window_size=8,
    ),
    "gpt-j": _old_decoder("GPTJForCausalLM", "GPTJConfig", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    "opt": _old_decoder(
        "OPTForCausalLM", "OPTConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
    "gpt-neox": _decoder("GPTNeoX", grouped=False),
    "bloom": _old_decoder("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=4),
    "falcon": _decoder("Falcon", grouped=False),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=None),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma": _decoder("Gemma", head_dim=8),
    "gemma2": _decoder("Gemma2", head_dim=8, sliding_window=32, query_pre_attn_scalar=8),
    "phi": _decoder("Phi", partial_rotary_factor=0.5),
    "phi3": _decoder("Phi3"),
    "stablelm": _decoder("StableLm"),
    "starcoder2": _decoder("Starcoder2"),
    "olmo2": _decoder("Olmo2"),
    "cohere": _decoder("Cohere"),
    "granite": _decoder("Granite"),
    "t5": Architecture(
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}, "seq2seq",
    ),
    "bart": Architecture("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ, "seq2seq"),
    "pegasus": Architecture("PegasusForConditionalGeneration", "PegasusConfig", _SEQ2SEQ, "seq2seq"),
    "vit": Architecture("ViTModel", "ViTConfig", _VISION, "image"),
    "deit": Architecture("DeiTModel", "DeiTConfig", _VISION, "image"),
    "beit": Architecture("BeitModel", "BeitConfig", {**_VISION, "use_relative_position_bias": True}, "image"),
    "swin": Architecture(
        "SwinModel", "SwinConfig", {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}, "image"
    ),
    "convnext": Architecture("ConvNextModel", "ConvNextConfig", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, "image"),
    "wav2vec2": Architecture(
        "Wav2Vec2Model", "Wav2Vec2Config",
        {**{k: v for k, v in _TEXT.items() if k != "vocab_size"}, "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 4),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}, "speech",
    ),
}  # fmt: skip

DECODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind == "decoder"]
WITH_LENGTHS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind != "image"]


class First(nn.Module):
    """A model's first output tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        output: torch.Tensor = self.model(**inputs, return_dict=False)[0]
        return output


def answer(fn: Callable[..., torch.Tensor], module: nn.Module, inputs: dict[str, Any], backward: bool) -> list[torch.Tensor]:
    """The output, and the gradients of all parameters along a fixed direction."""
    if not backward:
        with torch.no_grad():
            return [fn(**inputs)]
    module.zero_grad()
    output = fn(**inputs)
    along = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(output.dtype)
    output.backward(along)
    return [output.detach(), *[p.grad.clone() for p in module.parameters() if p.grad is not None]]


def complaint(got: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> str:
    """Output and gradients may be as far from float64 as eager mode's, and 32 ulp of the largest value of their kind."""
    if len(got) != len(eager):
        return f"{len(got)} tensors where eager mode gives {len(eager)}"
    eps = torch.finfo(got[0].dtype).eps
    for kind in (slice(0, 1), slice(1, None)):
        largest = max((float(t.abs().max()) for t in exact[kind]), default=0.0)
        errors = [
            max((float((t.double() - x).abs().max()) for t, x in zip(answers[kind], exact[kind], strict=True)), default=0.0)
            for answers in (got, eager)
        ]
        if not errors[0] <= errors[1] + 32 * eps * largest:
            return f"{'gradient' if kind.start else 'output'}: error {errors[0]:.3g}, eager's is {errors[1]:.3g}, the largest value {largest:.3g}"
    return ""


def in_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
