"""Small models of kinds that the census lacks: forward and gradients beside eager mode, judged by float64, at several batches or lengths."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from architectures import complaint
from engines import Compiler, same
from torch import nn

pytest.importorskip("deplo._C")


class Dlrm(nn.Module):
    """A recommender: bags of ids, a layer of numbers, and the products of all pairs of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 16, mode=mode) for rows, mode in ((50, "sum"), (30, "mean"), (20, "sum")))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers, *ids_and_offsets):
        dense = self.bottom(numbers)
        bags = [bag(*given) for bag, given in zip(self.bags, zip(ids_and_offsets[::2], ids_and_offsets[1::2], strict=True), strict=True)]
        features = torch.stack([dense, *bags], 1)
        pairs = features @ features.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, -1)
        return torch.sigmoid(self.top(torch.cat([dense, pairs[:, rows, columns]], 1)))

    @staticmethod
    def inputs(batch: int, generator: torch.Generator) -> list[torch.Tensor]:
        given = [torch.randn(batch, 13, generator=generator)]
        for rows in (50, 30, 20):
            lengths = torch.randint(4, (batch,), generator=generator)  # some bags are empty
            given += [torch.randint(rows, (3 * batch,), generator=generator), lengths.cumsum(0) - lengths]
        return given


class Vae(nn.Module):
    """Images to means and variances and back, by a noise that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU()),
            *(nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 1)),
        )
        self.decoder = nn.Sequential(
            *(nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()),
            *(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(8, 3, 3, padding=1)),
        )

    def forward(self, image, noise):
        mean, log_variance = self.encoder(image).chunk(2, 1)
        made = torch.sigmoid(self.decoder(mean + noise * torch.exp(0.5 * log_variance)))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum((1, 2, 3))
        return made, F.mse_loss(made, image, reduction="none").sum((1, 2, 3)) + divergence

    @staticmethod
    def inputs(batch: int, generator: torch.Generator) -> list[torch.Tensor]:
        return [torch.rand(batch, 3, 16, 16, generator=generator), torch.randn(batch, 4, 4, 4, generator=generator)]


class AudioFront(nn.Module):
    """Sums of a spectrum in bands, their logarithms, a convolution over time and one step of a recurrent cell."""

    def __init__(self, window: int = 32, bands: int = 10) -> None:
        super().__init__()
        self.window = window
        angles = 2 * math.pi / window * torch.arange(window)[:, None] * torch.arange(window // 2 + 1)
        self.register_buffer("shape", torch.hann_window(window))
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())
        self.register_buffer("bands", torch.rand(window // 2 + 1, bands, generator=torch.Generator().manual_seed(2)))
        self.mix = nn.Conv1d(bands, 12, 3, padding=1)
        self.cell = nn.GRUCell(12, 16)

    def forward(self, wave, state):
        frames = wave.unfold(-1, self.window, self.window // 2) * self.shape
        magnitude = ((frames @ self.cosines).square() + (frames @ self.sines).square() + 1e-6).sqrt()
        logs = torch.log(magnitude @ self.bands + 1e-5)
        mixed = F.gelu(self.mix(logs.transpose(1, 2)))
        return mixed, self.cell(mixed.mean(-1), state)

    @staticmethod
    def inputs(length: int, generator: torch.Generator) -> list[torch.Tensor]:
        return [torch.randn(3, 50 * length, generator=generator), torch.randn(3, 16, generator=generator)]


def answers(fn, module: nn.Module, inputs: list[torch.Tensor]):
    """Outputs, and the gradients of all parameters and inputs along fixed directions."""
    dtype = next(module.parameters()).dtype
    inputs = [x.to(dtype, copy=True).requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = fn(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    along = [torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(dtype) for y in outputs]
    gradients = torch.autograd.grad(outputs, [*module.parameters(), *(x for x in inputs if x.requires_grad)], along)
    return [*outputs], [outputs[0].detach(), *gradients]


@pytest.mark.parametrize("kind", [Dlrm, Vae, AudioFront])
def test_forward_and_gradients(kind):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = kind()
    exact = copy.deepcopy(module).double()
    compiler = Compiler()
    compiled = compiler(module, dynamic=True)
    for size in (5, 8, 13):
        inputs = kind.inputs(size, torch.Generator().manual_seed(size))
        (got, ours), (eager, theirs), (wanted, true) = (answers(f, m, inputs) for f, m in ((compiled, module), (module, module), (exact, exact)))
        same(got, eager, exact=wanted)
        text = complaint(ours, theirs, true)
        assert not text, f"size {size}: {text}"
    assert 1 <= compiler.graphs <= 2
