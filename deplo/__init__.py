"""deplo: a compiler behind `torch.compile(model, backend="deplo")` that generates all of its code.

`deplo.jit` compiles a function or module, `deplo.explain(model, *inputs)` shows what became of it, `deplo.export` writes a compiled model into a file
that `deplo.load` runs. Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import deplo as deplo
    from .decorator import jit as jit
    from .dispatch import CallReport as CallReport
    from .dispatch import call_report as call_report
    from .errors import Error as Error
    from .errors import FallbackWarning as FallbackWarning
    from .errors import InternalError as InternalError
    from .errors import UnsupportedError as UnsupportedError
    from .errors import UserError as UserError
    from .executable import repack as repack
    from .executable import restore_weights as restore_weights
    from .executable import synchronize as synchronize
    from .explanation import Explanation as Explanation
    from .explanation import explain as explain
    from .options import Options as Options
    from .options import read_options as read_options
    from .packages import Model as Model
    from .packages import load as load
    from .packaging import export as export
    from .preparing import prepare as prepare
    from .tier import wait_compiled as wait_compiled
    from .tier import wait_tuned as wait_tuned

__version__ = "0.1.0"

_HOME = {
    "deplo": "backend",
    "jit": "decorator",
    "call_report": "dispatch",
    "CallReport": "dispatch",
    "explain": "explanation",
    "repack": "executable",
    "restore_weights": "executable",
    "synchronize": "executable",
    "export": "packaging",
    "load": "packages",
    "prepare": "preparing",
    "Model": "packages",
    "wait_compiled": "tier",
    "wait_tuned": "tier",
    "Explanation": "explanation",
    "Options": "options",
    "read_options": "options",
    "Error": "errors",
    "UserError": "errors",
    "UnsupportedError": "errors",
    "InternalError": "errors",
    "FallbackWarning": "errors",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "topology":
        return importlib.import_module(".topology", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'deplo' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
