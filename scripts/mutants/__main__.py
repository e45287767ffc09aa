"""Mutation testing: changes one place of a pass or a rule at a time and looks whether the tests notice.

    python scripts/mutants [--count 200] [--seed 0] [--jobs 2] [--benches 2] [--folder build-mutants] [--only csrc/passes | --only deplo/]

One copy of the tree in `--folder` holds all mutants at once; a number in a shared file says which one is active, so that there is one build.
Each test runs once without mutants, which tells how long it takes and which mutants it reaches; a mutant is then judged by the tests that
reach it, cheapest first, until one fails, crashes or hangs. What no test reaches has survived. Places that do not compile in two forms are
left out, another is drawn.
`equivalent.txt` lists mutants that change nothing that could be observed, each with the reason: others are drawn for them.
A run goes on where the last one stopped; `--again` judges survivors once more, after tests were added. The last lines name the survivors; the exit
status is 1 where fewer than 90 % were killed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from places import Mutant, all_mutants, instrumented, overlaps, shuffled
from python_places import python_mutants
from runners import FILES, PYTHON_FILES, CppTests, PythonTests, Test, signature
from shared import MOST, Shared

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WANTED = 0.9
BATCH = 10.0  # seconds of Python tests that one process runs


class Bench:
    """Where one mutant at a time is judged."""

    def __init__(self, shop: Workshop, number: int) -> None:
        self.shop = shop
        self.number = number
        self.path = shop.folder / f"bench{number}"
        self.shared = Shared(self.path)
        self.environment = os.environ | {
            "DEPLO_CACHE_DIR": "off", "DEPLO_VERIFY": "1", "DEPLO_MUTANTS": str(self.path), "DEPLO_BUILD": str(shop.tree / "build"),
        }  # fmt: skip
        self.cpp = CppTests(shop.tree, self.environment, self.shared)
        self.pytest = self.server()
        if not self.pytest.alive:
            raise SystemExit(f"mutants: pytest does not start, see {self.path.with_suffix('.log')}")

    def server(self, mutant: int = 0) -> PythonTests:
        return PythonTests(self.shop.python, self.shop.tree, self.environment, self.shared, self.path, self.shop.files, mutant)

    def wait_for_room(self) -> None:
        """All but the first bench work only while nobody else needs the machine."""
        while self.number and os.getloadavg()[0] > (os.cpu_count() or 1) + 0.75:
            time.sleep(10)


class Workshop:
    """A copy of the tree with mutants in it, its build, and the tests."""

    def __init__(self, folder: Path, jobs: int, files: list[str]) -> None:
        self.folder = folder.resolve()
        self.tree = self.folder / "tree"
        self.jobs = jobs
        self.files = files
        self.folder.mkdir(parents=True, exist_ok=True)
        python = ROOT / ".venv/bin/python"
        self.python = str(python if python.exists() else sys.executable)
        self.mutants: dict[int, Mutant] = {}
        self.tests: dict[str, Test] = {}

    # The copy and its build.

    def _write(self, path: Path, text: bytes) -> None:
        if not (path.exists() and path.read_bytes() == text):  # equal files keep their time: no rebuild
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)

    def copy(self, chosen: dict[int, Mutant]) -> dict[str, dict[int, list[int]]]:
        """Brings the copy up to date. Returns the lines of each file that belong to a mutant."""
        files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        by_file: dict[str, list[tuple[int, Mutant]]] = collections.defaultdict(list)
        for number, mutant in chosen.items():
            by_file[mutant.path].append((number, mutant))
        lines = {}
        for name in filter(None, files.split("\0")):
            source = ROOT / name
            if not source.is_file():
                continue
            text = source.read_bytes()
            if name in by_file:
                changed, lines[name] = instrumented(text.decode(), by_file[name])
                text = changed.encode()
            if name == "CMakeLists.txt" and (sources := [path for path in sorted(by_file) if path.endswith(".cpp")]):
                quoted = "\n  ".join(f"${{PROJECT_SOURCE_DIR}}/{path}" for path in sources)
                where = "TARGET_DIRECTORY deplo_core deplo_cpu_schedule"
                text += f"set_property(SOURCE\n  {quoted}\n  {where} APPEND PROPERTY COMPILE_OPTIONS -w)\n".encode()
            self._write(self.tree / name, text)
        self._write(self.tree / "csrc/base/mutant.h", (HERE / "mutant.h").read_bytes())
        return lines

    def build(self, order: list[Mutant], count: int) -> None:
        """Chooses `count` mutants of those in `order` that compile, and builds them all."""
        state = self.folder / "plan.json"
        plan: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {"numbers": {}, "refused": []}
        by_key = {mutant.key: mutant for mutant in order}
        refused = set(plan["refused"])
        numbers: dict[str, int] = {key: number for key, number in plan["numbers"].items() if key in by_key and key not in refused}
        while True:
            taken = [by_key[key] for key in numbers]
            free = iter(sorted(set(range(1, MOST)) - set(numbers.values())))
            for mutant in order:
                if len(numbers) >= count:
                    break
                if mutant.key in refused or mutant.key in numbers or any(overlaps(mutant, other) for other in taken):
                    continue
                numbers[mutant.key] = next(free)
                taken.append(mutant)
            chosen = {number: by_key[key] for key, number in numbers.items()}
            bad = self._compile(self.copy(chosen), chosen)
            for number in bad:
                refused.add(chosen[number].key)
                del numbers[chosen[number].key]
            state.write_text(json.dumps({"numbers": numbers, "refused": sorted(refused)}, indent=1))
            if not bad:
                self.mutants = {number: mutant for number, mutant in chosen.items() if list(numbers).index(mutant.key) < count}
                return

    def _compile(self, lines: dict[str, dict[int, list[int]]], chosen: dict[int, Mutant]) -> set[int]:
        """The mutants that do not compile; none: everything is built. Those of Python need no build but that of `make build`."""
        if all(mutant.path.endswith(".py") for mutant in chosen.values()):
            built = [ROOT / "build", *(ROOT / "deplo").glob("_C*.so")]
            for path in built:
                link = self.tree / path.relative_to(ROOT)
                link.unlink(missing_ok=True)
                link.symlink_to(path)
            return set()
        if not (self.tree / "build/build.ninja").exists():
            # The flags of `make build`: ccache then has all files without mutants.
            configure = ["cmake", "-G", "Ninja", f"-DPython3_EXECUTABLE={self.python}", "-DDEPLO_WERROR=ON", "-DCMAKE_BUILD_TYPE=Release"]
            configure += ["-S", ".", "-B", "build"]
            subprocess.run(configure, cwd=self.tree, check=True, stdout=subprocess.DEVNULL)
        done = subprocess.run(["ninja", "-C", "build", "-k", "0", "-j", str(self.jobs)], cwd=self.tree, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return set()
        bad: set[int] = set()
        for step in re.split(r"^FAILED: ", done.stdout, flags=re.MULTILINE)[1:]:
            places = [(match[1], int(match[2]), match[3]) for match in re.finditer(r"(csrc/[\w/]+\.cpp):(\d+):\d+: +(\w+)", step)]
            found: set[int] = set()
            for errors_only in (True, False):
                for name, line, what in places:
                    if not errors_only or what == "error":
                        found |= {number for number, own in lines.get(name, {}).items() if line in own}
                if found:
                    break
            bad |= found or {number for name, _, _ in places for number in lines.get(name, {})}
        if not bad:
            raise SystemExit(f"mutants: the copy does not build\n{done.stdout[-4000:]}")
        print("do not compile in two forms: " + "; ".join(chosen[number].name for number in sorted(bad)), flush=True)
        return bad

    # Tests.

    def measure(self, skip: str, slowest: float, benches: int) -> None:
        """Which mutants each test reaches, and how long it takes. C++ tests reach none of Python."""
        self.benches = [Bench(self, k) for k in range(benches)]
        first = self.benches[0]
        self.cpp_names = set(first.cpp.names if any(mutant.path.endswith(".cpp") for mutant in self.mutants.values()) else [])
        state = self.folder / "coverage.json"
        stamp = json.dumps(sorted((number, mutant.key) for number, mutant in self.mutants.items()))
        known: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {}
        known = known if known.get("stamp") == stamp else {"stamp": stamp, "tests": {}}
        start = time.monotonic()
        names = [name for name in (*sorted(self.cpp_names), *first.pytest.names) if not (skip and re.search(skip, name))]
        signs = {name: signature(self.tree, name) for name in names}

        def is_known(name: str) -> bool:
            entry = known["tests"].get(name, {})
            return entry.get("signature") == signs[name] and (entry["result"] != "killed" or entry["seconds"] > slowest)

        def one(bench: Bench, name: str) -> None:
            runner: CppTests | PythonTests = bench.cpp if name in self.cpp_names else bench.pytest
            result, _, seconds, reached = runner.run(0, [name], [slowest / 6])
            known["tests"][name] = {"signature": signs[name], "result": result, "seconds": seconds, "reached": reached}

        todo = [name for name in names if not is_known(name)]
        for k in range(0, len(todo), 100):
            self.share_out(todo[k : k + 100], one)
            state.write_text(json.dumps(known))
        left_out = 0
        for name in names:
            entry = known["tests"][name]
            if entry["result"] == "failed":
                print(f"left out, for it fails without mutants: {name}", flush=True)
            elif entry["result"] == "killed" or entry["seconds"] > slowest:
                left_out += 1
            else:
                self.tests[name] = Test(name, entry["seconds"], frozenset(entry["reached"]))
        total = sum(test.seconds for test in self.tests.values())
        print(f"{len(self.tests)} tests, {total:.0f} s, measured in {time.monotonic() - start:.0f} s; {left_out} slower ones left out", flush=True)

    def share_out(self, items: Iterable[Any], work: Callable[[Bench, Any], None]) -> None:
        """work(bench, item) for all items, by all benches."""
        waiting = collections.deque(items)
        errors: list[BaseException] = []

        def work_at(bench: Bench) -> None:
            try:
                while not errors:
                    bench.wait_for_room()
                    if not waiting:
                        return
                    work(bench, waiting.popleft())
            except IndexError:  # another bench took the last one
                return
            except BaseException as error:  # noqa: BLE001 (raised below)
                errors.append(error)

        threads = [threading.Thread(target=work_at, args=(bench,)) for bench in self.benches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def judge(self, bench: Bench, number: int, passed: set[str], budget: float) -> tuple[str, list[str]]:
        """What noticed the mutant, or nothing; and the tests that did not. `budget` bounds the seconds of tests."""
        at_import = number in bench.pytest.at_import
        order = sorted((t for t in self.tests.values() if (number in t.reached or at_import) and t.name not in passed), key=lambda t: t.cost)
        server = bench.pytest
        fresh: PythonTests | None = None
        missed: list[str] = []
        spent = 0.0
        try:
            while order and (not budget or spent < budget):
                is_cpp = order[0].name in self.cpp_names
                batch: list[Test] = []
                while order and (order[0].name in self.cpp_names) == is_cpp and (not batch or (not is_cpp and sum(t.seconds for t in batch) < BATCH)):
                    batch.append(order.pop(0))
                if at_import and not is_cpp and fresh is None:
                    fresh = server = bench.server(number)
                    if not fresh.alive:
                        return "import", missed
                runner: CppTests | PythonTests = bench.cpp if is_cpp else server
                result, failed, seconds, _ = runner.run(number, [t.name for t in batch], [t.seconds for t in batch])
                spent += seconds
                if result != "passed":
                    name = failed or batch[0].name
                    self.tests[name].kills += 1
                    return f"{name}{' (crashed or hung)' if result == 'killed' else ''}", missed
                missed += [t.name for t in batch]
        finally:
            if fresh is not None:
                fresh.end()
        return "", missed


def equivalents() -> set[str]:
    lines = (HERE / "equivalent.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith(("#", "  "))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants to judge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of the build")
    parser.add_argument("--benches", type=int, default=1, help="mutants judged at once; all but the first wait while the machine does other work")
    parser.add_argument("--folder", type=Path, default=ROOT / "build-mutants")
    parser.add_argument("--only", default="csrc/", help="files whose path begins so; deplo/ for those in Python")
    parser.add_argument("--budget", type=float, default=0, help="seconds of tests for a mutant; by default all that reach it")
    parser.add_argument("--files", default="", help="files and folders of Python tests, separated by commas")
    parser.add_argument("--slowest", type=float, default=60, help="seconds of a test: longer ones are left out")
    parser.add_argument("--skip", default="", help="regular expression: tests to leave out, where time is short")
    parser.add_argument("--again", action="store_true", help="judge survivors by tests that did not judge them yet, new and changed ones among them")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    options = parser.parse_args()

    of_python = options.only.startswith("deplo")
    everything = list((python_mutants if of_python else all_mutants)(ROOT, options.only))
    known_equivalent = equivalents()
    order = [mutant for mutant in shuffled(everything, options.seed) if mutant.key not in known_equivalent]
    if options.list:
        for mutant in order[: options.count]:
            print(mutant.name)
        print(f"{len(everything)} places")
        return 0

    workshop = Workshop(options.folder, options.jobs, options.files.split(",") if options.files else PYTHON_FILES if of_python else FILES)
    workshop.build(order, options.count)
    workshop.measure(options.skip, options.slowest, options.benches)
    record = workshop.folder / "results.jsonl"
    known = {entry["key"]: entry for entry in map(json.loads, record.read_text().splitlines())} if record.exists() else {}
    for entry in known.values():
        if (killer := entry["killed_by"].removesuffix(" (crashed or hung)")) in workshop.tests:
            workshop.tests[killer].kills += 1
    results: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def one(bench: Bench, number: int) -> None:
        mutant = workshop.mutants[number]
        entry = known.get(mutant.key)
        if entry is None or (options.again and not entry["killed_by"]):
            before = entry["passed"].items() if entry else ()
            passed = {name for name, sign in before if signature(workshop.tree, name) == sign}
            killed_by, missed = workshop.judge(bench, number, passed, options.budget)
            signs = {name: signature(workshop.tree, name) for name in [*passed, *missed]} if not killed_by else {}
            entry = {"key": mutant.key, "name": mutant.name, "killed_by": killed_by, "passed": signs}
            with lock, record.open("a") as out:
                out.write(json.dumps(entry) + "\n")
                shown = killed_by or f"survived {len(signs)} tests"
                print(f"[{len(results) + 1}/{len(workshop.mutants)}] {mutant.name}: {shown}", flush=True)
        results[mutant.key] = entry

    workshop.share_out(workshop.mutants, one)
    for bench in workshop.benches:
        bench.pytest.end()

    survivors = [mutant for mutant in workshop.mutants.values() if not results[mutant.key]["killed_by"]]
    print(f"\n{len(results)} mutants, {len(results) - len(survivors)} killed ({1 - len(survivors) / max(1, len(results)):.1%})")
    for mutant in survivors:
        print(f"  survived {len(results[mutant.key]['passed'])} tests: {mutant.name}\n    {mutant.key}")
    return 0 if len(survivors) <= (1 - WANTED) * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
