"""Random schedules for the kernels of a program: nests from scratch, and proposals with other numbers, orders and directives left out."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from deplo.errors import UserError

NUMBERS = (1, 2, 3, 4, 5, 6, 8, 16, 32, 64)
ATTEMPTS = 4


def proposals(tile: str) -> dict[str, str]:
    """The schedules that Tile IR shows, by kernel."""
    return dict(re.findall(r"^schedule @(\w+): (.*)$", tile, re.MULTILINE))


def random_schedules(loop: str, tile: str, lowered: Callable[[dict[str, str]], str], rng: random.Random) -> dict[str, str]:
    """A schedule for each kernel that deplo takes, or none; `loop` and `tile` show the program, `lowered` gives Tile IR under schedules."""
    chosen: dict[str, str] = {}
    for kernel, proposal in proposals(tile).items():
        sums = re.findall(r"reduce (\w+): f32 = sum\(\w+\) over (.*):$", loop.partition(f"loop @{kernel}(")[2].partition("\n\n")[0], re.MULTILINE)
        for _ in range(ATTEMPTS):
            makers = [lambda p=proposal: changed(p, rng), lambda k=kernel, p=proposal: nest(k, p, lowered, rng)]
            if sums:
                makers.append(lambda k=kernel, s=sums: contraction(k, s, lowered, rng))
            schedule = rng.choice(makers)()
            try:
                lowered({kernel: schedule})
            except UserError:
                continue  # it does not fit
            chosen[kernel] = schedule
            break
    return chosen


def changed(proposal: str, rng: random.Random) -> str:
    words = re.findall(r"\w+(?:\([^()]*\))?", proposal)
    kept = [word for word in words if "(" not in word or rng.random() > 0.15]
    for position, word in enumerate(kept):
        if word.startswith(("tile(", "register_block(", "unroll(", "vectorize(", "transpose(")) and rng.random() < 0.5:
            kept[position] = re.sub(r"=(\d+)", lambda m: f"={rng.choice(NUMBERS)}", word)
        if word.startswith("parallel("):
            *names, work = word.removeprefix("parallel(").removesuffix(")").split(", ")
            if rng.random() < 0.3:
                rng.shuffle(names)
            work = work if rng.random() < 0.3 else f"work={rng.choice([1, 10, 1000])}"
            kept[position] = f"parallel({', '.join([*names, work])})"
    return " ".join(kept)


def nest(kernel: str, proposal: str, lowered: Callable[[dict[str, str]], str], rng: random.Random) -> str:
    """A schedule of the kind that fits every kernel: which axes run in parallel, which inside, in what order, with which lanes and tiles."""
    axes = axes_of(kernel, lowered)
    inside = [axis for axis in re.findall(r"\b(?:vectorize|tile)\(([\w.]+)", proposal) if axis not in axes]
    lanes = rng.choice([*axes, *axes, ""]) if axes else ""
    others = [axis for axis in axes if axis != lanes]
    rng.shuffle(others)
    parallel = [axis for axis in others if rng.random() < 0.7]
    serial = [axis for axis in others if axis not in parallel]
    words = []
    if lanes:
        words.append(f"vectorize({lanes}{rng.choice(['', ', by=1', ', by=2', ', by=3', ', by=8'])})")
        if rng.random() < 0.5:
            words.append(f"tile({lanes}={rng.choice(NUMBERS)})")
            parallel.insert(rng.randint(0, len(parallel)), lanes)
        along = [axis for axis in parallel if axis != lanes]
        if along and rng.random() < 0.25:
            axis = rng.choice(along)
            words += [f"tile({axis}={rng.choice(NUMBERS)})", f"transpose({axis}={rng.choice(NUMBERS[:8])})"]
    words.insert(0, f"parallel({', '.join([*parallel, f'work={rng.choice([1, 16, 1000, 65536])}'])})")
    if serial:
        words.insert(1, f"reorder({', '.join(serial)})")
    words += [f"vectorize({axis}, by={rng.choice([1, 2, 4, 6])})" for axis in inside if rng.random() < 0.7]
    return " ".join(["nest", *words])


def contraction(kernel: str, sums: list[tuple[str, str]], lowered: Callable[[dict[str, str]], str], rng: random.Random) -> str:
    """Of two of its axes, one gives the rows and one the lanes of a register block."""
    axes = axes_of(kernel, lowered)
    if len(axes) < 2:
        return "contraction"
    rows, lanes = rng.sample(axes, 2)
    block, vectors = rng.choice([1, 2, 3, 6]), rng.choice([8, 16, 32])
    words = [f"parallel({', '.join([*[a for a in axes if a not in (rows, lanes)], lanes, rows])}, work={rng.choice([1, 1000])})"]
    words += [f"tile({rows}={block * rng.choice([1, 2, 5])})", f"tile({lanes}={vectors * rng.choice([1, 2])})"]
    words += [f"vectorize({lanes})", f"register_block({rows}={block}, {lanes}={vectors})"]
    for result, over in sums:
        depth = "*".join(re.findall(r"(\w+) in ", over))
        words += [f"tile({result}.{depth}={rng.choice([1, 2, 3, 8, 64])})", f"unroll({result}.{depth}={rng.choice([1, 2, 3])})"]
        words += [f"pack({result}.lanes, at=block)", f"pack({result}.rows, at=block, pad={rng.choice([0, 1, 8, 16])})"]
    return " ".join(["contraction", *words])


def axes_of(kernel: str, lowered: Callable[[dict[str, str]], str]) -> list[str]:
    """What deplo names where a schedule asks for an axis that is not there."""
    try:
        lowered({kernel: "nest parallel(none_such, work=1)"})
    except UserError as error:
        found = re.search(r"there is no axis none_such; allowed: ([\w, ]*)", str(error))
        return re.findall(r"\w+", found[1]) if found else []
    return []
