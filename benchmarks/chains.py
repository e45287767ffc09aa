"""Layers followed by what networks put behind them: products and convolutions with activations, norms, pooling, reductions, residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[torch.Tensor], torch.Tensor]


class Chain(nn.Module):
    """Modules and functions, one after the other."""

    def __init__(self, *steps: Step) -> None:
        super().__init__()
        self.layers = nn.ModuleList(step for step in steps if isinstance(step, nn.Module))
        self.steps = [None if isinstance(step, nn.Module) else step for step in steps]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = iter(self.layers)
        for step in self.steps:
            x = next(layers)(x) if step is None else step(x)
        return x


class Residual(nn.Module):
    """What a module makes of a tensor, joined with the tensor by a function."""

    def __init__(self, inner: nn.Module, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add) -> None:
        super().__init__()
        self.inner, self.join = inner, join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(self.inner(x), x)


class Bias(nn.Module):
    """A learned tensor, added, or joined by another function."""

    def __init__(self, *shape: int, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add) -> None:
        super().__init__()
        self.bias, self.join = nn.Parameter(torch.randn(shape)), join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(x, self.bias)


def chains() -> list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    """Name, module and the shape of its input."""
    rows, image, small, volume, steps = (256, 1024), (8, 32, 64, 64), (8, 64, 32, 32), (2, 16, 16, 32, 32), (8, 64, 2048)

    def plane() -> nn.Module:
        return Bias(32, 1, 1)

    def linear(*more: Any, out: int = 1024) -> Callable[[], nn.Module]:
        return lambda: Chain(nn.Linear(1024, out), *_fresh(more))

    def conv(*more: Any, out: int = 64, kernel: int = 3, **settings: Any) -> Callable[[], nn.Module]:
        return lambda: Chain(nn.Conv2d(32, out, kernel, **settings), *_fresh(more))

    def conv3(*more: Any, out: int = 32, kernel: int = 3, **settings: Any) -> Callable[[], nn.Module]:
        return lambda: Chain(nn.Conv3d(16, out, kernel, **settings), *_fresh(more))

    def up(*more: Any, out: int = 32, kernel: int = 4, stride: int = 2, padding: int = 1, **settings: Any) -> Callable[[], nn.Module]:
        return lambda: Chain(nn.ConvTranspose2d(64, out, kernel, stride, padding, **settings), *_fresh(more))

    def up3(*more: Any, out: int = 32, kernel: int = 3, stride: int = 2, padding: int = 1, **settings: Any) -> Callable[[], nn.Module]:
        return lambda: Chain(nn.ConvTranspose3d(16, out, kernel, stride, padding, **settings), *_fresh(more))

    return [
        ("linear, times, leaky relu", linear(lambda x: F.leaky_relu(x * 2.0, 0.1)), rows),
        ("linear, swish, divide, clamp, tanh, clamp", linear(lambda x: (F.silu(x) / 2).clamp(-1, 1).tanh().clamp(-0.9, 0.9)), rows),
        ("linear, mish, mish", linear(F.mish, F.mish), rows),
        ("linear, divide, sum, scale", linear(lambda x: (x / 2).sum(1, keepdim=True) * 1.5), rows),
        ("linear, sum, max, mean, logsumexp", linear(lambda x: torch.logsumexp(torch.stack([x.sum(1), x.max(1).values, x.mean(1)], 1), 1)), rows),
        ("linear, scale, residual, clamp, logsumexp, mish", linear(_residual_logsumexp), rows),
        ("linear, average of four, gelu, scale, max", linear(lambda x: (F.gelu(F.avg_pool1d(x[:, None], 4)[:, 0]) * 2).max(1).values), rows),
        ("linear, max of two, sum, scale", linear(lambda x: F.max_pool1d(x[:, None], 2)[:, 0].sum(1) * 0.5), rows),
        ("linear, batch norm, gelu, relu", linear(lambda: nn.BatchNorm1d(1024), F.gelu, F.relu), rows),
        ("linear, batch norm, bias, divide, swish", linear(lambda: nn.BatchNorm1d(1024), lambda: Bias(1), lambda x: F.silu(x / 2)), rows),
        ("linear, group norm, hardtanh", linear(lambda: nn.GroupNorm(8, 1024), F.hardtanh), rows),
        (
            "linear, group norm, min, bias",
            linear(lambda: nn.GroupNorm(8, 1024), lambda x: x.min(1, keepdim=True).values, lambda: Bias(1, 1024)),
            rows,
        ),
        ("linear, group norm, swish, times, swish", linear(lambda: nn.GroupNorm(16, 1024), lambda x: F.silu(F.silu(x) * 1.5)), rows),
        ("linear, softmax over the rows", linear(lambda x: torch.softmax(x, 0)), rows),
        ("linear, dropout, softmax", linear(lambda x: torch.softmax(F.dropout(x, 0.2, training=False), 1)), rows),
        ("linear, sigmoid, sum", linear(lambda x: torch.sigmoid(x).sum(1, keepdim=True), out=2048), rows),
        ("linear, sigmoid, linear, logsumexp", linear(torch.sigmoid, lambda: nn.Linear(2048, 512), lambda x: torch.logsumexp(x, 1), out=2048), rows),
        ("linear, subtract, mean, logsumexp, gelu, residual", linear(_pooled_residual), rows),
        ("linear, instance norm, residual, times", linear(lambda x: (F.instance_norm(x[None])[0] + x) * x), rows),
        ("linear, layer norm, relu, linear", linear(lambda: nn.LayerNorm(1024), F.relu, lambda: nn.Linear(1024, 256)), rows),
        ("conv2d, relu, bias", conv(F.relu, lambda: Bias(64, 1, 1)), image),
        ("conv2d, mish, mish", conv(F.mish, F.mish), image),
        ("conv2d, min over channels, tanh, tanh", conv(lambda x: x.min(1, keepdim=True).values.tanh().tanh()), image),
        ("conv2d, softplus, tanh, times, batch norm", conv(lambda x: F.softplus(x).tanh() * x, lambda: nn.BatchNorm2d(64)), image),
        ("conv2d, instance norm, divide", conv(lambda: nn.InstanceNorm2d(64), lambda x: x / 2), image),
        ("conv2d, add, scale, sigmoid, group norm", conv(lambda x: torch.sigmoid((x + 1) * 2), lambda: nn.GroupNorm(8, 64)), image),
        ("conv2d, group norm, tanh, hardswish, residual, logsumexp", conv(lambda: nn.GroupNorm(8, 64), _residual_over_channels), image),
        ("conv2d, group norm, scale, max pool, clamp", conv(lambda: nn.GroupNorm(8, 64), lambda x: F.max_pool2d(x * 2, 4).clamp(0, 1)), image),
        ("conv2d, average pool, sigmoid, sum", conv(lambda x: torch.sigmoid(F.avg_pool2d(x, 4)).sum((1, 2, 3))), image),
        ("conv2d, subtract, tanh, subtract, average pool", conv(lambda x: F.avg_pool2d((x - 0.5).tanh() - 0.2, 2)), image),
        ("conv2d, hardswish, max pool, mish", conv(lambda x: F.mish(F.max_pool2d(F.hardswish(x - 0.5), 2))), image),
        ("conv2d, gelu, mean of the image", conv(lambda x: F.adaptive_avg_pool2d(F.gelu(x), 1)[..., 0, 0]), image),
        ("conv2d, batch norm, scale", conv(lambda: nn.BatchNorm2d(64), lambda x: x * 2), image),
        ("conv2d, layer norm of channels, gelu", conv(lambda: nn.GroupNorm(1, 64), F.gelu), image),
        ("conv2d 7x7 in groups, norm, 1x1, gelu, 1x1, residual", _convnext, (4, 64, 56, 56)),
        ("conv2d, channel attention", lambda: Chain(nn.Conv2d(32, 64, 3), _SqueezeExcite(64)), image),
        ("conv2d, pixel shuffle, relu", conv(lambda x: F.relu(F.pixel_shuffle(x, 2)), padding=1), image),
        ("conv2d, upsampled, conv2d", conv(lambda x: F.interpolate(x, scale_factor=2.0), lambda: nn.Conv2d(64, 16, 3, padding=1), padding=1), image),
        ("conv2d, split in two, gated", conv(lambda x: F.glu(x, 1), out=128), image),
        ("conv2d, channels shuffled, depthwise", _shuffled, small),
        ("conv_transpose2d, bias, clamp, scale, clamp, divide", up(plane, lambda x: (x.clamp(0, 1) * 2).clamp(0, 1) / 2), small),
        ("conv_transpose2d, max pool, hardtanh, mean, tanh", up(lambda x: F.hardtanh(F.max_pool2d(x, 2)).mean((2, 3), keepdim=True).tanh()), small),
        ("conv_transpose2d, mish, add, hardtanh, scale", up(lambda x: F.hardtanh(F.mish(x) + 0.5) * 2), small),
        ("conv_transpose2d, gelu, group norm", up(F.gelu, lambda: nn.GroupNorm(8, 32)), small),
        (
            "conv_transpose2d, softmax, bias, scale, sigmoid",
            up(_softmax, plane, lambda x: torch.sigmoid(x * 2)),
            small,
        ),
        ("conv_transpose2d, min, sum, gelu, add", up(lambda x: F.gelu(x.min(1, keepdim=True).values.sum(2, keepdim=True)) + 1), small),
        ("conv_transpose2d, mean, bias, logsumexp, sum", up(_mean_logsumexp), small),
        ("conv_transpose2d, batch norm, tanh, max pool, group norm", up(lambda: nn.BatchNorm2d(32), _tanh_pool, lambda: nn.GroupNorm(4, 32)), small),
        ("conv_transpose2d, subtract bias, tanh", up(lambda: Bias(32, 1, 1, join=torch.sub), torch.tanh), small),
        ("conv3d, min, softmax", conv3(lambda x: torch.softmax(x.min(2).values, 1)), volume),
        ("conv3d, softmax, max pool, max pool", conv3(lambda x: F.max_pool3d(F.max_pool3d(torch.softmax(x, 1), 2), 2)), volume),
        ("conv3d, group norm, mean", conv3(lambda: nn.GroupNorm(8, 32), lambda x: F.relu(x).mean((1, 2, 3, 4))), volume),
        ("conv3d, hardswish, relu, softmax, mean", conv3(lambda x: torch.softmax(F.relu(F.hardswish(x)), 1).mean((2, 3, 4))), volume),
        (
            "conv3d, relu, leaky relu, gelu, sigmoid, bias",
            conv3(lambda x: torch.sigmoid(F.gelu(F.leaky_relu(F.relu(x)))), lambda: Bias(32, 1, 1, 1)),
            volume,
        ),
        (
            "conv3d, scale, tanh, times, sigmoid",
            conv3(lambda: Bias(32, 1, 1, 1, join=torch.mul), torch.tanh, lambda: Bias(32, 1, 1, 1, join=torch.mul), torch.sigmoid),
            volume,
        ),
        ("conv3d, divide, max pool, mean, bias, sum", conv3(lambda x: F.max_pool3d(x / 2, 2).mean((2, 3, 4), keepdim=True).sum(1)), volume),
        ("conv3d, leaky relu, sum, clamp, gelu", conv3(lambda x: F.gelu((F.leaky_relu(x, 0.2) + 1).clamp(-1, 1))), volume),
        ("conv3d, times, instance norm, clamp, max", conv3(lambda x: (F.instance_norm(x * 2).clamp(-1, 1) * 2).max(1).values), volume),
        ("conv3d, mish, tanh", conv3(lambda x: F.mish(x).tanh()), volume),
        ("conv3d of time alone, of space alone", _separable, volume),
        ("conv_transpose3d, scale, batch norm, mean", up3(lambda x: x * 2, lambda: nn.BatchNorm3d(32), lambda x: x.mean((2, 3, 4))), volume),
        (
            "conv_transpose3d, sum, layer norm, average pool, gelu",
            up3(lambda: Bias(1), _norm_lines, lambda x: F.gelu(F.avg_pool3d(x, 2)), kernel=4),
            volume,
        ),
        ("conv_transpose3d, batch norm, average pools", up3(lambda: nn.BatchNorm3d(32), lambda x: F.avg_pool3d(F.avg_pool3d(x, 2), 2)), volume),
        ("conv_transpose3d, swish, group norm, hardswish", up3(F.silu, lambda: nn.GroupNorm(4, 32), F.hardswish), volume),
        ("conv_transpose3d, max pools, sum", up3(lambda x: F.max_pool3d(F.max_pool3d(x, 2), 3).sum(1, keepdim=True)), volume),
        ("conv_transpose3d, clamp, softmax, times", up3(lambda x: torch.softmax(F.avg_pool3d(x, 2).clamp(0, 1).flatten(2), 2) * 2), volume),
        ("conv_transpose3d, logsumexp, hardswish, clamp", up3(lambda x: F.hardswish(torch.logsumexp(x, 1, keepdim=True)).clamp(-1, 1)), volume),
        ("conv_transpose3d, max pool, softmax, swish, max", up3(lambda x: F.silu(torch.softmax(F.max_pool3d(x, 2), 1)).max(1).values), volume),
        (
            "conv1d, batch norm, relu, max pool",
            lambda: Chain(nn.Conv1d(64, 128, 5, padding=2), nn.BatchNorm1d(128), F.relu, lambda x: F.max_pool1d(x, 2)),
            steps,
        ),
        (
            "conv1d, gated by tanh and sigmoid, residual",
            lambda: Residual(Chain(nn.Conv1d(64, 128, 3, padding=2, dilation=2), _gate, nn.Conv1d(64, 64, 1))),
            steps,
        ),
        ("conv_transpose1d, leaky relu", lambda: Chain(nn.ConvTranspose1d(64, 32, 16, 8, 4), lambda x: F.leaky_relu(x, 0.1)), (8, 64, 256)),
        ("depthwise conv1d, swish, layer norm, linear", _conformer, (8, 512, 128)),
    ]


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 1)


def _fresh(more: tuple[Any, ...]) -> list[Step]:
    """The steps, of which functions without arguments make modules."""
    return [step() if getattr(step, "__code__", None) is not None and step.__code__.co_argcount == 0 else step for step in more]


def _residual_logsumexp(x: torch.Tensor) -> torch.Tensor:
    y = torch.logsumexp((x * 2 + x * 2).clamp(-10, 10), 1, keepdim=True)
    return y * F.mish(y)


def _pooled_residual(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.logsumexp((x - 0.5).mean(1, keepdim=True), 1, keepdim=True)) + x


def _residual_over_channels(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x + F.hardswish(x.tanh()), 1, keepdim=True)


def _mean_logsumexp(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x.mean((2, 3), keepdim=True) + 1, 1, keepdim=True).sum((2, 3)) * 10


def _tanh_pool(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x.tanh(), 2)


def _norm_lines(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _gate(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, 1)
    return a.tanh() * b.sigmoid()


class _SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))))


def _convnext() -> nn.Module:
    return Residual(Chain(nn.Conv2d(64, 64, 7, padding=3, groups=64), nn.GroupNorm(1, 64), nn.Conv2d(64, 256, 1), F.gelu, nn.Conv2d(256, 64, 1)))


def _shuffled() -> nn.Module:
    return Chain(nn.Conv2d(64, 64, 1, groups=4), lambda x: F.channel_shuffle(x, 4), nn.Conv2d(64, 64, 3, padding=1, groups=64), F.relu)


def _separable() -> nn.Module:
    return Chain(nn.Conv3d(16, 32, (1, 3, 3), padding=(0, 1, 1)), F.relu, nn.Conv3d(32, 32, (3, 1, 1), padding=(1, 0, 0)), F.relu)


def _conformer() -> nn.Module:
    across = Chain(lambda x: x.transpose(1, 2), nn.Conv1d(128, 128, 31, padding=15, groups=128), lambda x: x.transpose(1, 2))
    return Residual(Chain(nn.LayerNorm(128), nn.Linear(128, 256), F.glu, across, nn.LayerNorm(128), F.silu, nn.Linear(128, 128)))
