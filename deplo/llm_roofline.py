"""What a decoded token must read at least, and what this machine reads in a second."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .measure import quickest


@dataclasses.dataclass(frozen=True)
class Reads:
    """Bytes that the decode step of one token reads at least."""

    weights: float  # of all the model's weights that take part
    cache_of_token: float  # of each token that is in the cache

    def tokens_a_second(self, bandwidth: float, cached: int, batch: int = 1) -> float:
        """What `bandwidth` (bytes a second) allows with `cached` tokens a sequence in the cache."""
        return batch * bandwidth / (self.weights + batch * cached * self.cache_of_token)


def _is_int4(tensor: Any) -> bool:
    return str(vars(tensor).get("target_dtype", "")).endswith("int4")


def has_short_codes(model: Any) -> bool:
    """Whether some parameters are codes of four bits, which torchao keeps in a byte each."""
    return any(map(_is_int4, model.parameters()))


def bytes_of(tensor: torch.Tensor, as_stored: bool = False) -> int:
    """Of a tensor's elements; of a subclass, as torchao's quantised weights, those of the tensors in it: of 4-bit values half a byte, or what they
    take as stored."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        bits = 4 if _is_int4(tensor) and not as_stored else 8
        return sum(bytes_of(part) * (bits if name == "qdata" else 8) // 8 for name in names for part in [getattr(tensor, name)])
    return tensor.numel() * tensor.element_size()


def weights_of(model: torch.nn.Module, as_stored: bool = False) -> int:
    """Bytes of a model's parameters and buffers, each once."""
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return sum(bytes_of(x, as_stored) for x in tensors.values())


def weights_read(model: Any) -> float:
    """Bytes of weights that a token needs: of experts the chosen ones, and of an embedding's table nothing, unless it is the head's too."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None:
        tables -= {id(parameter) for parameter in head.parameters()}
    text = model.config.get_text_config(decoder=True).to_dict()
    chosen = text.get("num_experts_per_tok")
    experts = next((text[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if text.get(name)), None)
    share = chosen / experts if chosen and experts else 1.0
    total, counted = 0.0, set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) in tables or id(tensor) in counted:
            continue
        counted.add(id(tensor))
        total += bytes_of(tensor) * (share if ".experts." in name else 1.0)
    return total


def read_bandwidth() -> float:
    """Bytes a second that torch's threads read from memory: the best of several sums over 256 MB. Takes about 0.5 s."""
    block = torch.ones(64 << 20)
    return block.nbytes / quickest(block.sum, calls=100, budget=0.3)
