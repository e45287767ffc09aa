"""Machine code of kernels in what torch.compiler.save_cache_artifacts collects and load_cache_artifacts restores.

PyTorch reads such bytes only if each type of artifact in them is registered. `register` is therefore an entry point of the group `torch.backends`,
which `import torch` calls: a process that has yet to import deplo can load them.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Mapping
from typing import Any

KIND = "deplo_kernels"


@functools.cache
def _artifact_class() -> Any:
    from torch.compiler._cache import CacheArtifact, CacheArtifactFactory

    class KernelArtifact(CacheArtifact):
        """One kernel; the key says for which code, and for which features of a CPU."""

        def populate_cache(self) -> None:
            from .core import core
            from .errors import Error
            from .options import read_options

            with contextlib.suppress(Error, zlib.error):  # no extension, bad variables: whoever compiles is told
                image = zlib.decompress(self.content)
                core().offer_kernel(image)
                if folder := read_options().cache_folder():
                    core().keep_kernel(image, folder)

        @staticmethod
        def encode(content: Any) -> bytes:
            return zlib.compress(content, 1)  # PyTorch keeps it until the process ends

        @staticmethod
        def type() -> str:
            return KIND

    known: Any = CacheArtifactFactory
    return known._artifact_types.get(KIND) or known.register(KernelArtifact)


def register() -> None:
    """Makes PyTorch know this type of artifact, and pins a process of torchrun (DEPLO_PIN). Never raises: `import torch` would fail with it."""
    with contextlib.suppress(ImportError, AttributeError):
        _artifact_class()
    from .options import pin_phase

    if phase := pin_phase():
        from .topology import pin_by_environment

        pin_by_environment(phase)


def record(images: Mapping[str, bytes]) -> None:
    """Adds kernels, by key, to what save_cache_artifacts collects."""
    from torch.compiler._cache import CacheArtifactManager

    _artifact_class()
    for key, image in images.items():
        CacheArtifactManager.record_artifact(KIND, key, image)
