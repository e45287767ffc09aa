"""vLLM's attention over its paged cache as one call that a program makes: it takes queries, keys and values, and gives a tensor of its own.

vLLM's two calls write the cache and then an output that the graph made; named by an object that Torch IR cannot say. Their work is done by the
same functions of vLLM's here (which know of caches that are transferred or shared), behind an operator that takes the layer's name as text.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from .vllm_plugin import is_chosen

_NAME = "deplo_vllm::attention"


def attention(query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, layer_name: str, width: int) -> torch.Tensor:
    """query, key and value as [tokens, heads * head size], to [tokens, width] in query's dtype. Writes key and value to the layer's cache."""
    module = _module()
    layer = module.get_forward_context().no_compile_layers[layer_name]
    output = query.new_empty((query.shape[0], width))
    query = query.view(-1, layer.num_heads, layer.head_size)
    updates = not layer.attn_backend.forward_includes_kv_cache_update and layer.kv_sharing_target_layer_name is None
    if key is not None:
        key = key.view(-1, layer.num_kv_heads, layer.head_size)
    if value is not None:
        value = value.view(-1, layer.num_kv_heads, layer.head_size_v)
    if updates and key is not None and value is not None:
        module.unified_kv_cache_update(key, value, layer_name)
    module.unified_attention_with_output(query, key, value, output.view(-1, layer.num_heads, layer.head_size_v), layer_name)
    return output


def _attention_of_fakes(query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, layer_name: str, width: int) -> torch.Tensor:
    return query.new_empty((query.shape[0], width))


@functools.cache
def _module() -> Any:
    return importlib.import_module("vllm.model_executor.layers.attention.attention")


@functools.cache
def _library() -> Any:
    namespace, _, name = _NAME.partition("::")
    library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(f"{name}(Tensor query, Tensor? key, Tensor? value, str layer_name, int width) -> Tensor")
    library.impl(name, attention, "CPU")
    torch.library.register_fake(_NAME, _attention_of_fakes, lib=library)
    return library


def install() -> None:
    """Defines the operator, which packages of vLLM's cache name, and has models that deplo compiles call it."""
    _library()
    module = _module()
    kind = module.Attention
    if getattr(kind, "_deplo", False):
        return
    initialise, forward = kind.__init__, kind.forward
    operator = torch.ops.deplo_vllm.attention.default

    @functools.wraps(initialise)
    def with_choice(self: Any, *args: Any, **keywords: Any) -> None:
        initialise(self, *args, **keywords)
        config = importlib.import_module("vllm.config").get_current_vllm_config()
        # Others call vLLM's own operators or quantise queries.
        self.is_deplos = is_chosen(config.compilation_config) and not self.use_direct_call and self.query_quant is None

    @functools.wraps(forward)
    def in_one_call(self: Any, query: Any, key: Any, value: Any, output_shape: Any = None, output_dtype: Any = None) -> Any:
        if not self.is_deplos or not torch.compiler.is_compiling() or output_shape is not None or output_dtype is not None:
            return forward(self, query, key, value, output_shape, output_dtype)
        return operator(query, key, value, self.layer_name, self.num_heads * self.head_size_v)

    kind.__init__, kind.forward, kind._deplo = with_choice, in_one_call, True
