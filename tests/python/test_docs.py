"""The IR in the documentation is IR: it is read, verified, printed, read again and, where it is a whole program, lowered and run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import private_torch
import pytest

_C = pytest.importorskip("deplo._C")
ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("torch", "tensor", "loop", "tile", "kernel")
BLOCK = re.compile(rf"^```({'|'.join(LEVELS)})\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(path.name, level, text) for path in sorted((ROOT / "docs").glob("*.md")) for level, text in BLOCK.findall(path.read_text())]


@pytest.mark.parametrize(("file", "level", "text"), BLOCKS, ids=[f"{file}-{level}-{k}" for k, (file, level, _) in enumerate(BLOCKS)])
def test_examples_of_ir(file: str, level: str, text: str):
    as_read = json.dumps({"verify": True, "disable": ["share_calls"]} | ({} if level == "torch" else {"stop_after": f"lower_to_{level}"}))
    printed = _C.lower(text, level, as_read)
    assert _C.lower(printed, level, as_read) == printed, file
    for lower in LEVELS[LEVELS.index(level) + 1 :]:
        assert _C.lower(text, lower, '{"verify": true}')


def test_every_level_has_an_example():
    assert {level for _, level, _ in BLOCKS} == set(LEVELS)


def test_what_is_not_public_in_torch_is_listed():
    """docs/front.md names each, and the files that use it."""
    rows = [
        line.split(" | ") for line in (ROOT / "docs/front.md").read_text().split("| used | where | why |")[1].splitlines() if line.startswith("| `")
    ]
    assert all(len(row) == 4 and row[2].strip() and row[3].strip(" |") for row in rows)
    used = private_torch.uses()
    listed = {name: set(re.findall("`([^`]+)`", row[1])) for row in rows for name in re.findall("`([^`]+)`", row[0])}
    assert set(listed) == set(used)
    for row in rows:
        names = re.findall("`([^`]+)`", row[0])
        assert set(re.findall("`([^`]+)`", row[1])) == set().union(*(used[name] for name in names)), names
