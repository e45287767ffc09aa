"""deplo under vLLM on CPUs: what the entry point of the group vllm.general_plugins calls in every process of vLLM.

vLLM compiles a model with deplo where `compilation_config={"backend": "deplo"}` asks for it, or, with DEPLO_VLLM=1, wherever it would with Inductor.
Such models keep their linears, norms, rotations and activations as PyTorch's calls in the graph; attention over vLLM's paged cache is one call of
vLLM's own, which stays one (`vllm_attention.py`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import UserError
from .options import defaults

log = logging.getLogger(__name__)

BACKEND = "deplo"
VARIABLE = "DEPLO_VLLM"
# Weights change where vLLM loads them, which the plugin sees (vllm_layers): no call needs to look for other writes. What is packed takes their place.
_DEFAULTS = {"weight_checks": "versions", "weights": "own"}
# deplo.vllm_attention calls these by name; a vLLM without them is another version's.
_NEEDED = (
    ("vllm.platforms.cpu", "CpuPlatform", ("check_and_update_config", "apply_config_platform_defaults")),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", ()),
    ("vllm.model_executor.layers.attention.attention", "Attention", ("forward",)),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding", ()),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod", ("embedding",)),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner", ("load_model", "get_model", "reload_weights", "warming_up_model", "_dummy_run")),
    ("vllm.v1.worker.worker_base", "WorkerBase", ("apply_model",)),
    ("vllm.compilation.wrapper", "TorchCompileWithNoGuardsWrapper", ("aot_compile", "__call__")),
    ("vllm.compilation.caching", "aot_compile_hash_factors", ()),
)


def is_default(environment: Mapping[str, str]) -> bool:
    """Whether DEPLO_VLLM makes deplo the backend in Inductor's place. Raises UserError for anything but 0 and 1."""
    value = environment.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{VARIABLE}={value!r}: expected 1 (vLLM compiles with deplo where it would with Inductor) or 0")
    return value == "1"


def is_chosen(compilation: Any) -> bool:
    """Whether this CompilationConfig of vLLM compiles with deplo."""
    return compilation.backend == BACKEND and (compilation.mode is None or int(compilation.mode) != 0)


@contextlib.contextmanager
def with_defaults() -> Iterator[None]:
    """Has graphs that are compiled inside get the options that suit vLLM, where the user gave none."""
    token = defaults.set(_DEFAULTS)
    try:
        yield
    finally:
        defaults.reset(token)


def apply_defaults(compilation: Any, once: Any, default: bool = False) -> None:
    """Completes a CompilationConfig that names deplo: what vLLM does for Inductor alone. `once` is CompilationMode.DYNAMO_TRACE_ONCE.

    By `default` deplo takes Inductor's place, unless the user gives a mode: vLLM fills in the backend before it loads plugins, so that this
    alone tells an explicit choice. Mode 3 (VLLM_COMPILE) becomes mode 2, as vLLM does on CPUs for Inductor; mode 1 (torch.compile with guards) stays.
    """
    if default and compilation.backend == "inductor" and (compilation.mode is None or int(compilation.mode) == 3):
        compilation.backend = BACKEND
    if not is_chosen(compilation):
        return
    if compilation.mode is None or int(compilation.mode) == 3:
        compilation.mode = once
    if not any(name in compilation.custom_ops for name in ("all", "none")):
        compilation.custom_ops.append("none")  # norms, rotations and activations as PyTorch's calls
    compilation.ir_enable_torch_wrap = False  # and not inside of operators that PyTorch does not see through


def register() -> None:
    """The entry point. vLLM may call it several times in a process; does nothing where vLLM does not run on a CPU."""
    platforms = importlib.import_module("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        if is_default(os.environ):
            log.warning("%s=1 has no effect: deplo compiles for vLLM on CPUs only", VARIABLE)
        return
    if missing := _missing():
        log.warning("deplo does not know this version of vLLM, which has no %s: it compiles as without deplo", missing)
        return
    from . import vllm_attention, vllm_layers

    _choose_backend(type(platforms.current_platform))
    vllm_layers.install()
    vllm_attention.install()
    _tell_of_guards()
    _keep_packages()


def _tell_of_guards() -> None:
    """Mode 2 traces a model once, for two tokens and more, and drops the guards: calls of one token come to the same graph."""
    from .sizes import unguarded

    wrapper = importlib.import_module("vllm.compilation.wrapper").TorchCompileWithNoGuardsWrapper
    if getattr(wrapper, "_deplo", False):
        return

    def without_guards(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            token = unguarded.set(int(self.vllm_config.compilation_config.mode) == 2)
            try:
                with with_defaults():
                    return method(self, *args, **keywords)
            finally:
                unguarded.reset(token)

        return call

    wrapper.aot_compile, wrapper.__call__ = without_guards(wrapper.aot_compile), without_guards(wrapper.__call__)
    wrapper._deplo = True


def _missing() -> str:
    for module, name, members in _NEEDED:
        found = getattr(importlib.import_module(module), name, None)
        if found is None:
            return f"{module}.{name}"
        for member in members:
            if not hasattr(found, member):
                return f"{module}.{name}.{member}"
    return ""


def _choose_backend(platform: Any) -> None:
    if getattr(platform, "_deplo", False):
        return
    mode = importlib.import_module("vllm.config").CompilationMode
    defaults = platform.apply_config_platform_defaults.__func__

    def apply_config_platform_defaults(cls: Any, vllm_config: Any) -> None:
        defaults(cls, vllm_config)
        apply_defaults(vllm_config.compilation_config, mode.DYNAMO_TRACE_ONCE, is_default(os.environ))

    platform.apply_config_platform_defaults = classmethod(functools.wraps(defaults)(apply_config_platform_defaults))
    platform._deplo = True


def _keep_packages() -> None:
    """vLLM keeps what aot_compile gives under a key that names the backend, but not its version and options; and it calls a method of its own
    packages that PyTorch's, which mode 2 gives, lack."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    from .aliases import CheckedCall

    caching: Any = importlib.import_module("vllm.compilation.caching")
    factors = caching.aot_compile_hash_factors
    if getattr(factors, "_deplo", False):
        return

    @functools.wraps(factors)
    def with_deplo(vllm_config: Any) -> list[str]:
        found: list[str] = factors(vllm_config)
        return [*found, identity()] if is_chosen(vllm_config.compilation_config) else found

    caching_: Any = with_deplo
    caching_._deplo = True
    caching.aot_compile_hash_factors = with_deplo
    kinds: tuple[Any, ...] = (BundledAOTAutogradSerializableCallable, CheckedCall)
    for kind in kinds:
        if not hasattr(kind, "finalize_loading"):
            kind.finalize_loading = lambda self, vllm_config: None


def identity() -> str:
    """What beside vLLM's own key changes a package: deplo, its options, the machine's vectors and caches."""
    from .cache_key import key_of
    from .options import read_options

    return key_of(read_options(None, None), (), (), False, True)
