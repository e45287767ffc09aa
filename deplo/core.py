"""The compiled core, `deplo._C`, imported on first use."""

from __future__ import annotations

import functools
from typing import Any

from .errors import UserError


@functools.cache
def core() -> Any:
    """The extension module. Raises UserError with the remedy where it is missing or was built for another torch."""
    import torch  # before the extension, which links against libraries that torch loads

    try:
        from . import _C
    except ImportError as error:
        raise UserError(
            f"deplo's extension cannot be loaded ({error}). Build it with `make` in the source tree or `pip install .`, "
            f"against this torch ({torch.__version__})"
        ) from error
    return _C
