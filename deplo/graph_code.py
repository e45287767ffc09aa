"""An FX graph as Python text and what it names: it pickles, and runs op by op without being traced again."""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

from .errors import UnsupportedError


@dataclasses.dataclass
class GraphCode:
    """The text of a graph's `forward`, the objects that it names, and the tensors that the graph holds. Pickles as far as those objects do."""

    source: str
    names: dict[str, Any]
    modules: dict[str, str]  # of the names those that are modules of Python
    tensors: dict[str, torch.Tensor]

    @staticmethod
    def of(gm: torch.fx.GraphModule) -> GraphCode:
        """Raises UnsupportedError if the graph holds more than tensors, as the bodies of higher-order operators."""
        tensors = {}
        for node in gm.graph.find_nodes(op="get_attr"):
            name = str(node.target)
            value: Any = getattr(gm, name, None)
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(f"the graph holds {name}, which is no tensor")
            tensors[name] = value
        if gm.graph.find_nodes(op="call_module"):
            raise UnsupportedError("the graph calls a module")
        code = gm.graph.python_code("self")
        modules = {name: value.__name__ for name, value in code.globals.items() if isinstance(value, types.ModuleType)}
        names = {name: value for name, value in code.globals.items() if name not in modules}
        return GraphCode(code.src, names, modules, tensors)

    def function(self) -> Callable[..., Any]:
        """The graph as a function of its inputs."""
        space = {**self.names, **{name: importlib.import_module(module) for name, module in self.modules.items()}}
        exec(compile(self.source, "<stored graph>", "exec"), space)
        forward: Callable[..., Any] = types.MethodType(space["forward"], types.SimpleNamespace(**self.tensors))
        return forward


class EagerGraph:
    """A graph run op by op by ATen, called with a list like a compiled one."""

    def __init__(self, graph: torch.fx.GraphModule | GraphCode) -> None:
        self._graph = graph
        self._function: Callable[..., Any] | None = None if isinstance(graph, GraphCode) else graph
        self._boxed_call = True

    def code(self) -> GraphCode:
        """Raises UnsupportedError for a graph that has no such form."""
        return self._graph if isinstance(self._graph, GraphCode) else GraphCode.of(self._graph)

    def __call__(self, args: list[Any]) -> Any:
        if self._function is None:
            assert isinstance(self._graph, GraphCode)
            self._function = self._graph.function()
        inputs = list(args)
        args.clear()
        return self._function(*inputs)
