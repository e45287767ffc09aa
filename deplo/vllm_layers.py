"""Linears of vLLM's models as PyTorch's, with their weights as parameters of the graph; and the head, which vLLM calls outside of it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from .executable import repack
from .vllm_plugin import BACKEND, is_chosen, with_defaults


class Head(torch.nn.Module):
    """A linear over the vocabulary, by itself: the model's graph ends before it. `weight` is shared with the layer, as [vocabulary, hidden]."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, bias)


def compiled_head(weight: torch.nn.Parameter) -> Any:
    """A function (x [rows, hidden], weight, bias) -> [rows, vocabulary]: a program for one row, and one for all other numbers of rows.

    Where the layer's parameter has been replaced since, the given one is used.
    """
    kept = [Head(weight)]
    compiled = [torch.compile(kept[0], backend=BACKEND, dynamic=True)]

    def head(x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.Tensor | None) -> Any:
        if torch.compiler.is_compiling():  # a graph that holds the head
            return torch.nn.functional.linear(x, weight, bias)
        if weight is not kept[0].weight:
            kept[0] = Head(weight)
            compiled[0] = torch.compile(kept[0], backend=BACKEND, dynamic=True)
        with with_defaults():
            return compiled[0](x, bias)

    return head


def install() -> None:
    """Has linears of models that deplo compiles stay in the graph, their programs made before the first request, and new weights packed."""
    _install_linears()
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
    head_type = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding").ParallelLMHead

    @functools.wraps(dispatch)
    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight: Any = layer.weight
        if not _compiles_with_deplo() or weight.is_meta or weight.ndim != 2:
            dispatch(layer, remove_weight)
            return
        layer_: Any = layer
        if isinstance(layer, head_type):
            layer_.cpu_linear = compiled_head(weight)
        else:
            layer_.cpu_linear = torch.nn.functional.linear

    dispatch_: Any = dispatch_cpu_unquantized_gemm
    dispatch_._deplo = True
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def _compiles_with_deplo() -> bool:
    config = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
    return config is not None and is_chosen(config.compilation_config)
