"""Positions whose frequencies follow from the length of a text, which is a number in a tensor: tables as long as a prepared cache instead."""

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


def _of_long_texts(module: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A rotary embedding of kind longrope: cosines and sines [B, T, D], by a table for texts up to the limit, and one for all longer ones."""
    if not torch.compiler.is_compiling() or args or kwargs or x.dtype != module.deplo_tables[0].dtype:
        return type(module).forward(module, x, position_ids, *args, **kwargs)
    return from_tables(module, position_ids)


_of_long_texts.__name__ = "forward"


def from_tables(module: Any, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the module's tables."""
    short, long = module.deplo_tables[:2], module.deplo_tables[2:]
    limit = short[0].shape[0]
    rows = [table[position_ids.clamp(max=limit - 1)] for table in short]
    if long:
        is_long = position_ids.max() >= limit
        rows = [torch.where(is_long, table[position_ids], row) for table, row in zip(long, rows, strict=True)]
    return rows[0], rows[1]


@torch.no_grad()
def _install_tables(name: str, module: Any, length: int, dtype: torch.dtype) -> None:
    config = module.config
    given = getattr(config, "rope_parameters", None) or {}
    limit = given.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
    x = torch.zeros(1, dtype=dtype)

    def rows(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = type(module).forward(module, x, torch.arange(begin, end)[None])
        return cosines[0], sines[0]

    # What a token's row is depends on whether any is beyond the limit, and on nothing else of the text.
    tables = [*rows(0, min(limit, length)), *(rows(0, length) if length > limit else ())]
    module.__dict__.update(deplo_tables=tables, forward=types.MethodType(_of_long_texts, module))
    for begin, end in ((0, 1), (min(limit, length) - 1, min(limit, length)), (length - 1, length)):
        got = from_tables(module, torch.arange(begin, end)[None])
        if not all(torch.allclose(w, g[0], rtol=0, atol=4 * torch.finfo(dtype).eps) for w, g in zip(rows(begin, end), got, strict=True)):
            raise UnsupportedError(f"{name} ({type(module).__name__}) makes its table of positions in a way that deplo knows no formula of")


def install(model: torch.nn.Module, length: int) -> bool:
    """Lets such positions compile, if there are any; in eager mode they stay what they are. UnsupportedError where the formula gives others.

    Whether the model has tables that it makes as long as a text.
    """
    found = False
    dtype = next(model.parameters()).dtype
    for name, module in list(model.named_modules()):
        parameters = inspect.signature(type(module).forward).parameters
        if getattr(module, "rope_type", None) == "longrope" and "position_ids" in parameters:
            _install_tables(name, module, length, dtype)
        if not hasattr(module, "rope_init_fn") or "seq_len" not in parameters:
            continue
        module.__dict__.update(deplo_length=length, forward=types.MethodType(_forward, module))
        found = True
        x = torch.zeros(1, dtype=dtype)
        for tokens in {2, length}:
            wanted, got = type(module).forward(module, x, tokens), compute(module, x, torch.tensor(tokens))
            if not all(torch.equal(w, g[:tokens]) for w, g in zip(wanted, got, strict=True)):
                raise UnsupportedError(f"{name} ({type(module).__name__}) makes its table of positions in a way that deplo knows no formula of")
    return found


def has_tables(model: torch.nn.Module) -> bool:
    """Whether positions are looked up in tables of the prepared length."""
    return any("deplo_tables" in module.__dict__ for module in model.modules())


def remove(model: torch.nn.Module) -> None:
    """Takes the formula away."""
    for module in model.modules():
        function = getattr(module.__dict__.get("forward"), "__func__", None)
        if function in (_forward, _of_long_texts):
            del module.__dict__["forward"], module.__dict__["deplo_length" if function is _forward else "deplo_tables"]
