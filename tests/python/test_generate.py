"""Text by transformers' own generate(): compiled as its users write it, and prepared. Tokens are eager mode's, and nothing compiles twice."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig

import deplo
from deplo.backend import collect_records
from deplo.core import core

_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8, "num_hidden_layers": 4},
    "gemma3_text": {
        "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip
_GREEDY = {"max_new_tokens": 8, "do_sample": False}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_SIZES, **_KINDS[kind]})).eval()


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    ids = prompt(max(lengths), len(lengths), 3)
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long()
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def generate(model: Any, **settings: Any) -> torch.Tensor:
    torch.manual_seed(7)
    tokens: torch.Tensor = model.generate(pad_token_id=0, **settings)
    return tokens


@pytest.fixture(autouse=True)
def strictly() -> Iterator[None]:
    """What would run in eager mode unasked is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", deplo.FallbackWarning)
        yield


def test_generate_compiles_its_own_forward() -> None:
    torch._dynamo.reset()
    model = build("qwen3")
    how = CompileConfig(backend="deplo", mode=None, options={"strict": True})
    how._compile_all_devices = True  # otherwise only on a GPU
    cases = [{"input_ids": prompt(7)}, {"input_ids": prompt(5, 1, 2), "do_sample": True}]
    eager = [generate(model, cache_implementation="static", **{**_GREEDY, "max_length": 32, "max_new_tokens": None, **case}) for case in cases]
    with collect_records() as records:
        for case, expected in zip(cases, eager, strict=True):
            settings = {**_GREEDY, "max_length": 32, "max_new_tokens": None, **case}
            assert torch.equal(generate(model, cache_implementation="static", compile_config=how, **settings), expected)
    assert [record.kind for record in records] == ["inference"] and not records[0].left


