"""Results lie in memory as eager mode's, in forward and backward, also where PyTorch's shape rules trace another order."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from engines import needs_core

pytestmark = needs_core


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d) if t.dim() > 3 else t


def swapped(a: int, b: int):
    return lambda t: t.transpose(a, b).contiguous().transpose(a, b) if t.dim() > max(a, b) else t


LAYOUTS = {"channels_last": channels_last, "columns": swapped(0, 1), "last": swapped(1, 2), "outer": swapped(0, 2)}

PAIRS = [
    "copysign",
    "floor_divide",
    "heaviside",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_or",
    "logical_xor",
    "xlogy",
    "pow",
    "add",
    "atan2",
]
LOSSES = [F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.l1_loss, F.binary_cross_entropy]
IMAGE, VOLUME = (2, 4, 6, 5), (2, 3, 4, 5, 4)

CASES = {
    **{name: (getattr(torch, name), (6, 5, 4), (5, 4)) for name in PAIRS},
    "pairs with a hole": (torch.logical_and, (6, 1, 4), (5, 4)),
    "quotient": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (6, 5, 4), (5, 4)),
    "beside a number": (lambda x: (torch.copysign(x, torch.tensor(-1.0)), 2**x), (6, 5, 4)),
    "ldexp": (torch.ldexp, (6, 1, 4), (5, 4)),
    **{loss.__name__: (lambda x, y, loss=loss: loss(x.sigmoid(), y.sigmoid().detach()), IMAGE, IMAGE) for loss in LOSSES},
    **{
        f"{loss.__name__} of each": (lambda x, y, loss=loss: loss(x.sigmoid(), y.sigmoid().detach(), reduction="none"), (6, 5), (6, 5))
        for loss in LOSSES
    },
    "cross entropy": (lambda x: F.cross_entropy(x, torch.zeros(2, 5, dtype=torch.int64)), (2, 4, 5)),
    "log softmax": (lambda x: F.log_softmax(x, 1), IMAGE),
    "softmax": (lambda x: F.softmax(x, 1), IMAGE),
    "glu": (lambda x: F.glu(x, 1), IMAGE),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), IMAGE),
    "batch norm in use": (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), IMAGE),
    "batch norm of rows": (lambda x: F.batch_norm(x, None, None, training=True), (2, 4, 6)),
    "group norm": (lambda x: F.group_norm(x, 2), IMAGE),
    "layer norm": (lambda x: F.layer_norm(x, (6, 5)), IMAGE),
    "reflection": (lambda x: F.pad(x, (1, 2, 2, 1), "reflect"), IMAGE),
    "replication": (lambda x: F.pad(x, (1, 2, 2, 1), "replicate"), IMAGE),
    "reflection of volumes": (lambda x: F.pad(x, (1, 1, 2, 1, 1, 2), "reflect"), VOLUME),
    "replication of volumes": (lambda x: F.pad(x, (1, 1, 2, 1, 1, 2), "replicate"), VOLUME),
    "zeros around": (lambda x: F.pad(x, (1, 2, 2, 1)), IMAGE),
    "max pool": (lambda x: F.max_pool2d(x, 2), IMAGE),
    "average pool": (lambda x: F.avg_pool2d(x, 2), IMAGE),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, 2), IMAGE),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    "bilinear": (lambda x: F.interpolate(x, size=(5, 9), mode="bilinear"), IMAGE),
    "bicubic": (lambda x: F.interpolate(x, size=(5, 9), mode="bicubic"), IMAGE),
    "nearest by a factor": (lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"), IMAGE),
    "nearest of volumes": (lambda x: F.interpolate(x, scale_factor=2), VOLUME),
    "nearest of volumes by size": (lambda x: F.interpolate(x, size=(3, 7, 5), mode="nearest-exact"), VOLUME),
    "trilinear": (lambda x: F.interpolate(x, size=(3, 7, 5), mode="trilinear"), VOLUME),
    "nearest of rows": (lambda x: F.interpolate(x, scale_factor=1.5), (2, 4, 6)),
    "clone": (lambda x: x.clone(), IMAGE),
    "cosine": (lambda x, y: F.cosine_similarity(x, y), IMAGE, IMAGE),
    "dropout": (lambda x: F.dropout(x, 0.5), IMAGE),
    "activations": (lambda x: (F.gelu(x), F.silu(x), F.elu(x), F.softplus(x), F.logsigmoid(x), F.hardswish(x)), IMAGE),
    "reductions": (lambda x: (x.sum(1), x.mean((2, 3), keepdim=True), x.amax(1), x.cumsum(1)), IMAGE),
    "shapes": (lambda x: (x.flip(1), torch.cat([x, x], 1), x[:, ::2]), IMAGE),
    "rolled": (lambda x: x.roll(1, 2), IMAGE),
    "convolution": (lambda x: F.conv2d(x, torch.ones(3, 4, 3, 3)), IMAGE),
}


# AOTAutograd brings the gradient of a result into the strides that it traced before any decomposition.
FORWARD = {*PAIRS, "pairs with a hole", "quotient", "beside a number", "ldexp", "rolled"}


def layout(t: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that have several places."""
    return tuple(stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1)


