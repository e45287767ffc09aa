"""The backend function that Dynamo calls, and the compilers that it hands to AOTAutograd."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import inspect
import itertools
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException

from .aliases import CheckedCall, Checks, Places, view_written_inputs, writes_windows_with_gaps
from .artifacts import record as record_artifacts
from .autograd import aot_autograd, untraced_compiler
from .cache import warn_of
from .cache_key import key_of, keyed, reason_to_bypass
from .compiled_graph import CompiledGraph, Facts, asking, bundled, is_packaging
from .core import core
from .decompositions import decompositions
from .eager_calls import calls_as_in_eager_mode
from .errors import Error, FallbackWarning, InternalError, UnsupportedError, UserError
from .executable import Executable
from .finetune import Finetuned
from .flex_attention import write_out_attention
from .fx_import import import_graph
from .graph_code import EagerGraph
from .imported import Imported, Smaller
from .inputs import InputInfo, describe_inputs, is_bare, placeholder_info, static_names, takes_bases, written_inputs
from .mixed import Mixed, eager_as_traced
from .options import KEYS, Options, read_options
from .plain_inputs import plain_inputs
from .progress import progress
from .records import Record as Record
from .records import collect_records as collect_records
from .records import publish
from .registration import register_for_threads
from .subgraphs import inline_regions
from .targets import find_target
from .tier import Tiered, in_background, search_in_background
from .tune import has_folder, tune_graph

log = logging.getLogger(__name__)
_Backend = TypeVar("_Backend", bound=Callable[..., Any])


def raises_own_errors(function: _Backend) -> _Backend:
    """Lets errors of deplo through Dynamo, which wraps a backend's in BackendCompilerFailed unless they are of its own class ShortenTraceback."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except Error as error:
            if isinstance(error, ShortenTraceback):
                raise
            kind: Any = type(error)
            raise _own_error(kind)(str(error), first_useful_frame=inspect.currentframe()) from error.__cause__

    return cast(_Backend, call)


@functools.cache
def _own_error(kind: Any) -> Any:
    def initialise(self: Any, text: str, **keywords: Any) -> None:
        ShortenTraceback.__init__(self, text, **keywords)
        self.text = text

    # Dynamo appends advice about its own internals to `args`.
    members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__init__": initialise, "__str__": lambda self: self.text}
    return type(kind.__name__, (kind, ShortenTraceback), members)


