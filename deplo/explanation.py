"""`deplo.explain`: what became of a model: kernels, library calls with their reasons, memory, cache, times."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .backend import Record, collect_records, compile_with
from .calibration import calibration
from .capture import sum_of, unwrapped_errors
from .core import core
from .errors import Error, UserError
from .measure import Machine, measure_machine
from .options import Options, read_options
from .targets import Target, find_target
from .terminal import quantity, seconds, show_table, table_text
from .tier import settle

_CALL = re.compile(
    r"  %(?P<value>\w+): .*= \w+\.(?P<op>\w+)[\w.]*\(.*\)"
    r'(?: at "(?P<source>[^"]*)")?(?: in "(?P<module>[^":]*)(?::(?P<function>[^"]*))?")?$'
)
NO_GRAPH = (
    "no graph: Dynamo found no tensor operation that it hands to a backend; either there is none, or PyTorch runs the function in eager mode"
    " (sparse and quantised inputs, code that it cannot trace: torch.compile with fullgraph=True says why)"
)
_KERNEL_COLUMNS = ("kernel", "runs", "implements", "flops", "bytes", "estimate", "time", "of limit", "tuned")


@dataclasses.dataclass
class KernelReport:
    """One kernel of a program: what it implements, what it costs, and what a call of the program spends in it."""

    name: str
    implements: list[str]  # ATen calls and the user's: "addmm:addmm_1 of linear"
    schedule: str
    flops: float  # of all its runs in one call of the program, as are bytes and seconds
    bytes: float
    calls: int  # how often one call of the program runs it
    seconds: float  # 0 if it was not measured
    once: bool  # it packs weights: it runs again only when they change
    tuned_seconds: float = 0.0  # of the kernel alone by a schedule that a search found, which it has; 0: it has that of heuristics
    usual_seconds: float = 0.0  # the same by the schedule of heuristics, measured in turns with it
    estimated: float = 0.0  # seconds as `seconds`, by the target's model of the schedule on this machine; 0: it has none

    def user_calls(self, origin: Mapping[str, str]) -> list[str]:
        """What the user called, each once, by `origins`."""
        values = [part.partition(" of ")[0].partition(":") for part in self.implements]
        return list(dict.fromkeys(origin.get(value, op) for op, _, value in values))

    def limit(self, machine: Machine) -> float:
        """Seconds that its operations and bytes take at least where nothing comes from a cache."""
        return max(self.flops / machine.flops, self.bytes / machine.bandwidth)

    def share_of_limit(self, machine: Machine) -> float | None:
        """Of the machine's peak or its memory's bandwidth. None if not timed, or if faster: caches and bf16 dot products have limits of their own."""
        if self.once or not self.seconds:
            return None
        share = self.limit(machine) / self.seconds
        return share if share <= 1 else None


@dataclasses.dataclass
class GraphReport:
    """One compiled graph. `description` is what the core says of it, with the memory plan and the cache."""

    kind: str
    ops: int
    torch_ir: str
    fallback: str
    import_seconds: float
    compile_seconds: float
    kernels: list[KernelReport]
    library: list[tuple[str, str]]  # op and reason
    description: dict[str, Any]
    left: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # calls between parts that stay in ATen, and why
    restored: bool = False  # from PyTorch's cache: nothing was imported, and compile_seconds are those of linking the program
    hints: dict[str, int] = dataclasses.field(default_factory=dict)  # sizes of the first call by symbol
    background: str = ""  # what the option tier="background" did: its state, and calls in eager mode
    search: str = ""  # what tune="background" did: how many kernels were searched, and are faster

    @property
    def target(self) -> Target:
        return find_target(self.description.get("target", ""))

    @property
    def has_limits(self) -> bool:
        """Whether the kernels run on what measure_machine measures."""
        return not self.target.device

    def title(self) -> str:
        if self.left:
            return f"{self.kind}: {len(self.left)} calls stay in ATen, between the parts below"
        if self.background and not self.kernels and not self.library:
            return f"{self.kind}: {self.background}" + (f": {self.fallback}" if self.fallback else "")
        became = f"{self.kind}: {counted(self.ops, 'ATen call')} became {counted(len(self.kernels), 'kernel')}"
        if self.fallback and self.kernels:
            return f"{became}, but it runs in eager mode: {self.fallback}"
        if self.fallback:
            return f"{self.kind}: runs in eager mode: {self.fallback}"
        how = f"imported in {seconds(self.import_seconds)}, compiled in {seconds(self.compile_seconds)}"
        if self.background:
            how = f"imported in {seconds(self.import_seconds)}, {self.background}, in {seconds(self.compile_seconds)}"
        if self.search:
            how += f"; {self.search}"
        if self.restored:
            how = f"restored from PyTorch's cache in {seconds(self.compile_seconds)}"
        return f"{became} and {counted(len(self.library), 'library call')} ({how})"

    def kernel_rows(self, machine: Machine) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        origin = origins(self.torch_ir)
        for kernel in self.kernels:
            share = kernel.share_of_limit(machine) if self.has_limits else None
            rows.append(
                (
                    kernel.name,
                    "once" if kernel.once else str(kernel.calls),
                    shortened(kernel.user_calls(origin)),
                    quantity(kernel.flops, "flop"),
                    quantity(kernel.bytes, "B"),
                    seconds(kernel.estimated) if kernel.estimated and not kernel.once else "",
                    seconds(kernel.seconds) if kernel.seconds and not kernel.once else "",
                    "" if share is None else f"{100 * share:.0f} %",
                    f"{kernel.usual_seconds / kernel.tuned_seconds:.2f} x" if kernel.tuned_seconds else "",
                )
            )
        return rows

    def notes(self, machine: Machine) -> list[str]:
        notes = []
        if self.has_limits and any(k.seconds and not k.once for k in self.kernels):
            limit = "of limit: share of the machine's peak, or of its memory's bandwidth; empty where caches or bf16 dot products beat that"
            notes.append(limit + "; estimate: time by a model of the schedule and of what `python -m deplo env` has measured")
        if tuned := [k for k in self.kernels if k.tuned_seconds]:
            alone = ", ".join(f"{k.name} {seconds(k.usual_seconds)} -> {seconds(k.tuned_seconds)}" for k in tuned)
            notes.append(f"tuned: schedules that a search found, and how much faster they were, alone and cold: {alone}")
        memory, cache = self.description.get("memory", {}), self.description.get("cache", {})
        if "arena_bytes" in memory:
            saved = memory.get("bytes_without_reuse", 0)
            notes.append(
                f"memory: arena {quantity(memory['arena_bytes'], 'B')} for {memory.get('temporaries', 0)} temporaries"
                f" ({quantity(saved, 'B')} without reuse), packed weights {quantity(memory.get('packed_bytes', 0), 'B')}"
            )
        if twice := memory.get("kept_twice"):
            reasons: dict[str, list[str]] = {}
            for name, why in twice.items():
                reasons.setdefault(why, []).append(name)
            notes.extend(f"weights kept twice, for {why}: {shortened(names)}" for why, names in reasons.items())
        if device := self.description.get("device"):
            notes.append(
                f"device: {device}" + (", to which every call copies its inputs, and its results back" if self.description.get("copies") else "")
            )
        if cache and self.target.has_disk_cache:
            compiled, disk = counted(cache.get("compiled", 0), "kernel"), cache.get("directory") or "disk (off)"
            notes.append(f"cache: {compiled} compiled, {cache.get('memory_hits', 0)} from memory, {cache.get('disk_hits', 0)} from {disk}")
        return notes


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def origins(torch_ir: str) -> dict[str, str]:
    """From the first result of each call in Torch IR to what the user called, and where: `linear (layers.0.fc, net.py:12)`."""
    found = {}
    for line in torch_ir.splitlines():
        if match := _CALL.match(line):
            at = ", ".join(filter(None, (match["module"], match["source"])))
            found[match["value"]] = (match["function"] or match["op"].lstrip("_")) + (f" ({at})" if at else "")
    return found


def shortened(names: list[str], most: int = 6) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class Explanation:
    """What `deplo.explain` returns. Prints as tables; `graphs` holds the figures, `result` what the model returned."""

    def __init__(self, graphs: list[GraphReport], result: Any, machine: Machine) -> None:
        self.graphs = graphs
        self.result = result
        self.machine = machine

    def __str__(self) -> str:
        parts = []
        for graph in self.graphs:
            parts.append(graph.title())
            if graph.kernels:
                parts.append(table_text(*_without_empty(_KERNEL_COLUMNS, graph.kernel_rows(self.machine))))
            if graph.left:
                parts.append(table_text(("stays in ATen", "reason"), graph.left))
            if graph.library:
                parts.append(table_text(("library call", "reason"), graph.library))
            parts.extend(graph.notes(self.machine))
            parts.append("")
        return "\n".join(parts or [NO_GRAPH]).rstrip() + "\n"

    __repr__ = __str__

    def show(self) -> None:
        """Prints it: with rich on a terminal, plain in a pipe."""
        if not self.graphs:
            print(NO_GRAPH)
        for graph in self.graphs:
            print(graph.title())
            if graph.kernels:
                header, rows, right = _without_empty(_KERNEL_COLUMNS, graph.kernel_rows(self.machine))
                show_table("", header, rows, right)
            if graph.left:
                show_table("", ("stays in ATen", "reason"), graph.left)
            if graph.library:
                show_table("", ("library call", "reason"), graph.library)
            for note in graph.notes(self.machine):
                print(note)


def _without_empty(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> tuple[list[str], list[list[str]], list[int]]:
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    right = [at for at, i in enumerate(kept) if header[i] not in ("kernel", "implements")]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows], right


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    backward: bool = False,
    repeats: int = 3,
    **keywords: Any,
) -> Explanation:
    """Compiles `model(*inputs, **keywords)` afresh, runs it twice and `repeats` times more with each kernel timed, and says what became of it.

    What the runs change in tensors among the inputs, in the model's buffers and gradients and in the state of random numbers is put back;
    what they do in Python (counters, prints) is done as often. `backward` also runs and explains the gradient of the sum of the outputs. The
    model's compiled code elsewhere is dropped (torch._dynamo.reset). Raises UserError for bad options and for what cannot be called.
    """
    if not callable(model):
        raise UserError(f"explain takes a function or a torch.nn.Module, not {type(model).__name__}")
    checked = options if isinstance(options, Options) else read_options(options=options)

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return compile_with(checked, gm, example_inputs)

    torch._dynamo.reset()
    result = None
    with collect_records() as records, unwrapped_errors(), put_back(model, inputs, keywords):
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        # The second call's results still have fresh memory; later ones come from what earlier ones gave back.
        for turn in range(2 + repeats):
            if turn == 2:
                settle()
                _profile(records)
            result = compiled(*inputs, **keywords)
            if backward:
                sum_of(result).backward()  # type: ignore[no-untyped-call]
    torch._dynamo.reset()
    graphs = [report_of(record) for record in records]
    for graph in graphs:
        add_estimates(graph, checked)
    return Explanation(graphs, result, measure_machine())


def add_estimates(graph: GraphReport, options: Options) -> None:
    """What the target's model says of each kernel, where it knows: the graph's text goes once more to Tile IR."""
    if not graph.torch_ir or not graph.kernels or graph.target.device:
        return
    text = options.to_json(graph.hints, graph.kind != "inference")
    try:
        found = json.loads(core().estimate_program(graph.torch_ir, calibration(options).figures(), text))
    except Error:
        return  # it stands in eager mode for a reason that the report names
    estimates = {kernel["name"]: kernel["seconds"] for kernel in found}
    for kernel in graph.kernels:
        kernel.estimated = kernel.calls * estimates.get(kernel.name, 0.0)


@contextlib.contextmanager
def put_back(model: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[None]:
    """Runs leave tensors, gradients and random numbers as they were."""
    given = [leaf for leaf in tree_leaves((inputs, keywords)) if isinstance(leaf, torch.Tensor)]
    module = model if isinstance(model, torch.nn.Module) else torch.nn.Module()
    values = [(x, x._version, x.detach().clone()) for x in [*given, *module.buffers()] if not x.is_inference()]
    gradients = [(x, None if x.grad is None else x.grad.clone()) for x in [*given, *module.parameters()] if x.is_leaf and x.requires_grad]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for x, version, before in values:
                if x._version != version:
                    x.copy_(before)
        for x, gradient in gradients:
            x.grad = gradient


def _profile(records: list[Record]) -> None:
    for record in records:
        if hasattr(record.program, "set_profiling"):
            record.program.set_profiling(True)


def report_of(record: Record) -> GraphReport:
    """What became of one graph, with the core's description of its program."""
    description: dict[str, Any] = json.loads(record.program.describe()) if hasattr(record.program, "describe") else {}
    ops = sum(1 for line in record.torch_ir.splitlines()[1:] if not line.lstrip().startswith(("check ", "write ", "return")))
    library = [(str(call["op"]), str(call["reason"])) for call in description.get("library", [])]
    return GraphReport(
        record.kind,
        ops,
        record.torch_ir,
        record.fallback,
        record.import_seconds,
        record.compile_seconds,
        _kernels(description),
        library,
        description,
        record.left,
        record.restored,
        record.hints,
        "" if record.background is None else record.background.describe(),
        "" if record.search is None else record.search.describe(),
    )


def _kernels(description: Mapping[str, Any]) -> list[KernelReport]:
    once = {step["kernel"] for step in description.get("steps", []) if step.get("once")}
    return [
        KernelReport(
            kernel["name"],
            list(kernel["ops"]),
            kernel["schedule"],
            kernel["flops"],
            kernel["bytes"],
            kernel["calls"],
            kernel["seconds"],
            kernel["name"] in once,
            kernel["tuned_seconds"],
            kernel["usual_seconds"],
        )
        for kernel in description.get("kernels", [])
    ]
