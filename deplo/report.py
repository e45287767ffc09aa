"""`python -m deplo report`: a page about one model, with nothing outside of it, and a trace for Perfetto beside it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .core import core
from .errors import Error, UserError
from .explanation import Explanation, GraphReport, explain, origins, put_back, shortened
from .options import Options, read_options
from .report_page import page_of

LEVELS = ("torch", "tensor", "loop", "tile", "kernel")


@dataclasses.dataclass
class Span:
    """One step of a program, at its mean over the measured calls."""

    name: str
    kind: str  # "kernel" or "library"
    what: str  # what the user called, or why it is a library call
    start: float  # seconds from the beginning of the call
    seconds: float
    live: int  # bytes of temporaries while it runs


@dataclasses.dataclass
class GraphPage:
    """What the page says of one graph."""

    report: GraphReport
    spans: list[Span]
    texts: list[tuple[str, str]]  # level and IR


@dataclasses.dataclass
class Break:
    """Where Dynamo ended a graph."""

    reason: str
    place: str  # file, line, and its text


@dataclasses.dataclass
class ModelReport:
    """What the page says of a model."""

    title: str
    breaks: list[Break]
    graphs: list[GraphPage]
    explanation: Explanation


def load_model(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What `package.module:function` or `file.py:function` returns: a model and its arguments (a tuple or list; a dict of keywords; one tensor).

    Raises UserError where there is no such module or function, or where it returns something else.
    """
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        raise UserError(f"{name}: expected package.module:function or file.py:function, a function that returns (model, arguments)")
    make = getattr(_module(where), function, None)
    if not callable(make):
        raise UserError(f"{name}: {where} has no function {function}")
    made = make()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise UserError(f"{name}: expected (model, arguments) of {function}(), got {type(made).__name__}")
    model, given = made
    if isinstance(given, Mapping):
        return model, (), dict(given)
    return model, tuple(given) if isinstance(given, (tuple, list)) else (given,), {}


def _module(where: str) -> Any:
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(os.path.basename(where).removesuffix(".py"), where)
        if not os.path.isfile(where) or spec is None or spec.loader is None:
            raise UserError(f"{where}: no such file")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
        return module
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where + ".").startswith(error.name + "."):
            raise  # a module that the model itself needs
        raise UserError(f"{where}: no such module") from None


def report(
    title: str,
    model: Callable[..., Any],
    inputs: tuple[Any, ...] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
    dynamic: bool | None = None,
    backward: bool = False,
    repeats: int = 5,
) -> ModelReport:
    """Compiles `model(*inputs, **keywords)` and measures its steps over `repeats` calls, as `deplo.explain` does; has the IR of every graph, too.

    One more call, in eager mode, finds the breaks between graphs. PyTorch's caches are not asked: a restored graph has no IR.
    """
    checked = options or read_options()
    named = dict(keywords or {})
    breaks = _breaks(model, inputs, named)
    with torch._functorch.config.patch("enable_autograd_cache", False):
        explanation = explain(model, *inputs, options=checked, dynamic=dynamic, backward=backward, repeats=repeats, **named)
    graphs = [GraphPage(graph, spans_of(graph), _texts(graph, checked)) for graph in explanation.graphs]
    return ModelReport(title, breaks, graphs, explanation)


def _breaks(model: Callable[..., Any], inputs: tuple[Any, ...], keywords: dict[str, Any]) -> list[Break]:
    torch._dynamo.reset()
    with put_back(model, inputs, keywords):
        found = torch._dynamo.explain(model)(*inputs, **keywords)
    torch._dynamo.reset()
    breaks = []
    for item in found.break_reasons:
        frames = [f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.line or ''}".rstrip() for frame in item.user_stack]
        breaks.append(Break(str(item.reason), frames[-1] if frames else ""))
    return breaks


def spans_of(graph: GraphReport) -> list[Span]:
    """The steps of a call one behind another; those that pack weights only when they change, and those of other sizes, are left out."""
    said = {kernel.name: shortened(kernel.user_calls(origins(graph.torch_ir))) for kernel in graph.kernels}
    places = graph.description.get("memory_plan", [])
    spans: list[Span] = []
    start = 0.0
    for at, step in enumerate(graph.description.get("steps", [])):
        if step.get("once") or not step.get("calls"):
            continue
        seconds = step["nanoseconds"] * 1e-9 / step["calls"]
        live = sum(place["bytes"] for place in places if place["first_step"] <= at <= place["last_step"])
        kernel = step.get("kernel")
        name, kind = (kernel, "kernel") if kernel else (step["library"], "library")
        spans.append(Span(name, kind, said.get(name, "") if kernel else step["reason"], start, seconds, live))
        start += seconds
    return spans


def _texts(graph: GraphReport, options: Options) -> list[tuple[str, str]]:
    """The IR at each level, down to the texts that its target makes of Kernel IR."""
    if not graph.torch_ir:
        return []
    found = []
    asked = options.replace(target=graph.target.name)
    for level in (*LEVELS, *graph.target.levels):
        try:
            text = core().lower(graph.torch_ir, level, asked.to_json(graph.hints, graph.kind != "inference"), "<report>")
        except Error as error:
            text = f"{type(error).__name__}: {error}"
        found.append((level, text))
    return found


def trace_of(report: ModelReport) -> dict[str, Any]:
    """The steps of all graphs in the format of Chrome's traces, which https://ui.perfetto.dev opens. Times in microseconds."""
    events: list[dict[str, Any]] = []
    for number, page in enumerate(report.graphs):
        events.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": f"graph {number}: {page.report.kind}"}})
        for lane, kind in enumerate(("kernel", "library")):
            events.append({"name": "thread_name", "ph": "M", "pid": number, "tid": lane, "args": {"name": kind}})
        costs = {kernel.name: kernel for kernel in page.report.kernels}
        for span in page.spans:
            told: dict[str, Any] = {"what": span.what}
            if span.kind == "kernel":
                cost = costs[span.name]
                told |= {"flops": cost.flops / max(1, cost.calls), "bytes": cost.bytes / max(1, cost.calls), "schedule": cost.schedule}
            place = {"pid": number, "ts": span.start * 1e6}
            events.append(
                {"name": span.name, "cat": span.kind, "ph": "X", "tid": int(span.kind == "library"), "dur": span.seconds * 1e6, **place, "args": told}
            )
            events.append({"name": "temporaries", "ph": "C", **place, "args": {"bytes": span.live}})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write_report(report: ModelReport, folder: str) -> list[str]:
    """Writes `index.html` and `trace.json` into `folder`, which is made; their paths. Raises UserError where that fails."""
    written = []
    try:
        os.makedirs(folder, exist_ok=True)
        for name, text in (("index.html", page_of(report)), ("trace.json", json.dumps(trace_of(report)))):
            path = os.path.join(folder, name)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            written.append(path)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    return written
