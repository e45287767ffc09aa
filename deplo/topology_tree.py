"""A machine as a tree of packages, memory nodes, caches and cores, and the steps that turn it into services (`remove`, `group`).

The tree is hwloc's, with what has one child and no memory left out. Trees are values: those that differ in the system's numbers
alone have one `key_of`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from .core import core
from .errors import UserError

SERVICE = "service"  # a node that one process is to run on
KINDS = ("machine", "package", "die", "group", "numa", "l3", "l2", "l1", "core", "pu")  # outermost first
_MOST_PROCESSORS = 8192
_SYNTHETIC_MEMORY = 1 << 30  # what hwloc gives each node of a text that names no size
_LEVEL = re.compile(r"\[?([A-Za-z]\w*)(?::(\d+))?(\([^()]*\))?\]?")
_NAMES = {"machine", "pack", "package", "socket", "die", "group", "numa", "numanode", "node", "core", "pu"}
_NAMES |= {f"{kind}{suffix}" for kind in ("l1", "l2", "l3", "l4", "l5", "l1i", "l2i", "l3i") for suffix in ("", "cache", "d", "u")}


@dataclasses.dataclass(frozen=True)
class Node:
    """A part of a machine and what is in it."""

    kind: str
    index: int = -1  # the system's number; -1: it has none
    bytes: int = 0  # of a cache, or of a memory node; 0: unknown
    children: tuple[Node, ...] = ()

    def of_kind(self, kind: str) -> Iterator[Node]:
        """All nodes of that kind below, and itself, in order."""
        if self.kind == kind:
            yield self
            return
        for child in self.children:
            yield from child.of_kind(kind)

    def numbers(self, kind: str) -> list[int]:
        """The system's numbers of these nodes."""
        return [node.index for node in self.of_kind(kind)]


def read_tree(synthetic: str = "", xml: str | os.PathLike[str] = "") -> Node:
    """The tree of this machine, of hwloc's synthetic text (`package:2 numa:4 l3:2 core:8 pu:2`), or of an XML file that `lstopo x.xml` wrote.

    Raises UserError for text and files that hwloc does not take, for machines without processors, and where libhwloc is missing.
    """
    path = os.fspath(xml)
    if synthetic:
        _check_synthetic(synthetic)
    if path and not os.path.isfile(path):
        raise UserError(f"{path}: no such file")
    root = json.loads(core().topology(synthetic, path))
    tree = _tidy(_node_of(root, bool(synthetic)))
    if not list(tree.of_kind("core")):
        raise UserError(f"{path or synthetic or 'this machine'}: the topology has no processors")
    return tree


def _check_synthetic(text: str) -> None:
    """Names what is wrong, which hwloc does not."""
    total = 1
    rest = text.strip()
    if not rest:
        raise UserError("the synthetic topology is empty; expected levels such as 'package:2 numa:2 l3:4 core:4 pu:2'")
    while rest:
        match = _LEVEL.match(rest)
        if match is None or (match.end() < len(rest) and not rest[match.end()].isspace() and match[0][-1] not in "])"):
            raise UserError(
                f"synthetic topology {text!r}: {rest.split()[0]!r} is no level; expected KIND:COUNT, as in 'package:2 numa:2 l3:4 core:4 pu:2'"
            )
        name, count = match[1].lower(), match[2]
        if name not in _NAMES:
            raise UserError(f"synthetic topology {text!r}: {match[1]!r} is no kind of level; known: package, die, group, numa, l3, l2, l1, core, pu")
        if count is None and not match[0].startswith("["):
            raise UserError(f"synthetic topology {text!r}: level {match[1]!r} has no count; expected {match[1]}:COUNT")
        if count is not None and int(count) < 1:
            raise UserError(f"synthetic topology {text!r}: level {match[0]!r} has no parts; counts start at 1")
        total *= int(count or 1)
        if total > _MOST_PROCESSORS:
            raise UserError(f"synthetic topology {text!r} has more than {_MOST_PROCESSORS} processors")
        rest = rest[match.end() :].lstrip()


def _has_memory(about: dict[str, Any]) -> bool:
    return bool(about["memory"]) or any(_has_memory(child) for child in about["children"])


def _node_of(about: dict[str, Any], synthetic: bool) -> Node:
    """hwloc hangs memory nodes beside what is near to them: here what is near is inside of them."""
    children = tuple(_node_of(child, synthetic) for child in about["children"])
    # Memory beside parts that have their own is an expander's; of several nodes in one place, the largest is the main one.
    if about["memory"] and not any(_has_memory(child) for child in about["children"]):
        main = max(about["memory"], key=lambda node: node["bytes"])
        size = 0 if synthetic and main["bytes"] == _SYNTHETIC_MEMORY else main["bytes"]
        children = (Node("numa", main["index"], size, children),)
    return Node(about["kind"], about["index"], about["bytes"], children)


def _tidy(node: Node) -> Node:
    """Without what tells nothing: caches of one core, groups of one part. Processors without a core get one."""
    children: list[Node] = []
    for child in map(_tidy, node.children):
        spliced = child.kind == "l1" or (child.kind in ("l2", "die", "group") and len(child.children) <= 1)
        children += child.children if spliced else [child]
    if node.kind != "core" and any(child.kind == "pu" for child in children):
        children = [Node("core", child.index, 0, (child,)) if child.kind == "pu" else child for child in children]
    return dataclasses.replace(node, children=tuple(child for child in children if child.kind == "pu" or child.children))


# Steps


def _rebuilt(node: Node, change: Callable[[Node, tuple[Node, ...]], tuple[Node, ...]]) -> Node:
    children = change(node, tuple(_rebuilt(child, change) for child in node.children))
    return dataclasses.replace(node, children=children)


def remove(tree: Node, kind: str, keep: int) -> Node:
    """The tree with at most the first `keep` nodes of that kind under each parent."""

    def change(_: Node, children: tuple[Node, ...]) -> tuple[Node, ...]:
        left = keep
        kept = []
        for child in children:
            left -= child.kind == kind
            if child.kind != kind or left >= 0:
                kept.append(child)
        return tuple(kept)

    return _rebuilt(tree, change)


def group(tree: Node, kind: str, size: int) -> Node | None:
    """The tree with each `size` neighbours of that kind in a service; None where their number is no multiple of it somewhere, or there are none."""
    if kind == tree.kind:
        return Node(SERVICE, children=(tree,)) if size == 1 else None
    fits = True

    def change(_: Node, children: tuple[Node, ...]) -> tuple[Node, ...]:
        nonlocal fits
        if not any(child.kind == kind for child in children):
            return children
        if len(children) % size or any(child.kind != kind for child in children):
            fits = False
            return children
        return tuple(Node(SERVICE, children=children[at : at + size]) for at in range(0, len(children), size))

    changed = _rebuilt(tree, change)
    return _lifted(changed) if fits and any(True for _ in changed.of_kind(SERVICE)) else None


def _lifted(node: Node) -> Node:
    """A service that is all of its parent takes the parent in: services are then written in one way."""
    children = tuple(_lifted(child) for child in node.children)
    if node.kind != SERVICE and len(children) == 1 and children[0].kind == SERVICE:
        return Node(SERVICE, children=(dataclasses.replace(node, children=children[0].children),))
    return dataclasses.replace(node, children=children)


@functools.lru_cache(maxsize=1 << 16)
def key_of(node: Node) -> str:
    """The same for trees that differ in the system's numbers and in the order of parts alone."""
    parts = sorted(key_of(child) for child in node.children)
    return hashlib.sha256(f"{node.kind} {node.bytes} {' '.join(parts)}".encode()).hexdigest()
