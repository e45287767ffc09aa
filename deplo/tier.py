"""Graphs that compile in the background (options={"tier": "background"}): calls run op by op until the program is there. And searches there.

One thread of the process compiles one graph after the other, inside the core without Python's lock. It packs the model's weights before calls go to
the program, so that the first of these waits for nothing. When nothing is left to compile, it searches schedules of programs (deplo/finetune.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import Error, FallbackWarning
from .executable import Executable
from .finetune import Finetuned, Stopped

_Call = Callable[[list[Any]], Any]
_Linked = tuple[Executable | _Call, str]
_NICE = 5  # of the thread that compiles, and of those that it starts: calls come first


class Tiered:
    """A graph as AOTAutograd calls it: in eager mode at first, by its program from when that is there."""

    def __init__(self, kind: str, link: Callable[[], _Linked], eager: _Call, strict: bool, static: Sequence[bool] | None) -> None:
        """`link` gives the call and the text of a warning, or raises. `static` says which inputs keep their storage; without it nothing is packed."""
        self.kind = kind
        self.executable: Executable | None = None
        self.error: BaseException | None = None
        self.told = False  # a call raised the error
        self.eager_calls = 0  # so far, before the program was there
        self._link: Callable[[], _Linked] | None = link
        self._eager = eager
        self._strict = strict
        self._static = static
        self._example: list[Any] | None = None
        self._warning = ""
        self._call: _Call | None = None
        self._boxed_call = True

    def __call__(self, args: list[Any]) -> Any:
        call = self._call
        return self._before(args) if call is None else call(args)

    @property
    def state(self) -> str:
        """`compiling`, `compiled` or `failed`."""
        return "failed" if self.error is not None else "compiling" if self._link is not None else "compiled"

    def describe(self) -> str:
        """The state, for people."""
        if self._warning or (self.executable is None and self.state == "compiled"):
            return "failed to compile in the background"
        calls = f"{self.eager_calls} call{'' if self.eager_calls == 1 else 's'}"
        if self.state == "compiled":
            return f"compiled in the background, after {calls} in eager mode"
        return f"{'compiling' if self.state == 'compiling' else 'failed to compile'} in the background, {calls} in eager mode so far"

    def _before(self, args: list[Any]) -> Any:
        self.tell()
        with _worker.changed:
            call = self._call
            if call is None:
                call = self._eager
                self.eager_calls += 1
                if self._example is None and self._static is not None and self._link is not None:
                    self._example = _example_of(args, self._static)
                _worker.ensure()  # which a forked child does not have
        return call(args)

    def tell(self) -> None:
        """What came of the compilation and nobody was told: raises its error, or warns as if it had been compiled at once."""
        if self.error is not None:
            self.told = True
            raise self.error.with_traceback(None)
        with _worker.changed:
            warning, self._warning = self._warning, ""
            if warning:
                self._call = self._eager
        if warning:
            warnings.warn(warning, FallbackWarning, stacklevel=4)

    def compile(self) -> None:
        """In the thread that compiles."""
        link = self._link
        assert link is not None
        call: Executable | _Call | None = None
        warning, error = "", None
        try:
            call, warning = link()
            if isinstance(call, Executable):
                self._pack(call)
        except Exception as raised:  # the caller's thread raises it
            error = raised
        with _worker.changed:
            self._link = self._example = None
            self._warning, self.error = warning, error
            if isinstance(call, Executable):
                self.executable = call
                call = call.boxed()
            self._eager = call or self._eager
            if not warning:  # else the next call, which goes through _before, tells it
                self._call = call

    def _pack(self, executable: Executable) -> None:
        with _worker.changed:
            example, self._example = self._example, None
        if example is not None:
            with contextlib.suppress(Error, RuntimeError):  # the call raises it, too, if it still holds then
                executable.prepare(example)


def _example_of(args: Sequence[Any], static: Sequence[bool]) -> list[Any] | None:
    """Inputs to pack by: those that stay, and memory of the same layout, never touched, in place of the others. None: some have no such layout."""
    example: list[Any] = []
    with torch.no_grad():
        for value, stays in zip(args, static, strict=True):
            if not isinstance(value, torch.Tensor):
                example.append(value)
            elif type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.device.type != "cpu":
                return None
            elif stays:
                example.append(value.detach())  # its storage stays, whatever becomes of `value.data`
            else:
                example.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype))
    return example


class _Worker:
    """The thread that compiles. It ends when there is nothing to do, and before the next graph when the interpreter ends."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())  # guards the members below and the states of graphs
        self.compiling = threading.RLock()  # held while a graph compiles: a fork in the middle would leave the core's locks taken
        self._queue: deque[weakref.ref[Tiered]] = deque()
        self._searches: deque[Finetuned] = deque()
        self._known: weakref.WeakSet[Tiered] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._current: weakref.ref[Tiered] | Finetuned | None = None

    def add_search(self, search: Finetuned) -> None:
        with self.changed:
            self._searches.append(search)
            self.ensure()

    def add(self, graph: Tiered) -> None:
        with self.changed:
            self._queue.append(weakref.ref(graph))
            self._known.add(graph)
            self.ensure()

    def ensure(self) -> None:
        """Starts the thread if there is something to do."""
        if not (self._queue or self._searches) or self._thread is not None:
            return
        with self.changed:
            if self._thread is None and (self._queue or self._searches):
                thread = threading.Thread(target=self._run, name="deplo-compile")
                thread.daemon = False  # whoever ends the interpreter waits for the graph that is compiling: the core cannot stop in the middle
                self._thread = thread
                try:
                    thread.start()
                except RuntimeError:  # the interpreter ends: there is nobody to compile for
                    self._thread = None

    def _is_busy(self, searches: bool) -> bool:
        if any(reference() is not None for reference in self._queue):
            return True
        if searches:
            return self._current is not None or any(search.is_needed() for search in self._searches)
        return isinstance(self._current, weakref.ref)

    def wait(self, timeout: float | None, searches: bool = False) -> bool:
        """`searches`: also until these have ended."""
        until = None if timeout is None else time.monotonic() + timeout
        self.ensure()
        with self.changed:
            while self._is_busy(searches):
                left = None if until is None else until - time.monotonic()
                if (left is not None and left <= 0) or self._thread is None:
                    return False
                self.changed.wait(left)
        return True

    def untold(self) -> list[Tiered]:
        with self.changed:
            return [graph for graph in self._known if not graph.told]

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
        while (graph := self._next()) is not None:
            try:
                with self.compiling:
                    if isinstance(graph, Tiered):
                        graph.compile()
                    elif not graph.compile(self._pause) and graph.is_needed():
                        with self.changed:
                            self._searches.appendleft(graph)
            finally:
                del graph
                with self.changed:
                    self._current = None
                    self.changed.notify_all()

    def _pause(self, seconds: float) -> None:
        """In a search: forks may happen, and what is more urgent ends it."""
        self.compiling.release()
        try:
            with self.changed:
                self.changed.wait_for(self._is_urgent, seconds)
        finally:
            self.compiling.acquire()
        if self._is_urgent():
            raise Stopped

    def _is_urgent(self) -> bool:
        return bool(self._queue) or not threading.main_thread().is_alive()

    def _next(self) -> Tiered | Finetuned | None:
        with self.changed:
            while self._queue and threading.main_thread().is_alive():
                self._current = self._queue.popleft()
                if (graph := self._current()) is not None:  # else nobody can call it any more, as after torch._dynamo.reset()
                    return graph
            while self._searches and threading.main_thread().is_alive():
                self._current = self._searches.popleft()
                if self._current.is_needed():
                    return self._current
            self._current = None
            self._thread = None
            self.changed.notify_all()
            return None

    def before_fork(self) -> None:
        self.compiling.acquire()
        self.changed.acquire()

    def after_fork(self) -> None:
        self.changed.release()
        self.compiling.release()

    def in_child(self) -> None:
        """Other threads of the parent may have waited for its locks; its worker had not begun with the graph that it took last, or had ended it."""
        self.changed = threading.Condition(threading.RLock())
        self.compiling = threading.RLock()
        last = self._current() if isinstance(self._current, weakref.ref) else self._current
        if last is not None and last.state == "compiling":
            if isinstance(last, Tiered):
                self._queue.appendleft(weakref.ref(last))
            else:
                self._searches.appendleft(last)
        self._thread = self._current = None


