"""Finding out why something is slow: a model with a graph break and a call that deplo leaves to ATen, and what mends them.

python examples/slow.py                                 # what deplo.explain says before and after
python -m deplo report examples/slow.py:before -o out   # the same as a page: out/index.html, and a trace for Perfetto
"""

from __future__ import annotations

from typing import Any

import torch

import deplo

LAYER = torch.nn.Linear(64, 64)


def slow(x: torch.Tensor) -> torch.Tensor:
    y = LAYER(x).softmax(-1)
    if y.max() > 0.5:  # a branch on data: Dynamo ends the graph here
        y = y * 0.5
    return torch.sort(y, -1, descending=True)[0][:, :1]  # sorts each row for its largest number


def mended(x: torch.Tensor) -> torch.Tensor:
    y = LAYER(x).softmax(-1)
    y = torch.where(y.max() > 0.5, y * 0.5, y)
    return y.amax(-1, keepdim=True)


def before() -> tuple[Any, Any]:
    return slow, (torch.randn(128, 64),)


def after() -> tuple[Any, Any]:
    return mended, (torch.randn(128, 64),)


def main() -> None:
    torch.manual_seed(0)
    (_, inputs) = before()
    with torch.no_grad():
        for function in (slow, mended):
            explanation = deplo.explain(function, *inputs)
            calls = [op for graph in explanation.graphs for op, _ in graph.library]
            print(f"== {function.__name__}: graphs {len(explanation.graphs)}, calls left to ATen {calls or 'none'}\n{explanation}")
        torch.testing.assert_close(mended(*inputs), slow(*inputs))


if __name__ == "__main__":
    main()