@raises_own_errors
def deplo(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend of `torch.compile(model, backend="deplo")`.

    `mode` and `options` are those of torch.compile; `deplo.options.KEYS` lists the options. Raises UserError for bad options,
    and with `strict` also UnsupportedError and InternalError; without it such a graph runs in eager mode, with a warning.
    """
    return compile_with(read_options(mode, options), gm, example_inputs)


@raises_own_errors
def compile_with(
    options: Options,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    make: type[Compilation] | None = None,
    tell: Callable[[CompiledGraph], None] | None = None,
    bypass: str = "",
) -> Callable[..., Any]:
    """Compiles one graph of Dynamo by `make` (Compilation). `tell` is called with the graph that AOTAutograd runs in a call of it, if that is all.

    AOTAutogradCache is not asked where `bypass` says why not.
    """
    check_options(options)
    if plain := plain_inputs(gm, example_inputs):
        # Its key holds the text of a graph, but not of what tensors are put together from.
        return plain.around(compile_with(options, plain.gm, plain.inputs, make, bypass="regions take weights apart"))
    places = Places(gm, example_inputs)
    inputs = describe_inputs(gm, example_inputs)
    training = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    compilation = (make or Compilation)(options, inputs, gm)
    bypass = bypass or ("its compiler is not the backend's" if make else reason_to_bypass(options, gm, any(places.groups), is_packaging()))
    key = "" if bypass else key_of(options, inputs, example_inputs, training, is_packaging())
    try:
        with calls_as_in_eager_mode(), compilation.asking(gm, bypass, key):
            compiled: Callable[..., Any] = compilation.compiler(training)(gm, example_inputs)
    except (AssertionError, RuntimeError) as error:
        # AOTAutograd's for writes to some kinds of views, as one of another dtype.
        if isinstance(error, TorchDynamoException) or not any(places.groups):
            raise
        return _as_written(gm, UnsupportedError(f"inputs share memory, which AOTAutograd does not take: {str(error).splitlines()[0]}"), options)
    facts = compilation.facts
    if facts.writes_windows:
        return _as_written(gm, UnsupportedError("it writes to windows (unfold) that do not cover their tensor once each"), options)
    written = set(facts.written)
    if facts.has_bases:  # which of those that share memory are written, AOTAutograd does not tell
        written.update(i for i, group in enumerate(places.groups) if group)
    if not written:
        if tell is not None and compilation.graph is not None:
            tell(compilation.graph)
        return compiled
    return CheckedCall(compiled, EagerGraph(gm), Checks(places, written, facts.has_bases, facts.differentiates, options.strict))


def _as_written(gm: torch.fx.GraphModule, refusal: UnsupportedError, options: Options) -> Callable[..., Any]:
    """Dynamo's graph op by op, where AOTAutograd gives none that does the same."""
    if options.strict:
        raise refusal
    publish(Record("whole", fallback=str(refusal)))
    warn_fallback("whole", refusal)
    return gm


_graph_numbers = itertools.count()


class Compilation:
    """The compilers of one Dynamo graph: its forward, later its backward, or its inference graph."""

    def __init__(self, options: Options, inputs: list[InputInfo], user_graph: torch.fx.GraphModule | None = None) -> None:
        self.options = options
        self.inputs = inputs
        self.user_graph = user_graph
        self.facts = Facts()
        self.graph: CompiledGraph | None = None  # of the forward or the inference graph
        self._cached = False  # AOTAutogradCache is asked for the graph, and given it
        self._under_way = False

    def compiler(self, training: bool) -> Any:
        """AOTAutograd with these compilers. It is set up anew each time, since it changes what it is given."""
        from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        def kept(compile: Callable[..., CompiledGraph]) -> Any:
            return SerializableAOTDispatchCompiler(CompiledGraph, compile) if self._cached else compile

        return aot_autograd(
            fw_compiler=kept(self.forward),
            bw_compiler=kept(untraced_compiler(self.backward)),
            inference_compiler=kept(self.inference),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=decompositions(training),
            keep_inference_input_mutations=True,
        )

    @contextlib.contextmanager
    def asking(self, gm: torch.fx.GraphModule, bypass: str, key: str) -> Iterator[None]:
        """Inside, AOTAutograd looks for `gm` in its cache under a key that holds `key`, unless there is a reason to `bypass` it."""
        self._cached, self._under_way = not bypass, True
        if bypass:
            from torch._dynamo.utils import counters

            counters["aot_autograd"]["autograd_cache_bypass"] += 1
            log.info("AOTAutogradCache is not asked: %s", bypass)
        token = asking.set(self)
        try:
            with keyed(gm, "" if bypass else key), contextlib.nullcontext() if bypass else bundled():
                yield
        finally:
            asking.reset(token)
            self._under_way = False

    def forward(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        # A backward graph writes over nothing that was saved: a retained one may run again.
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []
        return self._compile("forward", gm, static_names(gm))

    def backward(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        compiled = self._compile("backward", gm, None)
        if self._cached and not self._under_way:
            compiled.bundle_until_called()
        return compiled

    def inference(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        return self._compile("inference", gm, static_names(gm))

    def _compile(self, kind: str, gm: torch.fx.GraphModule, static: set[str] | None) -> CompiledGraph:
        facts = None
        inline_regions(gm)
        write_out_attention(gm, kind != "inference")
        if kind != "backward":
            windows = self.user_graph is not None and writes_windows_with_gaps(self.user_graph, gm)
            bare = kind == "inference" and is_bare(gm)
            self.facts = facts = Facts(written_inputs(gm), kind == "forward", takes_bases(gm), windows, bare)
            view_written_inputs(gm)
        call = self._call(kind, gm, static)
        if isinstance(call, Executable):
            graph = CompiledGraph(call.boxed(), call, facts, self.options)
            if kind != "backward":
                self.graph = graph
            return graph
        tiered = isinstance(call, Tiered)
        why = f"the {kind} graph compiles in the background" if tiered else f"some calls of the {kind} graph stay in eager mode"
        graph = CompiledGraph(call, None, facts, self.options, why)
        if tiered and kind != "backward":
            self.graph = graph
        return graph

    def _call(self, kind: str, gm: torch.fx.GraphModule, static: set[str] | None) -> Executable | Callable[..., Any]:
        try:
            return self._recorded(kind, gm, static)
        except UnsupportedError as error:
            if self.options.strict:
                raise
            parts = Mixed.split(gm, self.options.target)
            if parts is None:
                return self._in_eager(kind, gm, error)
            publish(Record(kind, left=[(str(node.target), why) for node, why in parts.refused.items()]))
            self._compile_parts(kind, parts, static, error)
            return parts.boxed(saves=kind == "forward")
        except InternalError as error:
            if self.options.strict:
                raise
            return self._in_eager(kind, gm, error)

    def _recorded(self, kind: str, gm: torch.fx.GraphModule, static: set[str] | None) -> Executable | Callable[..., Any]:
        record = Record(kind)
        run = self._program(record, gm, static)
        publish(record)
        return run

    def _compile_parts(self, kind: str, parts: Mixed, static: set[str] | None, error: UnsupportedError) -> None:
        """Gives each part its call, with one warning for all calls that stay in eager mode: `error` says why the first one does."""
        calls, refused = len(parts.refused), 0
        reasons = [str(error)]
        for part in parts.parts:
            try:
                call = self._recorded(kind, part.gm, static)
                part.call = call.boxed() if isinstance(call, Executable) else call
            except UnsupportedError as why:  # a size that its calls share, say
                publish(Record(kind, fallback=str(why)))
                part.call = EagerGraph(part.gm)
                calls += sum(1 for node in part.gm.graph.nodes if node.op == "call_function")
                refused += 1
                reasons += [str(why)] if str(why) not in reasons else []
            except InternalError as bug:
                part.call = self._in_eager(kind, part.gm, bug)
        more = " (deplo.explain lists more reasons)" if len(reasons) > 2 else ""
        warn_fallback(kind, UnsupportedError("; ".join(reasons[:2]) + more), 0 if refused == len(parts.parts) else calls)

    def _in_eager(self, kind: str, gm: torch.fx.GraphModule, error: Error) -> Callable[..., Any]:
        publish(Record(kind, fallback=str(error)))
        warn_fallback(kind, error)
        return EagerGraph(gm)

    def _program(self, record: Record, gm: torch.fx.GraphModule, static: set[str] | None) -> Executable | Callable[..., Any]:
        imported = self._import(record, gm, static)
        if self.options.tier == "background" and not is_packaging() and not find_target(imported.target).device:
            return self._tiered(record, gm, imported, static)
        with progress(f"compiling the {record.kind} graph of {imported.text.count(chr(10)) - 2} calls"):
            call, warning = self._linked(record, gm, imported)
        if warning:
            warnings.warn(warning, FallbackWarning, stacklevel=2)
        return call

    def _linked(self, record: Record, gm: torch.fx.GraphModule, imported: Imported) -> tuple[Executable | Callable[..., Any], str]:
        """The program's call, or eager mode's with a warning where this machine lacks what runs the program. Runs in any thread."""
        start = time.perf_counter()
        tune_graph(imported, self.options)
        record.program = compile_text(imported, self.options)
        record.compile_seconds = time.perf_counter() - start
        if self.options.strict and self.options.allow_library is not None:
            check_library_calls(record.program, self.options.allow_library)
        if missing := record.program.missing():
            remedy = "; without the option 'target' they run on the CPU" if imported.device < 0 else ""
            record.fallback = f"its kernels for {imported.target} cannot run here: {missing}{remedy}"
            if self.options.strict:
                raise UnsupportedError(f"the {record.kind} graph: {record.fallback}")
            return EagerGraph(gm), f"the {record.kind} graph runs in eager mode, {record.fallback}"
        record_artifacts(record.program.images())
        others = compiler_of_others(record.kind, self.options)
        on_device = find_target(imported.target).device
        if self.options.tune == "background" and not on_device and not is_packaging() and has_folder(self.options):
            options = self.options  # not this object, which keeps the program
            record.search = Finetuned(record.program, imported, options, lambda: compile_text(imported, options))
            search_in_background(record.search)
        return Executable(record.program, imported, EagerGraph(gm), record.kind, self.options.strict, others), ""

    def _tiered(self, record: Record, gm: torch.fx.GraphModule, imported: Imported, static: set[str] | None) -> Tiered:
        """The graph in eager mode, while another thread compiles it."""
        warn_of(self.options)
        eager = EagerGraph(gm)

        def link() -> tuple[Executable | Callable[..., Any], str]:
            try:
                return self._linked(record, gm, imported)
            except (UnsupportedError, InternalError) as error:
                record.fallback = str(error)
                if self.options.strict:
                    raise
                return eager, fallback_text(record.kind, error)

        infos = [placeholder_info(node, self.inputs, static) for node in gm.graph.nodes if node.op == "placeholder"]
        packs = record.kind == "inference" and imported.device < 0
        call = eager_as_traced(gm) if record.kind == "forward" else eager
        record.background = Tiered(record.kind, link, call, self.options.strict, [info.is_static for info in infos] if packs else None)
        return in_background(record.background)

    def _import(self, record: Record, gm: torch.fx.GraphModule, static: set[str] | None) -> Imported:
        start = time.perf_counter()
        imported = import_graph(gm, record.kind, self.inputs, static, self.options.target)
        imported.training = record.kind != "inference"
        record.torch_ir, record.hints = imported.text, imported.hints
        trace_artifact(f"deplo_{record.kind}_torch_ir", imported.text)
        record.import_seconds = time.perf_counter() - start
        return imported


def compile_text(imported: Imported, options: Options) -> Any:
    """The core's Program. Every failure that is not the caller's becomes an InternalError that names a file to replay."""
    module = core()
    warn_of(options)
    if options.dump_dir:
        # One folder a graph: forward, backward and the next graph must not overwrite each other.
        options = options.replace(dump_dir=os.path.join(options.dump_dir, f"graph{next(_graph_numbers):02}"))
    try:
        return module.compile(imported.text, imported.options(options))
    except (UserError, UnsupportedError):
        raise
    except InternalError as error:
        raise InternalError(f"{error}; {replay_of(imported)}") from error
    except (Error, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise InternalError(f"[core] {type(error).__name__}: {error}; {replay_of(imported)}") from error


def compiler_of_others(kind: str, options: Options) -> Callable[[Imported, Smaller | None], Any]:
    """A function that compiles a graph's program, or one of its `smaller`, and tells who collects records."""

    def compile(graph: Imported, smaller: Smaller | None) -> Any:
        if smaller is not None:
            graph = dataclasses.replace(graph, text=smaller.text, hints={**graph.hints, graph.split_size: smaller.hint})
        start = time.perf_counter()
        with progress(f"compiling the {kind} graph for " + (f"sizes up to {smaller.most}" if smaller else "other switches of PyTorch's")):
            program = compile_text(graph, options)
        record_artifacts(program.images())
        publish(Record(kind, graph.text, program, compile_seconds=time.perf_counter() - start, hints=graph.hints))
        return program

    return compile


def check_options(options: Options) -> None:
    """Raises UserError for what deplo/options.py alone cannot judge: names of operators, passes and CPU features, and text of schedules."""
    check_operators(options.allow_library or ())
    target = Options({name: key.default for name, key in KEYS.items()}).replace(target=options.target)
    for name in ("disable", "dump", "stop_after", "features", "schedule"):
        value = getattr(options, name)
        if value == KEYS[name].default:
            continue
        try:
            core().check_options(target.replace(**{name: value}).to_json())
        except UserError as error:
            shown = "" if name == "schedule" else f" is {', '.join(value) if isinstance(value, tuple) else value!r}"
            raise UserError(f"{options.origin(name)}{shown}: {error}") from None


def check_operators(names: Sequence[str]) -> None:
    """Raises UserError for a name of `allow_library` that is no operator of PyTorch: such a name would allow nothing."""
    known = {name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()} if names else set()
    known |= {".".join(name.split(".")[:2]) for name in known}  # all overloads at once
    for name in names:
        if name.removesuffix(".default") not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"option 'allow_library' names {name!r}, which is no operator of PyTorch; "
                + (f"did you mean {close[0]}?" if close else "expected one such as aten.sort")
            )


def check_library_calls(program: Any, allowed: Sequence[str]) -> None:
    """Raises UnsupportedError if the program keeps an ATen call that `allowed` (overloads or packets, as aten.sort) does not name."""
    for call in json.loads(program.describe())["library"]:
        if call["op"] not in allowed and call["op"].rpartition(".")[0] not in allowed:
            raise UnsupportedError(f"{call['op']} stays in ATen ({call['reason']}), which allow_library does not name")


def replay_of(imported: Imported) -> str:
    """How to see the failure again: the graph in a file, and the command that takes it through every level."""
    return f"replay with: python -m deplo compile {write_replay(imported.text)} --ir {find_target(imported.target).levels[-1]}"


def write_replay(text: str) -> str:
    """Writes Torch IR to a file of its own in the temporary folder, readable by its owner only; its path, or a note that it failed."""
    name = f"deplo-{os.getuid()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.ir"
    path = os.path.join(tempfile.gettempdir(), name)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError as error:
        return f"FILE.ir (not written: {error})"
    return path


def warn_fallback(kind: str, error: Error, calls: int = 0) -> None:
    """One warning for one graph, all of which, or `calls` calls of which, run in eager mode."""
    warnings.warn(fallback_text(kind, error, calls), FallbackWarning, stacklevel=3)


def fallback_text(kind: str, error: Error, calls: int = 0) -> str:
    """What that warning says."""
    what = f"{calls} calls of the {kind} graph run" if calls > 1 else f"one call of the {kind} graph runs" if calls else f"the {kind} graph runs"
    why = "deplo has a bug there" if isinstance(error, InternalError) else "deplo does not compile that"
    return f"{what} in eager mode, {why}: {error}"


def trace_artifact(name: str, text: str) -> None:
    """Adds a text to torch's structured trace, where tlparse shows it."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


register_for_threads("deplo", deplo)
