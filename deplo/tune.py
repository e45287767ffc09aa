"""The search for schedules: `options={"tune": "fast"}` and `"full"`. docs/tuning.md says how it works.

What schedules there are, and which of them keep the bounds of errors, the core says (csrc/target/*/schedule/variants.cpp); here they are raced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from .core import core
from .errors import UserError
from .imported import Imported
from .options import Options
from .progress import Bar

FAST_SECONDS = 2.0  # of one kernel
GAIN = 0.02  # of the time, below which a schedule is taken for no faster
_BATCH = 6  # candidates of one race
_FEW = 4  # choices of one decision that a fast search tries at a time
_STEPS, _BASES, _IMAGINED = 3, 3, 0.25  # decisions that are changed at once by the estimate alone, schedules each time, and its part of a fast search
_HOPELESS = 2.0  # times the best by the estimate: schedules that a fast search does not measure
_NEAR = 1.05  # times the best: schedules from which a full search goes on once nothing next to the best is faster
_KEEP_EVERY = 5.0  # seconds between what a full search writes for one that goes on


@dataclasses.dataclass(frozen=True)
class Task:
    """One kernel as a program of its own. `options` is the core's JSON that candidates are compiled with; `keys` that of winners."""

    kernel: str
    ops: list[str]
    key: str
    text: str
    version: str
    schedules: dict[str, str]  # by version, as they are without a search
    proposals: list[str]
    inputs: list[dict[str, Any]]
    options: str

    @property
    def usual(self) -> str:
        return self.schedules[self.version]


class Runner(Protocol):
    """Makes and times candidates; tests have one without a clock."""

    def make(self, schedules: Sequence[str]) -> list[Any]:
        """A program for each; None for one that does not fit the kernel, or whose results are wrong."""

    def race(self, programs: Sequence[Any], patient: bool = False) -> list[float]:
        """Seconds of a run of each, measured in turns. `patient`: with more turns."""


@dataclasses.dataclass
class Found:
    """How far the search for one kernel has come."""

    best: str
    seconds: float = 0.0
    usual_seconds: float = 0.0
    level: str = "fast"
    done: bool = False
    tried: dict[str, float] = dataclasses.field(default_factory=dict)  # by digest of a schedule: its time / that of the best then; 0: it does not fit

    def rest(self, task: Task) -> str:
        about = {"kernel": task.kernel, "ops": task.ops, "version": task.version, "level": self.level, "done": self.done}
        return json.dumps(about | {"tried": {name: round(ratio, 4) for name, ratio in self.tried.items()}})


def _digest(schedule: str) -> str:
    return hashlib.sha256(schedule.encode()).hexdigest()[:16]


