"""Mixers of Mamba, Falcon-Mamba and Mamba 2 for prompts of any length: one formula in the place of loops over tokens or of padded chunks.

A mixer keeps, of a text, the last `conv_kernel` inputs of its convolution and one state; here a prompt begins with neither, and leaves both in the
cache. Tensors are [batch, tokens, channels]. Gu and Dao, arXiv:2312.00752 and arXiv:2405.21060.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .errors import UnsupportedError
from .faded import faded_sum
from .llm_state_caches import of_layer


def _convolution(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T, C]: each channel's own taps over it and what came before, activated; and the last inputs [B, C, taps]."""
    layer = block.conv1d
    taps, tokens = layer.weight.shape[2], x.shape[1]
    padded = F.pad(x, (0, 0, taps, 0))
    weight = layer.weight[:, 0].float()
    result = padded[:, 1 : 1 + tokens].float() * weight[:, 0]
    for tap in range(1, taps):
        result = result + padded[:, 1 + tap : 1 + tap + tokens].float() * weight[:, tap]
    if layer.bias is not None:
        result = result + layer.bias.float()
    return block.act(result.to(x.dtype)), padded[:, tokens:].transpose(1, 2)


def _first(block: Any, x: torch.Tensor, mask: torch.Tensor | None, early: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mamba's scan (Falcon's, too): each channel has a few states of its own, whose decay changes from token to token. `early`: padding is taken out
    before the first projection (transformers 5), rather than behind it."""
    if mask is not None and early:
        x = (x * mask[:, :, None]).to(x.dtype)
    hidden, gate = block.in_proj(x).chunk(2, dim=-1)
    if mask is not None and not early:
        hidden = hidden * mask[:, :, None]
    hidden, last = _convolution(block, hidden)
    if mask is not None:
        hidden = hidden * mask[:, :, None]
    size = block.ssm_state_size
    parts = torch.split(block.x_proj(hidden), [block.time_step_rank, size, size], dim=-1)
    if hasattr(block, "rms_eps"):
        parts = tuple(_normalised(part, block.rms_eps) for part in parts)
    step, into, out = parts
    step = F.softplus(block.dt_proj(step))
    rates = -torch.exp(block.A_log.float())
    level = rates.double() * step.double().cumsum(1)[..., None]  # of the decay so far
    added = step[..., None] * into[:, :, None].float() * hidden[..., None].float()
    states = faded_sum(level, added, 1)
    result = (states.to(x.dtype).float() * out[:, :, None].float()).sum(-1).to(x.dtype)
    result = (result + hidden * block.D) * block.act(gate)
    return block.out_proj(result), last, states[:, -1]


def _normalised(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _second(block: Any, x: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mamba 2's scan in chunks: within one each token sees those before it, as attention does, and the state before the chunk."""
    batch, tokens, _ = x.shape
    heads, groups, size, width, chunk = block.num_heads, block.n_groups, block.ssm_state_size, block.head_dim, block.chunk_size
    if mask is not None:
        x = (x * mask[:, :, None]).to(x.dtype)
    gate, hidden, step = torch.split(block.in_proj(x), [block.intermediate_size, block.conv_dim, heads], dim=-1)
    hidden, last = _convolution(block, hidden)
    if mask is not None:
        hidden = (hidden * mask[:, :, None]).to(x.dtype)
    hidden, into, out = torch.split(hidden, [block.intermediate_size, groups * size, groups * size], dim=-1)
    step = F.softplus(step + block.dt_bias).clamp(block.time_step_limit[0], block.time_step_limit[1])
    chunks = (tokens + chunk - 1) // chunk
    more = chunks * chunk - tokens  # tokens that add nothing, and after which nothing decays

    def chunked(y: torch.Tensor, *sizes: int) -> torch.Tensor:
        """[B, chunks, chunk, ...]."""
        return F.pad(y.float(), (0, 0, 0, more)).reshape(batch, chunks, chunk, *sizes)

    values = chunked(hidden, heads, width)
    into, out = chunked(into, groups, size), chunked(out, groups, size)
    step = chunked(step, heads)
    rates = -torch.exp(block.A_log.float())
    # Sums of decays differ by little where they are large.
    sums = (rates * step).double().cumsum(2).transpose(2, 3)  # [B, chunks, heads, chunk]
    values = (values * step[..., None]).permute(0, 1, 3, 2, 4)
    into, out = (y.permute(0, 1, 3, 2, 4).repeat_interleave(heads // groups, 2) for y in (into, out))
    distance = (sums[..., :, None] - sums[..., None, :]).float()
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    weights = (out @ into.transpose(-1, -2)) * torch.where(earlier, torch.exp(distance), 0)
    inside = weights @ values
    left = torch.exp((sums[..., -1:] - sums).float())
    added = (values * left[..., None]).transpose(-1, -2) @ into  # [B, chunks, heads, width, size]
    level = sums[..., -1].cumsum(1)[..., None, None].expand(added.shape)
    states = faded_sum(level, added, 1)
    before = F.pad(states, (0, 0, 0, 0, 0, 0, 1, 0))[:, :chunks]
    across = (out @ before.transpose(-1, -2)) * torch.exp(sums.float())[..., None]
    result = (inside + across).permute(0, 1, 3, 2, 4).reshape(batch, chunks * chunk, heads, width)[:, :tokens]
    result = result + block.D[:, None] * hidden.reshape(batch, tokens, heads, width).float()
    result = block.norm(result.reshape(batch, tokens, -1), gate)
    return block.out_proj(result.to(x.dtype)), last, states[:, -1]


@dataclasses.dataclass(frozen=True)
class Family:
    """Mixers that a formula stands for: those that have these parts, and whose results it gives (`_gives` compares them)."""

    parts: tuple[str, ...]
    formulas: tuple[Callable[[Any, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], ...]


_COMMON = ("A_log", "D", "act", "conv1d", "in_proj", "out_proj", "ssm_state_size", "layer_idx")
FAMILIES = (
    Family((*_COMMON, "x_proj", "dt_proj", "time_step_rank"), (_first, functools.partial(_first, early=True))),
    Family((*_COMMON, "dt_bias", "norm", "num_heads", "n_groups", "head_dim", "chunk_size", "conv_dim", "time_step_limit"), (_second,)),
)


def _family(block: Any) -> Family | None:
    return next((f for f in FAMILIES if all(hasattr(block, part) for part in f.parts)), None)


def _forward(block: Any, hidden_states: torch.Tensor, cache_params: Any = None, *args: Any, **kwargs: Any) -> Any:
    if args or cache_params is None or not torch.compiler.is_compiling() or hidden_states.shape[1] == 1:
        return type(block).forward(block, hidden_states, cache_params, *args, **kwargs)
    result, last, state = block.deplo_formula(block, hidden_states, kwargs.get("attention_mask"))
    for kept, value in zip(of_layer(cache_params, block.layer_idx), (last, state), strict=True):
        kept.copy_(value)
    return result


_forward.__name__ = "forward"  # as copies of the bound method look for it


def install(model: torch.nn.Module, new_cache: Callable[[int], Any], more: dict[str, Any]) -> None:
    """Lets mixers compile prompts by a formula; in eager mode they stay what they are. UnsupportedError for those that no formula serves.

    `new_cache` makes a cache of the model's for so many sequences, `more` are arguments that say it is a prompt.
    """
    found = [(name, block) for name, block in model.named_modules() if _family(block) is not None]
    if not found:
        raise UnsupportedError(f"{type(model).__name__} keeps its state in a way that deplo knows no formula of")
    for name, block in found:
        family = _family(block)
        assert family is not None
        formula = next((formula for formula in family.formulas if _gives(formula, block, new_cache, more)), None)
        if formula is None:
            raise UnsupportedError(f"{type(block).__name__} ({name}) goes through its tokens in a way that deplo knows no formula of")
        block.__dict__.update(deplo_formula=formula, forward=types.MethodType(_forward, block))


@torch.no_grad()
def ignores_mask_of_one(model: torch.nn.Module) -> bool:
    """Whether the mixers look for padding only where there are several sequences."""
    block: Any = next(m for m in model.modules() if _family(m) is not None)
    weight = block.in_proj.weight
    x = torch.ones(1, 3, weight.shape[1], dtype=weight.dtype)
    call = type(block).forward
    return torch.equal(call(block, x, attention_mask=torch.tensor([[0, 1, 1]])), call(block, x))


def remove(model: torch.nn.Module) -> None:
    """Takes the formulas away."""
    for block in model.modules():
        if getattr(block.__dict__.get("forward"), "__func__", None) is _forward:
            del block.__dict__["forward"], block.__dict__["deplo_formula"]


@contextlib.contextmanager
def _with_other_bias(layer: Any) -> Iterator[None]:
    """Values of a bias that is there meanwhile: one of zeros does not show whether padding is taken out before the layer or behind it."""
    bias = layer.bias
    if bias is None:
        yield
        return
    kept = bias.detach().clone()
    bias.copy_(torch.linspace(-1, 1, bias.numel(), dtype=torch.float32, device=bias.device).to(bias.dtype))
    try:
        yield
    finally:
        bias.copy_(kept)


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= 64 * torch.finfo(a.dtype).eps * max(float(b.abs().max()), 1e-30)


@torch.no_grad()
def _gives(formula: Any, block: Any, new_cache: Callable[[int], Any], more: dict[str, Any]) -> bool:
    """Whether the formula's results are the mixer's own for a few tokens, of which some are padding; what becomes of that, nobody reads."""
    weight = block.in_proj.weight
    accepted = inspect.signature(type(block).forward).parameters
    more = {key: value for key, value in more.items() if key in accepted}
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    x = torch.randn(2, 5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    for given in (None, mask):
        cache = new_cache(2)
        with _with_other_bias(block.in_proj):
            wanted = type(block).forward(block, x, cache, attention_mask=given, **more)
            got, *kept = formula(block, x, given)
        if given is not None:
            got, wanted = got[given.bool()], wanted[given.bool()]
        if not all(_is_alike(a, b) for a, b in zip((got, *kept), (wanted, *of_layer(cache, block.layer_idx)), strict=True)):
            return False
    return True