def layouts_of(fn, arguments: list[torch.Tensor], differentiable: bool) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    leaves = [t.detach().requires_grad_(differentiable) for t in arguments]
    outputs = fn(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    graded = [y for y in outputs if y.requires_grad]
    gradients = torch.autograd.grad(graded, leaves, [torch.ones_like(y) for y in graded], allow_unused=True) if graded else []
    return [layout(t) for t in (*outputs, *gradients) if t is not None]


@pytest.mark.parametrize("name", CASES)
def test_strides_are_those_of_eager_mode(name):
    fn, *shapes = CASES[name]
    torch.manual_seed(0)
    tensors = [torch.rand(shape) + 0.5 for shape in shapes]
    others = [LAYOUTS["columns"], torch.clone] if len(shapes) > 1 else [torch.clone]
    for first, rest in itertools.product(LAYOUTS.values(), others):
        arguments = [first(tensors[0]), *[rest(t) for t in tensors[1:]]]
        torch._dynamo.reset()
        fast = torch.compile(fn, backend="deplo", dynamic=False)
        assert layouts_of(fast, arguments, name not in FORWARD) == layouts_of(fn, arguments, name not in FORWARD)


ONE_ELEMENT = {
    "relu": lambda x, y: x.relu(),
    "pooled": lambda x, y: F.adaptive_avg_pool2d(x, 1).relu(),
    "gate": lambda x, y: x * torch.sigmoid(y),
    "chosen": lambda x, y: torch.where(x > 0, x, y),
    "clamped": lambda x, y: torch.lerp(x, y, 0.25).clamp(0, 1),
    "negated": lambda x, y: torch.maximum(x, -y),
    "cloned": lambda x, y: x.clone(),
    "plus a number": lambda x, y: x + 1,
    "batch norm": lambda x, y: F.batch_norm(x, torch.zeros(8), torch.ones(8)),
    "batch norm in training": lambda x, y: F.batch_norm(x, None, None, training=True),
    "layer norm": lambda x, y: F.layer_norm(x, x.shape[2:]),
    "log softmax": lambda x, y: F.log_softmax(x, 1),
    "triangle": lambda x, y: y.triu() + x.tril(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ONE_ELEMENT)
def test_strides_of_axes_of_one_element(name, dynamic):
    """They decide what memory format a later call sees."""
    fn = ONE_ELEMENT[name]
    points = torch.randn(2, 8, 1, 1)
    for x in (points.to(memory_format=torch.channels_last), torch.randn(1, 8, 3, 3).to(memory_format=torch.channels_last)):
        for y in (x.contiguous(), x + 0):
            torch._dynamo.reset()
            assert torch.compile(fn, backend="deplo", dynamic=dynamic)(x, y).stride() == fn(x, y).stride()


INDEXED = {
    "transposed": lambda w, i, j, k: w[i.t()],
    "in order": lambda w, i, j, k: w[i],
    "second dimension": lambda w, i, j, k: w[:, i.t()],
    "last dimension": lambda w, i, j, k: w[..., i.t()],
    "pairs": lambda w, i, j, k: w[i.t(), j],
    "pairs apart": lambda w, i, j, k: w[j, :, i.t()],
    "broadcast": lambda w, i, j, k: w[i[:, :1].t(), j[:, None]],
    "three": lambda w, i, j, k: w[k.permute(2, 0, 1)],
    "permuted source": lambda w, i, j, k: w.permute(1, 0, 3, 2)[i.t()],
    "channels_last": lambda w, i, j, k: w.contiguous(memory_format=torch.channels_last)[:, :, i.t(), j],
    "what follows": lambda w, i, j, k: w[i.t() % w.shape[3]] * 2 + 1,
    "mask": lambda w, i, j, k: w[(i.t() >= 0)[:1, 0].expand(7)],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", INDEXED)
def test_strides_of_indexing(name, dynamic):
    """By the order of the indices in memory, too."""
    fn = INDEXED[name]
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(7, 6, 5, 4, generator=generator)
    i, j, k = (torch.randint(0, 4, shape, generator=generator) for shape in ((3, 2), (2, 3), (5, 2, 3)))
    torch._dynamo.reset()
    got, want = torch.compile(fn, backend="deplo", dynamic=dynamic)(w, i, j, k), fn(w, i, j, k)
    assert got.stride() == want.stride()
    assert torch.equal(got, want)


BY_DATA = {
    "source": lambda x, m, i: x[m][i.t()],
    "another dimension": lambda x, m, i: x[m][:, i.t()],
    "indices": lambda x, m, i: x[i.t()[:, m[:3].nonzero().squeeze(1)]],
    "quotient": lambda x, m, i: torch.floor_divide(x[m].t(), x[m].t() + 3),
}


@pytest.mark.parametrize("name", BY_DATA)
@pytest.mark.filterwarnings("ignore:.*run in eager mode")
def test_strides_of_sizes_that_depend_on_data(name):
    fn = BY_DATA[name]
    x, m, i = torch.randn(8, 5), torch.tensor([True] * 4 + [False, True, False, True]), torch.randint(0, 4, (3, 2))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(fn, backend="deplo", fullgraph=True)(x, m, i)
    want = fn(x, m, i)
    assert got.stride() == want.stride()
    assert torch.equal(got, want)
