"""Places where a mutant may be, and the text that carries original and mutant at once (mutant schemata)."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from pathlib import Path

# What decides whether a program is right. Cost models, sizes of tiles and printers are left out: there a change costs speed or looks.
SOURCES = ("csrc/analysis", "csrc/expr", "csrc/loop_ir", "csrc/lower", "csrc/passes", "csrc/scalar", "csrc/target/cpu/schedule", "csrc/tensor_ir")
LEFT_OUT = re.compile(r"analysis/cost|/(print|text)\.cpp|contraction_sizes\.cpp|vector_math")

# Binary operators, which clang-format sets between spaces, by how tightly they bind.
PRECEDENCE = {"*": 10, "/": 10, "%": 10, "+": 9, "-": 9, "<<": 8, ">>": 8, "<": 7, ">": 7, "<=": 7, ">=": 7, "==": 6, "!=": 6, "&": 5, "|": 3}
PRECEDENCE |= {"&&": 2, "||": 1}
LOOSE = {"=", "+=", "-=", "*=", "/=", "%=", "|=", "&=", "?", ":", "->"}
OPENERS = {"(": ")", "[": "]", "{": "}"}
CLOSERS = {close: opener for opener, close in OPENERS.items()}


@dataclasses.dataclass(frozen=True)
class Mutator:
    kind: str
    shape: str  # how the text is taken apart: operator, call, word, condition, negation, statement
    pattern: str
    replacement: str


MUTATORS = [
    Mutator(kind, shape, pattern, replacement)
    for kind, shape, rows in (
        ("comparison", "operator", {" < ": "<=", " > ": ">=", " <= ": "<", " >= ": ">", " == ": "!=", " != ": "=="}),
        ("index", "operator", {r" \+ ": "-", " - ": "+", r" \* ": "+"}),
        ("index", "call", {r"\bfloordiv\(": "ceildiv", r"\bceildiv\(": "floordiv"}),
        ("index", "word", {r"(?<= - )1\b": "2", r"(?<= \+ )1\b": "2"}),
        ("combiner", "call", {r"(?<!\.)\bmin\(": "max", r"(?<!\.)\bmax\(": "min"}),
        ("combiner", "word", {rf"\bCombiner::{old}\b": f"Combiner::{new}" for old, new in (("sum", "max"), ("max", "min"), ("min", "max"))}),
        ("combiner", "word", {r"\bFn::(add|mul|sub)\b": "Fn::div"}),
        ("combiner", "call", {r"\bany_of\(": "all_of", r"\ball_of\(": "any_of"}),
        ("guard", "operator", {" && ": "||", r" \|\| ": "&&"}),
        ("guard", "negation", {r"\bif \(!(?=\w)": ""}),
        ("guard", "condition", {r"\bif \((?!!|auto|const)": "!"}),
        ("guard", "statement", {r"\breturn true;": "return false;", r"\breturn false;": "return true;", r"\bcontinue;": ";"}),
    )
    for pattern, replacement in rows.items()
]


@dataclasses.dataclass(frozen=True)
class Mutant:
    path: str
    line: int  # from 1
    column: int
    kind: str
    before: str
    after: str
    source: str  # the line, which names the place when others above change
    start: int  # characters of the file that are replaced
    end: int
    mutated: str  # what stands there instead, with @ID@ for the number of the mutant

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.kind}: {self.before.strip()} -> {self.after.strip() or 'nothing'}"

    @property
    def key(self) -> str:
        """The name that survives changes elsewhere in the file."""
        return f"{self.path}: {self.source.strip()} [{self.column - len(self.source) + len(self.source.lstrip())}: {self.after.strip() or 'nothing'}]"


def masked(text: str) -> str:
    """The text with comments and strings as spaces, so that what remains is code at its place."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(r'//[^\n]*|/\*.*?\*/|R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', blank, text, flags=re.S)


def _partner(code: str, at: int) -> int:
    """The position of the bracket that belongs to the one at `at`."""
    step = 1 if code[at] in OPENERS else -1
    depth = 0
    for k in range(at, len(code) if step > 0 else -1, step):
        depth += (code[k] in OPENERS) - (code[k] in CLOSERS)
        if depth == 0:
            return k
    raise ValueError("a bracket without its partner")


def _left_operand(code: str, at: int, strength: int) -> int:
    """Where the operand begins that ends before the operator at `at`."""
    k = at - 1
    while k >= 0:
        c = code[k]
        if c in CLOSERS:
            k = _partner(code, k) - 1
        elif c in OPENERS or c in ";,":
            break
        elif c.isspace():
            word = re.search(r"(\S+)\s+$", code[max(0, k - 200) : k + 1])
            token = word[1] if word else ""
            if PRECEDENCE.get(token, 0) < strength:
                break
            k -= len(word[0]) if word else 1
            while k >= 0 and code[k].isspace():
                k -= 1
        else:
            k -= 1
    return k + 1 + len(code[k + 1 : at]) - len(code[k + 1 : at].lstrip())


