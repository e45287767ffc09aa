"""Training steps of real models: eager, Inductor and deplo side by side; gradients judged by float64 in the same run.

    python benchmarks/training.py [--models bert-base,resnet-50] [--size real|tiny] [--threads 2] [--inductor] [--json FILE]

A step is forward, backward and an SGD update, whose in-place writes make every packed weight stale, as in real training. Each contestant trains
a copy of its own; times are medians of interleaved rounds with three rotating input sets (README.md here says how). `error` is the largest
difference of any gradient of the first step from that of the float64 model, relative to the gradient's largest element. `aten` counts ATen calls
of forward and backward, seen by PyTorch's profiler. Modules' dropout is off, so that steps can be compared.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import harness
import peak
import torch
import zoo
from torch import nn

# Those without a cache between calls.
NAMES = ("bert-base", "gpt2", "vit-base", "resnet-50", "mobilenet-v2", "convnext-tiny", "swin-tiny")
RATE = 1e-6
NOTHING = 1e-10


class Loss(nn.Module):
    """Mean of the squares of a model's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs).square().mean()


class Step:
    """Forward, backward and update of one copy of a model."""

    def __init__(self, model: nn.Module, sets: list[dict[str, Any]], compile_with: dict[str, Any] | None) -> None:
        self.model = Loss(copy.deepcopy(model))
        self.sets = sets
        self.forward: Callable[..., Any] = torch.compile(self.model, **compile_with) if compile_with else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def gradients(self, k: int) -> None:
        self.optimizer.zero_grad()
        self.forward(**self.sets[k]).backward()

    def __call__(self, k: int) -> None:
        self.gradients(k)
        self.optimizer.step()


def trainable(name: str, size: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    case = zoo.build(name, size, torch.float32)
    model = case.model.requires_grad_(True).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if hasattr(model, "model") and hasattr(model.model, "config"):
        # Attention takes its dropout from the config at each call, drop path at construction: both modules and numbers.
        for module in model.modules():
            for attribute in ("attention_dropout", "dropout_prob", "drop_prob", "attn_dropout", "dropout"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
    # Batches of two: statistics of one image of one point do not exist.
    pairs = [(case.inputs(seed), case.inputs(seed + 3)) for seed in range(3)]
    return model, [{key: torch.cat([a[key], b[key]]) for key in a} for a, b in pairs]


def worst_gradient(step: Step, judge: Step) -> float:
    step.gradients(0)
    pairs = [(p.grad, q.grad) for p, q in zip(step.model.parameters(), judge.model.parameters(), strict=True) if q.grad is not None]
    # The gradient of a bias before a normalisation is zero but for rounding.
    least = NOTHING * max(float(wanted.abs().max()) for _, wanted in pairs)
    return max(harness.max_error(got, wanted) for got, wanted in pairs if float(wanted.abs().max()) > least)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    model, sets = trainable(name, args.size)
    judge = Step(model.double(), harness.to_double(sets), None)
    model = model.float()
    judge.gradients(0)
    row: dict[str, Any] = {"model": name}
    contestants: dict[str, Step] = {"eager": Step(model, sets, None)}
    if args.inductor:
        contestants["inductor"] = Step(model, sets, {"backend": "inductor"})
    contestants["deplo"] = Step(model, sets, {"backend": "deplo", "options": {"strict": True}})
    for contestant, step in contestants.items():
        row[f"error {contestant}"] = worst_gradient(step, judge)
    del judge
    contestants["deplo"](0)
    calls = harness.aten_calls(lambda: contestants["deplo"].gradients(0))
    row["aten"] = " ".join(f"{key[6:]}x{n}" for key, n in sorted(calls.items())) or "none"
    others = harness.OtherWork()
    timings = harness.interleave(contestants, args.rounds, args.seconds, len(sets), args.pause)
    row["others"] = others.processors()
    row |= {f"{contestant} ms": timing.median * 1e3 for contestant, timing in timings.items()}
    return row | {f"vs {contestant}": harness.ratio(timings, contestant, "deplo") for contestant in timings if contestant != "deplo"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    harness.add_timing_options(parser, rounds=3, seconds=0.3)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    unknown = [name for name in args.models.split(",") if name not in NAMES]
    if unknown:
        parser.error(f"unknown model {unknown[0]}: the models are {', '.join(NAMES)}")
    warnings.filterwarnings("ignore")
    limits = peak.measure(args.threads)
    print(f"peak: {limits}, {args.threads} threads", file=sys.stderr)
    rows = []
    for name in args.models.split(","):
        torch._dynamo.reset()
        rows.append(measure(name, args))
        print(f"{name}: {rows[-1]['vs eager']:.2f}x eager", file=sys.stderr, flush=True)
    harness.show(rows, f"training, float32, {args.threads} threads")
    harness.show_means(rows)
    harness.write_json(args.json, rows, limits)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
