"""Expressions of the command line: `torch.softmax(r(4, 8), -1)` as a function of its random inputs."""

from __future__ import annotations

import ast
import copy
import logging
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .errors import UserError


def _random(*shape: Any, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, **options)


def scope() -> dict[str, Any]:
    """The names that an expression may use: torch, F, nn, r (torch.randn) and the functions of torch."""
    names = {name: getattr(torch, name) for name in dir(torch) if not name.startswith("_") and callable(getattr(torch, name))}
    return {**names, "torch": torch, "F": torch.nn.functional, "nn": torch.nn, "r": _random}


class _Hoist(ast.NodeTransformer):
    """Takes `r(...)` and `nn.Layer(...)` out of the expression: the one becomes an argument, the other a module made once."""

    def __init__(self) -> None:
        self.inputs: list[ast.expr] = []
        self.modules: list[ast.expr] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "r":
            self.inputs.append(node)
            return ast.copy_location(ast.Name(f"x{len(self.inputs) - 1}", ast.Load()), node)
        is_layer = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "nn"
        if is_layer and isinstance(node.func, ast.Attribute) and node.func.attr[:1].isupper():
            self.modules.append(node)
            return ast.copy_location(ast.Name(f"module{len(self.modules) - 1}", ast.Load()), node)
        return self.generic_visit(node)


def parse_expression(text: str, seed: int = 0) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A function of one argument for each `r(...)` in `text`, and seeded random values for them. Raises UserError for bad syntax."""
    if not text.strip():
        raise UserError("-c got no expression: it takes one in Python, such as 'torch.softmax(r(4, 8), -1)'")
    try:
        tree = ast.parse(text.strip(), filename="<expression>", mode="eval")
    except SyntaxError as error:
        raise UserError(f"<expression>:{error.lineno}:{error.offset}: {error.msg}") from None
    hoist = _Hoist()
    body = hoist.visit(tree.body)
    names = scope()
    torch.manual_seed(seed)
    try:
        inputs = [_evaluate(node, names) for node in hoist.inputs]
        for index, node in enumerate(hoist.modules):
            names[f"module{index}"] = _evaluate(node, names).eval()
    except Exception as error:
        raise UserError(f"<expression>: {type(error).__name__}: {error}") from error
    arguments = ", ".join(f"x{i}" for i in range(len(inputs)))
    source = f"def expression({arguments}):\n    return {ast.unparse(body)}\n"
    exec(compile(source, "<expression>", "exec"), names)  # the user's own command line
    _try(names["expression"], inputs)
    return names["expression"], inputs


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an expression with its layers in float64."""
    names = {name: copy.deepcopy(value).double() if isinstance(value, torch.nn.Module) else value for name, value in function.__globals__.items()}
    return types.FunctionType(function.__code__, names)


def _try(function: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    """Runs it without data, so that a mistake is said in the expression's words and not in the compiler's."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # PyTorch logs what is raised here, too
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            function(*[mode.from_tensor(x) for x in inputs])
    except (DataDependentOutputException, DynamicOutputShapeException):
        return  # its shapes are known only with data
    except Exception as error:
        raise UserError(f"<expression>: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
    finally:
        logging.disable(level)


def _evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.fix_missing_locations(ast.Expression(node)), "<expression>", "eval"), names)
