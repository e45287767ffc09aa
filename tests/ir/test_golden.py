"""Golden files: tests/ir/<level>/<pass>/*.ir, run through deplo_opt.

A file is a header, the input, and the text that must come out:

    // run: fuse_nests --hint s0=32
    <IR text>
    // expect:
    <IR text>

`run:` names passes and lowerings (lower_to_tile) in order, and options of deplo_opt; with no name the input is parsed,
verified and printed. Instead of `expect:`, bad IR carries `// error: <text>` at the end of the line at fault: deplo_opt
must fail with that text, and name that line if the message has a position.
DEPLO_BLESS=1 rewrites what is expected; CI refuses it.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(Path(__file__).parent.rglob("*.ir"))
EXPECT = "// expect:\n"
ERROR = re.compile(r"[ \t]*// error: (.*)$", re.MULTILINE)


def deplo_opt() -> Path:
    """The tool of the build that is tested: $DEPLO_BUILD, else build/."""
    return Path(os.environ.get("DEPLO_BUILD", ROOT / "build")) / "tools" / "deplo_opt"


@dataclass
class Golden:
    header: str
    arguments: list[str]
    source: str
    expected: str
    error: str
    error_line: int


def read(path: Path) -> Golden:
    header, _, body = path.read_text().partition("\n")
    match = re.fullmatch(r"// run:(.*)", header)
    assert match, f"{path}: the first line must be `// run: ...`"
    arguments: list[str] = []
    words = match.group(1).split()
    while words:
        word = words.pop(0)
        arguments += [word, words.pop(0)] if word.startswith("--") else ["--pass", word]
    source, _, expected = body.partition(EXPECT)
    fault = ERROR.search(source)
    line = source.count("\n", 0, fault.start()) + 1 if fault else 0
    return Golden(header, arguments, ERROR.sub("", source), expected, fault.group(1) if fault else "", line)


def run(source: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(deplo_opt()), "-", *arguments], input=source, capture_output=True, text=True, timeout=120, check=False)


def test_bless_is_off_in_ci() -> None:
    assert not (os.environ.get("CI") and os.environ.get("DEPLO_BLESS")), "CI must not rewrite what it checks"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(Path(__file__).parent)))
def test_golden(path: Path) -> None:
    assert deplo_opt().exists(), f"{deplo_opt()} is not built: run `make build`"
    golden = read(path)
    done = run(golden.source, golden.arguments)
    if golden.error:
        assert done.returncode != 0, "deplo_opt accepted bad IR"
        assert golden.error in done.stderr
        position = re.search(r"-:(\d+):\d+: ", done.stderr)
        assert position is None or int(position.group(1)) == golden.error_line, done.stderr
        return
    assert done.returncode == 0, done.stderr
    if os.environ.get("DEPLO_BLESS") and not os.environ.get("CI"):
        path.write_text(f"{golden.header}\n{golden.source}{EXPECT}{done.stdout}")
        return
    assert done.stdout == golden.expected
    if golden.arguments[:2] != ["--lower", "cuda"]:
        again = run(done.stdout, [])
        assert again.stdout == done.stdout, f"what was printed reads back as another module: {again.stderr}"
