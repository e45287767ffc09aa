"""Torch IR text run by ATen, node by node: the meaning of the text, for tests that the import loses nothing.

Reads only the text and the arguments, as the core does.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import torch

_DTYPES = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
_CONSTANTS = {"true": True, "false": False, "none": None, "inf": float("inf"), "nan": float("nan")}
_WORDS = {name: getattr(torch, name) for name in ("strided", "channels_last", "channels_last_3d", "contiguous_format", "preserve_format")} | {
    "cpu": torch.device("cpu")
}


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets and strings."""
    parts, depth, start, quoted = [], 0, 0, False
    for i, char in enumerate(text):
        if char == '"' and text[i - 1] != "\\":
            quoted = not quoted
        if quoted:
            continue
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text.strip() else []


def _close(text: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        if text[i] == '"' and text[i - 1] != "\\":
            quoted = not quoted
        if not quoted:
            depth += (text[i] in "[(") - (text[i] in "])")
            if depth == 0:
                return i
    raise ValueError(f"no closing bracket in {text}")


class Program:
    """Runs one text; `run` takes the inputs in the order of the header and returns the outputs."""

    def __init__(self, text: str) -> None:
        head, *self.body = text.strip().split("\n")
        start = head.index("(")
        self.inputs = [part.split(":", 1) for part in _split(head[start + 1 : _close(head, start)])]

    def missing(self) -> str:
        return ""

    def images(self) -> dict[str, bytes]:
        return {}  # no machine code

    def run(self, arguments: list[Any], holders: int = 0) -> list[Any]:
        env: dict[str, Any] = dict(_CONSTANTS | _WORDS | _DTYPES)
        assert len(arguments) == len(self.inputs)
        for (name, kind), value in zip(self.inputs, arguments, strict=True):
            env[name] = value
            self._bind(kind.strip(), value, env)
        writes = []
        for line in map(str.strip, self.body):
            if line.startswith("write "):
                value, target = line[len("write ") :].split(" to ")
                writes.append((env[target], env[value]))
            elif line.startswith("return"):
                outputs = [_value(part, env) for part in _split(line[len("return") :])]
            else:
                self._node(line, env)
        for target, value in writes:
            target.copy_(value)
        return outputs

    def _bind(self, kind: str, value: Any, env: dict[str, Any]) -> None:
        if kind == "sym":
            assert isinstance(value, int)
            return
        dtype, shape = re.match(r"(\w+)\[(.*?)\]", kind).groups()
        assert value.dtype == _DTYPES[dtype]
        sizes = _split(shape)
        assert len(sizes) == value.ndim
        for size, actual in zip(sizes, value.shape, strict=True):
            if re.fullmatch(r"[a-z]+\d+", size):
                assert env.setdefault(size, actual) == actual
        for size, actual in zip(sizes, value.shape, strict=True):
            assert _value(size, env) == actual

    def _node(self, line: str, env: dict[str, Any]) -> None:
        call = re.search(r"(?:^|= )([\w.]+)\(", line)
        results = line[: call.start()]
        end = _close(line, call.end() - 1)
        assert re.fullmatch(r'( at "[^"]*")?( in "[^"]*")?', line[end + 1 :])
        keywords = dict(part.split("=", 1) for part in _split(line[call.end() : end]))
        namespace, packet, overload = call[1].split(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        arguments = {name: _value(text, env) for name, text in keywords.items()}
        if packet.startswith("as_strided"):  # Torch IR counts from the first element, ATen from the start of the storage
            arguments["storage_offset"] += arguments["self"].storage_offset()
        value = op(**arguments)
        values = value if isinstance(value, (tuple, list)) else [value]
        for text, item in zip(_split(results), values, strict=False):
            name, kind = text.split(":", 1)
            env[name] = item
            self._check(name, kind.strip(), item, env)

    def _check(self, name: str, kind: str, value: Any, env: dict[str, Any]) -> None:
        if kind == "none":
            return
        dtype, shape, strides = re.fullmatch(r"(\w+)\[(.*?)\] strides \[(.*?)\]", kind).groups()
        assert value.dtype == _DTYPES[dtype], (name, kind, value.dtype)
        assert [_value(s, env) for s in _split(shape)] == list(value.shape), (name, kind, value.shape)
        expected = [_value(s, env) for s in _split(strides)]
        wrong = [e != s for e, s, n in zip(expected, value.stride(), value.shape, strict=True) if n != 1]
        assert not any(wrong) or value.numel() == 0, (name, kind, value.stride())


def _value(text: str, env: dict[str, Any]) -> Any:
    text = text.strip()
    if text in env:
        return env[text]
    if text.startswith("["):
        return [_value(part, env) for part in _split(text[1:-1])]
    if text.startswith('"'):
        return json.loads(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        names = {key: value for key, value in env.items() if isinstance(value, (int, float))}
        return eval(text, {"min": min, "max": max}, names)


class Core:
    """Stands where `deplo._C` stands."""

    @staticmethod
    def compile(text: str, options: str) -> Program:
        json.loads(options)
        return Program(text)
