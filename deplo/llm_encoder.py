"""Prepared models with an encoder: T5, BART, Whisper and their like.

Three programs beside each other: the encoder; what attention to its output reads, once a text; and the decoder's steps, which take that and a cache
of keys and values that stays where it is.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from .decorator import jit
from .errors import UnsupportedError, UserError
from .llm_cache import LayerShape, PreparedCache, View, shapes_of_layers
from .llm_plan import Plans, of_its_own
from .progress import Bar


class CrossLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of the encoder's output; without any, it takes those of the first update."""

    def __init__(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values
        self.is_initialized = keys is not None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        return 0 if self.keys is None else self.keys.shape[2]


def both(own: Cache, keys: list[torch.Tensor] | None, values: list[torch.Tensor] | None, layers: int) -> tuple[Any, list[CrossLayer]]:
    """What a decoder takes as its cache, and its layers over the encoder's output."""
    cross = [CrossLayer(keys[i], values[i]) if keys is not None and values is not None else CrossLayer(None, None) for i in range(layers)]
    return EncoderDecoderCache(own, Cache(layers=list(cross))), cross


def output_of(hidden: Any) -> BaseModelOutput:
    return BaseModelOutput(last_hidden_state=hidden)


class Encoding(torch.nn.Module):
    """The encoder's output."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.call = type(encoder).forward

    def forward(self, source: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden: torch.Tensor = self.call(self.encoder, source, attention_mask=mask, return_dict=True).last_hidden_state
        return hidden


class Crossing(torch.nn.Module):
    """Keys and values that the decoder's layers make of the encoder's output. What else a step computes, nothing needs."""

    def __init__(self, model: Any, shapes: list[LayerShape]) -> None:
        super().__init__()
        self.model, self.shapes = model, shapes
        self.call = type(model).forward

    def forward(self, hidden: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rows = hidden.shape[0]
        ids = torch.zeros(rows, 1, dtype=torch.int64)
        keys = [hidden.new_zeros(rows, s.heads, 1, s.key_size, dtype=s.dtype) for s in self.shapes]
        values = [hidden.new_zeros(rows, s.heads, 1, s.value_size, dtype=s.dtype) for s in self.shapes]
        position = torch.zeros(1, dtype=torch.int64)
        cache, cross = both(View(keys, values, position, (False,) * len(keys)), None, None, len(keys))
        self.call(
            self.model,
            encoder_outputs=output_of(hidden),
            decoder_input_ids=ids,
            decoder_attention_mask=torch.ones(rows, 1, dtype=torch.bool),
            past_key_values=cache,
            use_cache=True,
            cache_position=position,
        )
        return [layer.keys.contiguous() for layer in cross], [layer.values.contiguous() for layer in cross]  # type: ignore[union-attr]


class DecoderStep(torch.nn.Module):
    """One call of the model after the encoder: tokens at given positions of a store, and their logits."""

    def __init__(self, model: Any, accepted: frozenset[str]) -> None:
        super().__init__()
        self.model, self.accepted = model, accepted
        self.call = type(model).forward

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        position_ids: torch.Tensor,
        seen: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        cross_keys: list[torch.Tensor],
        cross_values: list[torch.Tensor],
        source_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        cache, _ = both(View(keys, values, positions, (False,) * len(keys)), cross_keys, cross_values, len(keys))
        hidden = cross_keys[0].new_zeros(ids.shape[0], cross_keys[0].shape[2], 1)  # its shape alone counts
        given = {"cache_position": positions, "decoder_position_ids": position_ids, "attention_mask": source_mask, "return_dict": True}
        more = {name: value for name, value in given.items() if name in self.accepted}
        logits: torch.Tensor = self.call(
            self.model,
            encoder_outputs=output_of(hidden),
            decoder_input_ids=ids,
            decoder_attention_mask=seen,
            past_key_values=cache,
            use_cache=True,
            **more,
        ).logits
        return logits


class EncoderDecoderCacheOfPlans(PreparedCache):
    """A prepared cache with what attention to the encoder's output reads, once a call has brought that."""

    cross: tuple[list[torch.Tensor], list[torch.Tensor], list[int]] | None = None
    source_length = 0  # of what was encoded: programs of any length have one more place for a single token

    def view(self, positions: torch.Tensor) -> Any:
        assert self.cross is not None
        return both(super().view(positions), self.cross[0], self.cross[1], len(self.store.keys))[0]

    def reset(self) -> None:
        super().reset()
        self.cross = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.cross is None:
            return
        keys, values, sources = self.cross
        rows = beam_idx.tolist()
        if [sources[row] for row in rows] == sources[: len(rows)]:  # beams of one text read the same
            return
        for tensor in (*keys, *values):
            tensor[: len(rows)].copy_(tensor.index_select(0, beam_idx))
        self.cross = keys, values, [sources[row] for row in rows] + sources[len(rows) :]

    def __getitem__(self, layer: int) -> Any:
        assert self.cross is not None
        own = (self.store.keys[layer][:, :, : self.length], self.store.values[layer][:, :, : self.length])
        return (*own, self.cross[0][layer], self.cross[1][layer])


class EncoderPlans(Plans):
    """What `deplo.prepare` puts into a model with an encoder."""

    ids_name, mask_name, positions_name = "decoder_input_ids", "decoder_attention_mask", "decoder_position_ids"
    own = frozenset(
        {"decoder_input_ids", "decoder_attention_mask", "decoder_position_ids"}
        | {"attention_mask", "encoder_outputs", "cache_position", "use_cache", "return_dict"}
    )
    cache_class = EncoderDecoderCacheOfPlans

    def make(self) -> None:
        model = self.model
        self.encoder = model.get_encoder()
        self.main_input = self.encoder.main_input_name
        self.layers, self.cross_shapes = _shapes_of(model)
        self.sliding = (False,) * len(self.layers)
        how: dict[str, Any] = {"options": self.options, "fullgraph": True, "guards": "inputs"}
        self.encode = jit(of_its_own(Encoding, self.encoder), **how)
        self.cross = jit(of_its_own(Crossing, model, self.layers), **how)
        self.prefill = jit(of_its_own(DecoderStep, model, self.accepted), **how)
        self.decode = jit(of_its_own(DecoderStep, model, self.accepted), **how)

    def install(self) -> None:
        super().install()
        self.encoder.forward = types.MethodType(_encode, self.encoder)
        self.encoder.__dict__["deplo_plans_of_encoder"] = self

    def remove(self) -> None:
        super().remove()
        for name in ("forward", "deplo_plans_of_encoder"):
            self.encoder.__dict__.pop(name, None)

    @property
    def of_fixed_length(self) -> bool:
        """Whether the source is a spectrum of one length, as Whisper's."""
        return bool(self.main_input == "input_features")

    def sources(self, batch: int, length: int) -> dict[str, torch.Tensor]:
        if not self.of_fixed_length:
            return {"input_ids": torch.zeros(batch, length, dtype=torch.int64), "attention_mask": torch.ones(batch, length, dtype=torch.int64)}
        config = self.model.config
        dtype = next(self.encoder.parameters()).dtype
        return {"input_features": torch.zeros(batch, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)}

    def warm_up_steps(self, lengths: list[int]) -> int:
        return 2 * len(self.batches)

    def warm_up(self, lengths: list[int], bar: Bar) -> None:
        # Schedules are those for the first one; encoders may have a table of positions.
        most = min(128, self.model.config.to_dict().get("max_position_embeddings", 128))
        source_lengths = [1] if self.of_fixed_length else [most, 12]
        for batch in self.batches:
            with torch.no_grad():
                bar.step(f"sources, {batch} at once")
                outputs = []
                for length in source_lengths:
                    source = self.sources(batch, length)
                    hidden = self.encoder(**source)
                    if not self.of_fixed_length:
                        self.encoder(source["input_ids"])  # without a mask
                    outputs.append((source.get("attention_mask"), hidden))
                bar.step(f"tokens, {batch} at once")
                for mask, hidden in outputs:
                    for tokens in [*dict.fromkeys(lengths), 1, 1]:  # single tokens go by their arguments alone from the second on
                        for given in [mask] if mask is None else [mask, None]:
                            cache = self.cache(batch)
                            ids = torch.zeros(batch, tokens, dtype=torch.int64)
                            more = {"attention_mask": given} if given is not None else {}
                            self.call(decoder_input_ids=ids, encoder_outputs=hidden, **{self.cache_name: cache}, **more)

    def encoded(self, source: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[rows, length, width] of the encoder's output."""
        rows, length = source.shape[0], source.shape[-1]
        batch = self.fitting(rows)
        pad = torch.nn.functional.pad
        if not self.of_fixed_length:
            if mask is None:
                mask = torch.ones(rows, length, dtype=torch.int64)
            more = max(0, 2 - length)  # programs of any length are of two tokens and more
            source, mask = pad(source, (0, more, 0, batch - rows)), pad(mask.long(), (0, more, 0, batch - rows), value=0)
            if batch > rows:
                mask[rows:, 0] = 1
            for tensor in (source, mask):
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        elif batch > rows:
            source = pad(source, (0, 0, 0, 0, 0, batch - rows))
        hidden: torch.Tensor = self.encode(source.contiguous(), mask)
        return hidden[:rows] if self.of_fixed_length else hidden[:rows, :length]

    def _run(self, cache: Any, ids: torch.Tensor, positions: torch.Tensor, kwargs: dict[str, Any], rows: int, tokens: int) -> torch.Tensor | None:
        if not self.bring_cross(cache, kwargs, rows):
            return None
        keys, values, _ = cache.cross
        store = cache.store
        ids, places = self.padded(store, ids, positions, kwargs, rows)
        mask = kwargs.get("attention_mask")
        length = keys[0].shape[2]
        if self.of_fixed_length:
            mask = None
        else:
            mask = torch.ones(rows, cache.source_length, dtype=torch.int64) if mask is None else mask.long()
            mask = torch.nn.functional.pad(mask, (0, length - mask.shape[1], 0, store.batch - rows), value=0)
            if store.batch > rows:
                mask[rows:, 0] = 1
            torch._dynamo.maybe_mark_dynamic(mask, 1)
            for tensor in (*keys, *values):
                torch._dynamo.maybe_mark_dynamic(tensor, 2)
        step = self.decode
        if tokens > 1:
            step = self.prefill
            for tensor, axis in ((ids, 1), (places, 1), (positions, 0)):
                torch._dynamo.maybe_mark_dynamic(tensor, axis)
        logits: torch.Tensor = step(ids, positions, places, store.seen, store.keys, store.values, keys, values, mask)
        return logits if rows == store.batch else logits[:rows]

    def bring_cross(self, cache: Any, kwargs: dict[str, Any], rows: int) -> bool:
        """Computes what a new text's steps read of the encoder's output; False if the call brings none."""
        if cache.cross is not None:
            return True
        outputs = kwargs.get("encoder_outputs")
        if outputs is None:
            return False
        hidden = outputs[0]
        batch = cache.store.batch
        sources = [next(k for k in range(row + 1) if torch.equal(hidden[k], hidden[row])) for row in range(rows)]
        more = 0 if self.of_fixed_length else max(0, 2 - hidden.shape[1])
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, more, 0, batch - rows)).contiguous()
        if not self.of_fixed_length:
            torch._dynamo.maybe_mark_dynamic(hidden, 1)
        keys, values = self.cross(hidden)
        cache.cross = keys, values, sources + list(range(rows, batch))
        cache.source_length = outputs[0].shape[1]
        return True

    def _as_it_was(self, cache: Any, kwargs: dict[str, Any], positions: torch.Tensor, rows: int, why: str) -> Any:
        if not self.bring_cross(cache, kwargs, rows):
            raise UserError("a prepared model with an encoder takes encoder_outputs with a new cache: model.get_encoder()(...) gives them")
        return super()._as_it_was(cache, kwargs, positions, rows, why)


