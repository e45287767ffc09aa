"""Caches of states: the model's own class of transformers 4, and the layers of the common cache of transformers 5.

A cache keeps for each layer the last inputs of its convolution [B, C, taps] and one state.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch

_STATES = ("conv_states", "ssm_states")


def kind_of(model: Any) -> Any:
    """What makes caches for the model, whose forward takes `cache_params`; None if they are not of states alone."""
    if "cache_params" not in inspect.signature(type(model).forward).parameters:
        return None
    return _own_of(model) or _layers_of(model)


def _own_of(model: Any) -> OwnCaches | None:
    module = inspect.getmodule(type(model))
    found = [kind for name, kind in vars(module).items() if isinstance(kind, type) and name.endswith("Cache") and hasattr(kind, "update_ssm_state")]
    return OwnCaches(model, found[0]) if len(found) == 1 else None


def _layers_of(model: Any) -> LayerCaches | None:
    utils: Any = importlib.import_module("transformers.cache_utils")
    layer = getattr(utils, "LinearAttentionLayer", None)  # of transformers 5
    if layer is None:
        return None
    made = utils.DynamicCache(config=model.config).layers
    is_alone = made and all(type(part) is layer and part.number_of_states == 1 for part in made)
    return LayerCaches(model, utils.DynamicCache, layer) if is_alone else None


def of_layer(cache: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cache keeps for a layer: inputs of the convolution, and the state."""
    if hasattr(cache, "conv_states"):
        return cache.conv_states[layer], cache.ssm_states[layer]
    kept = cache.layers[layer]
    return kept.conv_states[0], kept.recurrent_states[0]


class OwnCaches:
    """Caches of a class in the model's own module."""

    def __init__(self, model: Any, kind: Any) -> None:
        self._kind, self._config, self._dtype, self._device = kind, model.config, model.dtype, model.device
        example = self.make(1)
        self._layers = len(example.conv_states) if isinstance(example.conv_states, list) else 0
        self.axis = 0 if self._layers else 1  # of sequences
        self._fixed = {name: value for name, value in vars(example).items() if name not in _STATES and isinstance(value, int)}
        fixed = self._fixed

        class States(kind):  # type: ignore[misc]
            """The model's cache, over states that are there."""

            def __init__(self, conv: Any, ssm: Any) -> None:
                self.conv_states, self.ssm_states = conv, ssm
                for name, value in fixed.items():
                    setattr(self, name, value)

        self._view = States

    def make(self, batch: int) -> Any:
        """A cache for so many sequences, with none of their tokens."""
        return self._kind(self._config, batch, dtype=self._dtype, device=self._device)

    def tensors(self, cache: Any) -> list[torch.Tensor]:
        """Its states: one tensor a layer, or one for all of them."""
        found: list[torch.Tensor] = []
        for name in _STATES:
            states = getattr(cache, name)
            found += states if isinstance(states, list) else [states]
        return found

    def view(self, states: Sequence[torch.Tensor], is_first: bool) -> Any:
        """A cache over states that are there; `is_first`: nothing was read yet."""
        return self._view(states[: self._layers], states[self._layers :]) if self._layers else self._view(states[0], states[1])

    def arguments(self, position: torch.Tensor) -> dict[str, Any]:
        """What the model's forward is told beside tokens and cache, in a program."""
        return {"cache_position": position if self._layers else [1]}  # those of one tensor ask for nothing but whether it is the first one


class LayerCaches:
    """Caches whose layers are transformers 5's for linear attention."""

    axis = 0  # of sequences

    def __init__(self, model: Any, kind: Any, layer: Any) -> None:
        self._kind, self._config = kind, model.config
        seen = kind(config=model.config)
        with torch.no_grad():
            type(model).forward(model, input_ids=torch.zeros(1, 1, dtype=torch.int64), cache_params=seen, use_cache=True)
        # The layers' sizes without that of sequences, which their first call finds out.
        self._sizes = [(x.shape[1:], x.dtype) for x in self.tensors(seen)]

        class States(layer):  # type: ignore[misc]
            """A layer over states that are there."""

            def __init__(self, conv: torch.Tensor, state: torch.Tensor, is_first: bool) -> None:
                super().__init__()
                _fill(self, conv, state, is_first)

        self._layer = States

    def make(self, batch: int) -> Any:
        """A cache for so many sequences, with none of their tokens."""
        made = self._kind(config=self._config)
        states = [torch.zeros(batch, *size, dtype=dtype) for size, dtype in self._sizes]
        for layer, conv, state in zip(made.layers, states[: len(made.layers)], states[len(made.layers) :], strict=True):
            _fill(layer, conv, state, True)
        return made

    def tensors(self, cache: Any) -> list[torch.Tensor]:
        """Its states: one tensor a layer."""
        return [layer.conv_states[0] for layer in cache.layers] + [layer.recurrent_states[0] for layer in cache.layers]

    def view(self, states: Sequence[torch.Tensor], is_first: bool) -> Any:
        """A cache over states that are there; `is_first`: nothing was read yet."""
        half = len(states) // 2
        made = self._kind()
        made.layers = [self._layer(conv, state, is_first) for conv, state in zip(states[:half], states[half:], strict=True)]
        return made

    def arguments(self, position: torch.Tensor) -> dict[str, Any]:
        """What the model's forward is told beside tokens and cache, in a program."""
        return {}


def _fill(layer: Any, conv: torch.Tensor, state: torch.Tensor, is_first: bool) -> None:
    layer.dtype, layer.device = conv.dtype, conv.device
    layer.conv_states, layer.recurrent_states = {0: conv}, {0: state}
    layer.is_conv_states_initialized, layer.is_recurrent_states_initialized = {0: True}, {0: True}
    layer.conv_kernel_size, layer.has_previous_state = {0: conv.shape[-1]}, {0: not is_first}
