"""What transformers 5 does around a forward to collect outputs of layers, so that nothing is left behind where nothing is collected.

Its decorator notes what it collects in a global while torch.compile traces, even that it is nothing, and takes the note away behind the call.
Dynamo's code repeats both at each call: an effect in Python, for which direct calls would go through Dynamo. And once layers have hooks, which look
for the note, models do not trace where there is none.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def install() -> None:
    """For the rest of the process; calls that collect something do what they did. Nothing in versions without such a note."""
    try:
        output_capturing = importlib.import_module("transformers.utils.output_capturing")
    except ImportError:
        return
    note = getattr(output_capturing, "_active_collector", None)
    kind = getattr(output_capturing, "CompileableContextVar", None)
    if kind is not None and type(note) is kind:
        note.__class__ = _quiet(kind)


def _quiet(kind: Any) -> Any:
    class QuietNote(kind):  # type: ignore[misc]
        """A note that is not taken of nothing, where torch.compile traces."""

        def get(self) -> Any:
            return self.global_var if torch.compiler.is_compiling() else super().get()  # which does not trace before something was noted

        def set(self, value: Any) -> Any:
            if not value and not self.compiling and torch.compiler.is_compiling():
                return None
            return super().set(value)

        def reset(self, token: Any) -> None:
            if token is None and not self.compiling:
                return
            super().reset(token)

    return QuietNote
