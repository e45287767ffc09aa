"""generate() of prepared models with experts, encoders, states and drafts. Tokens are eager mode's, and nothing compiles twice."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import deplo
from deplo.backend import collect_records
from deplo.grouped import Blocks, grouped_mm

_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"]},
    "phimoe": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3,
        "rope_scaling": {  # a text of more than 12 tokens has other frequencies
            "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "short_mscale": 1.1, "long_mscale": 1.3,
            "original_max_position_embeddings": 12,
        },
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 0.1},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0, "num_key_value_heads": 4,
    },
}  # fmt: skip
_BLOCKS = {
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
    "deepseek_v2": {**_EXPERTS["deepseek_v3"], "n_group": 1},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 3},
}
_STACKED = int(transformers.__version__.split(".")[0]) >= 5  # experts are parts of tensors
_STATES: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "conv_kernel": 4, "time_step_rank": 4, "use_bias": True},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8},
}


def prompt(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(length))


def decoder(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_SIZES, **settings})).eval()


def prepared(model: Any, **settings: Any) -> Any:
    torch._dynamo.reset()
    return deplo.prepare(copy.deepcopy(model), **{"max_length": 40, "batch": 2, "quiet": True, **settings})


def agree(model: Any, other: Any, **settings: Any) -> None:
    """The same tokens, and no program that was not there."""
    settings = {"max_new_tokens": 6, "do_sample": False, **settings}
    torch.manual_seed(7)
    wanted = model.generate(**settings)
    with collect_records() as records:
        torch.manual_seed(7)
        got = other.generate(**settings)
    assert torch.equal(got, wanted) and not records


@pytest.fixture(autouse=True)
def strictly() -> Iterator[None]:
    """What would run in eager mode unasked is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", deplo.FallbackWarning)
        yield


@pytest.mark.parametrize("kind", _EXPERTS)
def test_experts(kind: str) -> None:
    model = decoder(kind, **_EXPERTS[kind])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with collect_records() as records:
        other = prepared(model)
    assert len(records) == 2 and not any(record.left for record in records)
    for ids in (prompt(1), prompt(3), prompt(25), prompt(9, 2)):
        agree(model, other, input_ids=ids)
    agree(model, other, input_ids=prompt(5), num_beams=2)
    agree(model, other, input_ids=prompt(5), do_sample=True)
    after = other.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.skipif(_STACKED, reason="its experts are one tensor a layer")
def test_weights_of_experts_are_one_copy() -> None:
    from deplo.llm_experts import are_in_place

    model = decoder("qwen3_moe", **_EXPERTS["qwen3_moe"])
    other = prepared(model)
    block = other.model.layers[0].mlp
    storages = {p.untyped_storage().data_ptr() for p in block.experts.parameters()}
    assert storages == {block.deplo_up.untyped_storage().data_ptr(), block.deplo_down.untyped_storage().data_ptr()}
    weight = block.experts[2].up_proj.weight
    other.load_state_dict({**other.state_dict(), "model.layers.0.mlp.experts.2.up_proj.weight": weight.flip(0)})
    model.model.layers[0].mlp.experts[2].up_proj.weight.data.copy_(weight)
    agree(model, other, input_ids=prompt(9))
    weight.data = weight.data.flip(1)  # now elsewhere
    assert not are_in_place(other)
    model.model.layers[0].mlp.experts[2].up_proj.weight.data.copy_(weight)
    agree(model, other, input_ids=prompt(9))
    assert are_in_place(other)
    with torch.no_grad():
        assert_close(other(input_ids=prompt(6)).logits, model(input_ids=prompt(6)).logits, rtol=0, atol=0)  # without a cache, as it was


@pytest.mark.parametrize("kind", _BLOCKS)
def test_formulas_of_experts(kind: str) -> None:
    """Installing compares them with the blocks themselves."""
    from deplo import llm_experts

    model = decoder(kind, **_BLOCKS[kind])
    llm_experts.install(model)
    blocks = [m for m in model.modules() if "forward" in m.__dict__]
    assert len(blocks) == 1
    llm_experts.remove(model)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_frequencies_of_long_texts() -> None:
    """longrope: other frequencies for texts of more than 12 tokens."""
    scaling = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_type" if _STACKED else "type": "longrope"}
    model = decoder("phi3", rope_scaling=scaling, original_max_position_embeddings=12)
    other = prepared(model)
    for ids in (prompt(1), prompt(5), prompt(20), prompt(14, 2)):
        agree(model, other, input_ids=ids)
    with torch.no_grad(), pytest.warns(deplo.FallbackWarning, match="reach from 0 to 102, beyond the 40 prepared ones"):
        places = torch.tensor([[0, 1, 102], [0, 1, 102]])
        got = other(input_ids=prompt(3, 2), position_ids=places, past_key_values=other.deplo_plans.cache()).logits
    assert_close(got, model(input_ids=prompt(3, 2), position_ids=places).logits)
    deplo.prepare(model, max_length=10, quiet=True)


