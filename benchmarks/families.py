"""Families of models in transformers that the model zoo does not have, at their usual widths with few layers: deplo beside eager mode.

    python benchmarks/families.py [--match TEXT] [--dtype float32|bfloat16] [--train] [--threads 2] [--rounds 5] [--json FILE]

Random weights and inputs; what is compared is a model's first result, or with `--train` the gradients of the mean of its squares (dropout is off;
a step is forward and backward). Times are medians of turns (README.md here says how); `vs eager` is eager
mode's time over deplo's. Numbers are judged by float64, as in run.py. `benchmarks/sass.py --suites families` judges their kernels for GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import harness
import peak
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

Inputs = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Configured:
    """A `model` of transformers with `settings` of its configuration."""

    model: str
    config: str
    settings: Mapping[str, Any]

    def build(self) -> torch.nn.Module:
        """For inference, of seeded random weights."""
        torch.manual_seed(0)
        made: torch.nn.Module = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.settings))
        return made.eval()


@dataclasses.dataclass(frozen=True)
class Family(Configured):
    """With inputs in the model's dtype."""

    name: str
    inputs: Callable[[torch.dtype], Inputs]
    keeps_in_eval: bool = False  #: keeps what has a gradient from call to call, unless it trains

    def make(self, dtype: torch.dtype) -> tuple[torch.nn.Module, Inputs]:
        """The module that gives the model's first result, for inputs by name."""
        return First(self.build().to(dtype)), self.inputs(dtype)


class First(torch.nn.Module):
    """A model's first result, without a cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        results = self.model(**inputs, **self.more, return_dict=False)
        result: torch.Tensor = results if isinstance(results, torch.Tensor) else results[0]
        return result


_BERT = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 2}
_DECODER = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 2, "pad_token_id": 0}
_GROUPED = {**_DECODER, "num_key_value_heads": 4, "intermediate_size": 2048}


def _text(name: str, batch: int = 8, length: int = 128, **settings: Any) -> Family:
    def inputs(_dtype: torch.dtype) -> Inputs:
        return {"input_ids": torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(0))}

    return Family(f"{name}Model", f"{name}Config", settings, name.lower(), inputs)


def _decoder(name: str, **settings: Any) -> Family:
    return _text(name, 2, 256, **settings)


def _image(name: str, size: int = 224, batch: int = 4, model: str = "", **settings: Any) -> Family:
    def inputs(dtype: torch.dtype) -> Inputs:
        return {"pixel_values": torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(dtype)}

    return Family(model or f"{name}Model", f"{name}Config", settings, name.lower(), inputs)


def _sound(name: str) -> Family:
    def inputs(dtype: torch.dtype) -> Inputs:
        return {"input_values": torch.randn(2, 32000, generator=torch.Generator().manual_seed(0)).to(dtype)}

    return Family(f"{name}Model", f"{name}Config", {"num_hidden_layers": 2}, name.lower(), inputs)


def _whisper(dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_features": torch.randn(1, 80, 3000, generator=generator).to(dtype),
        "decoder_input_ids": torch.randint(3, 1000, (1, 32), generator=generator),
    }


def _series(batch: int) -> Callable[[torch.dtype], Inputs]:
    return lambda dtype: {"past_values": torch.randn(batch, 512, 7, generator=torch.Generator().manual_seed(0)).to(dtype)}


def families() -> list[Family]:
    disentangled = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 256, "share_att_key": True}
    text = [
        _text("DebertaV2", **_BERT, **disentangled, norm_rel_ebd="layer_norm", max_relative_positions=-1, position_biased_input=False),
        *(_text(name, **_BERT) for name in ("MPNet", "Albert", "RoFormer", "Nystromformer", "SqueezeBert", "ConvBert")),
        _text("Electra", num_hidden_layers=2),
        _text("MobileBert", num_hidden_layers=2),
        _text("ModernBert", num_hidden_layers=2),
        _text("Longformer", 2, 512, **_BERT, attention_window=64, max_position_embeddings=1026),
        _text("BigBird", 1, 1024, **_BERT),
        _text("Funnel", block_sizes=[1, 1, 1]),
        _text("XLNet", n_layer=2),
    ]
    latent = {"q_lora_rank": 512, "kv_lora_rank": 256, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2}
    decoders = [
        _decoder("Gemma2", **{**_GROUPED, "num_attention_heads": 8}),
        Family("Gemma3TextModel", "Gemma3TextConfig", {**_GROUPED, "num_attention_heads": 4, "num_key_value_heads": 1}, "gemma3",
                     _decoder("Gemma3").inputs),
        _decoder("Mixtral", **_GROUPED, num_local_experts=4),
        _decoder("Qwen3Moe", **_GROUPED, num_experts_per_tok=4, moe_intermediate_size=512, num_experts=16),
        _decoder("DeepseekV3", **{**_GROUPED, "num_key_value_heads": 16}, **latent),
        _decoder("Falcon", **_DECODER),
        _decoder("Bloom", hidden_size=1024, n_head=16, n_layer=2),
        _decoder("GPTJ", n_embd=1024, n_head=16, n_layer=2, rotary_dim=32),
        _decoder("Phi3", **_GROUPED),
        _decoder("GptOss", **{**_GROUPED, "intermediate_size": 1024}, num_local_experts=8),
        _decoder("Lfm2", **_GROUPED),
        _text("Mamba2", 1, 64, hidden_size=1024, num_heads=32, head_dim=64, n_groups=1, num_hidden_layers=2),
    ]  # fmt: skip
    images = [
        _image("Beit", use_relative_position_bias=True, num_hidden_layers=2),
        _image("Dinov2", num_hidden_layers=2),
        _image("CLIPVision", num_hidden_layers=2),
        _image("SiglipVision", num_hidden_layers=2),
        _image("Segformer", 256, 2, "SegformerForSemanticSegmentation"),
        _image("MobileViT", 256),
        _image("MobileNetV1"),
        _image("RegNet", depths=[2, 2, 2, 2]),
        *(_image(name, depths=[1, 1, 1, 1]) for name in ("ConvNextV2", "FocalNet", "PvtV2", "PoolFormer")),
        dataclasses.replace(_image("Levit", batch=8), keeps_in_eval=True),
        _image("Swinv2", 256, depths=[2, 2, 2, 2], image_size=256, window_size=8),
        _image("Hiera", depths=[1, 1, 2, 1]),
        _image("Yolos", 256, image_size=[256, 256], num_hidden_layers=2),
        _image("DPT", 384, 1, "DPTForDepthEstimation", num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3]),
        _image("GLPN", 256, 2, "GLPNForDepthEstimation"),
    ]
    others = [
        *(_sound(name) for name in ("Wav2Vec2", "Hubert", "WavLM")),
        Family("WhisperModel", "WhisperConfig", {
            "encoder_layers": 2, "decoder_layers": 2, "d_model": 512, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
        }, "whisper", _whisper),
        Family("PatchTSTModel", "PatchTSTConfig", {
            "num_input_channels": 7, "context_length": 512, "patch_length": 16, "patch_stride": 8, "d_model": 256, "num_attention_heads": 8,
            "ffn_dim": 512,
        }, "patchtst", _series(16)),
        Family("PatchTSMixerModel", "PatchTSMixerConfig", {
            "num_input_channels": 7, "context_length": 512, "patch_length": 16, "patch_stride": 16, "d_model": 64, "num_layers": 3,
        }, "patchtsmixer", _series(32)),
    ]  # fmt: skip
    return [*text, *decoders, *images, *others]


def step(call: Callable[..., torch.Tensor], module: torch.nn.Module, inputs: Inputs) -> None:
    """Forward and backward."""
    module.zero_grad()
    call(**inputs).square().mean().backward()


def gradients(call: Callable[..., torch.Tensor], module: torch.nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """All of them after a step, in float64."""
    step(call, module, inputs)
    return [p.grad.double() for p in module.parameters() if p.grad is not None]


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference of any gradient, relative to its largest element, or to a thousandth of that of all: some are 0 but for rounding."""
    least = max(w.abs().max().item() for w in wanted) / 1000
    return max(((f - w).abs().max() / w.abs().max().clamp_min(least)).item() for f, w in zip(found, wanted, strict=True))


