"""A model's equal layers, traced once: each layer of a prepared model's programs is a region that Dynamo and AOTAutograd see once and reuse.

A region computes the layer's result and its cache's new keys and values; these are written outside of it, since regions change nothing. deplo puts
the regions together again (`subgraphs`), so that the program is the one that the layers give by themselves.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

from .llm_cache import Layer, View

_ATTRIBUTES = ("deplo_place", "deplo_cache_name", "deplo_gives_tuple", "forward")


class _Kept(Layer):
    """A layer of a cache whose tensors a region replaces."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = torch.index_copy(self.keys, 2, self.positions, key_states)
        self.values = torch.index_copy(self.values, 2, self.positions, value_states)
        return self.keys, self.values


class _View(View):
    """What a layer sees of the cache: its own keys and values alone, whatever its number."""

    def __init__(self, kept: _Kept) -> None:
        super(View, self).__init__(layers=[kept])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[0].update(key_states, value_states)  # type: ignore[no-any-return]

    def get_seq_length(self, *args: Any) -> Any:
        return self.layers[0].get_seq_length()

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> Any:
        return self.layers[0].get_mask_sizes(*args[:1])


def _layer(
    layer: Any, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, sliding: bool, names: str, *given: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The layer's result, and what its cache holds then. `names` are those of the arguments `given`: one with a number takes a tuple of so many."""
    kept = _Kept(keys, values, positions, sliding)
    more: dict[str, Any] = {layer.deplo_cache_name: _View(kept)}
    place = 0
    for text in names.split():
        name, _, parts = text.partition(":")
        more[name] = tuple(given[place : place + int(parts)]) if parts else given[place]
        place += int(parts) if parts else 1
    result = type(layer).forward(layer, hidden, **more)
    return (result[0] if isinstance(result, tuple) else result), kept.keys, kept.values


_region: Any = torch.compiler.nested_compile_region(_layer, max_reuse_entries=1000)


def _forward(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    cache = kwargs.get(layer.deplo_cache_name)
    if args or not isinstance(cache, View) or not torch.compiler.is_compiling():
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    names = ""
    given: list[Any] = []  # plain arguments, of which Dynamo knows whether they are as they were, without asking pytree
    for name, value in kwargs.items():
        if isinstance(value, tuple):
            names += f"{name}:{len(value)} "
            given += value
        elif name != layer.deplo_cache_name:
            names += f"{name} "
            given.append(value)
    slot = cache.layers[layer.deplo_place]
    hidden, keys, values = _region(layer, hidden_states, slot.keys, slot.values, slot.positions, slot.is_sliding, names, *given)
    slot.keys.copy_(keys)
    slot.values.copy_(values)
    return (hidden,) if layer.deplo_gives_tuple else hidden


_forward.__name__ = "forward"  # as copies of the bound method look for it


@contextlib.contextmanager
def watched(model: torch.nn.Module) -> Iterator[dict[Any, Any]]:
    """What each module that takes hidden states and a cache returned last, by module."""
    seen: dict[Any, Any] = {}
    hooks = []
    for modules in model.modules():
        if isinstance(modules, torch.nn.ModuleList) and len(modules) > 1 and _takes(modules[0]):
            hooks += [module.register_forward_hook(lambda m, _, result: seen.__setitem__(m, result)) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _takes(module: Any) -> str:
    """The name of its argument for a cache, if it takes hidden states and one."""
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in ("past_key_values", "past_key_value") if name in names and "hidden_states" in names), "")


def install(seen: dict[Any, Any], count: int) -> bool:
    """Makes regions of the modules that were `seen`, if they are the model's `count` layers, each of which gives one tensor."""
    if len(seen) != count or count < 3:
        return False
    if not all(isinstance(result, torch.Tensor) or (isinstance(result, tuple) and len(result) == 1) for result in seen.values()):
        return False
    for place, (layer, result) in enumerate(seen.items()):
        values = (place, _takes(layer), isinstance(result, tuple), types.MethodType(_forward, layer))
        layer.__dict__.update(zip(_ATTRIBUTES, values, strict=True))
    return True


def remove(model: torch.nn.Module) -> bool:
    """Makes regions layers again; whether there were any."""
    found = [m for m in model.modules() if getattr(m.__dict__.get("forward"), "__func__", None) is _forward]
    for layer in found:
        for name in _ATTRIBUTES:
            layer.__dict__.pop(name, None)
    return bool(found)