@pytest.mark.parametrize(("kind", "graphs"), [("llama", 4), ("t5", 6)])  # T5's first step computes what cross attention reads, the others do not
def test_compiled_forward(kind: str, graphs: int) -> None:
    """As its users write it: prompts and steps of any length share what Dynamo makes of the first few."""
    torch._dynamo.reset()
    if kind == "t5":
        settings = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings)).eval()
    else:
        model = build(kind)
    cases = [{"input_ids": prompt(n, 1, n)} for n in (6, 9, 11)]
    eager = [generate(model, **_GREEDY, **case) for case in cases]
    model.forward = torch.compile(model.forward, backend="deplo", options={"strict": True})
    counts = []
    with collect_records() as records:
        for case, expected in zip(cases, eager, strict=True):
            assert torch.equal(generate(model, **_GREEDY, **case), expected)
            counts.append(len(records))
    assert counts[-1] == counts[1] <= graphs and not any(record.left for record in records)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A model, and the same one prepared for 40 tokens and up to 4 sequences."""
    torch._dynamo.reset()
    model = build("qwen3")
    return model, deplo.prepare(copy.deepcopy(model), max_length=40, batch=(1, 4), quiet=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"input_ids": prompt(3)},
        {"input_ids": prompt(1)},
        {"input_ids": prompt(31)},
        {"input_ids": prompt(9, 4)},
        {"input_ids": prompt(6, 3)},  # a row of the cache stays empty
        {"input_ids": prompt(9), "do_sample": True, "top_k": 20, "temperature": 1.5},
        {"input_ids": prompt(9), "num_beams": 4},
        {"input_ids": prompt(5), "num_beams": 3, "num_return_sequences": 2},
        padded((9, 4, 7)),
        padded((9, 9, 2, 5)),
        {"input_ids": prompt(4), "attention_mask": torch.ones(1, 4, dtype=torch.int64), "repetition_penalty": 1.3},
    ],
    ids=["short", "one-token", "long", "batch", "odd-batch", "sampling", "beams", "sequences", "padded", "padded-batch", "penalty"],
)
def test_prepared(pair: tuple[Any, Any], settings: dict[str, Any]) -> None:
    model, prepared = pair
    expected = generate(model, **{**_GREEDY, **settings})
    with collect_records() as records:
        got = generate(prepared, **{**_GREEDY, **settings})
    assert torch.equal(got, expected)
    assert not records, "it was compiled before"


def test_steps_go_to_the_program_by_their_arguments_alone(pair: tuple[Any, Any]) -> None:
    decode = deplo.call_report(pair[1].deplo_plans.decode)
    generate(pair[1], input_ids=prompt(5), **_GREEDY)
    after = deplo.call_report(pair[1].deplo_plans.decode)
    assert not after.reason
    assert (after.direct - decode.direct, after.through_dynamo - decode.through_dynamo) == (7, 0)


def test_prepared_codes_of_four_bits_take_the_place_of_bytes(tmp_path: Any) -> None:
    """One packed copy for prompts and single tokens; who asks for the state finds weights that system calls can read."""
    from deplo.llm_bench import quantize

    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", **{**_SIZES, "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3, "head_dim": 128, "initializer_range": 0.05}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    quantize(model, "int4")
    eager = copy.deepcopy(model)
    packed, gone = core().packed_bytes(), core().owned_bytes()
    deplo.prepare(model, max_length=40, quiet=True)
    assert model.deplo_plans.has_regions  # its three layers were traced once
    codes = sum(p.qdata.numel() for p in model.parameters() if hasattr(p, "qdata"))
    assert core().owned_bytes() - gone > 0.9 * codes
    # Half a byte, and for 32 of them a scale of two bytes and a zero point, which both programs may want in an order of their own.
    assert core().packed_bytes() - packed <= codes * (1 / 2 + 2 * 3 / 32)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    cache = model.deplo_plans.cache()
    with torch.no_grad():
        for ids in (prompt(9), prompt(9)[:, :1], prompt(9)[:, -1:]):  # slices of one column have strides of nine
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    for length in (3, 30):
        assert torch.equal(generate(model, input_ids=prompt(length), **_GREEDY), generate(eager, input_ids=prompt(length), **_GREEDY))
    weight = model.model.layers[0].mlp.up_proj.weight
    state = {name: value.qdata for name, value in model.state_dict().items() if hasattr(value, "qdata")}
    assert core().owned_bytes() == gone
    torch.save(state, tmp_path / "state.pt", _use_new_zipfile_serialization=False)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(saved, eager.model.layers[0].mlp.up_proj.weight.qdata) and torch.equal(weight.qdata, saved)


def test_assisted(pair: tuple[Any, Any]) -> None:
    """Drafts of a prepared model, judged by another: both caches forget what is refused."""
    model, prepared = pair
    torch.manual_seed(1)
    settings = {"input_ids": prompt(6), "max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 2}
    assert torch.equal(generate(prepared, **settings), generate(model, **settings))


def test_pipeline(pair: tuple[Any, Any]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", padding_side="left")
    texts = [transformers.pipeline("text-generation", model=m, tokenizer=tokenizer)("w5 w17 w40", **_GREEDY) for m in pair]
    assert texts[0] == texts[1] and len(texts[0][0]["generated_text"].split()) > 3


def test_a_text_goes_on(pair: tuple[Any, Any]) -> None:
    """Calls of the model by hand: several tokens more on a cache that holds some, all their logits, and in the end one too many."""
    model, prepared = pair
    ids = prompt(12)
    cache = prepared.deplo_plans.cache()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        first = prepared(input_ids=ids[:, :5], past_key_values=cache, logits_to_keep=1).logits
        more = prepared(input_ids=ids[:, 5:], past_key_values=cache, logits_to_keep=1)
    assert more.past_key_values is cache and cache.get_seq_length() == 12
    torch.testing.assert_close(first[:, -1], wanted[:, 4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(more.logits[:, -1], wanted[:, -1], rtol=1e-4, atol=1e-4)
    with torch.no_grad(), pytest.raises(deplo.UserError, match="12 tokens are in the cache and 29 come to them, but the model is prepared for 40"):
        prepared(input_ids=prompt(29), past_key_values=cache)


def test_calls_that_no_program_serves_run_as_before(pair: tuple[Any, Any]) -> None:
    model, prepared = pair
    ids = prompt(6)
    with torch.no_grad():
        wanted = model(input_ids=ids, output_hidden_states=True)
        with pytest.warns(deplo.FallbackWarning, match="it is given output_hidden_states"):
            got = prepared(input_ids=ids, past_key_values=prepared.deplo_plans.cache(), output_hidden_states=True)
        assert torch.equal(prepared(input_ids=ids).logits, wanted.logits)
    torch.testing.assert_close(got.hidden_states[-1], wanted.hidden_states[-1], rtol=1e-4, atol=1e-4)
    assert torch.equal(generate(prepared, input_ids=ids, use_cache=False, **_GREEDY), generate(model, input_ids=ids, **_GREEDY))
    prepared(input_ids=ids, labels=ids).loss.backward()
    assert prepared.get_input_embeddings().weight.grad is not None
    prepared.zero_grad()


def test_written_weights_are_seen(pair: tuple[Any, Any]) -> None:
    model, prepared = pair
    weight = prepared.get_output_embeddings().weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.copy_(before.flip(0))
        changed = generate(prepared, input_ids=prompt(5), **_GREEDY)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert not torch.equal(changed, generate(model, input_ids=prompt(5), **_GREEDY))
    assert torch.equal(generate(prepared, input_ids=prompt(5), **_GREEDY), generate(model, input_ids=prompt(5), **_GREEDY))


def test_a_copy_has_programs_of_its_own(pair: tuple[Any, Any]) -> None:
    model, prepared = pair
    other = copy.deepcopy(prepared)
    with collect_records() as records:
        assert torch.equal(generate(other, input_ids=prompt(1), **_GREEDY), generate(model, input_ids=prompt(1), **_GREEDY))
    assert len(records) == 1 and other.deplo_plans.model is other
    with pytest.raises(AttributeError, match="has no attribute nothing"):
        _ = other.deplo_plans.nothing


def test_caches_of_texts_at_the_same_time(pair: tuple[Any, Any]) -> None:
    """A cache that somebody holds is not given to the next."""
    prepared = pair[1]
    first, second = prepared.deplo_plans.cache(), prepared.deplo_plans.cache()
    assert first.store is not second.store
    kept = first.store
    del first
    assert prepared.deplo_plans.cache().store is kept


def test_sliding_windows() -> None:
    """Layers that see the last six tokens, with texts far longer."""
    torch._dynamo.reset()
    model = build("gemma3_text")
    prepared = deplo.prepare(copy.deepcopy(model), max_length=32, quiet=True)
    for length in (4, 15):
        settings = {"input_ids": prompt(length), "max_new_tokens": 14, "do_sample": False}
        assert torch.equal(generate(prepared, **settings), generate(model, **settings))


def test_bytes_that_a_token_reads(pair: tuple[Any, Any]) -> None:
    from deplo.llm_roofline import Reads, bytes_of, weights_of, weights_read

    model = pair[0]
    parameters = sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert weights_of(model) == 4 * parameters + buffers
    assert weights_read(model) == 4 * (parameters - 96 * 32) + buffers  # without the embedding's table
    assert Reads(800.0, 2.0).tokens_a_second(1000.0, 100, 2) == 2 * 1000 / (800 + 400)
    assert bytes_of(torch.zeros(3, 5, dtype=torch.bfloat16)) == 30
    assert [layer.bytes_of_token() for layer in pair[1].deplo_plans.layers] == [2 * 2 * 8 * 4] * 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_length": 1}, "max_length is 1, expected the number of tokens"),
        ({"max_length": 129}, r"max_length is 129, but the model knows positions up to 128"),
        ({"max_length": "40"}, "max_length is '40'"),
        ({"batch": 0}, "batch is 0, expected"),
        ({"batch": []}, r"batch is \[\], expected"),
        ({"options": {"wieghts": "auto"}}, "unknown option 'wieghts'; did you mean 'weights'"),
        ({"model": torch.nn.Linear(3, 3)}, "Linear does not generate text"),
        ({"model": 3}, "prepare takes a model of transformers, not int"),
        ({"model": build("llama").train()}, "in training mode"),
        ({"model": build("llama").model}, "LlamaModel does not generate text"),
    ],
)
def test_bad_arguments(change: dict[str, Any], text: str) -> None:
    settings = {"model": change.pop("model", None) or build("llama"), "max_length": 40, **change}
    with pytest.raises(deplo.UserError, match=text):
        deplo.prepare(settings.pop("model"), **settings)


def test_bad_models() -> None:
    model = build("llama")
    model.forward = torch.compile(model.forward, backend="deplo")
    with pytest.raises(deplo.UserError, match="compiled already"):
        deplo.prepare(model, max_length=40)


def test_a_model_without_a_single_graph() -> None:
    """Sizes of parts that depend on the values of tensors. The model stays as it was."""
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("jetmoe", **_SIZES, kv_channels=8, num_local_experts=3, num_experts_per_tok=2)
    ).eval()
    with pytest.raises(deplo.UnsupportedError, match="JetMoeForCausalLM.*depends on the values of a tensor"):
        deplo.prepare(model, max_length=40)
    assert generate(model, input_ids=prompt(3), max_new_tokens=2).shape == (1, 5)


def test_bench_llm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from deplo import cli, llm_bench

    torch._dynamo.reset()
    monkeypatch.setitem(llm_bench.SHAPES, "tiny", ("Qwen3", {**_SIZES, "head_dim": 8, "tie_word_embeddings": True}))
    sizes = ["--prompt", "5", "--tokens", "2", "--rounds", "1"]
    assert cli.main(["bench-llm", "--shape", "tiny", "--quant", "bf16", "--no-llama", *sizes]) == 0
    text = capsys.readouterr().out
    assert "Qwen3ForCausalLM prepared in" in text and "for 1 sequences of 15 tokens" in text and "cache 960 B" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("deplo ", "eager "))]
    assert [row[:2] for row in rows] == [["deplo", "bf16"], ["eager", "bf16"]] and all(float(number) > 0 for row in rows for number in row[2:5])
    assert cli.main(["bench-llm", "--shape", "qwen9"]) == 1
    assert "--shape qwen9: expected one of qwen3-0.6b" in capsys.readouterr().err


def test_bad_calls(pair: tuple[Any, Any]) -> None:
    prepared = pair[1]
    with pytest.raises(deplo.UserError, match="prepared already"):
        deplo.prepare(prepared, max_length=40)
    with pytest.raises(deplo.UserError, match=r"may come to 41 tokens, but the model is prepared for 40: lower max_new_tokens"):
        generate(prepared, input_ids=prompt(9), max_new_tokens=32)
    with pytest.raises(deplo.UserError, match="5 sequences at once, but the model is prepared for at most 4"):
        generate(prepared, input_ids=prompt(9), num_beams=5, max_new_tokens=3)


def test_int4_weights_in_bytes_are_packed() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    torch._dynamo.reset()
    config = AutoConfig.for_model("llama", **{**_SIZES, "hidden_size": 512, "intermediate_size": 1024})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    quantization.quantize_(model, quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32)))
    expected = generate(model, input_ids=prompt(7), **_GREEDY)
    gc.collect()
    packed, owned = core().packed_bytes(), core().owned_bytes()
    with collect_records() as records:
        deplo.prepare(model, max_length=32, quiet=True)
    assert torch.equal(generate(model, input_ids=prompt(7), **_GREEDY), expected)
    codes = sum(p.qdata.numel() for p in model.parameters() if hasattr(p, "qdata"))
    assert core().owned_bytes() - owned > 0.9 * codes
    assert core().packed_bytes() - packed < codes  # half a byte, and scales of four bytes, which both programs may want in an order of their own
    assert any("pack_lanes0" in record.program.describe() for record in records)
