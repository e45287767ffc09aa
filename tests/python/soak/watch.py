"""Memory and progress of a process: what the soak judges besides values."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import resource
import sys
import threading
import time

import torch

from deplo.core import core

_LIBC = ctypes.CDLL(None)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def settled_bytes() -> int:
    """Resident memory when everything that nobody needs has been given back."""
    torch._dynamo.reset()
    for _ in range(2):
        gc.collect()
    core().trim_memory()
    _LIBC.malloc_trim(0)
    return resident_bytes()


class Beats:
    """Who works on what, and since when. A thread that is at one thing for `patience` seconds ends the process with the stacks of all threads: by
    faulthandler's own thread, which needs no lock of Python's."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.doing: dict[str, str] = {}
        self._since: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Beats:
        self._arm()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def beat(self, who: str, what: str) -> None:
        """`who` begins with `what`; nothing: is done."""
        self.doing[who] = what
        self._since[who] = time.monotonic()

    def late(self) -> list[str]:
        """Who is at one thing for too long."""
        now = time.monotonic()
        return [who for who, since in list(self._since.items()) if self.doing.get(who) and now - since > self.patience]

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self.patience, exit=True)

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.patience / 4)):
            if late := self.late():
                for who in late:
                    print(f"HANG: {who} is at {self.doing[who]!r} for more than {self.patience:.0f} s", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                faulthandler.dump_traceback_later(1.0, exit=True)
                return
            self._arm()
