"""A compiled graph as AOTAutograd calls it: picks the program's arguments, runs it, and rebuilds the outputs that alias something."""

from __future__ import annotations

import bisect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from . import sizes, tf32
from .core import core
from .errors import FallbackWarning, InternalError, UnsupportedError, UserError
from .graph_code import EagerGraph
from .imported import Imported, Output, Smaller, ViewStep


class Executable:
    """One program with the maps from the FX graph's inputs and outputs to its own.

    Calls are boxed: `call(args)` clears the list that it is given. Safe to call from several threads.
    """

    def __init__(
        self,
        program: Any,
        imported: Imported,
        eager: EagerGraph,
        kind: str,
        strict: bool = False,
        compile: Callable[[Imported, Smaller | None], Any] | None = None,
    ) -> None:
        """`compile` makes the programs of `imported.smaller`, and those for other switches of PyTorch's; the first call that needs one does so."""
        self.program = program
        self.imported = imported
        self.kind = kind
        self.eager = eager  # for a bug that shows only at run time, and for the words of errors
        self._run = program.run
        self._strict = strict
        self._arguments = imported.arguments
        self._constants = imported.constants
        self._inputs = imported.inputs
        self._outputs = [_reader(output, imported.symbols) for output in imported.outputs]
        self._direct = all(output.kind == "result" and output.index == i for i, output in enumerate(imported.outputs))
        self._writes = imported.writes
        self._has_bases = imported.has_bases
        self._refusal = _checker(imported)
        self._derived = _derived(imported)
        self._compile = compile
        self._smaller: list[Callable[..., Any] | None] = [None] * len(imported.smaller)
        self._choose = _chooser(imported)
        self._switch = _switch(imported)
        self._switched: dict[tuple[tf32.State, int], Callable[..., Any]] = {}
        self._failed = False
        self._lock = threading.Lock()

    def boxed(self) -> Callable[[list[Any]], Any]:
        """The function for AOTAutograd."""
        run, arguments, constants, refusal, derived = self._run, self._arguments, self._constants, self._refusal, self._derived
        takes_all = not constants and arguments == list(range(self._inputs))
        choose, switch = self._choose, self._switch
        # Outputs that are inputs, or views of them, need these; else nothing does once the program has read them.
        lets_go = not any(output.kind == "input" or (output.kind != "result" and output.of_input) for output in self.imported.outputs)
        passes_on = takes_all and self._direct  # sizes of views are read from inputs afterwards
        holders = 0 if not lets_go else 1 if passes_on else 2 if derived is None else 3

        def call(args: list[Any]) -> Any:
            if self._failed and not self._strict:
                return self.eager(args)
            inputs = list(args)
            args.clear()
            given = inputs if derived is None else [*inputs, *derived(inputs)]
            if refusal is not None and (why := refusal(given)):
                return self._pass_on(inputs, UnsupportedError(why))
            passed = inputs if passes_on else [given[i] for i in arguments] + constants
            try:
                at = -1 if choose is None else choose(given)
                if switch is not None and (state := switch()) is not None:
                    chosen = self._switched.get((state, at)) or self._run_switched(state, at)
                else:
                    chosen = run if at < 0 else self._smaller[at] or self._run_of_smaller(at)
                results = chosen(passed, holders)
            except (InternalError, UnsupportedError, UserError, IndexError, RuntimeError) as error:
                if arguments and not passed:  # some inputs are gone
                    inputs.clear()
                    given.clear()
                    if isinstance(error, InternalError) and not self._strict:
                        self._give_up(error)
                    raise
                return self._recover(inputs, error)
            if self._direct:
                return results
            return [read(results, given) for read in self._outputs]

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def prepare(self, inputs: list[Any]) -> None:
        """Packs the static ones of `inputs` for calls with such; of the others nothing is read but their layout. Raises deplo's errors."""
        given = inputs if self._derived is None else [*inputs, *self._derived(inputs)]
        self.program.prepare([given[i] for i in self._arguments] + self._constants)

    def bare_program(self) -> Any:
        """The program, where it takes a call's inputs and gives its outputs as they are, and writes none; None where a call is more."""
        takes_all = not self._constants and self._arguments == list(range(self._inputs))
        is_bare = takes_all and self._direct and not self._writes and self._refusal is None and self._derived is None and not self._failed
        is_bare = is_bare and self._choose is None and self._switch is None
        return self.program if is_bare else None

    def _run_of_smaller(self, at: int) -> Callable[..., Any]:
        with self._lock:
            run = self._smaller[at]
            if run is None:
                assert self._compile is not None
                run = self._smaller[at] = self._compile(self.imported, self.imported.smaller[at]).run
            return run

    def _run_switched(self, state: tf32.State, at: int) -> Callable[..., Any]:
        """Of the graph, or of one of `imported.smaller`, where PyTorch allows `state`."""
        with self._lock:
            run = self._switched.get((state, at))
            if run is None:
                assert self._compile is not None
                imported = self.imported.with_tf32(state)
                run = self._switched[state, at] = self._compile(imported, imported.smaller[at] if at >= 0 else None).run
            return run

    def _recover(self, inputs: list[Any], error: Exception) -> Any:
        """What eager mode gives or raises, where it may stand in; else raises the error."""
        if isinstance(error, InternalError):
            return self._fall_back(inputs, error)
        if isinstance(error, UnsupportedError):  # of an input, before anything ran
            return self._pass_on(inputs, error)
        if isinstance(error, UserError):  # Dynamo guards the sizes of inputs, but not of the base that some share
            if not self._has_bases:
                raise error
            return self._pass_on(inputs, UnsupportedError(str(error)))
        raise self._in_eagers_words(inputs, error) from None

    def _pass_on(self, inputs: list[Any], error: UnsupportedError) -> Any:
        if self._strict:
            raise error
        warnings.warn(f"a call of the {self.kind} graph runs in eager mode, deplo does not take its inputs: {error}", FallbackWarning, stacklevel=4)
        return self.eager(inputs)

    def _in_eagers_words(self, inputs: list[Any], error: Exception) -> Exception:
        """What eager mode raises for these inputs, which names the index, its dimension and size, say; else `error`, which kernels keep short.

        On a device an error is of an earlier call, and eager mode's would leave the device unusable.
        """
        if self.imported.device >= 0:
            return error
        if self._writes:  # should eager mode find nothing wrong, it would write them once more
            inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        try:
            with torch.random.fork_rng(devices=[]):
                self.eager(inputs)
        except (IndexError, RuntimeError, ZeroDivisionError) as eagers:
            return eagers.with_traceback(None)
        return error

    def _give_up(self, error: InternalError) -> None:
        with self._lock:
            if not self._failed:
                self._failed = True
                warnings.warn(f"the {self.kind} graph runs in eager mode from now on, deplo has a bug there: {error}", FallbackWarning, stacklevel=5)

    def _fall_back(self, inputs: list[Any], error: InternalError) -> Any:
        if self._strict:
            raise error
        self._give_up(error)
        if self._writes:
            raise error  # some inputs may be written already: running the graph again could apply a mutation twice
        return self.eager(inputs)


