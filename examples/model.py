"""A model: compiled by one line, compared with eager mode, and explained.

python examples/model.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import deplo


class Block(torch.nn.Module):
    """A gated layer with a norm in front and a residual around it, as in a transformer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.gate = torch.nn.Linear(width, hidden)
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def main() -> None:
    torch.manual_seed(0)
    model, x = Block(64, 256).eval(), torch.randn(32, 64)

    compiled = torch.compile(model, backend="deplo", options={"strict": True, "allow_library": []})
    with torch.no_grad():
        result, expected = compiled(x), model(x)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    print(f"largest difference from eager mode: {(result - expected).abs().max():.2g}")

    with torch.no_grad():
        print(deplo.explain(model, x))


if __name__ == "__main__":
    main()
