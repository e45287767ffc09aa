"""The tests that judge mutants: how to run one, which mutants each reaches, and how long it takes."""

from __future__ import annotations

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

from shared import Shared

# What compiles small programs and judges their numbers; whole models and training would take longer than they find.
FILES = [
    "tests/ir",
    *(
        f"tests/python/test_{name}.py"
        for name in ("rules_overloads", "convolutions", "cases", "core", "dynamic", "mutation", "numerics", "operators")
    ),
    *(f"tests/python/test_{name}.py" for name in ("front_backend", "front_mixed", "front_schedules", "bad_input", "opinfo", "fuzz", "guard")),
]
OF_GPUS = re.compile("CUDA|NVRTC")  # these call compilers for every kernel, and their schedules are no mutants
SLOWEST = 60.0  # seconds of a test: longer ones are left out


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


def _limits(cpu_seconds: int) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))


class CppTests:
    """Test cases of the Catch2 binary, each in a process of its own."""

    def __init__(self, tree: Path, environment: dict[str, str], shared: Shared) -> None:
        self.binary = str(tree / "build/tests/cpp/deplo_tests")
        self.tree, self.environment, self.shared = tree, environment, shared
        listed = subprocess.run([self.binary, "--list-test-names-only"], capture_output=True, text=True, check=False).stdout
        self.names = [line for line in listed.splitlines() if line and not OF_GPUS.search(line)]
        self.at_import: list[int] = []

    def run(self, mutant: int, names: list[str], cpu_seconds: int, wall_seconds: float) -> tuple[str, str, float, list[int]]:
        self.shared.activate(mutant)
        self.shared.forget()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for name in names:
            command = [self.binary, "-a", re.sub(r'([][\\,"~*])', r"\\\1", name)]
            child = subprocess.Popen(
                command,
                cwd=self.tree,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=lambda: _limits(cpu_seconds),
            )
            try:
                status = child.wait(wall_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                child.wait()
                status = -9
            if status:
                return "failed" if status > 0 else "killed", name, 0.0, []
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return "passed", "", after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, self.shared.reached()


class PythonTests:
    """Tests of pytest by a server, which forks for each request."""

    def __init__(self, python: str, tree: Path, environment: dict[str, str], shared: Shared, path: Path, files: list[str], mutant: int = 0) -> None:
        self.current = path.with_name("current")
        here = Path(__file__).resolve().parent
        asked, self._requests = os.pipe()
        self._answers, answered = os.pipe()
        shared.activate(mutant)
        shared.forget()
        command = [python, "-m", "pytest", "-q", "-p", "pytest_server", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0"]
        command += [f"--mutants-server={asked},{answered},{path}", *files]
        environment = environment | {"PYTHONPATH": f"{tree}:{here}", "OMP_NUM_THREADS": "1"}
        log = path.with_name("pytest.log").open("w")
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

    def run(self, mutant: int, names: list[str], cpu_seconds: int, wall_seconds: float) -> tuple[str, str, float, list[int]]:
        request = {"mutant": mutant, "tests": names, "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds}
        os.write(self._requests, json.dumps(request).encode() + b"\n")
        answer = self._line(wall_seconds + 60)
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
