"""The folder of compiled kernels, as the command line shows and empties it. The core alone reads and writes entries."""

from __future__ import annotations

import contextlib
import os

from .errors import UserError
from .options import Options

SUFFIX = ".deplo"  # of every entry


def cache_folder(options: Options) -> str:
    """The folder that is used with these options. Raises UserError where the disk cache is switched off."""
    folder = options.cache_folder()
    if not folder:
        raise UserError("the disk cache is switched off (cache_dir is empty)")
    return folder


def entries(folder: str) -> list[tuple[str, int]]:
    """Paths and sizes in bytes of the entries; none if there is no such folder."""
    found = []
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(SUFFIX):
                path = os.path.join(parent, name)
                with contextlib.suppress(OSError):
                    found.append((path, os.stat(path).st_size))
    return sorted(found)


def clear(folder: str) -> int:
    """Removes the entries, and nothing else that may be in the folder; how many."""
    removed = 0
    for path, _ in entries(folder):
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        removed += 1
    return removed
