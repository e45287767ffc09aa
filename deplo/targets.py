"""The targets that the core has, as data: nothing else in Python knows what one is called, or what it can do."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import Any

from .core import core


@dataclasses.dataclass(frozen=True)
class Target:
    """What csrc/target/target.h says of one target."""

    name: str
    is_default: bool
    device: str  # what people call the device that kernels run on, "gpu"; empty: the processors of this process
    tensors: str  # type of the torch.device whose tensors programs take, besides the CPU's
    has_tf32: bool  # PyTorch's switches about tf32 speak of its tensors
    has_disk_cache: bool
    levels: Sequence[str]  # of the texts below Kernel IR, the lowest last
    packages: dict[str, Sequence[Sequence[str]]]  # its own options: packages with a file that stands for an empty value, and the file's place in them
    devices: Sequence[dict[str, Any]] = ()  # that it knows by name, whether or not one is at hand; deplo/machine_code.py reads their figures


def targets() -> list[Target]:
    """All of them, in the core's order. Raises UserError where the extension is missing."""
    return [Target(**about) for about in core().targets()]


def find_target(name: str) -> Target:
    """The target of this name, one of options that were checked; the default one for an empty name."""
    return next(target for target in targets() if (target.name == name if name else target.is_default))


def target_of_tensors(kind: str) -> Target | None:
    """The target whose programs take tensors on devices of this type (torch.device.type), without an option that names one; nothing if none does."""
    return next((target for target in targets() if target.tensors == kind), None)


def packaged(places: Iterable[Sequence[str]]) -> str:
    """The first of the files that are installed, each given by a package and a path in it; empty where none is."""
    for package, file in places:
        parent = package.rpartition(".")[0]
        spec = importlib.util.find_spec(package) if not parent or importlib.util.find_spec(parent) else None
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            path = os.path.join(folder, file)
            if os.path.exists(path):
                return path
    return ""
