"""Tables of positions that a model makes as long as its text, which is a number in a tensor: as long as a prepared cache instead."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch

from .errors import UnsupportedError


def _rows(module: Any, x: torch.Tensor, seq_len: int | None, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [length, D] of all positions, with the frequencies of a text of `seq_len` tokens."""
    frequencies, scaling = module.rope_init_fn(module.config, x.device, seq_len)
    angles = torch.outer(torch.arange(module.deplo_length, device=x.device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    scale = scaling if scale is None else scale
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def _forward(module: Any, x: torch.Tensor, seq_len: Any = None) -> Any:
    """PhiMoE's rotary embedding, whose frequencies and scale may be others for long texts (longrope)."""
    if not torch.compiler.is_compiling() or not isinstance(seq_len, torch.Tensor):
        return type(module).forward(module, x, seq_len)
    return compute(module, x, seq_len)


_forward.__name__ = "forward"  # as copies of the bound method look for it


def compute(module: Any, x: torch.Tensor, seq_len: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [length, D] for a text of `seq_len` tokens."""
    scaling = module.config.rope_scaling
    if not scaling:
        return _rows(module, x, None, None)
    limit = scaling["original_max_position_embeddings"]
    short, long = _rows(module, x, limit, module.short_mscale), _rows(module, x, limit + 1, module.long_mscale)
    return torch.where(seq_len > limit, long[0], short[0]), torch.where(seq_len > limit, long[1], short[1])


def install(model: torch.nn.Module, length: int) -> bool:
    """Lets such tables compile, if there are any; in eager mode they stay what they are. UnsupportedError where the formula gives another one."""
    found = False
    for name, module in list(model.named_modules()):
        if not hasattr(module, "rope_init_fn") or "seq_len" not in inspect.signature(type(module).forward).parameters:
            continue
        module.__dict__.update(deplo_length=length, forward=types.MethodType(_forward, module))
        found = True
        x = torch.zeros(1, dtype=next(model.parameters()).dtype)
        for tokens in {2, length}:
            wanted, got = type(module).forward(module, x, tokens), compute(module, x, torch.tensor(tokens))
            if not all(torch.equal(w, g[:tokens]) for w, g in zip(wanted, got, strict=True)):
                raise UnsupportedError(f"{name} ({type(module).__name__}) makes its table of positions in a way that deplo knows no formula of")
    return found


def remove(model: torch.nn.Module) -> None:
    """Takes the formula away."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) is _forward:
            del module.__dict__["forward"], module.__dict__["deplo_length"]
