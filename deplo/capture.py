"""Torch IR of a function or module without compiling it: for the command line, `deplo.explain` and tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .backend import Compilation, Record, collect_records, compile_with
from .errors import FallbackWarning
from .graph_code import EagerGraph
from .options import Options, read_options


class _CaptureOnly(Compilation):
    def _program(self, record: Record, gm: torch.fx.GraphModule, static: set[str] | None) -> Callable[..., Any]:
        self._import(record, gm, static)
        return EagerGraph(gm)


def capture(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    dynamic: bool | None = None,
    backward: bool = False,
    options: Options | None = None,
    parts: bool = False,
) -> list[Record]:
    """The graphs that `fn(*inputs)` gives, as records with their Torch IR; `backward` also differentiates the sum of the outputs.

    The graphs run in eager mode. Raises UnsupportedError where a graph cannot be imported; with `parts`, and without the option strict, such a
    graph gives records of the parts that can be, and what the other calls' reasons are.
    """
    checked = options or read_options()
    checked = checked.replace(strict=checked.strict or not parts)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_with(checked, gm, example_inputs, _CaptureOnly)

    torch._dynamo.reset()
    with collect_records() as records, unwrapped_errors(), warnings.catch_warnings():
        if parts:  # the records say it
            warnings.simplefilter("ignore", FallbackWarning)
        result = torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
        if backward:
            sum_of(result).backward()  # type: ignore[no-untyped-call]
    torch._dynamo.reset()
    return records


class unwrapped_errors:
    """Raises deplo's own error in place of Dynamo's BackendCompilerFailed around it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from .errors import Error

        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, Error):
            raise inner from None


def sum_of(value: Any) -> torch.Tensor:
    """The sum of all differentiable tensors in a structure of outputs."""
    leaves = torch.utils._pytree.tree_leaves(value)
    parts = [leaf.float().sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack(parts).sum() if parts else torch.zeros((), requires_grad=True)
