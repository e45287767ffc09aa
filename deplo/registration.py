"""The backend's name in PyTorch's registry, which several threads may ask for at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register_for_threads(name: str, backend: Callable[..., Any]) -> None:
    """Lets each thread that finds the name of an entry point missing register the backend that this gives.

    `lookup_backend` (torch/_dynamo/backends/registry.py) loads the entry point and registers what it gives, without a lock: the second of two threads
    would fail with "duplicate name". Both import deplo.backend, which calls this, before they look whether the name is taken.
    """
    from torch._dynamo.backends import registry

    class Functions(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            return super().__contains__(key) and (key != name or self[name] is not backend)

    known: Any = registry
    known._COMPILER_FNS = Functions({**known._COMPILER_FNS, name: backend})
