"""Sums along one dimension in which earlier numbers count less and less: an operator of deplo's own, since none of PyTorch's says it.

Compiled, it is a scan; called by itself, a loop over the steps.
"""

from __future__ import annotations

from typing import Any

import torch

_library: Any = torch.library.Library("deplo", "DEF")  # type: ignore[no-untyped-call]
_library.define("faded_sum(Tensor level, Tensor added, int dim) -> Tensor")


def _steps(level: torch.Tensor, added: torch.Tensor, dim: int) -> torch.Tensor:
    decay = torch.exp(level.diff(dim=dim, prepend=level.narrow(dim, 0, min(1, level.shape[dim]))))
    state, states = torch.zeros_like(decay.select(dim, 0)) if level.shape[dim] else decay, []
    for factor, more in zip(decay.unbind(dim), added.unbind(dim), strict=True):
        state = factor * state + more
        states.append(state)
    return torch.stack(states, dim).to(added.dtype) if states else torch.empty_like(added)


def _of_fakes(level: torch.Tensor, added: torch.Tensor, dim: int) -> torch.Tensor:
    return added.new_empty(added.shape)


_library.impl("faded_sum", _steps, "CompositeExplicitAutograd")
torch.library.register_fake("deplo::faded_sum", _of_fakes, lib=_library)


def faded_sum(level: torch.Tensor, added: torch.Tensor, dim: int) -> torch.Tensor:
    """For each place t along `dim`, the sum over j <= t of exp(level[t] - level[j]) added[j], in float32; `level`, of the same shape in float64,
    never rises. So it is the state h[t] = a[t] h[t - 1] + added[t] of decays a whose logarithms add up to `level`.
    """
    function: Any = torch.ops.deplo.faded_sum
    result: torch.Tensor = function(level, added, dim)
    return result
