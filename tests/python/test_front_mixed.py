"""Graphs of which only a part can be said in Torch IR: that part is compiled, the rest runs in ATen."""

from __future__ import annotations

import pytest
import torch
from engines import compiler, same

import deplo
from deplo.backend import collect_records
from deplo.errors import FallbackWarning

__all__ = ["compiler"]


def rotary(x, freqs):
    """Rotary positions by complex numbers, as the first Llama wrote them, between two norms."""
    x = torch.softmax(x * 2, -1)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.view_as_complex(freqs)
    return torch.softmax(torch.view_as_real(z).flatten(-2) + 1, -1), z.abs().sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_complex_rotary_compiles_around_the_complex_calls(compiler, dynamic):
    x, freqs = torch.randn(6, 8), torch.randn(6, 4, 2)
    with torch.no_grad(), collect_records() as records, pytest.warns(FallbackWarning, match="calls of the inference graph run in eager") as caught:
        result = torch.compile(rotary, backend=deplo.deplo, dynamic=dynamic)(x, freqs)
    same(result, rotary(x, freqs))
    assert len([w for w in caught if w.category is FallbackWarning]) == 1
    assert sum("_softmax" in record.torch_ir for record in records) == 2
    assert not any(record.fallback for record in records)


def test_training_through_complex_calls(compiler):
    x = torch.randn(6, 8, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    freqs = torch.randn(6, 4, 2)
    with pytest.warns(FallbackWarning):
        compiled = torch.compile(rotary, backend=deplo.deplo)
        grads = [torch.autograd.grad(sum(part.square().sum() for part in fn(v, freqs)), v)[0] for fn, v in ((compiled, x), (rotary, y))]
    same(*grads, scale=64)


def test_mutation_and_several_results_beside_complex_calls(compiler):
    def fn(x, z):
        values, indices = x.max(1)
        y = (z * z).abs()
        x.add_(values[:, None])
        return y + indices, x.sum(), (z + 1).real

    x, z = torch.randn(3, 4), torch.randn(3, dtype=torch.complex64)
    other = x.clone()
    with torch.no_grad(), pytest.warns(FallbackWarning):
        same(torch.compile(fn, backend=deplo.deplo)(x, z), fn(other, z))
    same(x, other)


def test_sizes_that_depend_on_data_run_between_programs(compiler):
    def fn(x):
        y = x * 2 + 1
        return torch.softmax(y[y > 0].exp(), 0).sum(), y

    x = torch.randn(4, 5)
    config = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with config, torch.no_grad(), pytest.warns(FallbackWarning):
        same(torch.compile(fn, backend=deplo.deplo, fullgraph=True)(x), fn(x))


def test_explain_names_what_stays_in_aten():
    import deplo

    text = str(deplo.explain(lambda x: torch.fft.fft(x).abs() + 1, torch.ones(4)))
    assert "stay in ATen" in text and "_fft_r2c" in text and "complex" in text


@pytest.mark.parametrize("fullgraph", [False, True])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_values_give_one_warning(compiler, fullgraph):
    def fn(x):
        places = x.nonzero().squeeze(1)
        return ((places * 2).float() + 1).exp(), torch.unique(x) + 1, torch.softmax(x, 0)

    x = torch.tensor([1.0, 0.0, 3.0])
    with torch.no_grad(), pytest.warns(FallbackWarning) as caught:
        result = torch.compile(fn, backend=deplo.deplo, fullgraph=fullgraph)(x)
    same(result, fn(x))
    (text,) = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert "\n" not in text and "of the inference graph run in eager mode, deplo does not compile that: " in text
    assert "the size u0 depends on the values of a tensor, not on the sizes of the inputs" in text and "test_front_mixed.py" in text
