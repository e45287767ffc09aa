"""The compiled core, `deplo._C`, imported on first use."""

from __future__ import annotations

import functools
from typing import Any

from .errors import UserError
from .options import KEYS, OF_GRAPHS, OF_PYTHON

# Goes up with every change of the bindings or of Torch IR; csrc/bindings/CMakeLists.txt reads it.
INTERFACE = 12


def check_interface(module: Any) -> None:
    """Raises UserError for an extension that was built from other sources than these files."""
    names = sorted({*KEYS, *OF_GRAPHS} - set(OF_PYTHON))
    if not hasattr(module, "interface") or module.interface() != f"{INTERFACE} {', '.join(names)}":
        where = getattr(module, "__file__", "deplo._C")
        raise UserError(f"{where} was built from other sources than deplo's Python files; rebuild it: make build (or pip install .)")


@functools.cache
def core() -> Any:
    """The extension module. Raises UserError with the remedy where it is missing, or was built for another torch or from other sources."""
    import torch  # before the extension, which links against libraries that torch loads

    try:
        from . import _C
    except ImportError as error:
        raise UserError(
            f"deplo's extension cannot be loaded ({error}). Build it with `make` in the source tree or `pip install .`, "
            f"against this torch ({torch.__version__})"
        ) from error
    check_interface(_C)
    return _C
