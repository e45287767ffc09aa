"""AOTAutograd with deplo's compilers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.utils import counters


def aot_autograd(**keywords: Any) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """What torch._dynamo.backends.common.aot_autograd gives: that one imports parts of Inductor for its logs, a tenth of the time of a first call
    that PyTorch's cache answers. It is asked where it does more: for these logs, and for inputs in lists (compiled autograd's)."""
    from torch._functorch.aot_autograd import aot_module_simplified

    def compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if os.environ.get("TORCH_COMPILE_DEBUG") == "1" or any(isinstance(x, (list, tuple, dict)) for x in example_inputs):
            from torch._dynamo.backends.common import aot_autograd as pytorchs

            theirs: Callable[..., Any] = pytorchs(**keywords)(gm, example_inputs)
            return theirs
        counters["aot_autograd"]["total"] += 1
        try:
            compiled = aot_module_simplified(gm, example_inputs, **keywords)
        except Exception:
            counters["aot_autograd"]["not_ok"] += 1
            raise
        counters["aot_autograd"]["ok"] += 1
        return _untraced(compiled)

    return compile


def untraced_compiler(compile: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that Dynamo, in whose frames backward graphs are compiled, leaves alone, and what it gives as well."""
    hidden = _untraced(compile)
    return lambda *args, **keywords: _untraced(hidden(*args, **keywords))


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    result: Callable[..., Any] = torch.compiler.disable(function, reason="it is deplo's")  # type: ignore[no-untyped-call]
    return result