_worker = _Worker()
os.register_at_fork(before=_worker.before_fork, after_in_parent=_worker.after_fork, after_in_child=_worker.in_child)


def in_background(graph: Tiered) -> Tiered:
    """Has the graph compiled when those before it are."""
    _worker.add(graph)
    return graph


def search_in_background(search: Finetuned) -> None:
    """Has schedules searched when nothing is left to compile."""
    _worker.add_search(search)


def wait_tuned(timeout: float | None = None) -> bool:
    """Waits until the searches of options={"tune": "background"} have ended, for the programs of calls so far, and these run what was found.

    False if `timeout` seconds pass before (0: does not wait).
    """
    return _worker.wait(timeout, searches=True)


def wait_compiled(timeout: float | None = None) -> bool:
    """Waits until the graphs of options={"tier": "background"} that calls so far gave are compiled and their weights packed.

    False if `timeout` seconds pass before (0: does not wait). Raises and warns for compilations that failed, as the next call of each would:
    FallbackWarning, and with the option strict UnsupportedError or InternalError.
    """
    if not _worker.wait(timeout):
        return False
    for graph in _worker.untold():
        graph.tell()
    return True


def settle() -> None:
    """Waits for all compilations and searches, and leaves it to calls to tell of those that failed."""
    _worker.wait(None, searches=True)
