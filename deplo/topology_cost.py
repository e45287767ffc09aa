"""What a step of a language model costs on services of a machine: docs/topology.md derives the formulas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from .errors import UserError
from .topology_tree import SERVICE, Node

_JOBS = 6  # parallel jobs of one layer
_NEAR, _FAR = 0.8, 0.5  # share of a node's bandwidth that processors of another node, or of another package, get
_BARRIER = {"l3": 0.5e-6, "package": 1e-6, "machine": 2e-6}  # seconds for each doubling of the threads


@dataclasses.dataclass(frozen=True)
class Rates:
    """What parts of a machine do, in operations and bytes a second."""

    core_flops: float = 100e9
    node_bandwidth: float = 100e9  # reads of one memory node
    core_bandwidth: float = 20e9  # of one core
    l3_bandwidth: float = 60e9  # of the cores behind one of several last-level caches of a node
    near_link: float = 40e9  # between processes of one package
    far_link: float = 20e9  # between packages
    near_latency: float = 2e-6  # seconds of one exchange of an all-reduce
    far_latency: float = 4e-6


@dataclasses.dataclass(frozen=True)
class Model:
    """A dense decoder."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_width: int  # elements of K in one layer for one token; V has as many
    weight_bytes: float = 2.0  # of one parameter
    cache_bytes: float = 2.0  # of an element of the cache, and of activations

    @property
    def bytes(self) -> float:
        return self.parameters * self.weight_bytes

    def cache(self, tokens: float) -> float:
        """Bytes of keys and values of so many tokens."""
        return 2 * self.layers * self.kv_width * self.cache_bytes * tokens


SHAPES = {
    "qwen3-0.6b": Model("qwen3-0.6b", 0.596e9, 28, 1024, 1024),
    "tinyllama": Model("tinyllama", 1.1e9, 22, 2048, 256),
    "llama-3.2-1b": Model("llama-3.2-1b", 1.236e9, 16, 2048, 512),
    "qwen3-8b": Model("qwen3-8b", 8.19e9, 36, 4096, 1024),
    "llama-3.1-8b": Model("llama-3.1-8b", 8.03e9, 32, 4096, 1024),
    "llama-3.1-70b": Model("llama-3.1-70b", 70.6e9, 80, 8192, 1024),
}


