"""One process in which everything happens at once: `python -m soak.mixed --seed N --seconds S`. Prints a line of JSON; every wrong value ends it."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock

import deplo
from deplo import cache
from deplo.core import core
from deplo.dispatch import _dynamo_lock
from soak.subjects import SUBJECTS, TRAINED, WITH_STATE, WrongValue, build, doubled, in_double, judge, twin_of
from soak.watch import Beats, settled_bytes

STRICT = {"strict": True}
EXPORTED = ("small", "long", "images", "softmax")
SIGNALS = (signal.SIGUSR1, signal.SIGCHLD, signal.SIGINT)


class Held:
    """One callable by one engine, with eager mode's and float64's twin."""

    def __init__(self, name: str, engine: str, seed: int) -> None:
        self.name, self.engine = name, engine
        self.fn = build(name, seed)
        self.eager = twin_of(self.fn)
        self.exact = in_double(self.eager)
        self.call = compiled(self.fn, engine)
        self.lock = threading.Lock()

    def check(self, rng: random.Random) -> None:
        args = SUBJECTS[self.name][1](rng)
        given = tuple(x.clone() for x in args)
        with self.lock if self.name in WITH_STATE else contextlib.nullcontext(), torch.no_grad():
            eager, exact = self.eager(*args), self.exact(*(doubled(given)))
            got = self.call(*given)
        self.judge(got, eager, exact)
        for mine, its in zip(given, args, strict=True):  # written inputs
            judge(f"{self} (written input)", SUBJECTS[self.name][2], mine, its, its.double())

    def judge(self, got: Any, eager: Any, exact: Any) -> None:
        judge(str(self), SUBJECTS[self.name][2], got, eager, exact)

    def train(self, rng: random.Random) -> None:
        """Gradients, too."""
        args = SUBJECTS[self.name][1](rng)
        results = []
        for fn, given in ((self.call, args), (self.eager, args), (self.exact, doubled(args))):
            leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in given]
            wanted = [x for x in leaves if x.requires_grad]
            if isinstance(self.fn, nn.Module):
                wanted += list((self.fn if fn is self.call else fn).parameters())  # type: ignore[attr-defined]
            y = fn(*leaves)
            results.append([y, *torch.autograd.grad((y * y).sum(), wanted, allow_unused=True)])
        kept = [k for k, x in enumerate(results[1]) if x is not None]
        got, eager, exact = ([result[k] for k in kept] for result in results)
        # A gradient of a chain of sums: what each rounds is carried through the next.
        judge(f"{self} (gradient)", 8 * SUBJECTS[self.name][2] + 512, got, eager, exact)

    def write(self, rng: random.Random) -> None:
        """Changes a weight, in one of the ways that users have."""
        twins = [fn for fn in (self.fn, self.eager, self.exact) if isinstance(fn, nn.Module)]
        way, name = rng.randrange(6), rng.choice([name for name, _ in twins[0].named_parameters()])
        values = torch.randn(dict(twins[0].named_parameters())[name].shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        with torch.no_grad():
            for twin in twins:
                weight = dict(twin.named_parameters())[name]
                new = (values * 0.1).to(weight.dtype)
                if way == 0:
                    weight.copy_(new)
                elif way == 1:
                    weight.data.mul_(0.5)
                elif way == 2:
                    twin.load_state_dict({**twin.state_dict(), name: new})
                elif way == 3:
                    weight.data = new.clone()
                else:  # the ends, which lie beside whole pages
                    place = 0 if way == 4 else -1
                    weight.data[place] = new[place]

    def __str__(self) -> str:
        return f"{self.name} by {self.engine}"


def compiled(fn: Callable[..., Any], engine: str) -> Callable[..., Any]:
    if engine == "direct":
        return deplo.jit(fn, guards="inputs", dynamic=True, options=STRICT)
    if engine == "background":
        return torch.compile(fn, backend="deplo", options={**STRICT, "tier": "background"})
    if engine == "own":  # its weights leave memory while packed copies stand for them
        return torch.compile(fn, backend="deplo", options={**STRICT, "weights": "own"})
    if engine in ("eager", "aot_eager"):
        return torch.compile(fn, backend=engine)
    return torch.compile(fn, backend="deplo", dynamic=True if engine == "dynamic" else None, options=STRICT)


def compile_without_limit() -> None:
    """Settings of Dynamo's are each thread's own."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 20


