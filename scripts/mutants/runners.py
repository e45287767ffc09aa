"""The tests that judge mutants: how to run one, which mutants each reaches, and how long it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import resource
import select
import subprocess
from pathlib import Path
from typing import Any

from shared import Shared, wait

# What compiles small programs and judges their numbers; whole models and training would take longer than they find.
FILES = [
    "tests/ir",
    *(
        f"tests/python/test_{name}.py"
        for name in ("rules_overloads", "convolutions", "cases", "core", "dynamic", "mutation", "numerics", "operators", "sampling")
    ),
    *(f"tests/python/test_{name}.py" for name in ("front_backend", "front_mixed", "front_schedules", "bad_input", "opinfo", "fuzz", "guard")),
]
# What reads deplo/*.py as well.
PYTHON_FILES = [
    f"tests/python/test_{name}.py"
    for name in (
        *("aliases", "bad_input", "contract", "dtypes", "dynamic", "formulas", "front_backend", "front_import", "front_mixed"),
        *("mutation", "operators", "opinfo", "rules_overloads", "sampling", "strides", "training"),
    )
]
OF_GPUS = re.compile("CUDA|NVRTC")  # these call compilers for every kernel, and their schedules are no mutants


@dataclasses.dataclass
class Test:
    name: str
    seconds: float
    reached: frozenset[int]
    kills: int = 0

    @property
    def cost(self) -> float:
        """What comes first: cheap tests, and those that found much."""
        return (self.seconds + 0.02) / (1 + self.kills)


def allowance(seconds: float) -> float:
    """CPU seconds after which a test of `seconds` hangs."""
    return 3 + 6 * seconds


def patience(seconds: float) -> float:
    """Seconds after which tests of `seconds` hang that use no CPU, on a machine that does other work as well."""
    return 120 + 20 * seconds


class CppTests:
    """Test cases of the Catch2 binary, each in a process of its own."""

    def __init__(self, tree: Path, environment: dict[str, str], shared: Shared) -> None:
        self.binary = str(tree / "build/tests/cpp/deplo_tests")
        self.tree, self.environment, self.shared = tree, environment, shared
        listed = subprocess.run([self.binary, "--list-test-names-only"], capture_output=True, text=True, check=False).stdout
        self.names = [line for line in listed.splitlines() if line and not OF_GPUS.search(line)]

    def run(self, mutant: int, names: list[str], seconds: list[float]) -> tuple[str, str, float, list[int]]:
        self.shared.activate(mutant)
        self.shared.forget()
        spent = 0.0
        for name, expected in zip(names, seconds, strict=True):
            command = [self.binary, "-a", re.sub(r'([][\\,"~*])', r"\\\1", name)]
            null = subprocess.DEVNULL
            child = subprocess.Popen(command, cwd=self.tree, env=self.environment, stdout=null, stderr=null, process_group=0)
            limit = int(allowance(expected)) + 1
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(child.pid, resource.RLIMIT_CPU, (limit, limit + 5))
            result, used = wait(child.pid, patience(expected))
            child.returncode = 0  # it was waited for
            spent += used
            if result != "passed":
                return result, name, spent, []
        return "passed", "", spent, self.shared.reached()


class PythonTests:
    """Tests of pytest by a server, which forks for each request."""

    def __init__(self, python: str, tree: Path, environment: dict[str, str], shared: Shared, path: Path, files: list[str], mutant: int = 0) -> None:
        self.current = path.with_suffix(".current")
        here = Path(__file__).resolve().parent
        asked, self._requests = os.pipe()
        self._answers, answered = os.pipe()
        shared.activate(mutant)
        shared.forget()
        command = [python, "-m", "pytest", "-q", "-p", "pytest_server", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0"]
        command += [f"--mutants-server={asked},{answered},{path}", *files]
        environment = environment | {"PYTHONPATH": f"{tree}:{here}", "OMP_NUM_THREADS": "1"}
        log = path.with_suffix(".log").open("w")
        self.process = subprocess.Popen(command, cwd=tree, env=environment, stdout=log, stderr=log, pass_fds=[asked, answered])
        os.close(asked)
        os.close(answered)
        self._buffer = b""
        hello = self._line(600)
        self.alive = bool(hello)
        self.names: list[str] = hello["tests"] if hello else []
        self.at_import: list[int] = hello["at_import"] if hello else []

    def _line(self, seconds: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                return {}
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, mutant: int, names: list[str], seconds: list[float]) -> tuple[str, str, float, list[int]]:
        limits = [allowance(s) for s in seconds]
        request = {"mutant": mutant, "tests": names, "cpu_seconds": limits, "wall_seconds": patience(sum(seconds))}
        os.write(self._requests, json.dumps(request).encode() + b"\n")
        answer = self._line(4 * patience(sum(seconds)))
        if not answer:
            raise SystemExit("mutants: the server of the Python tests died")
        failed = self.current.read_text() if answer["result"] != "passed" and self.current.exists() else ""
        return answer["result"], failed, answer["seconds"], answer["reached"]

    def end(self) -> None:
        os.close(self._requests)
        os.close(self._answers)
        self.process.kill()
        self.process.wait()


def signature(tree: Path, name: str) -> str:
    """Changes where the test's file does."""
    path = tree / name.split("::")[0]
    texts = [path.read_bytes()] if "::" in name and path.exists() else [_cpp_file(tree, name)]
    golden = re.search(r"test_golden\[(.*)\]$", name)
    if golden:
        texts.append((tree / "tests/ir" / golden[1]).read_bytes())
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


@functools.cache
def _cpp_file(tree: Path, name: str) -> bytes:
    start = f'TEST_CASE("{name}"'.encode()
    return next((text for path in sorted((tree / "tests/cpp").glob("*.cpp")) if start in (text := path.read_bytes())), b"")
