"""An LLM: text by generate(), with one program for prompts of any length and one for single tokens, both ready before the first call.

    python examples/llm.py

The model is a tiny Llama with random weights, so that this needs no download; any decoder of transformers is prepared alike.
"""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deplo


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
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    eager = copy.deepcopy(model)
    deplo.prepare(model, max_length=64)
    for length in (7, 11):
        prompt = torch.randint(128, (1, length))
        tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
        assert torch.equal(tokens, eager.generate(prompt, max_new_tokens=8, do_sample=False)), "other tokens than in eager mode"
        print(f"{length} tokens of a prompt, then {tokens[0, length:].tolist()}")


if __name__ == "__main__":
    main()
