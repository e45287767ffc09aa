"""A progress line on a terminal for compilations that take over a second."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def progress(what: str, after: float = 1.0) -> Iterator[None]:
    """Shows `deplo: <what> ... 3 s` on stderr from `after` seconds on; nothing when stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        start = time.monotonic()
        shown = False
        while not done.wait(after if not shown else 0.5):
            shown = True
            sys.stderr.write(f"\rdeplo: {what} ... {time.monotonic() - start:.0f} s")
            sys.stderr.flush()
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    thread = threading.Thread(target=show, name="deplo-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Line:
    """One line on stderr with a bar that says how far something has come; nothing when stderr is not a terminal."""

    _WIDTH = 20

    def __init__(self) -> None:
        self._shown = False

    def show(self, what: str, done: int, count: int, more: str) -> None:
        if not sys.stderr.isatty():
            return
        full = self._WIDTH * done // max(1, count)
        self._shown = True
        sys.stderr.write(f"\r\x1b[Kdeplo: [{'#' * full}{'.' * (self._WIDTH - full)}] {done + 1} of {count}: {what} ({more})")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._shown = False


class Bar:
    """`deplo: preparing [====    ] 3/8 what` on stderr, where that is a terminal; a context that clears it at its end."""

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps, self.done = title, steps, 0

    def __enter__(self) -> Bar:
        return self

    def step(self, what: str) -> None:
        """Says what is done next; each call but the first counts one step as done."""
        if sys.stderr.isatty():
            full = 24 * self.done // max(self.steps, 1)
            sys.stderr.write(f"\r\x1b[Kdeplo: {self.title} [{'=' * full}{' ' * (24 - full)}] {self.done}/{self.steps} {what}")
            sys.stderr.flush()
        self.done += 1

    def __exit__(self, *error: object) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