def _right_operand(code: str, at: int, strength: int) -> int:
    """Where the operand ends that begins at `at`."""
    k = at
    while k < len(code):
        c = code[k]
        if c in OPENERS:
            k = _partner(code, k) + 1
        elif c in CLOSERS or c in ";,":
            break
        elif c.isspace():
            word = re.match(r"\s+(\S+)(?=\s)", code[k:])
            if word is None or PRECEDENCE.get(word[1], 0) <= strength:
                break
            k += len(word[0])
            k += len(code[k:]) - len(code[k:].lstrip())
        else:
            k += 1
    return k


TEST = "::deplo_mutant(@ID@)"


def _schema(text: str, code: str, mutator: Mutator, match: re.Match[str]) -> tuple[int, int, str] | None:
    """The range to replace and what stands there: both forms, chosen at run time. None where that is not known to work."""
    start, end = match.span()
    if mutator.shape == "operator":
        operator = match[0].strip()
        left = _left_operand(code, start, PRECEDENCE[operator])
        first = end + len(code[end:]) - len(code[end:].lstrip())
        right = _right_operand(code, first, PRECEDENCE[operator])
        a, b = text[left:start], text[first:right]
        if not a.strip() or not b.strip():
            return None
        return left, right, f"({TEST} ? ({a}) {mutator.replacement} ({b}) : ({a}) {operator} ({b}))"
    if mutator.shape == "call":
        close = _partner(code, end - 1)
        begin = start - len(re.search(r"[\w:]*$", code[:start])[0])  # type: ignore[index]
        prefix, arguments = text[begin:start], text[end - 1 : close + 1]
        return begin, close + 1, f"({TEST} ? {prefix}{mutator.replacement}{arguments} : {text[begin : close + 1]})"
    if mutator.shape == "word":
        begin = start - len(re.search(r"[\w:]*$", code[:start])[0])  # type: ignore[index]
        return begin, end, f"({TEST} ? {text[begin:start]}{mutator.replacement} : {text[begin:end]})"
    if mutator.shape == "negation":
        return end - 1, end, f"{TEST} != !"
    if mutator.shape == "condition":
        close = _partner(code, end - 1)
        condition = code[end:close]
        if ";" in condition or re.search(r" = ", condition):
            return None
        return end, close, f"{TEST} != static_cast<bool>({text[end:close]})"
    assert mutator.shape == "statement"
    return (
        start,
        end,
        f"{{ if ({TEST}) {{ {mutator.replacement} }} else {{ {match[0]} }} }}" if "return" in match[0] else f"{{ if (!{TEST}) continue; }}",
    )


def all_mutants(root: Path, only: str) -> Iterator[Mutant]:
    for source in SOURCES:
        for path in sorted((root / source).rglob("*.cpp")):
            name = str(path.relative_to(root))
            if LEFT_OUT.search(name) or not name.startswith(only):
                continue
            text = path.read_text()
            code = masked(text)
            offset = 0
            for number, (line, shown) in enumerate(zip(code.splitlines(keepends=True), text.splitlines()), 1):
                # Messages; and loops over containers, which only crash.
                passed_over = line.lstrip().startswith(("#", "template", "for (")) or "DEPLO_CHECK" in line or "fmt::" in line
                for mutator in () if passed_over else MUTATORS:
                    for match in re.compile(mutator.pattern).finditer(code, offset, offset + len(line)):
                        try:
                            schema = _schema(text, code, mutator, match)
                        except ValueError:
                            schema = None
                        if schema is None:
                            continue
                        start, end, mutated = schema
                        column = match.start() - offset + 1
                        yield Mutant(name, number, column, mutator.kind, match[0], mutator.replacement, shown, start, end, mutated)
                offset += len(line)


def shuffled(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """In the order in which they are drawn: the kinds take turns, the files are mixed."""
    rng = random.Random(seed)
    kinds = sorted({m.kind for m in mutants})
    piles = {kind: [m for m in mutants if m.kind == kind] for kind in kinds}
    for pile in piles.values():
        rng.shuffle(pile)
    picked: list[Mutant] = []
    while any(piles.values()):
        picked.extend(piles[kind].pop() for kind in kinds if piles[kind])
    return picked


def overlaps(a: Mutant, b: Mutant) -> bool:
    return a.path == b.path and a.start < b.end and b.start < a.end


def instrumented(text: str, mutants: list[tuple[int, Mutant]]) -> tuple[str, dict[int, list[int]]]:
    """The file with mutants in it, by number, and the lines of the result that belong to each."""
    cpp = mutants[0][1].path.endswith(".cpp")
    parts = ['#include "base/mutant.h"\n#line 1\n'] if cpp else []
    lines: dict[int, list[int]] = {}
    at = 0
    for number, mutant in sorted(mutants, key=lambda pair: pair[1].start):
        parts.append(text[at : mutant.start])
        # One line, so that what compilers say about a line means the same in both files.
        replaced = text[mutant.start : mutant.end]
        body = mutant.mutated.replace("@ID@", str(number))
        first = text.count("\n", 0, mutant.start) + 1
        last = first + replaced.count("\n")
        lines[number] = list(range(first, last + 1))
        body = re.sub(r"//[^\n]*" if cpp else r"#[^\n]*", "", body) if "\n" in body else body
        parts.append(body.replace("\n", " ") + "\n" * replaced.count("\n"))
        at = mutant.end
    parts.append(text[at:])
    return "".join(parts), lines
