"""What `python -m deplo env` prints: versions, CPU, topology, folders, options."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from typing import Any

import torch

from . import __version__
from .calibration import calibration
from .core import core
from .errors import UnsupportedError, UserError
from .options import KEYS, Options, read_options
from .targets import targets
from .terminal import quantity


def environment(anew: bool = False) -> Iterator[tuple[str, str]]:
    """Pairs of a name and its value. What the machine does at most is measured the first time, and `anew` on request."""
    options = read_options()
    yield "deplo", __version__
    yield "torch", torch.__version__
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    yield "torch threads", str(torch.get_num_threads())
    try:
        about = json.loads(core().env(options.to_json()))
    except UserError as error:
        yield "extension", str(error)
    else:
        for name, value in about.items():
            if name not in ("deplo", "cache_dir"):
                yield from _flat(name, value)
        yield from calibration(options, anew).rows()
        for target in targets():
            if target.device:
                yield target.device, _device(options.replace(target=target.name))
    yield "cache folder", options.cache_folder() or "none"
    for name, key in KEYS.items():
        if getattr(options, name) != key.default:
            yield f"option {name}", repr(getattr(options, name))


def _device(options: Options) -> str:
    try:
        return str(core().device(options.to_json()))
    except (UnsupportedError, RuntimeError) as error:
        return f"none: {error}"


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{name} {key}", item)
    else:
        text = quantity(value, "B") if name.endswith("_bytes") and isinstance(value, int) else value
        yield name.replace("_", " "), " ".join(map(str, text)) if isinstance(text, list) else str(text)