def _switch(imported: Imported) -> Callable[[], tf32.State | None] | None:
    """What tells another state of the switches that the graph's text depends on than it was imported in; None where it is that one."""
    made = imported.precision
    matters = tf32.switches(imported.text) if made is not None else (False, False)
    if made is None or not any(matters):
        return None

    def changed() -> tf32.State | None:
        now = tf32.state()
        state = (now[0] if matters[0] else made[0], now[1] if matters[1] else made[1])
        return None if state == made else state

    return changed


def _reader(output: Output, symbols: dict[str, tuple[int, int | None]]) -> Callable[[list[Any], list[Any]], Any]:
    if output.kind == "constant":
        return lambda results, inputs: output.value
    if output.kind == "input":
        return lambda results, inputs: inputs[output.index]
    if output.kind == "result":
        return lambda results, inputs: results[output.index]
    return _view_reader(output, symbols)


def _values(exprs: list[Any], symbols: dict[str, tuple[int, int | None]]) -> Callable[[list[Any]], tuple[int, ...]]:
    """A function from a call's inputs to the values of `exprs`."""
    names = sorted({str(symbol.name) for expr in exprs for symbol in expr.free_symbols})
    return _at_inputs(sizes.evaluator(names, exprs), names, symbols)


def _at_inputs(
    evaluate: Callable[..., tuple[int, ...]], names: list[str], symbols: dict[str, tuple[int, int | None]]
) -> Callable[[list[Any]], tuple[int, ...]]:
    places = [symbols[name] for name in names]
    return lambda inputs: evaluate(*(inputs[at] if dim is None else inputs[at].shape[dim] for at, dim in places))