def test_experts_without_a_formula() -> None:
    model = decoder("mixtral", **_EXPERTS["mixtral"])
    block = model.model.layers[0].mlp.experts if _STACKED else model.model.layers[0].block_sparse_moe
    kind = type(block)

    def twice(self: Any, *args: Any) -> Any:
        result = kind.forward(self, *args)
        return 2 * result if isinstance(result, torch.Tensor) else tuple(2 * part for part in result)

    block.__class__ = type("OtherBlock", (kind,), {"forward": twice})
    with pytest.raises(deplo.UnsupportedError, match="OtherBlock .* chooses or adds its experts in a way that deplo knows no formula of"):
        deplo.prepare(model, max_length=40)
    assert model.generate(prompt(3), max_new_tokens=2).shape == (1, 5)


def seq2seq(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "t5":
        settings = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "initializer_factor": 3.0}
        ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**settings, **ends)).eval()
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "init_std": 0.3}
    lengths = {"num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 40}
    quiet = {"suppress_tokens": None, "begin_suppress_tokens": None}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(vocab_size=96, d_model=32, **sides, **ends, **lengths, **quiet))
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model.eval()


def test_t5() -> None:
    model = seq2seq("t5")
    with collect_records() as records:
        other = prepared(model)
    assert len(records) == 4 and not any(record.left for record in records)
    mask = (torch.arange(9) < torch.tensor([[9], [5]])).long()
    cases: list[dict[str, Any]] = [
        {"input_ids": prompt(1)},
        {"input_ids": prompt(20)},
        {"input_ids": prompt(9, 2), "attention_mask": mask},
        {"input_ids": prompt(9), "num_beams": 2},
        {"input_ids": prompt(9), "do_sample": True},
        {"input_ids": prompt(6), "decoder_input_ids": torch.tensor([[0, 5, 6]])},
    ]
    for case in cases:
        agree(model, other, **case)
    with torch.no_grad(), pytest.raises(deplo.UserError, match="takes encoder_outputs with a new cache"):
        other(decoder_input_ids=prompt(1), input_ids=prompt(4), past_key_values=other.deplo_plans.cache(), labels=prompt(1))
    with pytest.raises(deplo.UserError, match="prepared for at most 2"):
        other.generate(prompt(4), num_beams=3)