class Packages:
    """Files of deplo.export, and the models whose they are."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.twins = {}
        for k, name in enumerate(EXPORTED):
            fn = build(name, 100 + k)
            module = fn if isinstance(fn, nn.Module) else _Module(fn)
            example = (_rows_of(name, 3),)
            deplo.export(module, example, path=self.path(name), dynamic_shapes=[{0: torch.export.Dim("rows", min=1)}], features=["native"])
            self.twins[name] = (module, in_double(module))

    def path(self, name: str) -> str:
        return str(self.folder / f"{name}.deplo")

    def check(self, name: str, rng: random.Random) -> None:
        """Loads, calls, drops."""
        model = deplo.load(self.path(name))
        with torch.no_grad():
            for _ in range(rng.randint(1, 3)):
                self.call(name, model, rng)

    def call(self, name: str, model: Callable[..., Any], rng: random.Random) -> None:
        x = _rows_of(name, rng.randint(1, 20), rng.randrange(1 << 30))
        eager, exact = self.twins[name]
        judge(f"{name} of a package", SUBJECTS[name][2], model(x), eager(x), exact(x.double()))


def _rows_of(name: str, rows: int, seed: int = 3) -> torch.Tensor:
    """An input of what is exported, whose other sizes are fixed."""
    (x,) = SUBJECTS[name][1](random.Random(3))
    return torch.randn(rows, *x.shape[1:], generator=torch.Generator().manual_seed(seed))


class _Module(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(x)


class Soak:
    """Clients and the main thread; all that they do is drawn from generators of their own, so that a seed gives the same actions again."""

    def __init__(self, seed: int, clients: int, folder: str, patience: float) -> None:
        self.seed, self.clients = seed, clients
        self.beats = Beats(patience)
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.over = threading.Event()
        self.gate = threading.Condition()
        self.working, self.pausing = 0, False
        self.packages = Packages(folder)
        self.loaded = {name: deplo.load(self.packages.path(name)) for name in EXPORTED}
        self.shared = [Held(name, engine, k) for k, name in enumerate(SUBJECTS) for engine in ("dynamic", "direct") if name not in WITH_STATE]
        self.sizes: list[tuple[int, int]] = []  # resident bytes and compilations so far, when all was quiet

    # What a client does. Weights are about the time that each takes: a compilation takes hundreds of calls'.

    def call(self, rng: random.Random, own: list[Held]) -> None:
        rng.choice(self.shared).check(rng)

    def call_own(self, rng: random.Random, own: list[Held]) -> None:
        rng.choice(own).check(rng)

    def call_package(self, rng: random.Random, own: list[Held]) -> None:
        name = rng.choice(EXPORTED)
        with torch.no_grad():
            self.packages.call(name, self.loaded[name], rng)

    def load(self, rng: random.Random, own: list[Held]) -> None:
        self.packages.check(rng.choice(EXPORTED), rng)

    def train(self, rng: random.Random, own: list[Held]) -> None:
        rng.choice([held for held in self.shared if held.name in TRAINED and held.engine == "dynamic"]).train(rng)

    def write(self, rng: random.Random, own: list[Held]) -> None:
        held = rng.choice([held for held in own if isinstance(held.fn, nn.Module)])
        held.write(rng)
        held.check(rng)

    def compile(self, rng: random.Random, own: list[Held]) -> None:
        held = Held(rng.choice([*SUBJECTS]), rng.choice(["deplo", "own", "dynamic", "direct", "background"]), rng.randrange(1000))
        for _ in range(rng.randint(1, 4)):
            held.check(rng)
        own[rng.randrange(len(own))] = held

    def beside(self, rng: random.Random, own: list[Held]) -> None:
        held = Held(rng.choice([*SUBJECTS]), rng.choice(["eager", "aot_eager"]), rng.randrange(1000))
        held.check(rng)

    def reset(self, rng: random.Random, own: list[Held]) -> None:
        torch._dynamo.reset()

    def clear_caches(self, rng: random.Random, own: list[Held]) -> None:
        cache.clear(os.environ["DEPLO_CACHE_DIR"])
        core().trim_memory()
        if rng.random() < 0.3:
            core().forget_packed()

    def pressure(self, rng: random.Random, own: list[Held]) -> None:
        held = [torch.ones(rng.randint(4, 24) << 18) for _ in range(rng.randint(2, 6))]
        rng.choice(self.shared).check(rng)
        del held

    def refuse(self, rng: random.Random, own: list[Held]) -> None:
        """An index beyond the table is eager mode's error, and the next call is as before."""
        held = next(held for held in self.shared if held.name == "table")
        with torch.no_grad():
            try:
                held.call(torch.tensor([[1, 2, 3, 4, 5, 40 + rng.randrange(9)]]))
            except IndexError:
                held.check(rng)
                return
        raise WrongValue(f"{held}: an index beyond the table raised nothing")

    def set_threads(self, rng: random.Random, own: list[Held]) -> None:
        torch.set_num_threads(rng.choice([1, 2, 2, 3]))
        rng.choice(self.shared).check(rng)

    ACTIONS = {
        "call": 60, "call_own": 30, "call_package": 20, "load": 4, "train": 4, "write": 6, "compile": 1.5, "beside": 0.5, "reset": 0.03,
        "clear_caches": 0.3, "pressure": 1, "refuse": 1, "set_threads": 1,
    }  # fmt: skip

    # Threads

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Not while all is to be quiet."""
        with self.gate:
            while self.pausing:
                self.gate.wait()
            self.working += 1
        try:
            yield
        finally:
            with self.gate:
                self.working -= 1
                self.gate.notify_all()

    def client(self, k: int) -> None:
        who = f"client {k}"
        rng = random.Random(f"{self.seed} {k}")
        compile_without_limit()
        try:
            own = [Held(name, rng.choice(["deplo", "dynamic", "direct"]), k) for name in ("small", "cache", "images", "accumulate")]
            names, weights = zip(*self.ACTIONS.items(), strict=True)
            while not self.over.is_set() and not self.failed:
                name = rng.choices(names, weights)[0]
                with self.at_work():
                    self.beats.beat(who, name)
                    getattr(self, name)(rng, own)
                    self.counts[name] += 1
                self.beats.beat(who, "")
        except BaseException as error:
            self.fail(who, error)
        finally:
            self.beats.beat(who, "")

    def fail(self, who: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error)) if not isinstance(error, WrongValue) else f"WRONG: {error}"
        self.failed.append(f"{who}, at {self.beats.doing.get(who)!r}: {text}")
        print(f"{'WRONG' if isinstance(error, WrongValue) else 'ERROR'}: {self.failed[-1]}", file=sys.stderr, flush=True)

    def quiet(self) -> None:
        """Notes what the process holds when nobody works and nothing is compiled."""
        self.beats.beat("main", "waits for quiet")
        with self.gate:
            self.pausing = True
            while self.working:
                self.gate.wait(0.1)
        try:
            deplo.wait_compiled()
            # Keys of entries that direct calls made hold their graphs: they stay, and are few.
            self.sizes.append((settled_bytes(), self.compilations()))
        finally:
            with self.gate:
                self.pausing = False
                self.gate.notify_all()
            self.beats.beat("main", "")

    def compilations(self) -> int:
        return self.counts["compile"] + self.counts["beside"] + (self.counts["reset"] + len(self.sizes)) * 2 * len(self.shared)

    def fork(self, rng: random.Random) -> None:
        """A child calls what the parent compiled, and compiles something of its own; in a second kind the system gives it no more memory."""
        starved = rng.random() < 0.3
        sys.stderr.flush()
        # A child of a thread that forks while another one compiles finds PyTorch's locks taken for ever, whatever the backend.
        with _dynamo_lock, compile_lock, torch.cuda._initialization_lock:
            child = os.fork()
        if child == 0:
            code = 1
            try:
                for number in SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                torch.set_num_threads(1)  # OpenMP's workers do not survive a fork
                self.in_child(rng, starved)
                code = 0
            except BaseException as error:
                self.fail("forked child", error)
                sys.stderr.flush()
            finally:
                os._exit(code)
        self.beats.beat("main", f"waits for child {child} (starved: {starved})")
        until = time.monotonic() + self.beats.patience / 2
        while (waited := _wait(child))[0] == 0:
            if time.monotonic() > until:
                os.kill(child, signal.SIGABRT)  # faulthandler prints its stacks
                _wait(child, 0)
                raise WrongValue(f"a forked child hangs (starved: {starved})")
            time.sleep(0.005)
        self.beats.beat("main", "")
        if waited[1] != 0:
            raise WrongValue(f"a forked child ended with {waited[1]} (starved: {starved})")

    def in_child(self, rng: random.Random, starved: bool) -> None:
        for name in EXPORTED:
            with torch.no_grad():
                self.packages.call(name, self.loaded[name], rng)
        for held in rng.sample(self.shared, 2):
            held.check(rng)
        Held(rng.choice([*SUBJECTS]), "deplo", rng.randrange(1000)).check(rng)
        if starved:
            model, rows = self.loaded["long"], torch.zeros(80_000, 256)
            with open("/proc/self/statm") as file:
                now = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), now + (32 << 20)))
            try:
                model(rows)
            except (RuntimeError, MemoryError):
                pass
            else:
                raise WrongValue("80,000 rows fit into 32 MB")
            with torch.no_grad():
                self.packages.call("small", self.loaded["small"], rng)

    def main_thread(self, seconds: float) -> None:
        """Signals arrive here, and SIGINT now and then as a KeyboardInterrupt."""
        rng = random.Random(f"{self.seed} main")
        start = last_quiet = time.monotonic()
        interval = max(seconds / 12, 2.0)
        self.quiet()
        while time.monotonic() - start < seconds and not self.failed:
            what = rng.choices(["call", "fork", "interrupted", "sleep"], [10, 1, 10, 10])[0]
            self.beats.beat("main", what)
            if what == "call":
                self.call_package(rng, [])
            elif what == "fork":
                self.fork(rng)
            elif what == "sleep":
                time.sleep(rng.random() / 50)
            else:
                self.interrupted(rng)
            self.counts[f"main {what}"] += 1
            self.beats.beat("main", "")
            if time.monotonic() - last_quiet > interval:
                self.quiet()
                last_quiet = time.monotonic()

    def interrupted(self, rng: random.Random) -> None:
        name = rng.choice(EXPORTED)
        model = self.loaded[name]
        x = _rows_of(name, 3)
        with torch.no_grad():
            self.raising = True
            try:
                got = [model(x) for _ in range(rng.randint(1, 40))]
            except KeyboardInterrupt:
                self.counts["KeyboardInterrupt"] += 1
                return
            finally:
                self.raising = False
            eager, exact = self.packages.twins[name]
            for one in got:
                judge(f"{name} of a package, under signals", SUBJECTS[name][2], one, eager(x), exact(x.double()))

    raising = False

    def handle(self, number: int, frame: types.FrameType | None) -> None:
        self.counts[signal.Signals(number).name] += 1
        if number == signal.SIGINT and self.raising:
            self.raising = False
            raise KeyboardInterrupt

    def run(self, seconds: float) -> int:
        for number in SIGNALS:
            signal.signal(number, self.handle)
        threads = [threading.Thread(target=self.client, args=(k,), name=f"client {k}") for k in range(self.clients)]
        with self.beats:
            for thread in threads:
                thread.start()
            try:
                self.main_thread(seconds)
            except BaseException as error:
                self.fail("main", error)
            self.over.set()
            for thread in threads:
                thread.join()
            if not self.failed:
                self.quiet()
        print(json.dumps({"counts": dict(self.counts), "resident": self.sizes, "failed": self.failed}))
        return int(bool(self.failed))


def _wait(child: int, flags: int = os.WNOHANG) -> tuple[int, int]:
    pid, status = os.waitpid(child, flags)
    return pid, os.waitstatus_to_exitcode(status) if pid else 0


def main() -> int:
    parser = argparse.ArgumentParser("python -m soak.mixed", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--patience", type=float, default=120, help="seconds at one thing that are a hang")
    parser.add_argument("--folder", required=True, help="for packages")
    arguments = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    compile_without_limit()
    return Soak(arguments.seed, arguments.clients, arguments.folder, arguments.patience).run(arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
