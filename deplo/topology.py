"""Which processors and memory nodes the processes of a served language model get: candidates of a machine, ranked, and pinning by them.

The method is that of Sandwich (Zhao et al., 2025, "Sandwich: Separating Prefill-Decode Compilation for Efficient CPU LLM Serving"): the tree of the
machine is transformed by steps that group and remove its parts, and each tree that comes out is a configuration. docs/topology.md has the formulas.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import platform
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .errors import UserError
from .topology_cost import SHAPES, Cost, Model, Rates, Service, Work, cost, model_of, services_of
from .topology_tree import SERVICE, Node, group, key_of, read_tree, remove

__all__ = [
    "SHAPES",
    "Candidate",
    "Choice",
    "Model",
    "Node",
    "Pinned",
    "Rates",
    "Work",
    "candidates",
    "choose",
    "model_of",
    "pin",
    "rank",
    "read_tree",
]

PHASES = ("prefill", "decode", "both")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A machine's processes: the tree that is used, with its services, and what was done to it."""

    tree: Node
    steps: tuple[str, ...]

    @property
    def processes(self) -> int:
        return sum(1 for _ in self.tree.of_kind(SERVICE))


@dataclasses.dataclass(frozen=True)
class Choice:
    """A candidate with how many neighbours share a model, and what that costs."""

    candidate: Candidate
    services: tuple[Service, ...]
    parallel: int  # processes that hold one copy of the model (tensor parallel)
    prefill: Cost
    decode: Cost
    work: Work

    @property
    def copies(self) -> int:
        return len(self.services) // self.parallel

    def seconds(self, phase: str) -> float:
        """Of all prompts (prefill), of a token of each sequence (decode), or of prompts and answers (both)."""
        if phase == "both":
            return self.prefill.seconds + self.work.generate * self.decode.seconds
        return (self.prefill if phase == "prefill" else self.decode).seconds

    def rate(self, phase: str) -> float:
        """Tokens a second of all sequences: of prompts in prefill, else of answers."""
        tokens = {"prefill": self.work.prompt, "decode": 1, "both": self.work.generate}[phase]
        return self.work.batch * tokens / self.seconds(phase)


def candidates(tree: Node) -> list[Candidate]:
    """All configurations that the steps give, each once: of equal trees (key_of) that with the fewest steps."""
    found: dict[str, Candidate] = {}
    for left, removed in _removals(tree):
        for services, grouped in _groupings(left):
            found.setdefault(key_of(services), Candidate(services, (*removed, grouped)))
    return list(found.values())


def _removals(tree: Node) -> Iterator[tuple[Node, tuple[str, ...]]]:
    """Whole packages, memory nodes, cores behind each cache and second processors of cores may stay idle. The machine as it is comes first."""
    counts = {kind: _most(tree, kind) for kind in ("package", "numa", "core", "pu")}
    keeps = {kind: _halves(count) for kind, count in counts.items()}
    keeps["core"] = sorted({max(1, round(counts["core"] * part)) for part in (1, 0.75, 0.5, 0.375, 0.25, 0.125)}, reverse=True)
    keeps["pu"] = [counts["pu"], 1] if counts["pu"] > 1 else [1]
    for choice in itertools.product(*(keeps.values())):
        left, steps = tree, []
        for kind, keep in zip(keeps, choice, strict=True):
            if keep < counts[kind]:
                left = remove(left, kind, keep)
                steps.append(f"remove {kind} to {keep}")
        yield left, tuple(steps)


def _most(tree: Node, kind: str) -> int:
    """The largest number of such nodes under one parent."""
    own = sum(child.kind == kind for child in tree.children)
    return max([own, *(_most(child, kind) for child in tree.children)], default=0) or (1 if tree.kind == kind else 0)


def _halves(count: int) -> list[int]:
    return [count >> k for k in range(count.bit_length())] or [0]


def _groupings(tree: Node) -> Iterator[tuple[Node, str]]:
    whole = group(tree, tree.kind, 1)
    if whole is not None:
        yield whole, "group all"
    kinds = [kind for kind in ("package", "die", "group", "numa", "l3", "l2") if any(True for _ in tree.of_kind(kind))]
    # Cores alone are services only where nothing else divides the machine: a process of a core or two does not serve a model.
    kinds += ["core"] if not any(_most(tree, kind) > 1 for kind in kinds) else []
    for kind in kinds:
        most = _most(tree, kind)
        for size in (size for size in range(1, most + 1) if most % size == 0):
            grouped = group(tree, kind, size)
            if grouped is not None:
                yield grouped, f"group {kind} by {size}"


