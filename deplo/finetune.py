"""Schedules that are searched while a program already serves calls (options={"tune": "background"}).

The graph is compiled at once, by heuristics or what earlier searches found. The thread of deplo/tier.py then searches schedules of its kernels, one
short race after the other, compiles the graph once more where something is faster, packs its weights, and has the program adopt the result: all who
call the program run that from their next call on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from . import tune
from .errors import Error
from .imported import Imported
from .options import Options

_log = logging.getLogger(__name__)
_MOST_PAUSE = 0.5  # seconds between two races, which else are as long as the race was: calls have the processors at least half of the time


class Stopped(KeyboardInterrupt):
    """The search ends early, and goes on later or in another process: there is something more urgent, or nobody calls the program any more."""


class Polite:
    """A runner that pauses before each race, as long as the last one was. Once it is told to stop, what is measured at last is not held up."""

    def __init__(self, runner: tune.Runner, pause: Callable[[float], None]) -> None:
        self._runner = runner
        self._pause = pause
        self._last = 0.0
        self._stops = False

    def _wait(self, seconds: float) -> None:
        if self._stops:
            return
        try:
            self._pause(seconds)
        except Stopped:
            self._stops = True
            raise

    def make(self, schedules: Sequence[str]) -> list[Any]:
        self._wait(0.0)
        return self._runner.make(schedules)

    def race(self, programs: Sequence[Any], patient: bool = False) -> list[float]:
        self._wait(min(self._last, _MOST_PAUSE))
        start = time.monotonic()
        times = self._runner.race(programs, patient)
        self._last = time.monotonic() - start
        return times


class Finetuned:
    """The search for one program, as the thread of deplo/tier.py works on it."""

    def __init__(self, program: Any, imported: Imported, options: Options, recompile: Callable[[], Any]) -> None:
        """`recompile` compiles the graph again, by all that is known then."""
        self._program = weakref.ref(program)
        self._imported = imported
        self._options = options
        self._recompile = recompile
        self.state = "compiling"
        self.searched = 0  # kernels
        self.improved = 0  # of these, that are faster now
        if not imported.training:
            program.want_example()

    def describe(self) -> str:
        """How far it is, for people."""
        if self.state == "compiling":
            return "schedules are searched in the background"
        return f"schedules of {self.searched} kernels searched in the background, {self.improved} of them faster since"

    def compile(self, pause: Callable[[float], None]) -> bool:
        """In the thread that searches; whether it is done. `pause` lets others have the processors for so many seconds, and raises Stopped."""
        try:
            self._search(pause)
        except Stopped:
            return False
        except Exception as error:  # the program works as it is
            _log.warning("a search for schedules ended: %s", error)
        self.state = "compiled"
        if (program := self._program()) is not None:
            program.take_example()  # which nobody needs any more
        return True

    def _search(self, pause: Callable[[float], None]) -> None:
        figures = tune.figures_of(self._imported, self._options)
        if figures is None:
            return
        options = self._imported.options(self._options)
        tasks = tune.tasks_of(self._imported.text, options)
        used = {kernel["name"]: kernel["schedule"] for kernel in json.loads(self._living().describe())["kernels"]}
        better = 0
        for task in tasks:
            self._living()
            found = tune.load(task, options) or tune.Found(task.usual)
            if not found.done and found.level != "full":  # which goes on when it is asked for
                try:
                    self._search_one(task, found, options, figures, pause)
                except Exception as error:  # the kernel stays as it is, others may be faster
                    _log.warning("schedules of %s are not searched: %s", task.kernel, error)
                    continue
            better += found.best != used.get(task.kernel + task.version, task.usual)
        self.searched = len(tasks)
        if better:
            self._adopt(pause)
            self.improved = better

    @staticmethod
    def _search_one(task: tune.Task, found: tune.Found, options: str, figures: str, pause: Callable[[float], None]) -> None:
        runner = tune.make_runner(task)
        if runner is None:
            return
        estimate = tune.estimator(task, figures) if figures else None
        tune.Search(task, found, Polite(runner, pause), lambda so_far: tune.store(task, so_far, options), estimate=estimate).run()

    def _living(self) -> Any:
        """The program, if anybody can still call it."""
        program = self._program()
        if program is None:
            raise Stopped
        return program

    def is_needed(self) -> bool:
        return self.state == "compiling" and self._program() is not None

    def _adopt(self, pause: Callable[[float], None]) -> None:
        made = self._recompile()
        pause(0.0)
        program = self._living()
        with contextlib.suppress(Error, RuntimeError):  # the call raises it, too, if it still holds then
            if (example := program.take_example()) is not None:
                made.prepare(example)
        program.adopt(made)
