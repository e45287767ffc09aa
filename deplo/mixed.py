"""A graph of which deplo compiles a part: runs of calls that it can say in Torch IR become programs, the calls between them stay in ATen."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch

from .fx_import import BY_STORAGE, refusals
from .fx_nodes import packet_name, storage_of
from .graph_code import EagerGraph
from .inputs import count_returned
from .sizes import example_of


@dataclasses.dataclass
class Part:
    """Calls that become one program: a graph of their own, and the nodes of the whole graph that it reads and gives."""

    gm: torch.fx.GraphModule
    inputs: list[torch.fx.Node]
    outputs: list[torch.fx.Node]
    call: Callable[[list[Any]], Any] | None = None


class Mixed:
    """The steps of a graph in order: parts, and nodes that run in ATen."""

    def __init__(self, gm: torch.fx.GraphModule, steps: list[Part | torch.fx.Node], refused: dict[torch.fx.Node, str]) -> None:
        self.gm = gm
        self.steps = steps
        self.refused = refused
        self.parts = [step for step in steps if isinstance(step, Part)]
        self.placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.output = next(node for node in gm.graph.nodes if node.op == "output")
        self._dead = self._last_uses()

    @staticmethod
    def split(gm: torch.fx.GraphModule, target: str) -> Mixed | None:
        """Splits `gm` at the calls that Torch IR cannot say. Nothing if those are not what stands in the way, or if no call is left."""
        refused = refusals(gm, target)
        runs = _runs(gm, refused)
        if not any(isinstance(step, list) for step in runs) or not any(node.op == "call_function" for node in refused):
            return None
        if _reads_storage_of_parts(gm, runs):
            return None
        steps = [_extract(gm, step) if isinstance(step, list) else step for step in runs]
        # One of the results of a call goes with the call.
        calls = {node: why for node, why in refused.items() if node.op == "call_function" and node.target is not operator.getitem}
        return Mixed(gm, steps, calls)

    def boxed(self, saves: bool = False) -> Callable[[list[Any]], Any]:
        """The function for AOTAutograd; `saves` if some results are for a backward graph, which was traced with their strides."""

        def call(args: list[Any]) -> Any:
            values: dict[torch.fx.Node, Any] = dict(zip(self.placeholders, args, strict=True))
            args.clear()

            def result(node: torch.fx.Node) -> Any:
                return _as_traced(node, values[node]) if saves else values[node]

            for step, dead in zip(self.steps, self._dead, strict=True):
                if isinstance(step, Part):
                    assert step.call is not None
                    results = step.call([_as_traced(node, values[node]) for node in step.inputs])
                    values.update(zip(step.outputs, results, strict=True))
                else:
                    values[step] = self._run(step, values)
                for node in dead:
                    values.pop(node, None)
            return torch.fx.node.map_arg(self.output.args[0], result)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _run(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.gm)
        assert callable(node.target)
        return node.target(*torch.fx.node.map_arg(node.args, values.__getitem__), **torch.fx.node.map_arg(node.kwargs, values.__getitem__))

    def _last_uses(self) -> list[list[torch.fx.Node]]:
        """For each step the values that nothing after it reads."""
        seen = set(self.output.all_input_nodes)
        dead: list[list[torch.fx.Node]] = []
        for step in reversed(self.steps):
            reads = step.inputs if isinstance(step, Part) else step.all_input_nodes
            dead.append([node for node in reads if node not in seen])
            seen.update(reads)
        return dead[::-1]


def eager_as_traced(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A forward graph op by op, called like a compiled one, whose results for a backward graph are laid out as that was traced with."""
    eager = EagerGraph(gm)
    (output,) = gm.graph.find_nodes(op="output")
    nodes = list(output.args[0])
    saved = range(count_returned(nodes), len(nodes))

    def call(args: list[Any]) -> Any:
        results = list(eager(args))
        for i in saved:
            if isinstance(nodes[i], torch.fx.Node):
                results[i] = _as_traced(nodes[i], results[i])
        return results

    return call


