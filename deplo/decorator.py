"""`deplo.jit`: a function or module compiled by deplo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from .errors import UserError
from .options import KEYS, read_options

_T = TypeVar("_T", bound=Callable[..., Any])


@overload
def jit(
    fn: _T,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    guards: str = "dynamo",
) -> _T: ...


@overload
def jit(
    fn: None = None,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    guards: str = "dynamo",
) -> Callable[[_T], _T]: ...


def jit(
    fn: Any = None,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    guards: str = "dynamo",
) -> Any:
    """Compiles a function or a module, as a call or a decorator, with or without arguments.

    The arguments are those of torch.compile: `dynamic=True` makes all sizes symbolic from the first call, `fullgraph=True` makes a
    graph break an error. With `guards="inputs"` calls go to the compiled graph by what their arguments are, without Dynamo (docs/calls.md says what
    is then not checked, and call_report how calls went). Raises UserError for unknown options, bad values and what cannot be called at once;
    torch.compile does so at the first call.
    """
    if guards not in ("dynamo", "inputs"):
        raise UserError(f"guards is {guards!r}, expected 'dynamo' or 'inputs'")
    checked = read_options(mode, options)
    if fn is None:
        return lambda decorated: jit(decorated, mode=mode, options=options, dynamic=dynamic, fullgraph=fullgraph, guards=guards)
    if not callable(fn):
        raise UserError(f"deplo.jit takes a function or a torch.nn.Module, not {type(fn).__name__}")
    import torch

    from .backend import check_options, deplo

    check_options(checked)
    if guards == "inputs":
        from .dispatch import dispatched

        def compile(fn: Any, backend: Any, fullgraph: bool, more: Any) -> Any:
            return torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph, options=more or None)

        return dispatched(fn, compile, read_options(mode, options), fullgraph)
    chosen: Any = {"options": dict(options)} if options else {}
    if mode is not None and options:
        # torch.compile takes one of the two; the mode's options are defaults for the others.
        base = read_options(mode)
        chosen["options"] = {**({"tune": base.tune} if base.tune != KEYS["tune"].default else {}), **options}
    elif mode is not None:
        chosen["mode"] = mode
    return torch.compile(fn, backend=deplo, dynamic=dynamic, fullgraph=fullgraph, **chosen)
