"""The file that tells all processes of a test which mutant is active, and notes which were reached; laid out as in mutant.h."""

from __future__ import annotations

import mmap
import struct
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

    def reached(self) -> list[int]:
        return [k for k, byte in enumerate(self.memory[4:]) if byte]
