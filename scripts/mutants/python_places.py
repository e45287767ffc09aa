"""The same of Python: places in `deplo/*.py`, by syntax trees. Both forms are one expression, or one statement, that asks the module `mutant`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from places import Mutant

# What decides whether a program is right: what comes between PyTorch and Torch IR, and between a program and its caller.
SOURCES = (
    "aliases",
    "backend",
    "decompositions",
    "eager_calls",
    "executable",
    "expression",
    "formulas",
    "fx_import",
    "fx_nodes",
    "fx_strides",
    "imported",
    "inputs",
    "mixed",
    "sizes",
    "strides",
)

COMPARISONS: dict[type[ast.AST], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
ARITHMETIC: dict[type[ast.AST], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+"}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}

TEST = "__import__('mutant').active(@ID@)"


class _Places(ast.NodeVisitor):
    """Mutants of one file, each as (node, kind, its text, the other form's)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[tuple[ast.expr | ast.stmt, str, str, str, bool]] = []

    def of(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ""

    def add(self, node: ast.expr | ast.stmt, kind: str, after: str, statement: bool = False) -> None:
        self.found.append((node, kind, self.of(node), after, statement))

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            kind = "guard" if isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)) else "comparison"
            self.add(node, kind, f"({self.of(node.left)}) {COMPARISONS[type(node.ops[0])]} ({self.of(node.comparators[0])})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC:
            self.add(node, "index", f"({self.of(node.left)}) {ARITHMETIC[type(node.op)]} ({self.of(node.right)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self.add(node, "guard", word.join(f"({self.of(value)})" for value in node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, "guard", f"bool({self.of(node.operand)})")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.add(node, "index", f"({self.of(node.operand)})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.add(node.test, "guard", f"not ({self.of(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add(node.test, "guard", f"not ({self.of(node.test)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            self.add(node.func, "combiner", CALLS[node.func.id])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self.add(node, "index", str(node.value + 1))

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Constant) and type(node.value.value) is bool:
            self.add(node.value, "guard", str(not node.value.value))
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "guard", "", statement=True)

    # What is no code that runs, or messages.
    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass


def python_mutants(root: Path, only: str) -> Iterator[Mutant]:
    """Places in the files whose path begins with `only`."""
    for source in SOURCES:
        path = root / "deplo" / f"{source}.py"
        name = str(path.relative_to(root))
        if not name.startswith(only):
            continue
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        places = _Places(text)
        places.visit(ast.parse(text))
        for node, kind, before, after, statement in places.found:
            # Columns of syntax trees count bytes.
            def offset(line: int, column: int) -> int:
                return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())  # noqa: B023

            start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno or 0, node.end_col_offset or 0)
            mutated = f"if not {TEST}: {before}" if statement else f"(({after}) if {TEST} else ({before}))"
            shown = lines[node.lineno - 1].rstrip("\n")
            yield Mutant(name, node.lineno, start - starts[node.lineno - 1] + 1, kind, before, after, shown, start, end, mutated)
