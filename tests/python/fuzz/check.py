"""Whether deplo runs a random program as eager mode does."""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from functorch.compile import make_boxed_func
from opinfo.judge import complaint, described
from opinfo.units import Noise, copied, laid_out, laid_out_as_traced, moved
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from deplo.backend import Compilation, collect_records, compile_with
from deplo.decompositions import decompositions
from deplo.errors import FallbackWarning
from deplo.options import Options, read_options
from fuzz.programs import Program, overlaps_nothing

Function = Callable[..., list[torch.Tensor]]
Given = torch.Tensor | int

REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)  # what PyTorch raises for a program that it does not take


class Wrong(AssertionError):
    """deplo and eager mode differ, or deplo fails."""


def compiled(program: Program, engine: str, options: Options) -> Function:
    """The program by deplo, or by PyTorch's trace of it run op by op (`traced`: with the strides that the trace promises)."""
    if program.dynamic:
        torch._dynamo.reset()
        backend: Any = (lambda gm, inputs: compile_with(options, gm, inputs)) if engine == "deplo" else "aot_eager"
        made: Function = torch.compile(program.function(), backend=backend, dynamic=True)
        return made
    compilation = Compilation(options, [])
    by: dict[str, Any] = {"fw_compiler": compilation.forward, "bw_compiler": compilation.backward, "inference_compiler": compilation.inference}
    if engine == "aot_eager":
        by = {name: lambda gm, _: make_boxed_func(gm.forward) for name in by}
    if engine == "traced":
        by = {name: lambda gm, _: make_boxed_func(laid_out_as_traced(gm)) for name in by}
    return aot_function(
        program.function(),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
        **by,
    )


def inputs_of(program: Program, sizes: dict[str, int], turn: int = 0) -> list[Given]:
    """The program's inputs, tensors before numbers; floats are moved by a few ulp for each `turn` after 0."""
    made = [given.make(sizes, k + 1) for k, given in enumerate(program.inputs)]
    generator = torch.Generator().manual_seed(turn)
    return [*([moved(t, generator) for t in made] if turn else made), *[sizes[name] for name in program.numbers]]


class TwoPassVariance(TorchDispatchMode):
    """Variances of float64 within some ulp: eager mode's running ones (WelfordOps of SharedReduceOps.h) err by hundreds, in any order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else ""
        if name not in ("var", "std", "var_mean", "std_mean") or func._overloadname != "correction" or args[0].dtype != torch.float64:
            return func(*args, **(kwargs or {}))
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        x, keep = given["self"], given.get("keepdim", False)
        dims = [d % max(1, x.dim()) for d in given.get("dim") or range(x.dim())]
        count = math.prod(x.shape[d] for d in dims) if x.dim() else 1
        correction = given.get("correction")
        mean = x.mean(dims, keepdim=True)
        mean = mean + (x - mean).mean(dims, keepdim=True)
        from_mean = x - mean
        rest = from_mean.sum(dims, keepdim=True)
        squares = (from_mean * from_mean).sum(dims, keepdim=True) - rest * rest / count
        variance = squares / max(0, count - (1 if correction is None else correction))
        value = variance.sqrt() if name.startswith("std") else variance
        if not keep and x.dim():
            value, mean = (t.squeeze(dims) for t in (value, mean))
        return (value, mean) if name.endswith("_mean") else value


def run_in(floats: torch.dtype, program: Program, sizes: dict[str, int], turn: int = 0) -> list[torch.Tensor] | None:
    """run() with one float dtype in place of all; None where PyTorch refuses that."""
    # Laid out as they are: whether `reshape` is a view, which a later write shows through, depends on it.
    inputs = [laid_out(t, lambda memory: memory.to(floats)) if is_float(t) else t for t in inputs_of(program, sizes, turn)]
    torch.set_default_dtype(floats)
    try:
        with TwoPassVariance() if floats == torch.float64 else contextlib.nullcontext():
            return run(program.function(floats, steady=turn > 0), inputs, program.backward)
    except REFUSALS:
        return None
    finally:
        torch.set_default_dtype(torch.float32)


def is_float(t: Given) -> TypeGuard[torch.Tensor]:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def run(fn: Function, inputs: Sequence[Given], backward: bool) -> list[torch.Tensor]:
    """Results, then the tensors among the inputs as they are left; or results, then gradients along fixed directions."""
    tensors = [copied(t) for t in inputs if isinstance(t, torch.Tensor)]
    numbers = [t for t in inputs if not isinstance(t, torch.Tensor)]
    if not backward:
        with torch.no_grad():
            return [*fn(*tensors, *numbers), *tensors]
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
    outputs = fn(*tensors, *numbers)
    differentiable = [t for t in outputs if t.requires_grad]
    grads: Sequence[torch.Tensor | None] = []
    if differentiable:
        generator = torch.Generator().manual_seed(1)
        along = [torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.dtype) for t in differentiable]
        grads = torch.autograd.grad(differentiable, [t for t in tensors if t.requires_grad], along, allow_unused=True)
    return [*[t.detach() for t in outputs], *[g for g in grads if g is not None]]


@contextlib.contextmanager
def bugs_raise() -> Iterator[None]:
    """A graph that runs in eager mode because of a bug in deplo is a failure."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, FallbackWarning) and "deplo has a bug there" in str(warning.message):
            raise Wrong(str(warning.message))


