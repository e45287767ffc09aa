"""Symbolic sizes: sympy expressions of a ShapeEnv as text of deplo's integer expressions, with ranges and hints.

Nothing here may install a guard: expressions are read from `sym.node.expr`, never compared or converted by int() or bool().
"""

from __future__ import annotations

import contextvars
import functools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from .errors import UnsupportedError

_INT64_MAX = (1 << 63) - 1


def expr_of(size: int | torch.SymInt) -> sympy.Expr:
    """The sympy expression of a size, as it stands, but with a symbol for each number that floats round to (`is_derived`)."""
    return _with_derived(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def term_of(size: int | torch.SymInt) -> int | sympy.Expr:
    """What compares as `expr_of` does: an integer itself, for which sympy would take most of an import's time."""
    return _with_derived(size.node.expr) if isinstance(size, torch.SymInt) else int(size)


# Derived sizes: integers that deplo's expressions cannot say, as trunc(1.7 * s0). Python computes them at each call.

_ROUNDINGS = {"FloorToInt": "floor", "CeilToInt": "ceil", "TruncToInt": "int", "RoundToInt": "round"}
_meanings: dict[str, sympy.Expr] = {}


@functools.lru_cache(maxsize=1 << 14)
def _with_derived(expr: sympy.Expr) -> sympy.Expr:
    if not expr.args:
        return expr
    return expr.replace(
        lambda part: type(part).__name__ in _ROUNDINGS and _rounded_quotient(part) is None and _rounding(part) is not None, _symbol_for
    )


def _symbol_for(expr: sympy.Expr) -> sympy.Symbol:
    name = f"sr{zlib.crc32(str(expr).encode())}"
    # Symbols of one name differ from graph to graph in what is assumed of them: the text tells.
    if (known := str(_meanings.setdefault(name, expr))) != str(expr):
        raise UnsupportedError(f"the symbolic sizes {expr} and {known} have the same checksum")
    _meanings[name] = expr
    return sympy.Symbol(name, integer=True)


def is_derived(name: str) -> bool:
    return name in _meanings


def meanings(names: Iterable[str]) -> dict[str, sympy.Expr]:
    """What derived sizes stand for, with those that they are made of."""
    found: dict[str, sympy.Expr] = {}
    for name in names:
        if is_derived(name):
            found |= {name: _meanings[name], **meanings(str(symbol.name) for symbol in _meanings[name].free_symbols)}
    return found


def know_derived(found: Mapping[str, sympy.Expr]) -> None:
    """Takes what `meanings` gave in another process."""
    for name, expr in found.items():
        _meanings.setdefault(name, expr)


def sources(name: str) -> set[sympy.Symbol]:
    """The symbols that a derived size follows from; of another symbol, none."""
    found: set[sympy.Symbol] = set()
    for symbol in _meanings[name].free_symbols if is_derived(name) else ():
        found |= sources(symbol.name) or {symbol}
    return found


def _derived_text(name: str) -> str:
    """Python text of a derived size, in its sources."""
    text = _rounding(_meanings[name]) or ""
    return re.sub(r"\bsr\d+\b", lambda match: _derived_text(match[0]) if is_derived(match[0]) else match[0], text)


# Whether the caller drops Dynamo's guards, and hands calls of sizes 0 and 1 to a graph that was traced for 2 and more.
unguarded: contextvars.ContextVar[bool] = contextvars.ContextVar("deplo_unguarded", default=False)


def _range_of(symbol: sympy.Symbol, shape_env: Any) -> Any:
    if not is_derived(symbol.name):
        values = shape_env.var_to_range.get(symbol)
        return type(values)(0, values.upper) if values is not None and values.lower == 2 and unguarded.get() else values
    from torch.utils._sympy.value_ranges import bound_sympy

    meaning = _meanings[symbol.name]
    ranges = {part: values for part in meaning.free_symbols if (values := _range_of(part, shape_env)) is not None}
    return bound_sympy(meaning, ranges) if len(ranges) == len(meaning.free_symbols) else None


def _rounding(expr: sympy.Expr) -> str | None:
    """Python text of a float of sizes that is rounded to an integer; nothing where the order of PyTorch's operations is not known."""
    inner = _float(expr.args[0])
    return None if inner is None else f"{_ROUNDINGS[type(expr).__name__]}({inner})"


def _float(expr: sympy.Expr) -> str | None:
    kind = type(expr).__name__
    if expr.is_Float:
        return repr(float(expr))
    try:
        if kind == "ToFloat":
            return f"float({to_text(expr.args[0])})"
        if kind == "IntTrueDiv":
            return "(" + " / ".join(f"({to_text(arg)})" for arg in expr.args) + ")"
    except UnsupportedError:
        return None
    sign = "/" if kind == "FloatTrueDiv" else "*" if expr.is_Mul else "+" if expr.is_Add else ""
    parts = [_float(arg) for arg in expr.args]
    # Sums and products of three floats depend on an order that sympy does not keep.
    return None if not sign or len(parts) != 2 or None in parts else f"({parts[0]} {sign} {parts[1]})"


def derived(symbols: Sequence[str], names: Sequence[str]) -> Callable[..., tuple[int, ...]]:
    """A function from the values of `symbols`, in order, to those of the derived sizes `names`."""
    body = "".join(f"{_derived_text(name)}, " for name in names)
    return _function(f"lambda {', '.join(symbols)}: ({body})")


def _infix(operator: str) -> Callable[[Sequence[str]], str]:
    return lambda args: "(" + f" {operator} ".join(args) + ")"


def _call(name: str) -> Callable[[Sequence[str]], str]:
    def text(args: Sequence[str]) -> str:
        result = args[0]
        for arg in args[1:]:
            result = f"{name}({result}, {arg})"
        return result

    return text


# By class name: the classes move between torch's modules from version to version.
_FUNCTIONS: dict[str, Callable[[Sequence[str]], str]] = {
    "FloorDiv": _infix("//"),
    "CleanDiv": _infix("//"),
    "Mod": _infix("%"),
    "PythonMod": _infix("%"),
    "ModularIndexing": lambda a: f"(({a[0]} // {a[1]}) % {a[2]})",
    "Max": _call("max"),
    "Min": _call("min"),
    "Identity": lambda a: a[0],
}


def _rounded_quotient(expr: sympy.Expr) -> str | None:
    """floor, ceil or trunc of an integer quotient (trunc only where neither side can be negative)."""
    name = type(expr).__name__
    parts = _quotient(expr.args[0]) if name in ("FloorToInt", "CeilToInt", "TruncToInt") else None
    if parts is None:
        return None
    a, b = (_atom(part) for part in parts)
    if name == "CeilToInt":
        return _ceiling(*parts)
    if name == "TruncToInt" and not all(part.is_nonnegative for part in parts):
        return None
    return f"({a} // {b})"


def _ceiling(a: sympy.Expr, b: sympy.Expr) -> str:
    """The quotient rounded up, in the form that sizes of layers have where the divisor is positive."""
    left, right = _atom(a), _atom(b)
    return f"(({left} + {right} - 1) // {right})" if b.is_positive else f"(0 - (0 - {left}) // {right})"


def _quotient(expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """Integers a and b with a / b equal to a float, no rounding included."""
    if type(expr).__name__ == "IntTrueDiv":
        return expr.args[0], expr.args[1]
    if not expr.is_Mul or len(expr.args) != 2 or not expr.args[0].is_Float or type(expr.args[1]).__name__ != "ToFloat":
        return None
    factor, size = float(expr.args[0]), expr.args[1].args[0]
    if not 0 < factor < 1 << 20:
        return None
    a, b = factor.as_integer_ratio()
    # 1.5 or 0.25: the product of 20 bits and a size of up to 33 is exact. A factor like 0.1 would round.
    return (a * size, sympy.Integer(b)) if a < 1 << 20 and b < 1 << 20 else None


def number_text(value: int) -> str:
    """Raises UnsupportedError where it does not fit."""
    if not -_INT64_MAX - 1 <= value <= _INT64_MAX:
        raise UnsupportedError(f"the size {value} does not fit in 64 bits")
    return str(value)


def to_text(expr: sympy.Expr) -> str:
    """Text that csrc/expr parses to the same integer. Raises UnsupportedError for what it has no operator for."""
    if expr.is_Integer:
        return number_text(int(expr))
    if expr.is_Symbol:
        return str(expr.name)
    if expr.is_Add:
        return "(" + " + ".join(to_text(arg) for arg in expr.args) + ")"
    if expr.is_Mul:
        return "*".join(to_text(arg) if not arg.is_Integer or arg >= 0 else f"({arg})" for arg in expr.args)
    if expr.is_Pow and expr.exp.is_Integer and 0 < expr.exp <= 16:
        return "*".join([to_text(expr.base)] * int(expr.exp))
    if type(expr).__name__ == "PowByNatural" and expr.args[1].is_Integer and 0 < expr.args[1] <= 16:
        return "*".join([to_text(expr.args[0])] * int(expr.args[1]))
    if type(expr).__name__ == "CeilDiv":
        return _ceiling(*expr.args)
    if (function := _FUNCTIONS.get(type(expr).__name__)) is not None:
        return function([_atom(arg) for arg in expr.args])
    if (text := _rounded_quotient(expr)) is not None:
        return text
    raise UnsupportedError(f"the symbolic size {expr} uses {type(expr).__name__}, which deplo's expressions do not have")


def _atom(expr: sympy.Expr) -> str:
    text = to_text(expr)
    return f"({text})" if expr.is_Mul or expr.is_Pow else text


@functools.lru_cache(maxsize=1 << 12)
def outer_text(expr: sympy.Expr) -> str:
    """to_text without the parentheses around a whole sum."""
    text = to_text(expr)
    return text[1:-1] if expr.is_Add else text


def _bound(value: Any) -> str:
    return str(int(value)) if getattr(value, "is_Integer", False) and abs(int(value)) < _INT64_MAX else ""


def range_text(symbol: sympy.Symbol, shape_env: Any, least: int | None = None, most: int | None = None) -> str:
    """`2..4096`: the inclusive range that the guards of this graph allow, open where unbounded; or the part of it from `least`, or up to `most`."""
    values = _range_of(symbol, shape_env) if shape_env is not None else None
    if values is None:
        return ".."
    lower, upper = _bound(values.lower), _bound(values.upper)
    return f"{lower if least is None else least}..{upper if most is None else most}"


def may_be_small(symbol: sympy.Symbol, shape_env: Any, most: int) -> bool:
    """Whether the guards of this graph allow a size both 0 or 1 and more than `most`: Dynamo traces 0 and 1 apart unless it is told not to."""
    values = _range_of(symbol, shape_env) if shape_env is not None and not is_derived(symbol.name) else None
    return values is not None and bool(0 <= values.lower < 2 and values.upper > most)


def may_be_zero(expr: sympy.Expr, shape_env: Any) -> bool:
    """Whether the guards of this graph allow that `expr` is 0."""
    values = shape_env.bound_sympy(expr)
    return not (values.lower > 0 or values.upper < 0)


def facts(shape_env: Any, known: Iterable[str]) -> list[str]:
    """`a == b` for every equality of sizes of `known` symbols that the guards of this graph ensure. Nothing is added to the guards."""
    names = set(known)
    found: list[str] = []
    for guard in getattr(shape_env, "guards", None) or ():
        expr = guard.expr
        if not isinstance(expr, sympy.Eq) or not {str(symbol.name) for symbol in expr.free_symbols} <= names:
            continue
        try:
            text = f"{outer_text(expr.lhs)} == {outer_text(expr.rhs)}"
        except UnsupportedError:
            continue
        if expr.free_symbols and text not in found:
            found.append(text)
    return found


def is_zero(expr: sympy.Expr) -> bool:
    """Whether `expr` is 0 as it stands, whatever its symbols are."""
    return bool(sympy.expand(expr) == 0)


def is_dense(shape: Sequence[sympy.Expr], strides: Sequence[sympy.Expr]) -> bool:
    """Whether elements laid out so are provably one block of memory without gaps, in any order of the dimensions."""
    left = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1 and 0 not in shape]
    expected = sympy.Integer(1)
    while left:
        found = next((pair for pair in left if is_zero(pair[1] - expected)), None)
        if found is None:
            return False
        left.remove(found)
        expected = expected * found[0]
    return True


def _example(symbol: sympy.Symbol, shape_env: Any) -> Any:
    """What Dynamo saw for a symbol. The dict's name differs between torch versions."""
    for name in ("backed_var_to_val", "var_to_val"):
        values: Mapping[Any, Any] | None = getattr(shape_env, name, None) if shape_env is not None else None
        if values is not None:
            return values.get(symbol)
    return None


def hint_of(symbol: sympy.Symbol, shape_env: Any) -> int | None:
    """An example value; nothing for symbols that stand for data."""
    if is_derived(symbol.name):
        examples = {str(part.name): hint_of(part, shape_env) for part in sources(symbol.name)}
        return None if None in examples.values() else derived(list(examples), [symbol.name])(*examples.values())[0]
    value = _example(symbol, shape_env)
    return int(value) if getattr(value, "is_Integer", False) else None


def example_of(size: int | torch.SymInt) -> int | None:
    """The value at the sizes of the first call; nothing for sizes that stand for data."""
    if isinstance(size, int):
        return size
    examples = {symbol: hint_of(symbol, size.node.shape_env) for symbol in size.node.expr.free_symbols}
    value: Any = None if None in examples.values() else size.node.expr.xreplace({symbol: sympy.Integer(at) for symbol, at in examples.items()})
    return int(value) if getattr(value, "is_Integer", False) else None


def is_integer_symbol(symbol: sympy.Symbol, shape_env: Any) -> bool:
    """False for the ragged sizes of nested tensors, which are no integers at run time."""
    return type(_example(symbol, shape_env)).__name__ != "SingletonInt"


def unbound(symbols: Iterable[sympy.Symbol], known: set[str], given: Sequence[sympy.Expr]) -> list[str]:
    """The symbols whose values follow neither from `known` nor, one unknown at a time, from the sizes and strides `given`."""
    known = set(known)
    pending = [expr for expr in given if expr.free_symbols]
    progress = True
    while progress:
        progress = False
        for expr in pending:
            left = [symbol for symbol in expr.free_symbols if symbol.name not in known]
            if len(left) == 1 and _is_linear(expr, left[0]):
                known.add(str(left[0].name))
                progress = True
    return sorted(str(symbol.name) for symbol in symbols if symbol.name not in known)


def _is_linear(expr: sympy.Expr, symbol: sympy.Symbol) -> bool:
    expanded = sympy.expand(expr)
    factor = expanded.coeff(symbol, 1)
    return not factor.has(symbol) and factor != 0 and not (expanded - factor * symbol).expand().has(symbol)


def evaluator(symbols: Sequence[str], exprs: Sequence[sympy.Expr]) -> Callable[..., tuple[int, ...]]:
    """A function from the values of `symbols`, in order, to those of `exprs`."""
    body = ", ".join(to_text(e) for e in exprs)
    return _function(f"lambda {', '.join(symbols)}: ({body}{',' if exprs else ''})")


def _function(code: str) -> Callable[..., tuple[int, ...]]:
    names = {"min": min, "max": max, "int": int, "float": float, "floor": math.floor, "ceil": math.ceil, "round": round}
    function: Callable[..., tuple[int, ...]] = eval(code, {"__builtins__": {}, **names})  # text made above, of numbers and symbols
    return function