class Search:
    """Looks for the fastest schedule of one kernel: all forms first, then one decision at a time, and, if it is `full`, from what came near.

    `keep` is called with what was found so far.
    """

    def __init__(
        self,
        task: Task,
        found: Found,
        runner: Runner,
        keep: Callable[[Found], None] = lambda found: None,
        show: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = FAST_SECONDS,
        estimate: Callable[[Sequence[str]], list[float | None]] | None = None,
    ) -> None:
        self.task = task
        self.found = found
        self._runner = runner
        self._keep = keep
        self._show = show
        self._clock = clock
        self._start = self._kept = clock()
        self._full = found.level == "full"
        self._seconds = seconds
        self._estimate = estimate
        self._raced = 0
        self._programs: dict[str, Any] = {}  # of the best and the usual schedule

    def run(self) -> None:
        """Searches until `found.done`. KeyboardInterrupt leaves in `found` what stands, and keeps it."""
        found = self.found
        try:
            if self._program(self.task.usual) is None:
                found.done = True  # it does not run on made-up inputs: there is nothing to compare
                return
            if found.best != self.task.usual and self._program(found.best) is None:
                found.best = self.task.usual
            self._challenge(self.task.proposals if self._full else self._promising(self.task.proposals, self.task.usual))
            self._challenge(self._imagined())
            while self._descend() or (self._full and self._go_on()):
                pass
            self._judge()
            found.done = True
        except KeyboardInterrupt:
            if found.best != self.task.usual and not found.seconds:
                with contextlib.suppress(KeyboardInterrupt):
                    self._judge()
            raise
        finally:
            self._keep(found)

    def _program(self, schedule: str) -> Any:
        if schedule not in self._programs:
            (self._programs[schedule],) = self._runner.make([schedule])
        return self._programs[schedule]

    def _out_of_time(self) -> bool:
        return not self._full and self._clock() - self._start > self._seconds

    def _all_directions(self, schedule: str, wide: bool) -> Iterator[tuple[str, list[str]]]:
        for direction in json.loads(core().tuning_directions(self.task.text, self.task.version, schedule, wide, self.task.options)):
            yield direction["name"], direction["schedules"]

    def _directions(self, schedule: str, wide: bool) -> Iterator[tuple[str, Sequence[str]]]:
        for name, schedules in self._all_directions(schedule, wide):
            choices = self._promising(schedules, schedule)
            # Those near to the present one come first, then those that are farther off: a fast search looks at a few of both.
            yield name, choices if self._full or self._estimate else choices[:: -(-len(choices) // _FEW)]

    def _promising(self, schedules: Sequence[str], base: str) -> Sequence[str]:
        """The quickest by the estimate first; of these a fast search takes a few that do not look hopeless beside `base`."""
        if self._estimate is None or not schedules:
            return schedules
        usual, *estimates = self._estimate([base, *schedules])
        # What does not fit the kernel drops out when it is made, at once.
        ranked = sorted(zip(estimates, schedules, strict=True), key=lambda each: math.inf if each[0] is None else each[0])
        if self._full or usual is None:
            return [schedule for _, schedule in ranked]
        return [schedule for seconds, schedule in ranked if seconds is not None and seconds <= _HOPELESS * usual][:_FEW]

    def _imagined(self) -> list[str]:
        """Schedules that differ from all forms in several decisions at once, the quickest by the estimate: nothing is compiled for them."""
        if self._estimate is None:
            return []
        begin, first = self._clock(), [self.task.usual, *self.task.proposals]
        seconds = {s: e for s, e in zip(first, self._estimate(first), strict=True) if e is not None}
        seen: set[str] = set()
        for _ in range(_STEPS):
            near = sorted((s for s in seconds if s not in seen), key=seconds.__getitem__)[:_BASES]
            for base in near:
                seen.add(base)
                # A fast search spends a part of its time on this.
                if not self._full and self._clock() - begin > _IMAGINED * self._seconds:
                    break
                others = [s for _, schedules in self._all_directions(base, self._full) for s in schedules if s not in seconds]
                seconds.update({s: e for s, e in zip(others, self._estimate(others), strict=True) if e is not None})
        return sorted(seconds, key=seconds.__getitem__)[: 2 * _BATCH if self._full else _BATCH]

    def _descend(self) -> bool:
        """Each decision in turn, the others as in the best schedule so far. Whether anything improved it, and there is time to go on."""
        improved, names = False, {""}
        while names:
            before = self.found.best
            # Decisions of the schedule as it is by now; each once in a round.
            todo = [(name, schedules) for name, schedules in self._directions(before, self._full) if name not in names]
            if not todo:
                break
            for name, schedules in todo:
                names.add(name)
                if self._out_of_time():
                    return False
                if self._challenge(schedules):
                    improved = True
                    break
        return improved and not self._out_of_time()

    def _go_on(self) -> bool:
        """From schedules that were nearly as fast as the best, which one more decision may make faster."""
        near = [(self.found.tried.get(_digest(s), 9.0), s) for _, schedules in self._directions(self.found.best, True) for s in schedules]
        for ratio, schedule in sorted(near):
            if not 0 < ratio <= _NEAR:
                continue
            for _, schedules in self._directions(schedule, False):
                if self._challenge(schedules):
                    return True
        return False

    def _challenge(self, schedules: Sequence[str]) -> bool:
        """Races those that were not tried with the best; whether one of them is the best now."""
        tried = self.found.tried
        fresh = [s for s in dict.fromkeys(schedules) if _digest(s) not in tried and s != self.found.best]
        improved = False
        for at in range(0, len(fresh), _BATCH):
            if self._out_of_time():
                break
            improved |= self._race(fresh[at : at + _BATCH])
            if self._full and self._clock() - self._kept > _KEEP_EVERY:
                self._kept = self._clock()
                self._keep(self.found)
        return improved

    def _race(self, schedules: Sequence[str]) -> bool:
        found = self.found
        made = [(s, program) for s, program in zip(schedules, self._runner.make(schedules), strict=True)]
        found.tried.update({_digest(s): 0.0 for s, program in made if program is None})
        rivals = [(s, program) for s, program in made if program is not None]
        if not rivals:
            return False
        best = self._program(found.best)
        times = self._runner.race([best, *(program for _, program in rivals)])
        self._raced += len(rivals)
        found.tried.update({_digest(s): t / times[0] for (s, _), t in zip(rivals, times[1:], strict=True)})
        self._show(f"{self._raced} schedules")
        first = min(range(len(rivals)), key=lambda i: times[i + 1])
        if times[first + 1] > (1 - GAIN) * times[0]:
            return False
        again = self._runner.race([best, rivals[first][1]], patient=True)  # one of many is the fastest by chance
        if again[1] > (1 - GAIN) * again[0]:
            found.tried[_digest(rivals[first][0])] = again[1] / again[0]
            return False
        found.tried[_digest(found.best)] = again[0] / again[1]
        found.best = rivals[first][0]
        found.seconds = found.usual_seconds = 0.0
        self._programs = {s: p for s, p in self._programs.items() if s == self.task.usual} | {found.best: rivals[first][1]}
        return True

    def _judge(self) -> None:
        """The best beside the usual schedule, which stays unless the best is faster."""
        found, usual = self.found, self.task.usual
        if found.best == usual:
            (found.seconds,) = self._runner.race([self._program(usual)])
            found.usual_seconds = found.seconds
            return
        times = self._runner.race([self._program(usual), self._program(found.best)], patient=True)
        found.usual_seconds, found.seconds = times
        if times[1] > (1 - GAIN) * times[0]:
            found.best, found.seconds = usual, times[0]


def tasks_of(text: str, options: str) -> list[Task]:
    """The kernels of IR text for which schedules can be searched. `options` is what the core would compile it with."""
    given = json.loads(options)
    base = given | {"tune": "off", "schedule": {}, "cache_dir": "off", "verify": False, "guard": False}
    base |= {"dump": "", "dump_dir": "", "stop_after": "", "time": False, "debug": False}
    # The kernel is as it is after these: they would only change it once more.
    base["disable"] = [*given.get("disable", []), *(p["name"] for p in core().passes() if p["level"] == "loop")]
    alone = json.dumps(base, sort_keys=True)
    return [Task(**about, options=alone) for about in json.loads(core().tuning_tasks(text, options))]


def load(task: Task, options: str) -> Found | None:
    """What an earlier search has found of the kernel on this machine."""
    kept = core().load_winner(task.key, options)
    if kept is None:
        return None
    schedules, seconds, usual_seconds, rest = kept
    about = json.loads(rest)
    try:
        return Found(schedules[task.version], seconds, usual_seconds, about["level"], about["done"], dict(about["tried"]))
    except (KeyError, TypeError, ValueError):
        return None  # of another version of the kernel, or of another search


def store(task: Task, found: Found, options: str) -> None:
    """Keeps it for later processes."""
    schedules = {**task.schedules, task.version: found.best}
    core().store_winner(task.key, schedules, found.seconds, found.usual_seconds, found.rest(task), options)


def make_runner(task: Task) -> Runner | None:
    """The real one; None where inputs cannot be made up for the kernel. Tests put another one in its place."""
    from .tune_runner import Programs

    return Programs.for_task(task)


def tune(text: str, options: str, level: str, figures: str = "") -> int:
    """Searches schedules for the kernels that IR text becomes, and keeps them where the core finds them when it compiles the text: for how many.

    `figures`: JSON of what the machine does, by which schedules are estimated before they are measured; empty: they are not.

    What was searched to its end before is left alone, what was interrupted goes on. An interrupt (Ctrl-C) ends the search, not the compilation.
    """
    todo = []
    for task in tasks_of(text, options):
        found = load(task, options) or Found(task.usual, level=level)
        if found.level == "full" if level == "fast" else found.done and found.level == "full":
            continue
        if found.done and found.level == level:
            continue
        found.done, found.level = False, level
        todo.append((task, found))
    try:
        with Bar("tuning", len(todo)) as bar:
            for task, found in todo:
                bar.step(task.kernel)
                _tune_one(task, found, options, bar, figures)
    except KeyboardInterrupt:
        warnings.warn("the search for schedules was interrupted: what it has found is used, and it goes on when it is asked for again", stacklevel=2)
    return len(todo)


def _tune_one(task: Task, found: Found, options: str, bar: Bar, figures: str) -> None:
    start = time.monotonic()

    def show(text: str) -> None:
        gain = f", {found.usual_seconds / found.seconds:.2f} times as fast" if found.seconds else ""
        bar.show(f"{task.kernel} ({text}{gain}, {time.monotonic() - start:.0f} s)")

    show("measuring")
    runner = make_runner(task)
    if runner is None:
        return
    estimate = estimator(task, figures) if figures else None
    Search(task, found, runner, lambda so_far: store(task, so_far, options), show, estimate=estimate).run()


def estimator(task: Task, figures: str) -> Callable[[Sequence[str]], list[float | None]]:
    """Seconds that schedules of the task take, by a model and what `figures` says of the machine (docs/tuning.md); None where one does not fit."""
    from .tune_runner import bytes_of

    # Two sets of inputs at least take turns.
    resident = 2.0 * sum(map(bytes_of, task.inputs))
    known: dict[str, float | None] = {}

    def estimate(schedules: Sequence[str]) -> list[float | None]:
        fresh = [schedule for schedule in dict.fromkeys(schedules) if schedule not in known]
        if fresh:
            text = core().tuning_estimates(task.text, task.version, fresh, task.schedules, figures, resident, task.options)
            known.update(zip(fresh, json.loads(text), strict=True))
        return [known[schedule] for schedule in schedules]

    return estimate


def figures_of(imported: Imported, options: Options) -> str | None:
    """What `tune` takes by that name for a graph; None where its kernels are not searched."""
    from .calibration import calibration
    from .targets import find_target

    if not find_target(imported.target).device:
        return calibration(options).figures()
    # Copies to and from the device are what calls on the host's tensors cost; figures are the processors'.
    return "" if imported.device >= 0 else None


def has_folder(options: Options) -> bool:
    """Whether schedules can be kept; warns where they cannot."""
    if options.cache_folder():
        return True
    warnings.warn(f"tune={options.tune!r} has no folder to keep schedules in (cache_dir is off): they come from heuristics", stacklevel=3)
    return False


def tune_graph(imported: Imported, options: Options) -> None:
    """What the option `tune` asks for, before a graph is compiled."""
    if options.tune not in ("fast", "full") or not has_folder(options):
        return
    from torch.utils._python_dispatch import _disable_current_modes

    from .executable import synchronize

    with _disable_current_modes():
        figures = figures_of(imported, options)
        if figures is not None:
            if imported.device >= 0:
                synchronize()  # errors of earlier calls are the caller's, and no candidate's
            tune(imported.text, imported.options(options), options.tune, figures)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A winner as a folder holds it."""

    file: str
    kernel: str
    machine: str
    level: str
    done: bool
    version: str  # of deplo
    schedule: str
    seconds: float
    usual_seconds: float


def entries(folder: str) -> list[Entry]:
    """All winners in a folder of compiled kernels, of any machine."""
    found = []
    for about in json.loads(core().winners(folder)):
        with contextlib.suppress(KeyError, TypeError):  # of another version
            rest = about["rest"]
            schedule = about["schedules"][rest["version"]]
            times = (float(about["seconds"]), float(about["usual_seconds"]))
            found.append(Entry(about["file"], rest["kernel"], about["machine"], rest["level"], rest["done"], about["version"], schedule, *times))
    return sorted(found, key=lambda entry: (entry.machine, entry.kernel, entry.file))


def clear(folder: str) -> int:
    """Removes all winners in a folder of compiled kernels, and nothing else; how many."""
    removed = 0
    for entry in entries(folder):
        try:
            os.unlink(entry.file)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{entry.file}: {error.strerror}") from None
        removed += 1
    return removed