def _shapes_of(model: Any) -> tuple[list[LayerShape], list[LayerShape]]:
    """What the decoder's layers keep of each of its tokens, and of each place of the encoder's output."""
    config = model.config
    width = getattr(config, "d_model", None) or config.hidden_size
    dtype = next(model.parameters()).dtype
    hidden = torch.zeros(1, 2, width, dtype=dtype)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.no_grad():
        model(encoder_outputs=output_of(hidden), decoder_input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache)
    own = shapes_of_layers(model, cache.self_attention_cache.layers, 1)
    cross = shapes_of_layers(model, cache.cross_attention_cache.layers, 2)
    if len(own) != len(cross):
        raise UnsupportedError(f"{type(model).__name__}: not all layers of its decoder read the encoder's output")
    return own, cross


def _encode(encoder: Any, *args: Any, **kwargs: Any) -> Any:
    """The encoder's forward."""
    plans: EncoderPlans = encoder.__dict__["deplo_plans_of_encoder"]
    given = dict(zip((plans.main_input, "attention_mask"), args, strict=False)) | kwargs
    source, mask = given.pop(plans.main_input, None), given.pop("attention_mask", None)
    asked = any(value is not None and value is not False for name, value in given.items() if name != "return_dict")
    wants_gradients = torch.is_grad_enabled() and any(p.requires_grad for p in encoder.parameters())
    matrix = mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)
    served = source is not None and len(args) < 3 and not asked and not wants_gradients and not encoder.training and matrix
    if not served or torch.compiler.is_compiling() or source.shape[0] > plans.batches[-1]:
        return type(encoder).forward(encoder, *args, **kwargs)
    hidden = plans.encoded(source, mask)
    return (hidden,) if given.get("return_dict") is False else output_of(hidden)


_encode.__name__ = "forward"  # as copies of the bound method look for it
