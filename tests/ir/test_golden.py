"""Golden files: tests/ir/<level>/<pass>/*.ir, run through deplo_opt.

A file is a header, the input, and the text that must come out:

    // run: fuse_nests --hint s0=32
    <IR text>
    // expect:
    <IR text>

`run:` names passes and lowerings (lower_to_tile) in order, and options of deplo_opt; with no name the input is parsed,
verified and printed. Instead of `expect:`, bad IR carries `// error at 3: <text>` at the end of the line at fault: deplo_opt
must fail with that text and name that line and column; `// error: <text>` is for what is no fault of a line, as a schedule.
DEPLO_BLESS=1 rewrites what is expected; CI refuses it.

A folder tests/ir/<level>/<pass>/ holds at least one rewrite, one no-op (nothing_to_do*.ir) and one refusal (refuse*.ir or
keep*.ir: what the pass must leave, or must not do in full). Numbers before and after a pass are compared by the interpreters.
"""

import itertools
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from deplo.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(Path(__file__).parent.rglob("*.ir"))
EXPECT = "// expect:\n"
ERROR = re.compile(r"[ \t]*// error(?: at (\d+))?: (.*)$", re.MULTILINE)
INPUT = re.compile(r"%?([\w.]+): (?:(sym)|(\w+)\[([^\]]*)\])")
RANGE = re.compile(r"(\w+) in (\d*)\.\.\d*$")


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
    error_place: str


def read(path: Path) -> Golden:
    header, _, body = path.read_text().partition("\n")
    match = re.fullmatch(r"// run:(.*)", header)
    assert match, f"{path}: the first line must be `// run: ...`"
    arguments: list[str] = []
    words = shlex.split(match.group(1))
    while words:
        word = words.pop(0)
        is_flag = word == "--deterministic"
        arguments += [word] if is_flag else [word, words.pop(0)] if word.startswith("--") else ["--pass", word]
    source, _, expected = body.partition(EXPECT)
    fault = ERROR.search(source)
    place = f"-:{source.count(chr(10), 0, fault.start()) + 1}:{fault[1]}: " if fault and fault[1] else ""
    return Golden(header, arguments, ERROR.sub("", source), expected, fault[2] if fault else "", place)


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
        assert golden.error_place in done.stderr
        assert golden.error_place or not re.search(r"-:\d+:\d+: ", done.stderr), "say at which column: // error at COLUMN: ..."
        return
    assert done.returncode == 0, done.stderr
    if os.environ.get("DEPLO_BLESS") and not os.environ.get("CI"):
        path.write_text(f"{golden.header}\n{golden.source}{EXPECT}{done.stdout}")
        return
    assert done.stdout == golden.expected
    if golden.arguments[:2] != ["--lower", "cuda"]:
        again = run(done.stdout, [])
        assert again.stdout == done.stdout, f"what was printed reads back as another module: {again.stderr}"


def passes() -> list[tuple[str, str]]:
    done = subprocess.run([str(deplo_opt()), "--list"], capture_output=True, text=True, timeout=120, check=True)
    return sorted({(line.split("\t")[0], line.split("\t")[1]) for line in done.stdout.splitlines()})


@pytest.mark.parametrize(("level", "name"), passes() if deplo_opt().exists() else [], ids=lambda word: word)
def test_every_pass_has_a_rewrite_a_no_op_and_a_refusal(level: str, name: str) -> None:
    kinds = set()
    for path in (Path(__file__).parent / level / name).glob("*.ir"):
        golden = read(path)
        place = golden.arguments.index(name)
        before = run(golden.source, golden.arguments[: place - 1] + golden.arguments[place + 1 :])
        changes = before.stdout != golden.expected
        if path.stem.startswith("nothing_to_do"):
            assert not changes, f"{path}: {name} changes it"
            kinds.add("no-op")
        elif path.stem.startswith(("refuse", "keep")):
            kinds.add("refusal")
        else:
            assert changes, f"{path}: {name} leaves it"
            kinds.add("rewrite")
    assert kinds == {"rewrite", "no-op", "refusal"}


def test_every_lowering_has_golden_files() -> None:
    for level in ("tensor", "loop", "tile", "kernel"):
        assert len(list((Path(__file__).parent / level / f"lower_to_{level}").glob("*.ir"))) >= 1


def sizes_of(head: str) -> dict[str, int]:
    """Sizes of the symbols that are in their ranges and fulfil the facts behind `where`."""
    parts = [part.strip() for part in head.partition(" where ")[2].split(",") if part.strip()]
    lowest = {match[1]: int(match[2] or 2) for match in map(RANGE.match, parts) if match}
    facts = [part for part in parts if not RANGE.match(part)]
    choices = itertools.product(*[range(max(low, 5), low + 12) for low in lowest.values()])
    return next(sizes for sizes in (dict(zip(lowest, choice, strict=True)) for choice in choices) if all(eval(fact, {}, sizes) for fact in facts))


def random_inputs(text: str) -> list[torch.Tensor | int]:
    """Arguments of a text's program; small integers are in the range of whatever they index."""
    head = text.split("return")[0].partition("\n  ")[0]
    sizes = sizes_of(head)
    generator = torch.Generator().manual_seed(1)
    inputs: list[torch.Tensor | int] = []
    for name, symbol, dtype, shape in INPUT.findall(head.partition(" where ")[0]):
        extents = [int(eval(size, {}, sizes)) for size in shape.split(",") if size.strip()]
        if symbol:
            inputs.append(sizes[name])
        elif dtype.startswith("f") or dtype == "bf16":
            kind = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}[dtype]
            inputs.append(torch.rand(extents, generator=generator).to(kind))
        else:
            inputs.append(
                torch.randint(0, 2, extents, generator=generator).to(
                    {"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool}[dtype]
                )
            )
    return inputs


def interpreted(text: str, inputs: list[torch.Tensor | int]) -> list[torch.Tensor]:
    """The outputs, or none where the program divides by zero or PyTorch refuses a call."""
    from deplo.core import core

    try:
        return core().interpret(text, [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs], "exact")
    except UserError as error:
        assert str(error).endswith(("ZeroDivisionError", "division_by_zero"))
        return []
    except (IndexError, RuntimeError) as error:
        assert "Dimension out of range" in str(error) or "for index" in str(error), error
        return []


def is_program(path: Path) -> bool:
    """Whether interpreters run it: no kernels alone, no random numbers, no operator that PyTorch does not have."""
    golden = read(path)
    return golden.expected.startswith(("torch", "tensor", "program")) and not re.search(r"aten\.(rand|native_dropout)|custom\.", golden.source)


PROGRAMS = [path for path in FILES if is_program(path)]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(Path(__file__).parent)))
def test_numbers_before_and_after_are_equal(path: Path) -> None:
    golden = read(path)
    inputs = random_inputs(golden.source)
    before, after = interpreted(golden.source, inputs), interpreted(golden.expected, inputs)
    assert len(before) == len(after)
    for was, is_ in zip(before, after, strict=True):
        # Sums are formed in another order: at most as many roundings as there are elements in the inputs.
        bound = (4 + sum(x.numel() for x in inputs if isinstance(x, torch.Tensor))) * torch.finfo(torch.float64).eps
        torch.testing.assert_close(is_, was, rtol=bound, atol=bound, equal_nan=True)
