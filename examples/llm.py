"""An LLM: greedy generation with a static KV cache, one program for prompts of any length and one for single tokens.

    python examples/llm.py

The model is a tiny Llama with random weights, so that this needs no download; any model of transformers is compiled alike.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache


def generate(forward: object, config: LlamaConfig, prompt: torch.Tensor, tokens: int) -> list[int]:
    """The most likely next tokens, one after another. `prompt` is int64 (1, length)."""
    cache = StaticCache(config=config, max_batch_size=1, max_cache_len=64)
    found: list[int] = []
    given, place = prompt, torch.arange(prompt.shape[1])
    with torch.no_grad():
        for _ in range(tokens):
            logits = forward(input_ids=given, past_key_values=cache, cache_position=place).logits  # type: ignore[operator]
            given, place = logits[:, -1:].argmax(-1), place[-1:] + 1
            found.append(int(given))
    return found


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    compiled = torch.compile(model, backend="deplo", options={"strict": True})
    for length in (7, 11):
        prompt = torch.randint(128, (1, length))
        tokens = generate(compiled, config, prompt, 8)
        assert tokens == generate(model, config, prompt, 8), "other tokens than in eager mode"
        print(f"{length} tokens of a prompt, then {tokens}")


if __name__ == "__main__":
    main()
