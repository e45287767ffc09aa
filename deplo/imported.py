"""What importing an FX graph gives: its Torch IR, and how its caller's arguments and results map to the program's."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch

from . import tf32
from .options import Options


@dataclasses.dataclass
class ViewStep:
    """A call of the FX graph that views its first argument."""

    call: Any  # an overload, or operator.getitem
    args: list[Any]  # after the first; sizes are sympy expressions, in lists, too
    kwargs: dict[str, Any]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "call": str(self.call) if isinstance(self.call, torch._ops.OpOverload) else self.call}  # overloads do not pickle

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(self.call, str):
            self.call = operator.attrgetter(self.call)(torch.ops)


@dataclasses.dataclass
class Output:
    """Where one output of the FX graph comes from at run time."""

    kind: str  # "result" of the program, "input" passed through, "view" of a result or input, "constant"
    index: int = -1  # of the result or of the FX graph's input
    of_input: bool = False  # a view of an input, not of a result
    value: Any = None  # of a constant
    layout: Any = None  # of a view: sizes, strides and the offset from its base, as sympy expressions
    detached: str = ""  # of a view: autograd takes it for no view ("itself"), or for one of a detached tensor ("base")
    steps: list[ViewStep] | None = None  # of a view by other calls than as_strided: those from the input to it

    def layout_exprs(self) -> list[Any]:
        return [*self.layout[0], *self.layout[1], self.layout[2]] if self.layout else []


@dataclasses.dataclass
class Smaller:
    """The same graph for calls whose split size is at most `most`, with the size that schedules are chosen for."""

    most: int
    hint: int
    text: str


@dataclasses.dataclass
class Imported:
    """A graph in Torch IR, and how its caller's arguments and results map to the program's."""

    text: str
    inputs: int  # how many the FX graph has
    arguments: list[int]  # positions of the FX graph's inputs that the program takes, in order
    constants: list[torch.Tensor]  # appended to the arguments
    outputs: list[Output]
    symbols: dict[str, tuple[int, int | None]]  # symbol -> input position, and dimension (None: the input itself)
    hints: dict[str, int]
    writes: bool  # whether the graph writes to its inputs
    offsets: list[tuple[int, Any]] = dataclasses.field(default_factory=list)  # inputs that must start there in their storages (sympy)
    has_bases: bool = False  # some inputs are the bases of inputs that share memory
    nonnegative: list[Any] = dataclasses.field(default_factory=list)  # sympy expressions that the caller checks, facts of the Torch IR
    target: str = ""  # the option of that name that the program is compiled with
    device: int = -1  # ordinal of the target's device that all its tensors are on; -1: they are on the CPU
    training: bool = False  # whether it is a part of a training step
    derived: list[str] = dataclasses.field(default_factory=list)  # sizes that Python computes (sizes.is_derived): inputs after those of the FX graph
    # A size that may be 0 or 1 though the graph was traced for any: calls of all sizes come to this graph, which guards would keep apart. `text` is
    # for the largest, `smaller` for calls up to a size each, in rising order.
    split_size: str = ""
    smaller: list[Smaller] = dataclasses.field(default_factory=list)
    precision: tf32.State | None = None  # what PyTorch allowed (deplo/tf32.py); None: the graph does not ask

    def with_tf32(self, state: tf32.State) -> Imported:
        """The same graph where PyTorch allows `state`."""
        smaller = [dataclasses.replace(one, text=tf32.switched(one.text, state)) for one in self.smaller]
        return dataclasses.replace(self, text=tf32.switched(self.text, state), smaller=smaller, precision=state)

    def options(self, options: Options) -> str:
        """What the core reads to compile the program, or to restore it.

        The programs for few rows keep packed weights in any case: that for more shares them.
        """
        shared = {"auto": "pack", "own": "own pack"} if self.smaller else {}
        return options.replace(target=self.target).to_json(self.hints, self.training, self.device, shared.get(options.weights, ""))
