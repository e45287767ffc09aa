"""Programs of one kernel, their inputs and their times, for the search of deplo/tune.py."""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .core import core
from .errors import Error, UnsupportedError, UserError
from .executable import synchronize
from .targets import find_target
from .tune import Task

_DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
_NARROW = (torch.int8, torch.uint8, torch.bool)
_MOST_SETS = 8  # of inputs
_MOST_BYTES = 1 << 30  # of all that is measured at a time
_SAMPLE_SECONDS = 2e-4  # a sample repeats shorter calls
_LEAST_TURNS, _MOST_TURNS = 3, 40
_SECONDS, _PATIENT_SECONDS = 0.1, 0.3  # of a race's turns, unless these are few
_PATIENT_TURNS = 7  # at least
_SLOW = (1.3, 1.1, 1.05)  # times the best: who is out after one turn, after two, and after more
_COMPARED = 1 << 17  # elements of a result
_SWEEP_BYTES = 256 << 20  # read between samples, at most: weights are then where a model has them, not in a cache
_DEVICE_CACHE = 64 << 20  # of a device that does not say


class Programs:
    """Makes and times the candidates of one task."""

    def __init__(self, task: Task, sets: list[list[Any]], clock: Callable[[], float] = time.perf_counter) -> None:
        self._task = task
        self._sets = sets
        self._clock = clock
        self._next = 0
        self._device = device_of(task)
        self._timer = _timer(self._device, clock)
        static = sum(bytes_of(about) for about in task.inputs if about.get("static"))
        l2, l3 = _caches(self._device)
        self._sweep = torch.zeros(min(l3, _SWEEP_BYTES) // 4, device=self._device) if static > l2 // 2 else None
        self._at_once = max(1, min(8, _MOST_BYTES // max(1, static)))
        self._expected: list[Any] | None = None

    @classmethod
    def for_task(cls, task: Task) -> Programs | None:
        """With made-up inputs on which the kernel runs as it is; None if there are none."""
        if any(about.get("dtype", "f32") not in _DTYPES for about in task.inputs):
            return None
        for bound in _bounds(task):
            first = _make_set(task, bound, 0)
            if first is None:
                return None
            made = cls(task, [first])
            (program,) = made.make([task.usual])
            if program is not None:
                made.add_sets(bound, program)
                return made
        return None

    def add_sets(self, bound: int, program: Any) -> None:
        """More inputs of the kind, if the kernel takes them: more than the caches hold are read between two calls with the same ones."""
        changing = sum(bytes_of(about) for about in self._task.inputs if not about.get("static"))
        l2, _ = _caches(self._device)
        wanted = min(_MOST_SETS, 2 + 2 * l2 // max(1, changing), max(2, _MOST_BYTES // 4 // max(1, changing)))
        statics = [x for x, about in zip(self._sets[0], self._task.inputs, strict=True) if about.get("static")]
        for seed in range(1, wanted):
            again = _make_set(self._task, bound, seed, statics)
            if again is not None and _runs(program, again) is not None:
                self._sets.append(again)

    def make(self, schedules: Sequence[str]) -> list[Any]:
        """Programs; None where the schedule does not fit, or the results are others."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            made = list(pool.map(self._compile, schedules))
        return [program if program is not None and self._is_right(program) else None for program in made]

    def _compile(self, schedule: str) -> Any:
        given = json.loads(self._task.options)
        every = {**self._task.schedules, self._task.version: schedule}
        given["schedule"] = {"alone" + version: text for version, text in every.items()}
        try:
            return core().compile(self._task.text, json.dumps(given))
        except (UserError, UnsupportedError):
            return None

    def _is_right(self, program: Any) -> bool:
        """Whether it gives what the first program gave, but for sums in another order: against slips, which verifiers do not see."""
        inputs = [x.clone() if about.get("written") else x for x, about in zip(self._sets[0], self._task.inputs, strict=True)]
        results = _runs(program, inputs)
        if results is None:
            return False
        results += [x for x, about in zip(inputs, self._task.inputs, strict=True) if about.get("written")]
        if self._expected is None:
            self._expected = results
            return True
        return all(_agree(got, wanted) for got, wanted in zip(results, self._expected, strict=True) if isinstance(got, torch.Tensor))

    def race(self, programs: Sequence[Any], patient: bool = False) -> list[float]:
        """Medians of samples in turns; each turn begins with another program. Slow ones leave early."""
        if len(programs) > self._at_once + 1:  # their packed weights would not fit
            first = self.race(programs[: self._at_once + 1], patient)
            later = self.race([programs[0], *programs[self._at_once + 1 :]], patient)
            return first + [t * first[0] / later[0] for t in later[1:]]
        loops = []
        for program in programs:
            self._sample(program, 1)
            loops.append(max(1, min(200, math.ceil(_SAMPLE_SECONDS / min(self._sample(program, 1) for _ in range(2))))) if self._sweep is None else 1)
        samples: list[list[float]] = [[] for _ in programs]
        racing = list(range(len(programs)))
        start = self._clock()
        least, seconds = (_PATIENT_TURNS, _PATIENT_SECONDS) if patient else (_LEAST_TURNS, _SECONDS)
        for turn in range(_MOST_TURNS):
            for place in range(len(racing)):
                i = racing[(place + turn) % len(racing)]
                samples[i].append(self._sample(programs[i], loops[i]))
            if not patient:
                most = min(statistics.median(samples[i]) for i in racing) * _SLOW[min(turn, len(_SLOW) - 1)]
                racing = [i for i in racing if i == 0 or statistics.median(samples[i]) <= most]
            if turn + 1 >= least and (self._clock() - start > seconds or racing == [0]):
                break
        return [statistics.median(each) for each in samples]

    def _sample(self, program: Any, calls: int) -> float:
        """Seconds of a call, each on the next set of inputs."""
        if self._sweep is not None:
            self._sweep.sum()  # a device does it before what it is given next
        sets, at = self._sets, self._next
        self._next = (at + calls) % len(sets)
        order = [sets[(at + i) % len(sets)] for i in range(calls)]
        run = program.run

        def all_of_them() -> None:
            for inputs in order:
                run(inputs)

        return max(1e-9, self._timer(all_of_them) / calls)


def _runs(program: Any, inputs: list[Any]) -> list[Any] | None:
    """The results; None where the kernel does not take these inputs."""
    try:
        results = list(program.run(inputs))
        if any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in inputs):
            synchronize()  # raises what the kernel reports
        return results
    except (Error, RuntimeError, LookupError, ArithmeticError):
        return None


def device_of(task: Task) -> torch.device:
    """Where the task's program has its inputs."""
    given = json.loads(task.options)
    target = find_target(given["target"])
    return torch.device(target.tensors, given["device"]) if target.device else torch.device("cpu")


def _timer(device: torch.device, clock: Callable[[], float]) -> Callable[[Callable[[], None]], float]:
    """Seconds of what a function does: of the host, or of the device between two events in its stream; by the host, where it has no such events."""

    def by_clock(run: Callable[[], None]) -> float:
        start = clock()
        run()
        if device.type != "cpu":
            synchronize()
        return clock() - start

    def by_events(run: Callable[[], None]) -> float:
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end)

    if device.type == "cpu":
        return by_clock
    try:
        by_events(lambda: None)
    except (RuntimeError, NotImplementedError):
        return by_clock
    return by_events


@functools.cache
def _caches(device: torch.device) -> tuple[int, int]:
    """Bytes of a core's own cache, or of a device's; of the last one before memory."""
    if device.type == "cpu":
        about = json.loads(core().target("{}"))
        return int(about["l2_bytes"]), int(about["l3_bytes"])
    try:
        size = int(torch.get_device_module(device).get_device_properties(device).L2_cache_size)
    except (RuntimeError, AttributeError, AssertionError):
        size = _DEVICE_CACHE
    return size, 2 * size


def _span(about: dict[str, Any]) -> int:
    """Elements from the first to the last."""
    if 0 in about["shape"]:
        return 0
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(about["shape"], about["strides"], strict=True))


def bytes_of(about: dict[str, Any]) -> int:
    return 0 if "size" in about else int(_span(about) * _DTYPES[about["dtype"]].itemsize)


def _bounds(task: Task) -> Iterator[int]:
    """Below which integers may be drawn: they may be indices of any of the sizes, or divisors (0: ones)."""
    integers = any("dtype" in about and not _DTYPES[about["dtype"]].is_floating_point for about in task.inputs)
    if not integers:
        yield 1
        return
    sizes = {size for about in task.inputs for size in about.get("shape", ()) if size > 0}
    yield from sorted(sizes, reverse=True)[:4]
    yield 1
    yield 0


def _make_set(task: Task, bound: int, seed: int, statics: Sequence[Any] = ()) -> list[Any] | None:
    """Inputs for one call; with these static ones, if some are given. None where they would not fit in memory."""
    if sum(bytes_of(about) for about in task.inputs) > _MOST_BYTES:
        return None
    random = torch.Generator().manual_seed(seed)
    device = device_of(task)
    given = iter(statics)
    made: list[Any] = []
    for about in task.inputs:
        if "size" in about:
            made.append(int(about["size"]))
            continue
        if statics and about.get("static"):
            made.append(next(given))
            continue
        flat = _values(_DTYPES[about["dtype"]], _span(about), bound, random).to(device)
        made.append(flat.as_strided(about["shape"], about["strides"]))
    return made


def _values(dtype: torch.dtype, count: int, bound: int, random: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(count, generator=random, device="cpu").to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=random, device="cpu").to(torch.bool)
    if dtype in _NARROW:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max + 1, (count,), generator=random, device="cpu", dtype=dtype)
    if bound == 0:
        return torch.ones(count, dtype=dtype, device="cpu")
    return torch.randint(0, bound, (count,), generator=random, device="cpu", dtype=dtype)


def _agree(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """As near as sums in another order are: within a few hundred roundings of the largest value."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if got.numel() == 0:
        return True
    step = 1 + got.numel() // _COMPARED
    got, wanted = got.reshape(-1)[::step], wanted.reshape(-1)[::step]
    if not got.is_floating_point():
        return float((got != wanted).float().mean()) <= 0.01  # comparisons of floats may turn
    a, b = got.double(), wanted.double()
    finite = a.isfinite() & b.isfinite()
    if float((a.isnan() != b.isnan()).float().mean()) > 0.01:
        return False
    scale = float(b[finite].abs().max()) if bool(finite.any()) else 0.0
    few = 512 if got.dtype in (torch.float32, torch.float64) else 4
    return bool(((a - b).abs()[finite] <= few * torch.finfo(got.dtype).eps * scale).all())
