"""One compiled graph as AOTAutograd calls it, and as PyTorch's caches and packages keep it."""

from __future__ import annotations

import contextlib
import contextvars
import copyreg
import dataclasses
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor.output_code import OutputCode
from torch.utils._python_dispatch import _disable_current_modes

from . import artifacts, sizes
from .cache import warn_of
from .core import core
from .errors import UnsupportedError
from .executable import Executable
from .graph_code import EagerGraph, GraphCode
from .imported import Imported
from .options import Options
from .records import Record, publish
from .tier import Tiered


def _global_name(format: torch.memory_format) -> str:
    return str(format).removeprefix("torch.")


# Left alone, pickle looks for the first module with an attribute `torch.channels_last`: that of whoever imported torch first. Its name would be in
# PyTorch's keys, and whoever reads an entry would have to import it.
copyreg.pickle(torch.memory_format, _global_name)  # type: ignore[arg-type]


@dataclasses.dataclass
class Facts:
    """What a forward or inference graph of AOTAutograd tells about Dynamo's graph: the code around it depends on it."""

    written: set[int] = dataclasses.field(default_factory=set)  # inputs of Dynamo's graph
    differentiates: bool = False  # the graph keeps values for its gradient
    has_bases: bool = False  # some inputs share memory: the graph takes their base and views it by strides
    writes_windows: bool = False  # in a way that AOTAutograd's graph does not repeat
    bare: bool = False  # AOTAutograd's code around the graph passes inputs and outputs on as they are


class Asking(Protocol):
    """A compilation that PyTorch's cache may answer."""

    options: Options
    facts: Facts
    graph: Any  # the CompiledGraph


# The compilation under way in this thread: no argument of PyTorch's leads from a graph that it restores to who asked for it.
asking: contextvars.ContextVar[Asking | None] = contextvars.ContextVar("deplo_asking", default=None)


@dataclasses.dataclass
class StoredGraph:
    """What makes a compiled graph again without importing a graph or running a pass."""

    kind: str
    imported: Imported
    kernel_ir: str
    kernels: str  # JSON about them
    images: dict[str, bytes]  # their machine code, in packages; caches have it apart
    eager: GraphCode
    facts: Facts | None  # none of a backward graph
    derived_sizes: dict[str, Any]
    options: Options

    def restored(self, options: Options) -> Executable:
        """Links the program, and tells who collects records. Raises deplo's errors."""
        start = time.perf_counter()
        sizes.know_derived(self.derived_sizes)
        for image in self.images.values():
            core().offer_kernel(image)
        program = core().restore(self.kernel_ir, self.kernels, self.imported.options(options))
        artifacts.record(program.images())
        seconds = time.perf_counter() - start
        publish(Record(self.kind, self.imported.text, program, compile_seconds=seconds, hints=self.imported.hints, restored=True))
        from .backend import compiler_of_others

        others = compiler_of_others(self.kind, options)
        return Executable(program, self.imported, EagerGraph(self.eager), self.kind, options.strict, others)


class CompiledGraph(OutputCode):
    """Calls are boxed, like an Executable's. A graph without an `executable` is not kept by caches, with `refusal` as the reason."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(
        self, call: Callable[[list[Any]], Any], executable: Executable | None, facts: Facts | None, options: Options, refusal: str = ""
    ) -> None:
        self._boxed_call = True  # the object's, not the class's: AOTAutograd's wrappers copy what is in __dict__
        self._call: Callable[[list[Any]], Any] | None = call
        self._executable = executable
        self._facts = facts
        self._options = options
        self._refusal = refusal
        self._stored = b""

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self._call(inputs)  # type: ignore[misc, arg-type]

    def bare_program(self) -> Any:
        """The core's Program, where a call of Dynamo's graph is a call of it and nothing else; None where it is more."""
        executable = self._call.executable if isinstance(self._call, Tiered) else self._executable
        if self._facts is None or not self._facts.bare or executable is None:
            return None
        return executable.bare_program()

    def is_compiling(self) -> bool:
        """Whether it runs in eager mode until it is compiled."""
        return isinstance(self._call, Tiered) and self._call.state == "compiling"

    def prepare_for_serialization(self) -> None:
        """Leaves what pickles. Raises PyTorch's BypassAOTAutogradCache where nothing does."""
        if self._executable is not None:
            self._stored = self._pickled(self._executable)
        elif not self._stored:
            raise BypassAOTAutogradCache(self._refusal)
        self._call = self._executable = self._facts = None

    def _pickled(self, executable: Executable) -> bytes:
        program, imported = executable.program, executable.imported
        kernel_ir, kernels = program.text()
        images = program.images() if is_packaging() else {}
        try:
            with _disable_current_modes():
                code = executable.eager.code()
                derived = sizes.meanings(imported.derived)
                stored = StoredGraph(executable.kind, imported, kernel_ir, kernels, images, code, self._facts, derived, self._options)
                # PyTorch keeps each entry for save_cache_artifacts until the process ends; a third is left of it, for a few milliseconds.
                return zlib.compress(pickle.dumps(stored), 1)
        except (UnsupportedError, pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
            raise BypassAOTAutogradCache(f"the {executable.kind} graph does not pickle: {error}") from error

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Links a graph that was restored from a cache or a package."""
        if self._call is not None:
            return
        stored: StoredGraph = pickle.loads(zlib.decompress(self._stored))
        compilation = asking.get()
        self._options = stored.options if compilation is None else compilation.options
        if compilation is not None and stored.facts is not None:
            compilation.facts = stored.facts
            compilation.graph = self
        self._facts = stored.facts
        warn_of(self._options)
        self._executable = stored.restored(self._options)
        self._call = self._executable.boxed()
        self._stored = b""

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There is no Triton here."""

    def bundle_until_called(self) -> None:
        """Has AOTAutograd, which compiles a backward graph when it is first called, store it with its forward graph in one entry."""
        revert = contextlib.ExitStack()
        revert.enter_context(bundled())
        thread, call = threading.get_ident(), self._call

        def first(args: list[Any]) -> Any:
            if threading.get_ident() == thread:  # the option is the thread's
                revert.close()
            self._call = call
            return call(args)  # type: ignore[misc]

        self._call = first


def bundled() -> contextlib.AbstractContextManager[Any]:
    """Entries of AOTAutogradCache hold the compiled graphs themselves; without, PyTorch looks for them among Inductor's."""
    patch: contextlib.AbstractContextManager[Any] = torch._functorch.config.patch(bundled_autograd_cache=True)
    return patch


def is_packaging() -> bool:
    """Whether the compilation is for aot_compile."""
    return bool(torch._functorch.config.bypass_autograd_cache_key)
