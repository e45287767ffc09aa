"""What `python -m deplo env` prints: versions, CPU, topology, folders, options."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator

import torch

from . import __version__
from .core import core
from .errors import UserError
from .options import KEYS, read_options


def environment() -> Iterator[tuple[str, str]]:
    """Pairs of a name and its value."""
    options = read_options()
    yield "deplo", __version__
    yield "torch", torch.__version__
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    yield "torch threads", str(torch.get_num_threads())
    try:
        given = core().env()
    except UserError as error:
        yield "extension", str(error)
    else:
        for name, value in (json.loads(given) if isinstance(given, str) else given).items():
            yield str(name).replace("_", " "), ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    yield "cache folder", options.cache_folder() or "none"
    for name, key in KEYS.items():
        if getattr(options, name) != key.default:
            yield f"option {name}", repr(getattr(options, name))