def check(program: Program, options: Options | None = None) -> None:
    """Raises Wrong where deplo and eager mode differ by more than rounding."""
    options = options or read_options()
    all_sizes = (program.sizes, *(program.other_sizes if program.dynamic else ()))
    expected = []
    for sizes in all_sizes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected.append((sizes, run(program.function(), inputs_of(program, sizes), program.backward)))
            except REFUSALS:
                if sizes is program.sizes:
                    return
    with collect_records() as records, bugs_raise():
        try:
            fn = compiled(program, "deplo", options)
            answers = [run(fn, inputs_of(program, sizes), program.backward) for sizes, _ in expected]
            again = run(fn, inputs_of(program, program.sizes), program.backward)
        except Exception as error:
            if _refused_by_pytorch(program, options):
                return
            raise Wrong(f"{type(error).__name__}: {error}{_ir(records)}") from error
    for (sizes, want), got in zip([*expected, expected[0]], [*answers, again], strict=True):
        text = difference(program, sizes, got, want)
        if text and not _witness_agrees(program, sizes, got, want, options):
            raise Wrong(f"sizes {sizes}: {text}{_ir(records)}")


def difference(program: Program, sizes: dict[str, int], got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> str:
    """What is wrong with `got`, or nothing."""
    if len(got) != len(want):
        return f"{len(got)} tensors where eager mode gives {len(want)}"
    exact = list(program.exact) + ([False] * len(want) if program.backward else list(program.exact_inputs))
    if sizes is not program.sizes:
        exact = [e and not w.is_floating_point() for e, w in zip(exact, want, strict=False)]  # sums of more terms may round
    judged: list[list[torch.Tensor] | None] = []

    for k, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        gradient = program.backward and k >= len(program.outputs)  # as long as the values are right, PyTorch takes any strides
        mine = _laid_out_alike(mine, theirs, gradient)
        if k < len(exact) and exact[k] and described(mine) == described(theirs):
            if not torch.equal(mine, theirs):
                bad = (mine != theirs).nonzero()
                at = tuple(bad[0].tolist())
                return f"result {k}: {len(bad)} of {mine.numel()} exact values differ, the first at {at}: {mine[at]} for {theirs[at]}"
            continue
        judged = judged or [run_in(torch.float64, program, sizes)]
        wide = judged[0]

        def nearby(k: int = k, wide: list[torch.Tensor] | None = wide) -> list[tuple[torch.Tensor, torch.Tensor]]:
            pairs = []
            for turn in range(1, 4):
                # Where eager mode is its own judge (float64, and what float64 refuses), its rounding errors are made larger.
                with Noise(turn) if want[k].dtype == torch.float64 or wide is None else contextlib.nullcontext():
                    eager = run(program.function(steady=True), inputs_of(program, sizes, turn), program.backward)[k]
                wide_there = run_in(torch.float64, program, sizes, turn) if wide is not None else None
                pairs.append((eager, wide_there[k] if wide_there is not None else eager))
            return pairs

        if text := complaint(mine.detach(), theirs.detach(), wide[k].detach() if wide is not None else None, False, nearby):
            return f"result {k}: {text}"
    return ""


def _laid_out_alike(t: torch.Tensor, other: torch.Tensor, any_strides: bool) -> torch.Tensor:
    """t with the other's strides where they say nothing (in axes of one element, and in tensors without elements) or any will do."""
    if t.shape != other.shape:
        return t
    if not t.numel() or all(a == b or n == 1 for a, b, n in zip(t.stride(), other.stride(), t.shape, strict=True)):
        return t.as_strided(other.shape, other.stride())
    return torch.empty_strided(other.shape, other.stride(), dtype=t.dtype).copy_(t) if any_strides and overlaps_nothing(other) else t


def _refused_by_pytorch(program: Program, options: Options) -> bool:
    try:
        run(compiled(program, "aot_eager", options), inputs_of(program, program.sizes), program.backward)
    except Exception:  # noqa: BLE001 (whatever it raises, deplo had no part in it)
        return True
    return False


def _witness_agrees(program: Program, sizes: dict[str, int], got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], options: Options) -> bool:
    """True if PyTorch's own trace, run op by op, differs from eager mode as well, and equals `got`."""
    for engine in ("traced", "aot_eager"):
        try:
            witness = run(compiled(program, engine, options), inputs_of(program, sizes), program.backward)
        except Exception:  # noqa: BLE001
            return False
        if difference(program, sizes, witness, want) and not difference(program, sizes, got, witness):
            return True
    return False


def _ir(records: Sequence[Any]) -> str:
    return "\n" + "".join(record.torch_ir for record in records)


def write_failure(folder: str, program: Any, error: Exception) -> Path:
    """Files about one failure: the program and what is wrong as .txt, its IR as .ir for `python -m deplo compile`."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(repr(program).encode()).hexdigest()[:12]
    message, _, torch_ir = str(error).partition("\ntorch @")
    (place / f"{name}.txt").write_text(f"{program!r}\n{message}\n")
    texts = [f"torch @{text}\n" for text in torch_ir.split("\ntorch @")] if torch_ir else [getattr(error, "text", "")]
    for number, text in enumerate(filter(None, texts)):
        (place / f"{name}_{number}.ir").write_text(text)
    return place / f"{name}.txt"
