"""The folder of compiled kernels, as the command line shows and empties it. The core alone reads and writes entries."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import warnings

from .errors import UserError
from .options import Options
from .targets import find_target

_ENTRY = re.compile(r"[0-9a-f]{64}\.o")
_MAGIC = b"deplo-kernel-"  # csrc/target/cpu/llvm/disk_cache.cpp writes both


def cache_folder(options: Options) -> str:
    """The folder that is used with these options. Raises UserError where the disk cache is switched off."""
    folder = options.cache_folder()
    if not folder:
        raise UserError("the disk cache is switched off (cache_dir is off)")
    return folder


def why_unusable(folder: str) -> str:
    """Why the core keeps nothing in `folder`, which it makes if need be; empty where it does (csrc/target/cpu/llvm/disk_cache.cpp)."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        about = os.stat(folder)
    except (FileExistsError, NotADirectoryError):
        return "it is no folder, or lies in a file"
    except OSError as error:
        return error.strerror or str(error)
    if about.st_uid != os.geteuid():
        return "it belongs to another user"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"


@functools.cache
def warn_if_unusable(folder: str) -> None:
    """One warning for a folder in which nothing can be kept."""
    if why := why_unusable(folder):
        warnings.warn(f"compiled kernels are not kept in {folder}: {why}", stacklevel=2)


def warn_of(options: Options) -> None:
    """The same for the folder that these options name, if their target keeps machine code."""
    if options.cache_dir not in ("", "off") and find_target(options.target).has_disk_cache:
        warn_if_unusable(options.cache_folder())


def entries(folder: str) -> list[tuple[str, int]]:
    """Paths and sizes in bytes of the entries; none if there is no such folder."""
    found = []
    try:
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as items:
            for item in items:
                if _ENTRY.fullmatch(item.name) and item.is_file(follow_symlinks=False) and _is_ours(item.path):
                    found.append((item.path, item.stat().st_size))
    except OSError as error:
        raise UserError(f"the cache folder {folder} cannot be read: {error.strerror}") from None
    return sorted(found)


def _is_ours(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


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