def _as_traced(node: torch.fx.Node, value: Any) -> Any:
    """A result of ATen in the order of dimensions that the graph was traced with: some kernels give another one than PyTorch's shape rules say."""
    traced = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not isinstance(traced, torch.Tensor) or value.layout != torch.strided:
        return value
    # At the sizes of the first call: their order is the same for all. Sizes that depend on data have none.
    steps = [step for size in traced.stride() if (step := example_of(size)) is not None]
    if len(steps) < value.dim():
        return value
    order = sorted(range(value.dim()), key=lambda d: (steps[d], -d))
    wanted, size = [0] * value.dim(), 1
    for d in order:
        wanted[d] = size
        size *= max(value.shape[d], 1)
    same = all(given == step or extent == 1 for given, step, extent in zip(value.stride(), wanted, value.shape, strict=True))
    span = 1 + sum((extent - 1) * step for step, extent in zip(value.stride(), value.shape, strict=True))
    if same or span != value.numel():  # the latter has gaps or repeats, as views do
        return value
    return torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device).copy_(value)


def _is_tensor_call(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _runs(gm: torch.fx.GraphModule, refused: dict[torch.fx.Node, str]) -> list[list[torch.fx.Node] | torch.fx.Node]:
    """Lists of consecutive calls to compile, and single nodes to run in ATen. Numbers and constants are cheap: they do not end a list."""
    steps: list[list[torch.fx.Node] | torch.fx.Node] = []
    open_run: list[torch.fx.Node] | None = None
    home: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        parent = node.args[0] if node.target is operator.getitem else None
        if isinstance(parent, torch.fx.Node) and parent in home:
            home[parent].append(node)  # with the op whose result it is
            home[node] = home[parent]
        elif not _is_tensor_call(node):
            # A number may be made from a value of the open list: it comes after it.
            if any(source in home for source in node.all_input_nodes):
                open_run = None
            steps.append(node)
        elif node in refused or (isinstance(parent, torch.fx.Node) and parent in refused):
            open_run = None
            steps.append(node)
        else:
            if open_run is None:
                open_run = []
                steps.append(open_run)
            open_run.append(node)
            home[node] = open_run
    return _in_order(steps)


def _in_order(steps: list[list[torch.fx.Node] | torch.fx.Node]) -> list[list[torch.fx.Node] | torch.fx.Node]:
    """Numbers and constants that an open list reads stand after its start: they move in front of it, with what they are made of."""
    ordered: list[list[torch.fx.Node] | torch.fx.Node] = []
    for step in steps:
        at = len(ordered)
        if not isinstance(step, list) and not _is_tensor_call(step):
            sources = set(step.all_input_nodes)
            while at > 0:
                before = ordered[at - 1]
                made = set(before) if isinstance(before, list) else {before}
                if made & sources:
                    break
                at -= 1
        ordered.insert(at, step)
    return ordered


def _reads_storage_of_parts(gm: torch.fx.GraphModule, steps: list[list[torch.fx.Node] | torch.fx.Node]) -> bool:
    """Whether a call addresses a storage that another step makes: a part gives its results storages of their own, laid out as it likes."""
    if not any(packet_name(node) in BY_STORAGE for node in gm.graph.nodes):
        return False
    makers: dict[int, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor) and torch._C._has_storage(value):
            makers.setdefault(storage_of(value), node)
    for step in steps:
        for node in step if isinstance(step, list) else [step]:
            if packet_name(node) not in BY_STORAGE:
                continue
            source = node.args[0]
            assert isinstance(source, torch.fx.Node)
            maker = makers[storage_of(source.meta["val"])]
            if maker.op != "placeholder" and not (isinstance(step, list) and maker in step):
                return True
    return False


def _extract(gm: torch.fx.GraphModule, nodes: list[torch.fx.Node]) -> Part:
    inside = set(nodes)
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs = _inputs(gm, nodes)
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.node_copy(source)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [node for node in nodes if any(user not in inside for user in node.users) and node.meta.get("val") is not None]
    graph.output([copies[node] for node in outputs])
    return Part(torch.fx.GraphModule(gm, graph), inputs, outputs)


def _inputs(gm: torch.fx.GraphModule, nodes: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """What the nodes read from outside, and all symbols of the graph, since any size may use any of them."""
    inside = set(nodes)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt)]
    for node in nodes:
        inputs += [source for source in node.all_input_nodes if source not in inside and source not in inputs and source.op != "get_attr"]
    return inputs
