"""check_dumps.py FOLDER: every graph's dumps under FOLDER are complete (one file a pass, in order) and read back as what they show."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deplo.core import core

LEVELS = ("torch", "tensor", "loop", "tile", "kernel")


def expected_files() -> list[tuple[str, str]]:
    """(level, pass) of each file of one graph."""
    passes = core().passes()
    files = []
    for level in LEVELS:
        files.append((level, "import" if level == "torch" else "lower"))
        files += [(level, row["name"]) for row in passes if row["level"] == level]
    return files


def check(folder: Path) -> int:
    """Checks the dumps of one graph; how many there are. AssertionError says what is wrong."""
    files = sorted(folder.glob("*.ir"))
    disabled = sorted({row["name"] for row in core().passes()})
    shown = []
    before: dict[str, str] = {}
    for number, file in enumerate(files):
        place, level, rest = file.stem.split("_", 2)
        unchanged = rest.endswith("_unchanged")
        text = file.read_text()
        assert int(place) == number, f"{file}: number {number} is missing"
        assert unchanged == (before.get(level) == text), f"{file}: its mark does not say whether the text changed"
        shown.append((level, rest.removesuffix("_unchanged")))
        if before.get(level) != text:
            again = core().lower(text, level, json.dumps({"disable": disabled, "verify": True}), str(file))
            assert again == text, f"{file}: reads back as another module"
        before[level] = text
    assert shown == expected_files(), f"{folder}: {shown} are not the passes of the pipeline"
    return len(files)


def main() -> None:
    folders = sorted({file.parent for file in Path(sys.argv[1]).rglob("*.ir")})
    assert len(folders) >= int(sys.argv[2]), f"only {len(folders)} graphs were dumped"
    count = sum(check(folder) for folder in folders)
    print(f"dumps: {count} files of {len(folders)} graphs, complete, each read back")


if __name__ == "__main__":
    main()
