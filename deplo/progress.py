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


class Bar:
    """`deplo: preparing [====    ] 3 of 8: what` on stderr, where that is a terminal; a context that clears it at its end."""

    _WIDTH = 24

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps, self.begun = title, steps, 0

    def __enter__(self) -> Bar:
        return self

    def step(self, what: str) -> None:
        """Begins the next step, and says what it is."""
        self.begun += 1
        self.show(what)

    def show(self, what: str) -> None:
        """Says more of the step that was begun last."""
        if not sys.stderr.isatty():
            return
        full = self._WIDTH * (self.begun - 1) // max(self.steps, 1)
        sys.stderr.write(f"\r\x1b[Kdeplo: {self.title} [{'=' * full}{' ' * (self._WIDTH - full)}] {self.begun} of {self.steps}: {what}")
        sys.stderr.flush()

    def __exit__(self, *error: object) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
