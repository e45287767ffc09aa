"""Linears of vLLM's models as PyTorch's, with their weights as parameters of the graph; the head, which vLLM calls outside of it; and embeddings,
whose weight may be the head's."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from .core import core
from .executable import repack
from .sizes import unguarded
from .vllm_plugin import BACKEND, is_chosen, with_defaults

_EMBEDDING = "deplo_vllm::embedding"


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows of `weight` [vocabulary, hidden] that `ids` (int64) name, as [*ids.shape, hidden]. A weight of which only the head's packed copy is in
    memory is read from that. Raises IndexError."""
    result = weight.new_empty((*ids.shape, weight.shape[1]))
    ids = ids.contiguous()
    if ids.numel() == 0:
        return result
    if not weight.is_contiguous():
        return torch.nn.functional.embedding(ids, weight)
    least, most = torch.aminmax(ids)
    if least < 0 or most >= weight.shape[0] or ids.dtype != torch.int64:
        raise IndexError(f"rows {int(least)} to {int(most)} of an embedding of {weight.shape[0]}, in {ids.dtype}")
    core().read_rows(weight.data_ptr(), weight.shape[1] * weight.element_size(), ids.data_ptr(), ids.numel(), result.data_ptr())
    return result


def _embedding_of_fakes(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@functools.cache
def _library() -> Any:
    namespace, _, name = _EMBEDDING.partition("::")
    library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(f"{name}(Tensor ids, Tensor weight) -> Tensor")
    library.impl(name, embedding, "CPU")
    torch.library.register_fake(_EMBEDDING, _embedding_of_fakes, lib=library)
    return library


class Head(torch.nn.Module):
    """A linear over the vocabulary, by itself: the model's graph ends before it. `weight` is shared with the layer, as [vocabulary, hidden]."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, bias)


def compiled_head(weight: torch.nn.Parameter) -> Any:
    """A function (x [rows, hidden], weight, bias) -> [rows, vocabulary]: one graph for any number of rows, as the model's.

    Where the layer's parameter has been replaced since, the given one is used.
    """
    kept: list[Any] = [None, None]

    def head(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.Tensor | None) -> Any:
        if torch.compiler.is_compiling():  # a graph that holds the head
            return torch.nn.functional.linear(x, weight, bias)
        is_new = kept[0] is None or weight is not kept[0].weight
        if is_new:
            kept[0] = Head(weight)
            kept[1] = torch.compile(kept[0], backend=BACKEND)
            torch._dynamo.mark_dynamic(x, 0)
        token = unguarded.set(True)
        try:
            with with_defaults(), torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                return kept[1](x, bias)
        finally:
            unguarded.reset(token)

    return head


def install() -> None:
    """Has linears of models that deplo compiles stay in the graph, their programs made before the first request, and new weights packed."""
    _library()
    _install_linears()
    _install_embeddings()
    _install_warm_up()
    _install_repack()


def _install_repack() -> None:
    """vLLM writes weights through `.data`, which PyTorch does not count: by its runner, by load_weights of its models, and in what users apply."""
    runner = importlib.import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner
    worker = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    if getattr(worker, "_deplo", False):
        return
    load, reload, apply = runner.load_model, runner.reload_weights, worker.apply_model

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **keywords: Any) -> None:
        load(self, *args, **keywords)
        model = self.get_model()
        if is_chosen(self.vllm_config.compilation_config) and hasattr(model, "load_weights"):
            model.load_weights = _then_repack(model.load_weights, model)

    @functools.wraps(reload)
    def reload_weights(self: Any, *args: Any, **keywords: Any) -> None:
        _then_repack(reload, self.get_model())(self, *args, **keywords)

    @functools.wraps(apply)
    def apply_model(self: Any, fn: Any) -> Any:
        return _then_repack(apply, self.get_model())(self, fn)

    runner.load_model, runner.reload_weights = load_model, reload_weights
    worker.apply_model, worker._deplo = apply_model, True


def _then_repack(method: Any, model: torch.nn.Module) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return method(*args, **keywords)
        finally:
            repack(model)

    return call


def _install_warm_up() -> None:
    runner = importlib.import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner
    if getattr(runner, "_deplo", False):
        return
    warm_up = runner.warming_up_model

    @functools.wraps(warm_up)
    def warming_up_model(self: Any) -> None:
        warm_up(self)
        if is_chosen(self.vllm_config.compilation_config):
            for tokens in (2, 1):  # vLLM's own is of as many as a batch may have
                hidden = self._dummy_run(tokens)[0]
                if self.is_pooling_model is False and isinstance(hidden, torch.Tensor):
                    self.model.compute_logits(hidden[:tokens])

    runner.warming_up_model, runner._deplo = warming_up_model, True


def _install_linears() -> None:
    utils: Any = importlib.import_module("vllm.model_executor.layers.utils")
    dispatch = utils.dispatch_cpu_unquantized_gemm
    if getattr(dispatch, "_deplo", False):
        return
    embedding_type = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding").VocabParallelEmbedding

    @functools.wraps(dispatch)
    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight: Any = layer.weight
        if not _compiles_with_deplo() or weight.is_meta or weight.ndim != 2:
            dispatch(layer, remove_weight)
            return
        layer_: Any = layer
        if isinstance(layer, embedding_type):  # a head, or an embedding that may be one, too
            layer_.cpu_linear, layer_._deplo = compiled_head(weight), True
        else:
            layer_.cpu_linear = torch.nn.functional.linear

    dispatch_: Any = dispatch_cpu_unquantized_gemm
    dispatch_._deplo = True
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def _install_embeddings() -> None:
    method = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding").UnquantizedEmbeddingMethod
    if getattr(method, "_deplo", False):
        return
    usual = method.embedding
    operator = torch.ops.deplo_vllm.embedding.default

    @functools.wraps(usual)
    def read(self: Any, layer: Any, input_: torch.Tensor) -> Any:
        return operator(input_, layer.weight) if getattr(layer, "_deplo", False) else usual(self, layer, input_)

    method.embedding, method._deplo = read, True


def _compiles_with_deplo() -> bool:
    config = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
    return config is not None and is_chosen(config.compilation_config)