def _derived(imported: Imported) -> Callable[[list[Any]], tuple[int, ...]] | None:
    """A function from a call's inputs to the sizes that Python computes; none where there are none."""
    if not imported.derived:
        return None
    names = sorted({str(symbol.name) for name in imported.derived for symbol in sizes.sources(name)})
    return _at_inputs(sizes.derived(names, imported.derived), names, imported.symbols)


def _checker(imported: Imported) -> Callable[[list[Any]], str] | None:
    """A function that says why this program does not take a call's inputs, or nothing; none where there is nothing to check."""
    if not imported.offsets and not imported.nonnegative:
        return None
    values = _values([expr for _, expr in imported.offsets] + imported.nonnegative, imported.symbols)

    def check(inputs: list[Any]) -> str:
        found = values(inputs)
        for (position, _), offset in zip(imported.offsets, found, strict=False):
            start = inputs[position].storage_offset()
            if start != offset:
                return f"an input that views by strides read starts at {start} of its storage, not at {offset}"
        if any(value < 0 for value in found[len(imported.offsets) :]):
            return "a view by strides leaves the memory that its input shows"
        return ""

    return check


def _chooser(imported: Imported) -> Callable[[list[Any]], int] | None:
    """A function that says which of `imported.smaller` is for a call's inputs, -1 if none is; none where there are none."""
    if not imported.smaller:
        return None
    at, dim = imported.symbols[imported.split_size]
    bounds = [smaller.most for smaller in imported.smaller]

    def choose(inputs: list[Any]) -> int:
        size = inputs[at] if dim is None else inputs[at].shape[dim]
        found = bisect.bisect_left(bounds, size)
        return found if found < len(bounds) else -1

    return choose


def _view_reader(output: Output, symbols: dict[str, tuple[int, int | None]]) -> Callable[[list[Any], list[Any]], Any]:
    rank = len(output.layout[0])
    layout = _values(output.layout_exprs(), symbols)
    steps = None if output.steps is None else _replayer(output.steps, symbols)

    def read(results: list[Any], inputs: list[Any]) -> torch.Tensor:
        base: torch.Tensor = inputs[output.index] if output.of_input else results[output.index]
        if output.detached == "base":
            base = base.detach()
        if steps is not None and base.requires_grad:
            view = steps(base, inputs)
        else:
            values = layout(inputs)
            view = base.as_strided(values[:rank], values[rank : 2 * rank], base.storage_offset() + values[-1])
        return view.detach() if output.detached == "itself" else view

    return read


def _replayer(steps: list[ViewStep], symbols: dict[str, tuple[int, int | None]]) -> Callable[[torch.Tensor, list[Any]], torch.Tensor]:
    """A function that takes these views of a tensor as autograd would record them in eager mode, given a call's inputs."""
    leaves, tree = torch.utils._pytree.tree_flatten([(step.args, step.kwargs) for step in steps])
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, sympy.Expr)]
    values = _values([leaves[at] for at in places], symbols)

    def view_of(tensor: torch.Tensor, inputs: list[Any]) -> torch.Tensor:
        filled = list(leaves)
        for at, value in zip(places, values(inputs), strict=True):
            filled[at] = value
        # What AOTAutograd takes again from the graph's input is then this chain; without, it is one as_strided.
        with torch.autograd.grad_mode._force_original_view_tracking(True):
            for step, (args, kwargs) in zip(steps, torch.utils._pytree.tree_unflatten(filled, tree), strict=True):
                tensor = step.call(tensor, *args, **kwargs)
        return tensor

    return view_of


def synchronize() -> None:
    """Waits for everything that was started on the accelerator, and raises what compiled kernels have reported there: IndexError, RuntimeError.

    Calls on tensors of a GPU do not wait for their kernels. Without this, the next call of the same compiled graph raises what they report.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    core().check_kernel_errors()


def restore_weights() -> None:
    """Brings all weights back that `weights="own"` took out of memory; the next call of a program that uses one may let it go again.

    For what hands a weight's memory to the system itself (safetensors' `save_file`, `numpy.save`, sockets): system calls fail on memory that is gone,
    instead of bringing it back. Raises RuntimeError where memory is missing.
    """
    core().restore_weights()


def repack(model: torch.nn.Module) -> None:
    """Makes compiled code pack the parameters and buffers of `model` anew at its next call.

    Needed only after writes that PyTorch does not count: through `.data`, numpy or another library. Raises UserError for anything but a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"repack takes a torch.nn.Module, not {type(model).__name__}")
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_inference():  # those have no version, and what is made of them is not kept
            torch.autograd.graph.increment_version(tensor)