def model_of(shape: str = "", parameters: float = 0, weight_bytes: float = 2.0) -> Model:
    """A known shape, or one of that many parameters: 12 layers hidden^2 of them, and hidden = 128 layers, as most decoders have."""
    if not weight_bytes > 0 or not math.isfinite(weight_bytes):
        raise UserError(f"{weight_bytes} bytes a weight: expected a number above 0, as 2 or 0.5")
    if shape:
        if shape not in SHAPES:
            raise UserError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}; or give the number of parameters")
        return dataclasses.replace(SHAPES[shape], weight_bytes=weight_bytes)
    if not parameters >= 1e6 or not math.isfinite(parameters):
        raise UserError(f"{parameters:g} parameters: expected a million or more, as 8e9")
    layers = max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
    hidden = 64 * max(1, round(math.sqrt(parameters / (12 * layers)) / 64))
    return Model(f"{parameters:g} parameters", parameters, layers, hidden, max(128, hidden // 4), weight_bytes)


@dataclasses.dataclass(frozen=True)
class Work:
    """What is served at once."""

    batch: int = 1  # sequences
    prompt: int = 128  # tokens of each
    generate: int = 128

    @property
    def context(self) -> float:
        """Cached tokens of a sequence, in the middle of its answer."""
        return self.prompt + self.generate / 2


@dataclasses.dataclass(frozen=True)
class Service:
    """What one process runs on."""

    processors: tuple[int, ...]  # the system's numbers
    cores: int
    nodes: tuple[int, ...]  # memory nodes by their place in the tree
    node_numbers: tuple[int, ...]  # the system's
    packages: tuple[int, ...]
    caches: int  # last-level caches
    bandwidth: float  # bytes a second that it reads while the others do
    memory: float  # bytes of its nodes, shared evenly among who is there; 0: unknown


def services_of(tree: Node, rates: Rates) -> list[Service]:
    """The services of a grouped tree. `tree` is what is left of the machine: who shares a memory node shares its bandwidth."""
    parts = list(tree.of_kind(SERVICE))
    found = [_places(tree, part, rates) for part in parts]
    demand: dict[int, float] = {}
    users: dict[int, int] = {}
    for places in found:
        for node, cap in places.caps.items():
            demand[node] = demand.get(node, 0.0) + cap
            users[node] = users.get(node, 0) + 1
    services = []
    for part, places in zip(parts, found, strict=True):
        local = sum(min(cap, rates.node_bandwidth * cap / demand[node]) for node, cap in places.caps.items())
        memory = [places.sizes[node] / users[node] for node in places.caps]
        services.append(
            Service(
                tuple(part.numbers("pu")),
                len(part.numbers("core")),
                tuple(places.caps),
                tuple(places.numbers),
                tuple(sorted(places.packages)),
                places.caches,
                local * _reach(places.package_of),
                0.0 if 0 in memory else sum(memory),
            )
        )
    return services


@dataclasses.dataclass
class _Places:
    caps: dict[int, float]  # by memory node: bytes a second that the cores there take
    numbers: list[int]
    sizes: dict[int, int]
    package_of: dict[int, int]
    caches: int
    packages: set[int]


def _places(tree: Node, part: Node, rates: Rates) -> _Places:
    """Where the cores of a service are."""
    places = _Places({}, [], {}, {}, 0, set())
    mine = {id(core) for core in part.of_kind("core")}
    package_of = {id(core): number for number, package in enumerate(tree.of_kind("package")) for core in package.of_kind("core")}
    for at, node in enumerate(list(tree.of_kind("numa")) or [tree]):
        caches = list(node.of_kind("l3")) or [node]
        counts = [count for cache in caches if (count := sum(id(core) in mine for core in cache.of_kind("core")))]
        if not counts:
            continue
        limit = rates.l3_bandwidth if len(caches) > 1 else math.inf
        places.caps[at] = sum(min(limit, count * rates.core_bandwidth) for count in counts)
        places.numbers += [node.index] if node.kind == "numa" else []
        places.sizes[at] = node.bytes if node.kind == "numa" else 0
        homes = {package_of.get(id(core), 0) for core in node.of_kind("core")}
        places.package_of[at] = min(homes)  # one node of several packages is as far from either
        places.packages |= {package_of.get(id(core), 0) for core in node.of_kind("core") if id(core) in mine}
        places.caches += len(counts)
    return places


def _reach(package_of: dict[int, int]) -> float:
    """The share of the nodes' bandwidth that is left where a process's pages lie on all of its nodes in turn."""
    nodes = len(package_of)
    time = 0.0
    for package in package_of.values():
        near = sum(other == package for other in package_of.values()) - 1
        time += (1 + near / _NEAR + (nodes - 1 - near) / _FAR) / nodes
    return nodes / time


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of one step of all sequences, and where they go."""

    memory: float
    compute: float
    synchronize: float
    reduce: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.compute) + self.synchronize + self.reduce


def cost(services: Sequence[Service], parallel: int, phase: str, model: Model, work: Work, rates: Rates) -> Cost | None:
    """A step of `phase` (prefill: all prompts; decode: a token of each) on services of which each `parallel` neighbours hold one copy of the model.

    None where it does not fit into their memory.
    """
    copies = len(services) // parallel
    sequences = math.ceil(work.batch / copies)
    tokens = sequences * (work.prompt if phase == "prefill" else 1)
    worst: Cost | None = None
    for at in range(0, len(services), parallel):
        team = services[at : at + parallel]
        share = (model.bytes + model.cache(sequences * (work.prompt + work.generate))) / parallel
        if any(service.memory and service.memory < share for service in team):
            return None
        found = _team_cost(team, phase, sequences, tokens, model, work, rates)
        worst = found if worst is None or found.seconds > worst.seconds else worst
    return worst


def _team_cost(team: Sequence[Service], phase: str, sequences: int, tokens: int, model: Model, work: Work, rates: Rates) -> Cost:
    size = len(team)
    flops = 2 * model.parameters * tokens
    read = model.bytes
    if phase == "prefill":
        flops += 2 * model.layers * model.hidden * tokens * work.prompt  # scores and weighted values of the half that is not masked
    else:
        flops += 4 * model.layers * model.hidden * tokens * work.context
        read += model.cache(sequences * work.context)
    memory = max(read / size / service.bandwidth for service in team)
    compute = max(flops / size / (service.cores * rates.core_flops) for service in team)
    synchronize = max(model.layers * _JOBS * _barrier(service) for service in team)
    return Cost(memory, compute, synchronize, 2 * model.layers * _all_reduce(team, tokens * model.hidden * model.cache_bytes, rates))


def _barrier(service: Service) -> float:
    scope = "machine" if len(service.packages) > 1 else "l3" if service.caches <= 1 else "package"
    return _BARRIER[scope] * math.ceil(math.log2(len(service.processors))) if len(service.processors) > 1 else 0.0


def _all_reduce(team: Sequence[Service], size: float, rates: Rates) -> float:
    """Each process sums its part of what all have, and reads the other parts."""
    count = len(team)
    if count == 1:
        return 0.0
    far = len({package for service in team for package in service.packages}) > 1
    latency, link = (rates.far_latency, rates.far_link) if far else (rates.near_latency, rates.near_link)
    return 2 * latency * math.ceil(math.log2(count)) + 2 * (count - 1) / count * size / link