def rank(
    found: Sequence[Candidate],
    phase: str = "both",
    model: Model = SHAPES["qwen3-0.6b"],
    work: Work | None = None,
    rates: Rates | None = None,
    measured: Mapping[tuple[tuple[int, ...], ...], Sequence[float]] | None = None,
) -> list[Choice]:
    """What fits into memory, the quickest first; of what is equally quick (to 1 %), fewer processes, then fewer cores, then fewer threads.

    `measured` has, by the processors of all services, the bytes a second that each was seen to read beside the others. Raises UserError for
    an unknown phase.
    """
    if phase not in PHASES:
        raise UserError(f"unknown phase {phase!r}; expected one of {', '.join(PHASES)}")
    work, rates = work or Work(), rates or Rates()
    choices: list[Choice] = []
    for candidate in found:
        services = services_of(candidate.tree, rates)
        if seen := (measured or {}).get(tuple(service.processors for service in services)):
            services = [dataclasses.replace(service, bandwidth=value) for service, value in zip(services, seen, strict=True)]
        for parallel in (p for p in range(1, len(services) + 1) if len(services) % p == 0):
            if model.hidden % parallel or len(services) // parallel > work.batch:
                continue  # heads do not divide, or copies have nothing to do
            costs = [cost(services, parallel, step, model, work, rates) for step in ("prefill", "decode")]
            if costs[0] is not None and costs[1] is not None:
                choices.append(Choice(candidate, tuple(services), parallel, costs[0], costs[1], work))
    choices.sort(key=lambda choice: choice.seconds(phase))
    return _thrifty(choices, phase)


def _thrifty(choices: list[Choice], phase: str) -> list[Choice]:
    """Within runs of choices that differ by less than 1 %, the one that takes least of the machine first."""
    ordered: list[Choice] = []
    while choices:
        limit = choices[0].seconds(phase) * 1.01
        run = choices[: sum(choice.seconds(phase) <= limit for choice in choices)]
        run.sort(key=lambda c: (len(c.services), sum(s.cores for s in c.services), sum(len(s.processors) for s in c.services)))
        ordered += run
        choices = choices[len(run) :]
    return ordered


def choose(tree: Node, processes: int, phase: str = "both", model: Model = SHAPES["qwen3-0.6b"], work: Work | None = None) -> Choice:
    """The best configuration of so many processes, all of which share one model.

    Raises UserError where the machine does not divide so, or the model does not fit.
    """
    every = candidates(tree)
    found = [candidate for candidate in every if candidate.processes == processes]
    if not found:
        known = sorted({candidate.processes for candidate in every})
        raise UserError(f"this machine does not divide into {processes} equal services; it does into {', '.join(map(str, known))}")
    ranked = [choice for choice in rank(found, phase, model, work) if choice.parallel == processes]
    if not ranked:
        raise UserError(f"{model.name} does not fit into the memory of {processes} services, or does not divide between them")
    return ranked[0]


# Pinning


@dataclasses.dataclass(frozen=True)
class Pinned:
    """What `pin` gave this process."""

    rank: int
    processes: int
    processors: tuple[int, ...]
    nodes: tuple[int, ...]
    policy: str  # of memory: preferred, interleaved, or why it was left alone


def pin(phase: str = "both", *, rank: int | None = None, processes: int | None = None, model: Model = SHAPES["qwen3-0.6b"]) -> Pinned:
    """Keeps this process on the processors of its service and its memory on the nodes there, and gives torch a thread for each core.

    `rank` and `processes` are by default what torchrun says (LOCAL_RANK and LOCAL_WORLD_SIZE; without them the process is the only one). To be called
    before weights are loaded: pages stay where they are. Raises UserError for a machine that does not divide into so many services.
    """
    rank = _number("LOCAL_RANK", 0) if rank is None else rank
    processes = _number("LOCAL_WORLD_SIZE", 1) if processes is None else processes
    if not 0 <= rank < processes:
        raise UserError(f"rank {rank} of {processes} processes: expected a rank from 0 to {processes - 1}")
    service = choose(read_tree(), processes, phase, model).services[rank]
    for thread in _threads():
        try:
            os.sched_setaffinity(thread, service.processors)
        except ProcessLookupError:  # it has ended
            continue
        except OSError as error:
            raise UserError(f"this process may not run on processors {ranges(service.processors)}: {error.strerror}") from None
    import torch

    torch.set_num_threads(service.cores)
    os.environ["OMP_NUM_THREADS"] = str(service.cores)
    return Pinned(rank, processes, service.processors, service.node_numbers, set_memory_policy(service.node_numbers))


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return otherwise
    if not text.isdecimal():
        raise UserError(f"{name} is {text!r}, expected a number")
    return int(text)


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]


def ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as `0-2,5`, as the system's tools have it."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED, _INTERLEAVE = 1, 3


def set_memory_policy(nodes: Sequence[int]) -> str:
    """Of the calling thread and of those that it starts: one node is preferred (a full one sends pages elsewhere), several take turns."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or not nodes or min(nodes) < 0:
        return "left alone: no number of a memory node is known"
    words = (max(nodes) // 64) + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    libc: Any = ctypes.CDLL(None, use_errno=True)
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    if libc.syscall(number, mode, mask, ctypes.c_ulong(64 * words + 1)) != 0:
        return f"left alone: {os.strerror(ctypes.get_errno())}"
    return "preferred" if mode == _PREFERRED else "interleaved"


_pinned = threading.Event()


def pin_by_environment(phase: str) -> None:
    """For DEPLO_PIN, when torch is imported in a process of torchrun: warns where `pin` raises, and does nothing in the launcher itself."""
    if "LOCAL_RANK" not in os.environ or _pinned.is_set():
        return
    _pinned.set()
    try:
        pin(phase)
    except (UserError, OSError) as error:
        warnings.warn(f"DEPLO_PIN={phase}: {error}", stacklevel=2)