def test_sources_shorter_than_those_of_the_warm_up() -> None:
    """Encoders with a table of positions, of fewer than prompts are scheduled for."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(vocab_size=256, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=40, **sizes)
    model = transformers.BartForConditionalGeneration(config).eval()
    agree(model, deplo.prepare(copy.deepcopy(model), max_length=30, quiet=True), input_ids=prompt(20))


def test_whisper() -> None:
    model = seq2seq("whisper")
    other = prepared(model, max_length=20)
    features = torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(0))
    agree(model, other, input_features=features[:1])
    agree(model, other, input_features=features)
    agree(model, other, input_features=features[:1], num_beams=2)
    agree(model, other, input_features=features[1:], decoder_input_ids=torch.tensor([[3, 5, 6]]))
    with pytest.raises(deplo.UserError, match="knows positions up to 40 .max_target_positions."):
        deplo.prepare(model, max_length=41)


@pytest.mark.parametrize("kind", _STATES)
def test_states(kind: str) -> None:
    model = decoder(kind, **_STATES[kind])
    with torch.no_grad():  # as after `_init_weights`: padding before a projection and behind it are alike until the bias is another
        for name, parameter in model.named_parameters():
            if name.endswith("in_proj.bias"):
                parameter.zero_()
    with collect_records() as records:
        other = prepared(model)
    if _STACKED:  # transformers 4 puts the token after a prompt shorter than the convolution at a wrong place, which shows where states matter
        with torch.no_grad():
            for (name, parameter), copied in zip(model.named_parameters(), other.parameters(), strict=True):
                if name.endswith("_proj.bias"):
                    copied.copy_(parameter.normal_(0, 0.3))
    assert len(records) == (3 if kind == "mamba2" else 2) and not any(record.left for record in records)  # prompts of one chunk and of several
    assert all(json.loads(record.program.describe())["library"] == [] for record in records)
    for ids in (prompt(1), prompt(2), prompt(8), prompt(21), prompt(9, 2)):  # fewer tokens than a convolution has taps, chunks that are whole
        agree(model, other, input_ids=ids, max_new_tokens=9)
    agree(model, other, input_ids=prompt(5), do_sample=True)
    mask = (torch.arange(9) >= torch.tensor([[0], [3]])).long()
    agree(model, other, input_ids=prompt(9, 2), attention_mask=mask)
    with torch.no_grad():
        wanted = model(input_ids=prompt(9, 2), attention_mask=mask).logits
        got = other(input_ids=prompt(9, 2), attention_mask=mask, cache_params=other.deplo_plans.cache()).logits
    assert_close(got[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)
    calls = deplo.call_report(other.deplo_plans.decode)
    assert not calls.reason and calls.through_dynamo == 1 and not deplo.call_report(other.deplo_plans.prefill).reason
    with torch.no_grad():  # as its float64 self says, at least as closely as eager mode
        ids = prompt(30)
        exact = copy.deepcopy(model).double()(input_ids=ids, use_cache=False).logits
        got = other(input_ids=ids, cache_params=other.deplo_plans.cache()).logits
        assert (got - exact).abs().max() <= 4 * (model(input_ids=ids).logits - exact).abs().max()
        cache = other.deplo_plans.cache()  # by the programs, by the model itself, and by the programs again
        with pytest.warns(deplo.FallbackWarning, match="output_hidden_states"):
            parts = [
                other(input_ids=part, cache_params=cache, output_hidden_states=own).logits
                for part, own in zip(ids.split((27, 1, 1, 1), 1), (False, True, True, False), strict=True)
            ]
        assert_close(torch.cat(parts, 1), exact.float(), rtol=1e-4, atol=1e-4)


def test_faded_sums() -> None:
    """Compiled, against steps one by one in float64; sums stay exact where levels are far apart."""
    from deplo.faded import faded_sum

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    level = -torch.rand(3, 50, 7, dtype=torch.float64, generator=generator).mul(40).cumsum(1)
    level[:, 20:30] = level[:, 20:21]  # nothing fades
    added = torch.randn(3, 50, 7, generator=generator)
    wanted = faded_sum(level, added.double(), 1)
    with collect_records() as records:
        got = torch.compile(faded_sum, backend="deplo", fullgraph=True, options={"strict": True})(level, added, 1)
    assert not records[0].left and json.loads(records[0].program.describe())["library"] == []
    assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)
    assert_close(faded_sum(level, added, 1).double(), wanted, rtol=1e-6, atol=1e-6)


def test_a_draft_of_another_model() -> None:
    model, draft = decoder("llama"), decoder("llama", hidden_size=16, intermediate_size=24)
    both = prepared(model, batch=1), deplo.prepare(copy.deepcopy(draft), max_length=40, quiet=True)
    for assistant in (draft, both[1]):
        wanted = model.generate(prompt(6), assistant_model=draft, max_new_tokens=12, do_sample=False)
        assert torch.equal(both[0].generate(prompt(6), assistant_model=assistant, max_new_tokens=12, do_sample=False), wanted)
    assert torch.equal(wanted, model.generate(prompt(6), max_new_tokens=12, do_sample=False))


@pytest.mark.parametrize("ends", [[3, 3, 40, 41], [0, 0, 0, 41], [1, 17, 18, 41]])
def test_grouped_products(ends: list[int]) -> None:
    """Compiled alone, as experts of transformers 5 use them."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((41, 32), (4, 24, 32)))
    at = torch.tensor(ends, dtype=torch.int32)

    def function(x: torch.Tensor, weights: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=at)

    wanted = function(x, weights, at)
    assert_close(grouped_mm(x, weights.transpose(1, 2), at), wanted)
    with collect_records() as records:
        assert_close(torch.compile(function, backend="deplo", fullgraph=True, options={"strict": True})(x, weights, at), wanted)
    assert not records[0].left and json.loads(records[0].program.describe())["library"] == []


def test_blocks() -> None:
    groups = torch.tensor([2, 0, 2, 2, 1, 0] + [3] * 65)
    blocks = Blocks.of_choices(groups, 5)
    assert blocks.groups[:5].tolist() == [0, 1, 2, 3, 3] and blocks.places[6:].tolist() == list(range(192, 257))
    assert blocks.counts[:5].tolist() == [2, 1, 3, 65, 1] and int(blocks.counts[5:].max()) <= 0
    x = torch.randn(71, 3)
    laid = blocks.gather(x).reshape(-1, 3)
    assert torch.equal(laid[blocks.places], x)
    assert int((laid != 0).any(1).sum()) == 71
    assert torch.equal(blocks.only(blocks.gather(x)), blocks.gather(x))
    ordered = Blocks.of_ends(torch.tensor([1, 1, 66, 71]), 71)
    assert ordered.groups[:4].tolist() == [0, 2, 2, 3] and ordered.counts[:4].tolist() == [1, 65, 1, 5] and int(ordered.counts[4:].max()) <= 0
