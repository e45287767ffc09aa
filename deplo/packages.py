"""`deplo.load`: runs a file of `deplo.export` without tracing or compiling."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .core import core
from .errors import UserError
from .options import read_options
from .terminal import quantity

CHECKS = ("code", "quick", "full")
OPTIONS = ("features", "threads", "memory_limit", "guard")  # that a compiled program still reads


def load(path: str | os.PathLike[str], *, check: str = "quick", options: Mapping[str, Any] | None = None) -> Model:
    """The model of a package as a callable with the exported model's arguments and outputs.

    `check` says how constants are compared with what was written: `quick` by checksums that find damage, `full` by SHA-256, `code` not at all;
    everything else is always compared. `options` may have `features`, `threads`, `memory_limit` and `guard` of the backend's. Raises UserError that
    begins with the path for a file that is no package, of a newer format, truncated, damaged, or without code for this CPU. A package is code: load
    none of a source that you do not trust.
    """
    if check not in CHECKS:
        raise UserError(f"check is {check!r}, expected one of {', '.join(CHECKS)}")
    for name in options or {}:
        if name not in OPTIONS:
            raise UserError(f"option {name!r} is of compilations; load takes {', '.join(OPTIONS)}")
    return Model(os.fspath(path), check, options)


def read_manifest(path: str) -> dict[str, Any]:
    """What a package says of itself. Raises UserError like `load`."""
    manifest: dict[str, Any] = json.loads(core().package_manifest(path))
    return manifest


def describe(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of a name and its value: what people ask of a package."""
    yield "written by", f"deplo {manifest['deplo']}, torch {manifest['torch']}"
    yield "machine", manifest["machine"]
    for about in manifest["inputs"]:
        yield "input", _type_of(about) + (" (written)" if about.get("is_written") else "")
    for name, (low, high) in sorted(manifest["symbols"].items()):
        yield "symbol", f"{name} in {'' if low is None else low}..{'' if high is None else high}"
    for output in manifest["outputs"]:
        yield "output", repr(output["value"]) if output["kind"] == "constant" else f"{output['kind']} {output['index']}"
    for tensor in manifest["tensors"]:
        if tensor["is_written"]:
            yield "buffer", f"{tensor['name']}: {tensor['dtype']}{tensor['sizes']}"
    for variant in manifest["variants"]:
        places = {argument["tensor"] for argument in variant["arguments"] if "tensor" in argument}
        constants = sum(manifest["tensors"][place]["bytes"] for place in places)
        kernels = f"{len(variant['entries'])} kernels, {quantity(variant['code']['bytes'], 'B')} of code, {quantity(constants, 'B')} of constants"
        yield f"code for {variant['name']}", f"{kernels} ({' '.join(variant['features'])})"
        if variant["library"]:
            yield "  calls ATen's", ", ".join(variant["library"])


class Model:
    """A loaded package. Calls raise UserError for arguments of another structure, dtype or size than it was exported for; results carry no gradient.

    Any thread may call; calls that write the model's `buffers` wait for each other.
    """

    def __init__(self, path: str, check: str, options: Mapping[str, Any] | None) -> None:
        checked = read_options(None, options)
        package = core().Package(path, checked.features, check)
        manifest = json.loads(package.manifest())
        self.path = path
        self.features: str = package.variant()  # whose code runs
        self.buffers: dict[str, torch.Tensor] = {}  # those that calls write, by name
        self._program = package.program(checked.to_json())
        self._lock = threading.Lock()  # of calls that write buffers
        self._inputs: list[dict[str, Any]] = manifest["inputs"]
        self._outputs: list[dict[str, Any]] = manifest["outputs"]
        self._leaves: list[dict[str, Any]] = manifest["python"]["leaves"]
        self._in_spec = _spec(path, manifest["python"]["in_spec"])
        self._out_spec = _spec(path, manifest["python"]["out_spec"])
        self._keywords: list[str] = self._in_spec.children()[1].context
        tensors = manifest["tensors"]
        self._arguments: list[tuple[int | None, Any]] = []  # a place among the user's inputs, or a tensor
        for is_tensor, place in package.arguments():
            tensor = package.tensor(place) if is_tensor else None
            if tensor is not None and tensors[place]["is_written"]:
                tensor = self.buffers.setdefault(tensors[place]["name"], tensor.clone(memory_format=torch.preserve_format))
            self._arguments.append((None if is_tensor else place, tensor))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._given(args, kwargs)
        inputs = [tensor if place is None else given[place] for place, tensor in self._arguments]
        try:
            with self._lock if self.buffers else contextlib.nullcontext():
                results = self._program.run(inputs)
        except UserError as error:
            raise UserError(f"{self.path}: {self._with_symbols(str(error))}") from None
        outputs = [self._output(output, results, given) for output in self._outputs]
        return torch.utils._pytree.tree_unflatten(outputs, self._out_spec)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The inputs, in order, of a call."""
        if set(kwargs) == set(self._keywords):
            kwargs = {name: kwargs[name] for name in self._keywords}
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise UserError(f"{self.path}: the arguments are {_shown(spec)}, but the model was exported with {_shown(self._in_spec)}")
        given: list[Any] = [None] * len(self._inputs)
        for at, (leaf, value) in enumerate(zip(self._leaves, leaves, strict=True)):
            if "input" in leaf:
                wanted = self._inputs[leaf["input"]]
                if isinstance(value, torch.Tensor) != wanted["is_tensor"]:
                    raise UserError(f"{self.path}: input {wanted['name']} is a {type(value).__name__}, expected {_type_of(wanted)}")
                given[leaf["input"]] = value
            elif type(value) is not type(leaf["constant"]) or value != leaf["constant"]:
                raise UserError(f"{self.path}: argument {at} is {value!r}, but the model was exported with {leaf['constant']!r}, a part of its code")
        return given

    def _output(self, output: dict[str, Any], results: Sequence[Any], given: Sequence[Any]) -> Any:
        if output["kind"] == "constant":
            return output["value"]
        return (results if output["kind"] == "result" else given)[output["index"]]

    def _with_symbols(self, text: str) -> str:
        """A complaint about sizes with what its symbols are."""
        places: dict[str, str] = {}
        for about in self._inputs:
            for dim, size in enumerate(about.get("sizes", ())):
                places.setdefault(size, f"size {dim} of input {about['name']}")
            if not about["is_tensor"]:
                places.setdefault(about["value"], f"input {about['name']}")
        named = [f"{name} is the {places[name]}" for name in dict.fromkeys(re.findall(r"\b[su]\d+\b", text)) if name in places]
        return f"{text} ({', '.join(named)})" if named else text

    def __repr__(self) -> str:
        return f"deplo.load({self.path!r}): {', '.join(map(_type_of, self._inputs))}; code for {self.features}"


def _type_of(about: Mapping[str, Any]) -> str:
    return f"{about['name']}: {about['dtype']}[{', '.join(about['sizes'])}]" if about["is_tensor"] else f"{about['name']}: an integer"


def _spec(path: str, text: str) -> torch.utils._pytree.TreeSpec:
    try:
        return torch.utils._pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise UserError(f"{path} takes or gives a type that is not registered with torch.utils._pytree here: {error}") from None


def _shown(spec: torch.utils._pytree.TreeSpec) -> str:
    """Structure of arguments, a star for each value."""
    args, kwargs = torch.utils._pytree.tree_unflatten([_Star()] * spec.num_leaves, spec)
    return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]) or "none"


class _Star:
    def __repr__(self) -> str:
        return "*"
