"""A training loop: forward, backward and the optimizer's step compiled, beside the same steps in eager mode.

python examples/train.py
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

import deplo


def train(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor, steps: int, compiled: bool) -> list[float]:
    """Losses of `steps` steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), target)

    loss_fn, step = (deplo.jit(loss_of), deplo.jit(optimizer.step)) if compiled else (loss_of, optimizer.step)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(x, target)
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 10))
    x, target = torch.randn(128, 32), torch.randint(10, (128,))

    eager = train(copy.deepcopy(model), x, target, 20, compiled=False)
    losses = train(model, x, target, 20, compiled=True)
    torch.testing.assert_close(losses, eager, rtol=1e-4, atol=1e-4)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} (eager mode {eager[0]:.4f} -> {eager[-1]:.4f})")


if __name__ == "__main__":
    main()
