"""Inputs that share memory. AOTAutograd's graphs read all inputs before they write one, so that calls whose inputs share memory with one
that is written run op by op, unless the graph was made for just that."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .core import core
from .errors import FallbackWarning, UnsupportedError
from .fx_import import storage_of
from .inputs import readable_name


class Places:
    """Which inputs of Dynamo's graph share storages when it is compiled, and where they lie in them."""

    def __init__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        storages = [storage_of(x) if isinstance(x, torch.Tensor) and torch._C._has_storage(x) else None for x in example_inputs]
        shared = [storage for storage in dict.fromkeys(storages) if storage is not None and storages.count(storage) > 1]
        self.groups = [1 + shared.index(storage) if storage in shared else 0 for storage in storages]  # 0: alone
        self.offsets = []
        for i, (node, x) in enumerate(zip(self.placeholders, example_inputs, strict=False)):
            fake = node.meta.get("example_value")
            if self.groups[i]:
                offset = fake.storage_offset() if isinstance(fake, torch.Tensor) else x.storage_offset()
                if not isinstance(offset, torch.SymInt):  # a symbol is passed at each call
                    self.offsets.append((i, offset))

    def name(self, i: int) -> str:
        return readable_name(str(self.placeholders[i].target))


def checked_call(
    gm: torch.fx.GraphModule, places: Places, compiled: Callable[..., Any], written: set[int], has_bases: bool, training: bool, strict: bool
) -> Callable[..., Any]:
    """`compiled` for calls whose inputs share no memory with those in `written`, else Dynamo's graph op by op.

    With `has_bases`, inputs of one storage have become views of one base. AOTAutograd writes their storage offsets into the graph, and Dynamo
    does not guard them: they must lie as they did. Views of one storage share its version, so that in `training` a write to one would make
    another stale that is kept for the gradient, though they have no element in common.
    """
    fixed = places.offsets if has_bases else []
    count = len(places.groups)
    find = core().AliasCheck([i in written for i in range(count)], places.groups if has_bases else [0] * count, training)

    def why_not(args: Sequence[Any]) -> str:
        for i, offset in fixed:
            if args[i].storage_offset() != offset:
                return f"inputs share memory, and input {places.name(i)} lies elsewhere in it than when the graph was compiled"
        if (pair := find(args)) is not None:
            return f"input {places.name(pair[0])}, which it writes, shares memory with input {places.name(pair[1])}"
        return ""

    told: set[str] = set()

    def call(*args: Any) -> Any:
        if not (why := why_not(args)):
            return compiled(*args)
        if strict:
            raise UnsupportedError(f"a call of a graph: {why}")
        if why not in told:
            told.add(why)
            warnings.warn(f"a call of a graph runs in eager mode: {why}", FallbackWarning, stacklevel=2)
        return gm(*args)

    return call
