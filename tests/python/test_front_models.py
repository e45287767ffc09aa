"""The models of the census, imported and run from their Torch IR text by ATen: the text loses nothing."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch_ir_eager
from engines import same

from deplo import backend
from deplo.options import read_options

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import harness  # noqa: E402
import zoo  # noqa: E402

NAMES = [name for name in zoo.NAMES if not name.endswith(("s128", "s512"))]


@pytest.fixture(autouse=True)
def text_runs_in_aten(monkeypatch):
    monkeypatch.setattr(backend, "core", lambda: torch_ir_eager.Core)
    torch._dynamo.reset()


def compiled(fn, **keywords):
    return torch.compile(fn, backend=functools.partial(backend.compile_with, read_options(options={"strict": True})), **keywords)


@pytest.mark.parametrize("name", NAMES)
def test_inference(name):
    case = zoo.build(name, "tiny")
    fn = compiled(lambda **inputs: case.model(**inputs))
    with torch.no_grad():
        case.model(**case.inputs(0))  # makes the KV cache, which reset() fills
        for seed in range(2):
            inputs = case.inputs(seed)
            if case.reset:
                case.reset()
            expected = case.model(**inputs)
            if case.reset:
                case.reset()
            torch.testing.assert_close(fn(**inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bert-base", "gpt2", "t5-small", "resnet-50", "swin-tiny", "vit-base", "convnext-tiny"])
def test_training(name):
    case = zoo.build(name, "tiny")
    case.model.train()
    inputs = case.inputs(0)

    def gradients(fn):
        case.model.zero_grad()
        torch.manual_seed(7)
        fn(**inputs).square().mean().backward()
        return {key: p.grad.clone() for key, p in case.model.named_parameters() if p.grad is not None}

    buffers = {key: value.clone() for key, value in case.model.named_buffers()}

    def back():
        for key, value in case.model.named_buffers():
            value.copy_(buffers[key])

    eager = gradients(lambda **keywords: case.model(**keywords))
    after = {key: value.clone() for key, value in case.model.named_buffers()}
    back()
    actual = gradients(compiled(lambda **keywords: case.model(**keywords)))
    same(dict(case.model.named_buffers()), after)
    back()
    case.model.double()
    inputs = harness.to_double(inputs)
    wanted = gradients(lambda **keywords: case.model(**keywords))

    # Relative to each parameter's largest gradient; some are zero but for rounding.
    least = 1e-6 * max(float(g.abs().max()) for g in wanted.values())
    scales = {key: max(float(g.abs().max()), least) for key, g in wanted.items()}

    def errors(got):
        return {key: float((got[key] - wanted[key]).abs().max()) / scales[key] for key in wanted if scales[key] > least}

    assert actual.keys() == wanted.keys()
    allowed = 2 * max(errors(eager).values()) + 8 * torch.finfo(torch.float32).eps
    assert max(errors(actual).values()) <= allowed, (errors(actual), allowed)
    assert all(float(actual[key].abs().max()) <= 10 * least for key in wanted if scales[key] == least)


@pytest.mark.parametrize("name", ["llama-block-s32", "gpt2", "vit-base"])
def test_symbolic_sizes(name):
    case = zoo.build(name, "tiny")
    fn = compiled(lambda **inputs: case.model(**inputs), dynamic=True)
    with torch.no_grad():
        inputs = case.inputs(0)
        if case.reset:
            case.reset()
        expected = case.model(**inputs)
        if case.reset:
            case.reset()
        torch.testing.assert_close(fn(**inputs), expected, rtol=0, atol=0)
