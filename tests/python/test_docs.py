"""The documentation is true: its IR is read, verified, printed, lowered and run; tables, code and the picture are those of the sources."""

from __future__ import annotations

import json
import re
from pathlib import Path

import plot
import private_torch
import pytest

from deplo.cli import main
from deplo.options import KEYS

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


def rows_of(file: str) -> list[list[str]]:
    lines = (ROOT / "docs" / file).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


def test_every_option_is_listed_with_its_variable():
    listed = {row[0].strip("`"): row[1].strip("`") for row in rows_of("options.md")}
    assert listed == {name: key.variable for name, key in KEYS.items()}


def test_every_command_is_listed_with_its_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = dict(re.findall(r"^    ([a-z-]+)\s+(\S.*)$", capsys.readouterr().out, re.MULTILINE))
    assert len(commands) > 5 and {row[0].strip("`"): row[1] for row in rows_of("cli.md")} == commands


def test_the_tutorial_shows_what_the_examples_run():
    for section in (ROOT / "docs/tutorial.md").read_text().split("\n## ")[1:]:
        (example,) = set(re.findall(r"^    python (examples/\w+\.py)$", section, re.MULTILINE))
        passages = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        assert passages and all(passage in (ROOT / example).read_text() for passage in passages), example


def test_the_picture_shows_the_recorded_run():
    rows = plot.rows_of_table((ROOT / "benchmarks/README.md").read_text())
    assert len(rows) >= 5 and all(len(row["rounds"]) >= 5 and {"eager", "deplo"} <= set(row["rounds"]) for row in rows)
    shown = [text.strip() for text in re.findall(r">([^<>]+)</text>", (ROOT / "docs/speeds.svg").read_text())]
    times = [
        plot.time_of(*seconds) for row in rows for _, seconds in sorted(row["rounds"].items(), key=lambda pair: list(plot.COLORS).index(pair[0]))
    ]
    assert [text for text in shown if re.fullmatch(r"[\d.]+ m?s", text)] == times
    assert {row["case"] for row in rows} <= set(shown)
