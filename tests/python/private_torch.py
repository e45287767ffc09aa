"""What of torch that is not public the files of deplo/ use, read from their syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = {"_as_it_was", "_deplo", "active", "expression", "generator", "is_Integer"}  # attributes of our own objects, of operators and of sympy


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def dotted(node: ast.expr) -> str:
    """`torch.ops.aten` of such a chain of attributes; of others the last name with a leading dot."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


class Uses(ast.NodeVisitor):
    """Gathers dotted names under torch with a private part, private attributes of other objects, keys of `node.meta`, names that getattr looks up."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and node.module.split(".")[0] == "torch" and any(map(is_private, node.module.split("."))):
            self.names |= {f"{node.module}.{alias.name}" for alias in node.names}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = dotted(node)
        if chain.startswith("torch."):
            if any(map(is_private, chain.split("."))) and not chain.startswith("torch.ops."):
                self.names.add(chain)
            return
        if is_private(node.attr) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "importer", "_C")) and node.attr not in OURS:
            self.names.add("." + node.attr)
        if isinstance(node.value, ast.Name) and node.value.id == "shape_env":
            self.names.add("ShapeEnv." + node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.value, ast.Attribute) and node.value.attr == "meta" and isinstance(node.slice, ast.Constant):
            self.names.add(f'meta["{node.slice.value}"]')
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        key = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if (
            isinstance(function, ast.Attribute)
            and function.attr == "get"
            and isinstance(function.value, ast.Attribute)
            and function.value.attr == "meta"
        ):
            self.names.add(f'meta["{key}"]')
        if isinstance(function, ast.Name) and function.id == "getattr" and isinstance(node.args[1], ast.Constant):
            name = node.args[1].value
            self.names |= set() if name in OURS or name.startswith("__") else {"." + name}
        self.generic_visit(node)


def uses() -> dict[str, set[str]]:
    """From each name to the files that use it."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "deplo").glob("*.py")):
        visitor = Uses()
        visitor.visit(ast.parse(path.read_text()))
        for name in visitor.names:
            found.setdefault(name, set()).add(path.name)
    return found
