"""Mutation testing: changes one place of a pass or a rule at a time and looks whether the tests notice.

    python scripts/mutants.py [--count 200] [--seed 0] [--jobs 2] [--folder build-mutants] [--only csrc/passes]

Works on a copy of the tree in `--folder` and goes on where it stopped. A mutant is killed by the first stage that fails or hangs: the C++ tests,
the golden files, then the Python tests of operators. Mutants that do not compile count for nothing. The last lines name the survivors; the exit
status is 1 where fewer than 90 % were killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WANTED = 0.9

# What decides whether a program is right. Cost models, sizes of tiles and printers are left out: there a change costs speed or looks.
SOURCES = ("csrc/analysis", "csrc/expr", "csrc/loop_ir", "csrc/lower", "csrc/passes", "csrc/scalar", "csrc/tensor_ir")
LEFT_OUT = re.compile(r"analysis/cost|/(print|text)\.cpp|contraction_sizes\.cpp|/gpu\w*\.cpp|vector_math")


@dataclasses.dataclass(frozen=True)
class Mutator:
    kind: str
    pattern: str
    replacement: str


MUTATORS = [
    Mutator("comparison", r" < ", " <= "),
    Mutator("comparison", r" > ", " >= "),
    Mutator("comparison", r" <= ", " < "),
    Mutator("comparison", r" >= ", " > "),
    Mutator("comparison", r" == ", " != "),
    Mutator("comparison", r" != ", " == "),
    Mutator("index", r" \+ ", " - "),
    Mutator("index", r" - ", " + "),
    Mutator("index", r" \* ", " + "),
    Mutator("index", r"\bfloordiv\(", "ceildiv("),
    Mutator("index", r"\bceildiv\(", "floordiv("),
    Mutator("index", r" - 1\b", " - 2"),
    Mutator("index", r" \+ 1\b", " + 2"),
    Mutator("combiner", r"\bmin\(", "max("),
    Mutator("combiner", r"\bmax\(", "min("),
    Mutator("combiner", r"\bCombiner::sum\b", "Combiner::max"),
    Mutator("combiner", r"\bCombiner::max\b", "Combiner::min"),
    Mutator("combiner", r"\bCombiner::min\b", "Combiner::max"),
    Mutator("combiner", r"\bFn::(add|mul|sub)\b", "Fn::div"),
    Mutator("combiner", r"\bany_of\(", "all_of("),
    Mutator("combiner", r"\ball_of\(", "any_of("),
    Mutator("guard", r" && ", " || "),
    Mutator("guard", r" \|\| ", " && "),
    Mutator("guard", r"\bif \(!", "if ("),
    Mutator("guard", r"\bif \((?!!|auto|const)", "if (!"),
    Mutator("guard", r"\breturn true;", "return false;"),
    Mutator("guard", r"\breturn false;", "return true;"),
    Mutator("guard", r"\bcontinue;", ";"),
]


@dataclasses.dataclass(frozen=True)
class Mutant:
    path: str
    line: int  # from 1
    column: int
    kind: str
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.kind}: {self.before.strip()} -> {self.after.strip()}"


def code_of(line: str) -> str:
    """The part of a line that is code: no comment, no string."""
    bare = re.sub(r'"(\\.|[^"\\])*"', lambda m: " " * len(m[0]), line)
    return bare.split("//")[0]


def all_mutants(root: Path, only: str) -> Iterator[Mutant]:
    for source in SOURCES:
        for path in sorted((root / source).rglob("*.cpp")):
            name = str(path.relative_to(root))
            if LEFT_OUT.search(name) or not name.startswith(only):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                code = code_of(line)
                if code.lstrip().startswith(("#", "template", "for (")) or "DEPLO_CHECK" in code or "fmt::" in code:
                    continue  # messages; and loops over containers, which only crash
                for mutator in MUTATORS:
                    for match in re.finditer(mutator.pattern, code):
                        after = re.sub(mutator.pattern, mutator.replacement, match[0])
                        yield Mutant(name, number, match.start() + 1, mutator.kind, match[0], after)


def chosen(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """As many of each kind, spread over the files."""
    rng = random.Random(seed)
    kinds = sorted({m.kind for m in mutants})
    piles = {kind: [m for m in mutants if m.kind == kind] for kind in kinds}
    for pile in piles.values():
        rng.shuffle(pile)
    picked: list[Mutant] = []
    while len(picked) < count and any(piles.values()):
        picked.extend(piles[kind].pop() for kind in kinds if piles[kind])
    return picked[:count]


class Workshop:
    """A copy of the tree with a build of its own."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.tree = folder.resolve() / "tree"
        self.jobs = jobs
        self.limits: dict[str, float] = {}
        python = ROOT / ".venv/bin/python"
        self.python = str(python if python.exists() else sys.executable)
        self.environment = os.environ | {"PYTHONPATH": str(self.tree), "DEPLO_CACHE_DIR": "off", "DEPLO_VERIFY": "1"}

    def prepare(self) -> None:
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, files.split("\0")):
            source, copy = ROOT / name, self.tree / name
            if source.is_file() and not (copy.exists() and copy.read_bytes() == source.read_bytes()):  # equal files keep their time: no rebuild
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, copy)
        configure = ["cmake", "-G", "Ninja", f"-DPython3_EXECUTABLE={self.python}", "-DCMAKE_BUILD_TYPE=Release", "-S", ".", "-B", "build"]
        subprocess.run(configure, cwd=self.tree, check=True, stdout=subprocess.DEVNULL)
        if not self.build():
            raise SystemExit("mutants: the unchanged tree does not build")
        for stage, command in self.stages():
            start = time.monotonic()
            if not self.passes(command, None):
                raise SystemExit(f"mutants: the unchanged tree fails stage '{stage}': {' '.join(command)}")
            self.limits[stage] = 60 + 4 * (time.monotonic() - start)
            print(f"unchanged tree: {stage} passes in {time.monotonic() - start:.0f} s", flush=True)

    def build(self) -> bool:
        return subprocess.run(["ninja", "-C", "build", "-j", str(self.jobs)], cwd=self.tree, capture_output=True, check=False).returncode == 0

    def stages(self) -> list[tuple[str, list[str]]]:
        pytest = [self.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", str(self.jobs)]
        return [
            ("C++ tests", ["bash", "scripts/test_cpp.sh", "build/tests/cpp/deplo_tests", str(self.jobs)]),
            ("golden files", [*pytest, "tests/ir"]),
            ("operators", [*pytest, "tests/python/test_rules_overloads.py", "tests/python/test_convolutions.py"]),
            ("cases", [*pytest, "tests/python/test_cases.py", "tests/python/test_core.py"]),
            ("samples", [*pytest, "tests/python/test_opinfo.py"]),
        ]

    def passes(self, command: list[str], limit: float | None) -> bool:
        try:
            done = subprocess.run(command, cwd=self.tree, env=self.environment, capture_output=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def judge(self, mutant: Mutant) -> str:
        """The stage that noticed the change, 'survived', or 'does not compile'."""
        path = self.tree / mutant.path
        text = path.read_text()
        lines = text.split("\n")
        line = lines[mutant.line - 1]
        start = mutant.column - 1
        lines[mutant.line - 1] = line[:start] + mutant.after + line[start + len(mutant.before) :]
        try:
            path.write_text("\n".join(lines))
            if not self.build():
                return "does not compile"
            for stage, command in self.stages():
                if not self.passes(command, self.limits[stage]):
                    return stage
            return "survived"
        finally:
            path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants that compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=ROOT / "build-mutants")
    parser.add_argument("--only", default="", help="files whose path begins so")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    options = parser.parse_args()

    everything = list(all_mutants(ROOT, options.only))
    order = chosen(everything, len(everything), options.seed)
    if options.list:
        for mutant in order[: options.count]:
            print(mutant.name)
        print(f"{len(everything)} places")
        return 0

    workshop = Workshop(options.folder, options.jobs)
    workshop.prepare()
    record = options.folder / "results.jsonl"
    known = {entry["name"]: entry["result"] for entry in map(json.loads, record.read_text().splitlines())} if record.exists() else {}
    results: dict[str, str] = {}
    with record.open("a") as out:
        for mutant in order:
            if sum(r != "does not compile" for r in results.values()) >= options.count:
                break
            result = known.get(mutant.name) or workshop.judge(mutant)
            results[mutant.name] = result
            if mutant.name not in known:
                out.write(json.dumps({"name": mutant.name, "result": result}) + "\n")
                out.flush()
                print(f"{result:16} {mutant.name}", flush=True)

    judged = {name: result for name, result in results.items() if result != "does not compile"}
    survivors = sorted(name for name, result in judged.items() if result == "survived")
    print(f"\n{len(judged)} mutants, {len(judged) - len(survivors)} killed ({1 - len(survivors) / max(1, len(judged)):.0%})")
    for name in survivors:
        print("  survived", name)
    return 0 if len(survivors) <= (1 - WANTED) * len(judged) else 1


if __name__ == "__main__":
    sys.exit(main())
