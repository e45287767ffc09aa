"""What the soak calls: small models and functions of each kind of graph, with inputs of random sizes and a judge."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ULPS = 16  # of functions of single elements on the way


class WrongValue(AssertionError):
    """A result is not eager mode's."""


class Small(nn.Module):
    """A perceptron: weights are packed, rows are any number."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(48, 96), nn.Linear(96, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(nn.functional.gelu(self.wide(x)))


class Long(nn.Module):
    """The same where a call takes long enough for other threads to come in between."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.wide(x)))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.norm(self.first(x))))
        return self.head(y.mean((2, 3)))


class Cache(nn.Module):
    """Attention over a cache that each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.register_buffer("seen", torch.zeros(2, 2, 24, 16))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(1, 1, 2, 16).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.seen[0].index_copy_(1, at, k[0])
        self.seen[1].index_copy_(1, at, v[0])
        return nn.functional.scaled_dot_product_attention(q, self.seen[:1], self.seen[1:]).transpose(1, 2).flatten(2)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 24)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.table(index).sum(1) * 2, -1)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 1.5 + 0.25, -1)


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.amax(-1), (x * x).sum(0), x.t().contiguous() + 1


def accumulate(x: torch.Tensor) -> torch.Tensor:
    """Writes its argument."""
    x.add_(1).mul_(0.5)
    return x.cumsum(-1)


def large(x: torch.Tensor) -> torch.Tensor:
    """An output of the recycling pool's."""
    return torch.tanh(x) * 2


Inputs = Callable[[random.Random], tuple[torch.Tensor, ...]]


def _floats(rng: random.Random, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))


def _cache_inputs(rng: random.Random) -> tuple[torch.Tensor, ...]:
    return _floats(rng, 1, 1, 32), torch.tensor([rng.randrange(24)])


def _indices(rng: random.Random) -> tuple[torch.Tensor, ...]:
    return (torch.tensor([[rng.randrange(40) for _ in range(6)] for _ in range(rng.randint(1, 9))]),)


# By name: what makes the callable, and its inputs; the number of terms in its longest sum bounds what rounding may do.
SUBJECTS: dict[str, tuple[Callable[[], Callable[..., Any]], Inputs, int]] = {
    "small": (Small, lambda rng: (_floats(rng, rng.randint(1, 17), 48),), 144),
    "long": (Long, lambda rng: (_floats(rng, rng.randint(1, 40), 256),), 1280),
    "images": (Images, lambda rng: (_floats(rng, rng.randint(1, 3), 3, 16, 16),), 128),
    "cache": (Cache, _cache_inputs, 64),
    "table": (Table, _indices, 32),
    "softmax": (lambda: softmax, lambda rng: (_floats(rng, rng.randint(1, 40), rng.randint(2, 70)),), 70),
    "statistics": (lambda: statistics, lambda rng: (_floats(rng, rng.randint(2, 40), rng.randint(2, 70)),), 70),
    "accumulate": (lambda: accumulate, lambda rng: (_floats(rng, rng.randint(2, 30), rng.randint(2, 30)),), 30),
    "large": (lambda: large, lambda rng: (_floats(rng, rng.randint(300, 700), 1024),), 1),
}
WITH_STATE = {"cache"}  # whose calls change the module
TRAINED = ("small", "images", "softmax", "table")


_making = threading.Lock()


def build(name: str, seed: int) -> Callable[..., Any]:
    """A callable of its own: compiled apart from others of its kind."""
    with _making:  # the generator is every thread's
        torch.manual_seed(seed)
        made = SUBJECTS[name][0]()
    return made.eval() if isinstance(made, nn.Module) else twin_of(made)


def twin_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Another one with the same weights."""
    if isinstance(fn, nn.Module):
        return copy.deepcopy(fn)
    return type(fn)(fn.__code__.replace(), fn.__globals__, fn.__name__)  # type: ignore[attr-defined, no-any-return, call-arg]


def in_double(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same of float64, with a state of its own."""
    return copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn


def doubled(args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.double() if x.is_floating_point() else x.clone() for x in args)


def judge(what: str, terms: int, got: Any, eager: Any, exact: Any) -> None:
    """Raises WrongValue unless each tensor is as near to float64's as a sum of `terms` rounded terms is, or as eager mode's is."""
    gots, eagers, exacts = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (got, eager, exact))
    if len(gots) != len(eagers):
        raise WrongValue(f"{what}: {len(gots)} results, eager mode gives {len(eagers)}")
    for k, (g, e, x) in enumerate(zip(gots, eagers, exacts, strict=True)):
        # A stride of an axis of one element means nothing.
        strides = all(a == b for size, a, b in zip(g.shape, g.stride(), e.stride(), strict=False) if size > 1)
        if (g.dtype, g.shape) != (e.dtype, e.shape) or not strides:
            raise WrongValue(f"{what}: result {k} is {g.dtype}{tuple(g.shape)} {g.stride()}, eager mode's {e.dtype}{tuple(e.shape)} {e.stride()}")
        if not g.numel():
            continue
        if not g.is_floating_point():
            if not torch.equal(g, e):
                raise WrongValue(f"{what}: result {k} is not eager mode's")
            continue
        g, e, x = g.detach(), e.detach(), x.detach()
        error, eagers_error, scale = (float(t.abs().max()) for t in (g.double() - x, e.double() - x, x))
        bound = eagers_error + (terms + ULPS) * torch.finfo(e.dtype).eps * max(scale, torch.finfo(e.dtype).tiny)
        if not error <= bound:
            raise WrongValue(
                f"{what}: result {k}, {tuple(g.shape)}, is {error:.3g} off float64's, eager mode's {eagers_error:.3g}; allowed {bound:.3g}"
            )
