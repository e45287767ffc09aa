"""Interpolation, sampling by grids and pooling at drawn places, as eager mode computes them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from engines import equal, needs_core, same

import deplo

pytestmark = needs_core


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_fractional_pooling_takes_the_windows_and_the_places_of_eager_mode(dtype, dynamic):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 11, 13, generator=generator).to(dtype)
    x[0, 0, 3:6, 3:7] = float("nan")
    x[1, 1] = float("-inf")
    samples = torch.rand(2, 3, 2, generator=generator).to(dtype)
    volume, more = torch.randn(2, 3, 5, 7, 6, generator=generator).to(dtype), torch.rand(2, 3, 3, generator=generator).to(dtype)

    def fn(x, samples, volume, more):
        pool, pool3 = torch.nn.functional.fractional_max_pool2d, torch.nn.functional.fractional_max_pool3d
        return (
            pool(x, (2, 3), output_size=(5, 4), return_indices=True, _random_samples=samples),
            pool(x[1], 2, output_size=(5, 1), return_indices=True, _random_samples=samples[1:]),
            pool3(volume, (2, 3, 1), output_size=(3, 4, 5), return_indices=True, _random_samples=more),
        )

    compiled = torch.compile(fn, backend="deplo", dynamic=dynamic, options={"strict": True, "allow_library": []})
    for got, wanted in zip(compiled(x, samples, volume, more), fn(x, samples, volume, more), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 1, 7), (2, 1, 3, 4, 5), (2, 1, 1, 2, 1)], ids=str)
def test_affine_grids(size, aligned):
    torch.manual_seed(0)
    rank = len(size) - 2

    def grid(theta):
        return torch.nn.functional.affine_grid(theta, size, align_corners=aligned)

    for dtype in (torch.float32, torch.float64, *[torch.bfloat16] * (1 not in size[2:])):
        for theta in (torch.randn(2, rank, rank + 1), torch.randn(2, rank + 1, rank).transpose(1, 2), torch.full((2, rank, rank + 1), math.inf)):
            theta = theta.to(dtype)
            got = torch.compile(grid, backend="deplo", dynamic=False, options={"strict": True, "allow_library": []})(theta)
            same(got, grid(theta), exact=grid(theta.double()))
            assert got.stride() == grid(theta).stride()


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("sizes", [(4, 8), (4, 7), (5, 3), (4, 4), (6, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("mode", ["linear", "bilinear", "trilinear"])
def test_interpolation_multiplies_what_eager_mode_multiplies(mode, sizes, align_corners):
    """PyTorch traces a + (b - a) * weight, NaN where a is infinite; eager mode adds a * (1 - weight) and b * weight, dimension by dimension."""
    dims = {"linear": 1, "bilinear": 2, "trilinear": 3}[mode]

    def resized(x):
        return F.interpolate(x, [sizes[1]] * dims, mode=mode, align_corners=align_corners)

    compiled = torch.compile(resized, backend="deplo", dynamic=False, options={"strict": True})
    for value in (torch.inf, -torch.inf, torch.nan):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = torch.rand(1, 1, *[sizes[0]] * dims, generator=torch.Generator().manual_seed(0)).to(dtype)
            x.view(-1)[min(1, x.numel() - 1)] = value
            wanted = resized(x)
            torch.testing.assert_close(compiled(x), wanted, equal_nan=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("mode", ["linear", "bilinear", "trilinear"])
@pytest.mark.parametrize("how", [{"size": 7}, {"scale_factor": 2}, {"scale_factor": 1.5, "recompute_scale_factor": True}], ids=str)
def test_gradients_of_interpolation(how, mode, dynamic):
    dims = {"linear": 1, "bilinear": 2, "trilinear": 3}[mode]
    how = {name: [value] * dims if name == "size" else value for name, value in how.items()}
    memory_formats = {1: [torch.contiguous_format], 2: [torch.contiguous_format, torch.channels_last]}
    for memory_format in memory_formats.get(dims, [torch.contiguous_format, torch.channels_last_3d]):
        torch._dynamo.reset()
        x = torch.randn(2, 3, *[5, 6, 4][:dims], generator=torch.Generator().manual_seed(0))
        results = []
        for call, dtype in ((torch.compile(F.interpolate, backend="deplo", dynamic=dynamic, options={"strict": True}), torch.float32),) + (
            (F.interpolate, torch.float32),
            (F.interpolate, torch.float64),
        ):
            given = x.to(dtype, memory_format=memory_format).requires_grad_()
            y = call(given, mode=mode, **how)
            seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype, memory_format=memory_format)
            results.append([y, *torch.autograd.grad(y, given, seed)])
        for got, eager, wanted in zip(*results, strict=True):
            assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
            # Products of weights and sums of at most 27 terms of the size of the largest: each rounds by half an ulp.
            assert (got - wanted).abs().max() <= (eager - wanted).abs().max() + 4 * torch.finfo(torch.float32).eps * wanted.abs().max()


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_interpolation_of_no_images(mode, dynamic):
    def double(x):
        return F.interpolate(x, scale_factor=2, mode=mode)

    compiled = torch.compile(double, backend="deplo", dynamic=dynamic)
    for n in (2, 0):
        x = torch.randn(n, 3, 4, 5, requires_grad=True)
        equal(compiled, double, x)
        assert torch.autograd.grad(compiled(x).sum(), x)[0].shape == x.shape
    with pytest.raises(Exception, match="[Nn]on-empty"):
        compiled(torch.randn(2, 0, 4, 5))


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("rank", [2, 3])
def test_grids_of_no_numbers(rank, mode, padding):
    """Where eager mode looks for a coordinate that is NaN or infinite depends on padding and rank."""
    image = torch.arange(1.0, 5**rank + 1).view(1, 1, *[5] * rank)
    points = [[v if d == k else 0.1 for d in range(rank)] for v in (float("nan"), float("inf"), -float("inf"), 0.3) for k in range(rank)]
    grid = torch.tensor(points).view(1, *[1] * (rank - 1), len(points), rank)
    for align in (False, True):
        for dtype in (torch.float32, torch.float64):

            def f(image, grid, align=align):
                return F.grid_sample(image, grid, mode=mode, padding_mode=padding, align_corners=align)

            compiled = torch.compile(f, backend="deplo", dynamic=False, options={"strict": True})
            torch.testing.assert_close(compiled(image.to(dtype), grid.to(dtype)), f(image.to(dtype), grid.to(dtype)), equal_nan=True)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("align", [False, True])
def test_gradients_of_grids_of_no_numbers(align, mode, padding):
    """In three dimensions; eager mode's kernel of two reads outside of its memory there."""

    def gradients(f, dtype):
        torch.manual_seed(0)
        image = torch.randn(1, 2, 3, 4, 5, dtype=dtype, requires_grad=True)
        grid = torch.rand(1, 1, 2, 6, 3, dtype=dtype) * 2 - 1
        grid.view(-1)[::4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 2.0, 0.0, 1.0, -1.0])
        grid.requires_grad_()
        y = f(image, grid)
        return torch.autograd.grad(y, [image, grid], torch.randn(y.shape, dtype=dtype))

    def f(image, grid):
        return F.grid_sample(image, grid, mode=mode, padding_mode=padding, align_corners=align)

    for dtype in (torch.float32, torch.float64):
        compiled = torch.compile(f, backend="deplo", dynamic=False, options={"strict": True})
        torch.testing.assert_close(gradients(compiled, dtype), gradients(f, dtype), equal_nan=True)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("how", [{"size": (6, 6)}, {"size": (9, 6)}, {"scale_factor": (1.0, 1.1)}, {"scale_factor": (1.05, 0.7)}], ids=str)
