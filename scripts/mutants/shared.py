"""The file that tells all processes of a test which mutant is active, and notes which were reached; laid out as in mutant.h."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import time
from pathlib import Path

MOST = 4096


class Shared:
    def __init__(self, path: Path) -> None:
        if not path.exists() or path.stat().st_size != 4 + MOST:
            path.write_bytes(bytes(4 + MOST))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 4 + MOST)

    def activate(self, number: int) -> None:
        self.memory[0:4] = struct.pack("<i", number)

    def forget(self) -> None:
        self.memory[4:] = bytes(MOST)

    def asks(self, number: int) -> bool:
        """Whether the mutant is active; it is noted as reached."""
        self.memory[4 + number] = 1
        return bool(struct.unpack("<i", self.memory[0:4])[0] == number)

    def reached(self) -> list[int]:
        return [k for k, byte in enumerate(self.memory[4:]) if byte]


def wait(child: int, seconds: float) -> tuple[str, float]:
    """'passed', 'failed', or 'killed' (by a signal, or for taking too long), and the CPU seconds of `child`, which leads a process group.

    Time in which this process was stopped does not count.
    """
    pause = 0.002
    result = ""
    while not result:
        done, status, usage = os.wait4(child, os.WNOHANG if seconds > 0 else 0)
        if done:
            result = {0: "passed"}.get(status, "failed" if os.WIFEXITED(status) else "killed")
        else:
            before = time.monotonic()
            time.sleep(pause)
            seconds -= min(time.monotonic() - before, 2 * pause + 1)
            pause = min(pause * 1.5, 0.1)
        if done or seconds <= 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what a test left behind, or the test
    return result, usage.ru_utime + usage.ru_stime