def measure(family: Family, args: argparse.Namespace, limits: peak.Limits) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    module, inputs = family.make(dtype)
    module.train(args.train and family.keeps_in_eval)
    exact = harness.double_copy(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="deplo")
    calls = {"eager": module, "deplo": compiled}
    contestants: dict[str, Callable[[int], Any]]
    row: dict[str, Any] = {"family": family.name}
    if args.train:
        contestants = {who: lambda _, call=call: step(call, module, inputs) for who, call in calls.items()}
        wanted = gradients(exact, exact, harness.to_double(inputs))
        row["eps"] = torch.finfo(dtype).eps
        row |= {f"error {who}": worst(gradients(call, module, inputs), wanted) for who, call in calls.items()}
    else:
        contestants = {who: lambda _, call=call: call(**inputs) for who, call in calls.items()}
        row |= harness.judged(contestants, exact(**harness.to_double(inputs)), dtype)
    with FlopCounterMode(display=False) as counter:
        contestants["eager"](0)
    timings = harness.interleave(contestants, args.rounds, args.seconds, 1, args.pause)
    moved = sum(x.numel() * x.element_size() for x in [*module.parameters(), *inputs.values()])
    return row | harness.contestant_columns(row, timings, float(counter.get_total_flops()), float(moved), limits, "ms", 1e3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_subject_options(parser, "families")
    parser.add_argument("--train", action="store_true", help="steps of training: forward and backward")
    harness.add_timing_options(parser, rounds=5, seconds=0.1)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    limits = peak.measure(args.threads)
    rows = []
    with torch.set_grad_enabled(args.train):
        for family in families():
            if args.match in family.name:
                rows.append(measure(family, args, limits))
                print(f"{family.name}: {rows[-1]['vs eager']:.2f}x eager", file=sys.stderr, flush=True)
    return harness.conclude(rows, "family", f"{args.dtype}, {args.threads} threads", args, limits)


if __name__ == "__main__":
    raise SystemExit(main())
