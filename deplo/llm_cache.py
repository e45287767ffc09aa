"""The key-value caches of a prepared model: tensors that stay where they are, and what transformers sees of them.

A `View` with its `Layer`s is made anew for each call, in the compiled function itself: nothing outside of it changes but the tensors. A
`PreparedCache` is what generate() keeps between calls. This file imports transformers, and is imported where it is needed only.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from .errors import UnsupportedError, UserError


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of each token: `heads` keys of `key_size` numbers, and values."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    sliding: bool

    def bytes_of_token(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class Store:
    """Memory for `batch` sequences of `length` tokens: per layer keys (batch, heads, length, key_size) and values, and which tokens are padding."""

    def __init__(self, layers: list[LayerShape], batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self.keys = [torch.zeros(batch, s.heads, length, s.key_size, dtype=s.dtype) for s in layers]
        self.values = [torch.zeros(batch, s.heads, length, s.value_size, dtype=s.dtype) for s in layers]
        self.seen = torch.ones(batch, length, dtype=torch.bool)
        self._has_padding = False

    def set_mask(self, mask: torch.Tensor | None) -> None:
        """`mask` (batch or less, tokens so far) is 0 where a token is padding; later tokens and other rows count as seen."""
        if mask is None:
            if self._has_padding:
                self.seen.fill_(True)
                self._has_padding = False
            return
        rows, tokens = mask.shape
        self.seen[:rows, :tokens].copy_(mask)
        self._has_padding = True

    def renew(self) -> None:
        """For a new text."""
        self.set_mask(None)

    def reorder(self, rows: torch.Tensor, length: int) -> None:
        """Row i becomes what row rows[i] was, in place, so that programs go on with the same memory."""
        count = rows.shape[0]
        if bool((rows == torch.arange(count)).all()):
            return
        for tensor in (*self.keys, *self.values):
            used = tensor[:count, :, :length]
            used.copy_(used.index_select(0, rows))
        if self._has_padding:
            self.seen[:count].copy_(self.seen[:count].index_select(0, rows))


def shapes_of(model: Any, cache_name: str) -> list[LayerShape]:
    """What the layers of a model of transformers keep, found by a call with one token. Raises UnsupportedError for states of another kind."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **{cache_name: cache})
    finally:
        model.train(was_training)
    return shapes_of_layers(model, cache.layers, 1)


def shapes_of_layers(model: Any, layers: list[Any], tokens: int) -> list[LayerShape]:
    """What the layers of a cache hold of each of so many tokens."""
    found = []
    for layer in layers:
        keys, values = (layer.keys, layer.values) if isinstance(layer, DynamicLayer) else (None, None)
        if keys is None or values is None or keys.ndim != 4 or keys.shape[2] != tokens:
            raise UnsupportedError(f"prepare knows layers that keep keys and values of each token, not {type(layer).__name__}")
        found.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, bool(layer.is_sliding)))
    if not found:
        raise UnsupportedError(f"{type(model).__name__} puts nothing into its cache: it keeps its state in another way")
    return found


class Layer(StaticLayer):  # type: ignore[misc]
    """A layer that keeps each token at its own position, those too that a sliding window has left: masks leave them out, and no kernel reads them."""

    keys: Any
    values: Any
    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, sliding: bool) -> None:
        self.keys, self.values, self.positions = keys, values, positions
        self.is_sliding = sliding
        self.is_initialized = True
        self.max_batch_size = self.batch_size = keys.shape[0]
        self.max_cache_len = keys.shape[2]
        self.dtype, self.device = keys.dtype, keys.device

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self.positions, key_states)
        self.values.index_copy_(2, self.positions, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_seq_length(self, *args: Any) -> Any:
        return self.positions[0]

    get_query_offset = get_seq_length

    def get_max_cache_shape(self) -> int:
        return self.max_cache_len

    get_max_length = get_max_cache_shape


class View(Cache):  # type: ignore[misc]
    """A store during one call."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], positions: torch.Tensor, sliding: tuple[bool, ...]) -> None:
        super().__init__(layers=[Layer(k, v, positions, s) for k, v, s in zip(keys, values, sliding, strict=True)])


class PreparedCache(Cache):  # type: ignore[misc]
    """A store with the number of tokens in it. It goes back to its pool when nobody has it any more."""

    # generate() would otherwise make masks of 4 dimensions, which the program computes itself, and better: it then knows which keys it need not read.
    is_compileable = False

    def __init__(self, store: Store, owner: Any, pool: list[Store], sliding: tuple[bool, ...]) -> None:
        self.store, self.owner, self.length, self._sliding = store, owner, 0, sliding
        self.layers = []
        self.offloading = False
        store.renew()
        weakref.finalize(self, pool.append, store)

    def __len__(self) -> int:
        return len(self.store.keys)

    @property
    def is_sliding(self) -> list[bool]:
        return list(self._sliding)

    @property
    def max_batch_size(self) -> int:
        return self.store.batch

    @property
    def max_cache_len(self) -> int:
        return self.store.length

    def view(self, positions: torch.Tensor) -> Any:
        """For a call of the model as it was."""
        return View(self.store.keys, self.store.values, positions, self._sliding)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError("this cache belongs to a prepared model: only that model's own calls write it")

    def get_seq_length(self, *args: Any) -> int:
        return self.length

    get_query_offset = get_seq_length

    def get_max_cache_shape(self, *args: Any) -> int:
        return self.store.length

    get_max_length = get_max_cache_shape

    def crop(self, tokens: int) -> None:
        """Forgets tokens: all after the first `tokens`, or the last `-tokens`."""
        self.length = min(self.length, tokens) if tokens > 0 else max(0, self.length + tokens)

    def reset(self) -> None:
        self.length = 0
        self.store.renew()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.store.reorder(beam_idx, self.length)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise UserError("the batch of a prepared model's cache does not change")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UserError("the batch of a prepared model's cache does not change")