def test_antialiasing_keeps_what_keeps_its_size(how, mode, align_corners):
    x = torch.rand(1, 2, 6, 6)
    x[0, 0, 2, 3] = float("inf")

    def f(x):
        return F.interpolate(x, mode=mode, antialias=True, align_corners=align_corners, **how)

    torch.testing.assert_close(torch.compile(f, backend="deplo", dynamic=False)(x), f(x), equal_nan=True)

    x = torch.rand(1, 2, 6, 6, requires_grad=True)
    results = f(x), torch.compile(f, backend="deplo", dynamic=False)(x)
    cotangent = torch.linspace(-1, 1, results[0].numel()).view(results[0].shape)
    cotangent[0, 0, 2, 3] = float("inf")
    expected, got = (torch.autograd.grad(y, x, cotangent)[0] for y in results)
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bicubic"])
@pytest.mark.parametrize("how", [{"scale_factor": 2}, {"scale_factor": 1.7}, {"size": (9, 4)}], ids=str)
def test_interpolation_is_one_call_in_training(mode, how):
    """PyTorch's tracer would make indexing of it, whose gradient scatters."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)

    def fn(x):
        return F.interpolate(x, mode=mode, **how)

    results = []
    torch._dynamo.reset()
    for run in (torch.compile(fn, backend="deplo", options={"strict": True}, dynamic=False), fn):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, y.detach().cos())))
    torch.testing.assert_close(*results)
    assert "1 ATen call " in str(deplo.explain(fn, x.requires_grad_()))


@pytest.mark.parametrize("function", [lambda x: F.adaptive_avg_pool2d(x, 2), lambda x: F.interpolate(x, size=(2, 3), mode="bilinear")])
def test_what_has_no_elements_is_refused_as_in_eager_mode(function):
    x = torch.rand(2, 3, 0, 5)
    for call in (function, torch.compile(function, backend="deplo", options={"strict": True})):
        with pytest.raises(RuntimeError, match="non-zero size|[Nn]on-empty|greater than 0"):
            call(x)
