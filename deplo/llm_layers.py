"""A model's equal layers, traced once: each layer of a prepared model's programs is a region that Dynamo and AOTAutograd see once and reuse.

A region computes the layer's result and its cache's new keys and values; what it gives back is written outside of it, since regions change nothing.
deplo puts the regions together again (`subgraphs`), so that the program is the one that the layers give by themselves.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch

from .llm_cache import Layer, View


class _Kept(Layer):
    """A layer of a cache whose tensors a region replaces."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = torch.index_copy(self.keys, 2, self.positions, key_states)
        self.values = torch.index_copy(self.values, 2, self.positions, value_states)
        return self.keys, self.values


class _View(View):
    """What a layer sees of the cache: its own keys and values alone."""

    def __init__(self, kept: _Kept) -> None:
        super(View, self).__init__(layers=[kept])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[0].update(key_states, value_states)


def _region(
    layer: Any, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, sliding: bool, names: str, *given: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The layer's result, and what its cache holds then. `names` are those of the arguments `given`: those with a number are parts of a tuple."""
    kept = _Kept(keys, values, positions, sliding)
    more: dict[str, Any] = {layer.deplo_cache_name: _View(kept)}
    place = 0
    for name in names.split():
        name, _, parts = name.partition(":")
        more[name] = tuple(given[place : place + int(parts)]) if parts else given[place]
        place += int(parts) if parts else 1
    result = type(layer).forward(layer, hidden, **more)
    return (result[0] if isinstance(result, tuple) else result), kept.keys, kept.values


def _forward_of_layer(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    cache = kwargs.get(layer.deplo_cache_name)
    if args or not isinstance(cache, View) or not torch.compiler.is_compiling():
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    names, given = "", []
    for name, value in kwargs.items():
        if name == layer.deplo_cache_name:
            continue
        if isinstance(value, tuple):
            names += f"{name}:{len(value)} "
            given += value
        else:
            names += f"{name} "
            given.append(value)
    slot = cache.layers[layer.deplo_place]
    hidden, keys, values = layer.deplo_region(
        layer, hidden_states, slot.keys, slot.values, slot.positions, slot.is_sliding, names, *given
    )
    slot.keys.copy_(keys)
    slot.values.copy_(values)
    return (hidden,) if layer.deplo_gives_tuple else hidden


def _lists_of_layers(model: torch.nn.Module) -> list[list[Any]]:
    """Modules in a list that take hidden states and a cache, one of each number."""
    found = []
    for modules in model.modules():
        if not isinstance(modules, torch.nn.ModuleList) or len(modules) < 2:
            continue
        parameters = inspect.signature(type(modules[0]).forward).parameters
        if "hidden_states" in parameters and {"past_key_values", "past_key_value"} & set(parameters):
            found.append(list(modules))
    return found


def install(model: torch.nn.Module, count: int) -> None:
    """Makes the layers of a model regions, if it has one list of so many that each keep keys and values."""
    lists = [layers for layers in _lists_of_layers(model) if len(layers) == count]
    if len(lists) != 1:
        return
    region = torch.compiler.nested_compile_region(_region, max_reuse_entries=count)
    for place, layer in enumerate(lists[0]):
        names = inspect.signature(type(layer).forward).parameters
        layer.__dict__.update(
            deplo_place=place,
            deplo_region=region,
            deplo_cache_name=next(name for name in ("past_key_values", "past_key_value") if name in names),
            deplo_gives_tuple=False,
            forward=types.MethodType(_forward_of_layer, layer),
        )
