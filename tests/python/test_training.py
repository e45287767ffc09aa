"""Whole training steps beside eager mode: losses, gradients, statistics, optimizers, and what forward keeps for backward."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engines import same
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint

from deplo.backend import collect_records
from deplo.decompositions import decompositions
from deplo.errors import UnsupportedError

pytest.importorskip("deplo._C")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import harness  # noqa: E402
import zoo  # noqa: E402

STRICT = {"strict": True}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class UNet(nn.Module):
    """Two levels, with both ways of going up, group and batch norm, and skip connections."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        c = channels
        self.down1, self.down2, self.middle = self.block(3, c), self.block(c, 2 * c), self.block(2 * c, 4 * c)
        self.up2, self.join2 = nn.ConvTranspose2d(4 * c, 4 * c, 2, 2), self.block(6 * c, 2 * c)
        self.up1, self.join1 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), self.block(3 * c, c)
        self.out = nn.Conv2d(c, 1, 1)

    @staticmethod
    def block(i: int, o: int) -> nn.Module:
        first = [nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.SiLU()]
        return nn.Sequential(*first, nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        y = self.join2(torch.cat([self.up2(self.middle(F.avg_pool2d(b, 2))), b], 1))
        return self.out(self.join1(torch.cat([self.up1(y), a], 1)))


def build(name: str):
    """A model in training mode, and a function from a seed to its inputs."""
    if name == "unet":
        torch.manual_seed(0)
        return UNet().train(), lambda seed: {"x": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}
    case = zoo.build(name, "tiny")

    def inputs(seed: int):
        kept = {key: value for key, value in case.inputs(seed).items() if key not in ("past_key_values", "cache_position")}
        # Statistics over a batch of one image would make every rounding error grow from step to step.
        kept = {
            key: value.expand(4, *value.shape[1:]) + 0.3 * torch.randn(4, *value.shape[1:]) if key == "pixel_values" else value
            for key, value in kept.items()
        }
        return kept | ({"use_cache": False} if "use_cache" in kept else {})

    return case.model.train(), inputs


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(
        y.to(torch.promote_types(y.dtype, torch.float32)), torch.linspace(-1, 1, y.numel()).view_as(y).to(torch.promote_types(y.dtype, torch.float32))
    )


# Eager's own runs from parameters an ulp apart end further from each other than twice the error of one of them.
FAR_APART = {"unet"}


def neighbour(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy whose parameters are moved by at most an ulp."""
    net, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            shares = torch.rand(parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + shares * torch.finfo(parameter.dtype).eps)
    return net


@pytest.mark.parametrize("name", ["bert-base", "resnet-50", "llama-block-s32", "unet"])
def test_ten_steps_follow_eager(name):
    model, inputs = build(name)
    reference, judge = copy.deepcopy(model), copy.deepcopy(model).double()
    others = [neighbour(model, seed) for seed in range(4)]
    losses = {}
    for net in (judge, reference, *others, model):
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-4)
        compiled = net is model
        whole = compiled and name == "llama-block-s32"  # the optimizer, too
        call = torch.compile(net, backend="deplo", options=STRICT) if compiled else net
        step = torch.compile(optimizer.step, backend="deplo", options=STRICT) if whole else optimizer.step
        losses[net] = []
        for seed in range(10):
            torch.manual_seed(seed)
            given = inputs(seed)
            if net is judge:
                given = {key: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in given.items()}
            optimizer.zero_grad()
            torch.manual_seed(100 + seed)
            loss = loss_of(call(**given))
            loss.backward()
            step()
            losses[net].append(loss.item())
    assert losses[model] == pytest.approx(losses[reference], rel=1e-4)
    # Ten steps of AdamW carry an ulp far: statistics are held to where eager mode itself arrives from parameters an ulp away.
    for got, exact, *eager in zip(*(net.buffers() for net in (model, judge, reference, *others)), strict=True):
        if got.is_floating_point():
            errors = [harness.max_error(there, exact) for there in eager]
            most = max(errors) if name in FAR_APART else min(max(errors), 2 * errors[0])
            assert harness.max_error(got, exact) <= harness.allowed_error(most, torch.finfo(got.dtype).eps)
        else:
            assert torch.equal(got, eager[0])


@pytest.mark.parametrize("name", ["bert-base", "llama-block-s32", "unet", "resnet-50"])
def test_autocast_is_as_close_to_float64_as_eager(name):
    model, inputs = build(name)
    model.train(name == "resnet-50")  # with the statistics of its batches
    reference, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="deplo", options=STRICT)
    errors, sizes = [], []  # of each draw: by gradient, ours and eager mode's
    # Of one model, it is a matter of chance which elements of a ReLU rounding switches.
    for draw in range(8):
        torch.manual_seed(draw)
        with torch.no_grad():
            for own, *others in zip(*(net.parameters() for net in (model, reference, exact)), strict=True):
                own.mul_(1 + 0.3 * torch.randn_like(own))
                for other in others:
                    other.copy_(own)
        given = inputs(draw)
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(compiled(**given)).backward()
            loss_of(reference(**given)).backward()
        loss_of(exact(**{k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()})).backward()
        gradients = [[p.grad for p in net.parameters()] for net in (model, reference, exact)]
        used = [[g.double() for g in each] for each in zip(*gradients, strict=True) if each[2] is not None]
        errors.append(torch.stack([torch.stack([(g - judge).norm() for g in (own, eagers)]) for own, eagers, judge in used]))
        sizes.append(torch.stack([judge.norm() for *_, judge in used]))
        for net in (model, reference, exact):
            net.zero_grad()
    ours, eagers = torch.stack(errors).norm(dim=(0, 1))
    assert ours <= 1.05 * eagers
    ours, eagers = (torch.stack(errors).norm(dim=0) / torch.stack(sizes).norm(dim=0)[:, None]).T
    assert bool((ours <= 1.5 * eagers + 2**-8).all())


# Optimizers


OPTIMIZERS = {
    "SGD": lambda p, foreach: torch.optim.SGD(p, lr=0.1, foreach=foreach),
    "SGD with momentum": lambda p, foreach: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=foreach),
    "Adam": lambda p, foreach: torch.optim.Adam(p, lr=1e-3, foreach=foreach),
    "Adam with amsgrad": lambda p, foreach: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1, foreach=foreach),
    "AdamW": lambda p, foreach: torch.optim.AdamW(p, lr=1e-3, foreach=foreach),
    "RMSprop": lambda p, foreach: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, foreach=foreach),
    "Adagrad": lambda p, foreach: torch.optim.Adagrad(p, lr=1e-2, foreach=foreach),
    "NAdam": lambda p, foreach: torch.optim.NAdam(p, lr=1e-3, foreach=foreach),
    "RAdam": lambda p, foreach: torch.optim.RAdam(p, lr=1e-3, foreach=foreach),
    "Adamax": lambda p, foreach: torch.optim.Adamax(p, lr=1e-3, foreach=foreach),
    "Adadelta": lambda p, foreach: torch.optim.Adadelta(p, foreach=foreach),
    "Rprop": lambda p, foreach: torch.optim.Rprop(p, lr=1e-2, foreach=foreach),
    "ASGD": lambda p, foreach: torch.optim.ASGD(p, lr=1e-2, foreach=foreach),
}


def parameters(shapes) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(*shape)) for shape in shapes]


def steps_beside_eager(make, shapes, steps: int = 3) -> list[dict]:
    """Descriptions of the programs of a compiled optimizer, whose parameters and states end as eager's do."""
    ours, theirs = parameters(shapes), parameters(shapes)
    mine, other = make(ours), make(theirs)
    with collect_records() as records:
        step = torch.compile(mine.step, backend="deplo", options=STRICT)
        for seed in range(steps):
            generator = torch.Generator().manual_seed(seed)
            for a, b in zip(ours, theirs, strict=True):
                a.grad = torch.randn(a.shape, generator=generator)
                b.grad = a.grad.clone()
            step()
            other.step()
    same(ours, theirs, scale=16)
    for a, b in zip(ours, theirs, strict=True):
        same(dict(mine.state[a]), dict(other.state[b]), scale=16)
    return [json.loads(record.program.describe()) for record in records]


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_are_few_kernels_in_place(name, foreach):
    shapes = [(64, 32), (32,), (128, 64), (7, 3), (128,)]
    programs = steps_beside_eager(lambda p: OPTIMIZERS[name](p, foreach), shapes, steps=8)  # RAdam rectifies from the sixth on
    assert programs
    for about in programs:
        assert not about["library"], about["library"]
        assert about["memory"]["temporaries"] == 0, "states are updated where they are"
        assert len(about["steps"]) <= (4 if name == "ASGD" else 3)  # whose rates follow from the count of steps, and are states too


def test_parameters_of_equal_shapes_share_their_kernels():
    shapes = [(96, 96), (96,)] * 12
    (about,) = steps_beside_eager(lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True), shapes)
    assert about["memory"]["temporaries"] == 0
    assert len(about["kernels"]) <= 4 and len(about["steps"]) <= 12 + 3


# What forward keeps for backward


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        scores = F.dropout(torch.softmax(q @ k.transpose(-1, -2) / 4, -1), 0.1, True)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


class Swiglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.norm = nn.Linear(64, 176), nn.Linear(64, 176), nn.Linear(176, 64), nn.RMSNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Residuals(nn.Module):
    """Blocks whose sums the gradient needs again: from the masks of dropout, which are saved anyway."""

    def __init__(self, blocks: int, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(blocks))
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.dropout(self.activation(layer(norm(x))), 0.1, True)
        return x


class Rotary(nn.Module):
    """Angles by a product of vectors, concatenated with themselves, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("frequencies", 1e4 ** -(torch.arange(8) / 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1]).float()
        angles = (self.frequencies[None, :, None] @ positions[None, None]).transpose(1, 2)
        angles = torch.cat((angles, angles), -1).unsqueeze(2)
        query = self.query(x).unflatten(-1, (4, 16))
        turned = torch.cat((-query[..., 8:], query[..., :8]), -1)
        return self.out((query * angles.cos() + turned * angles.sin()).flatten(2))


KEPT = {
    "rotary": lambda: (Rotary(), (2, 16, 64)),
    "pointwise": lambda: (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.ELU(), nn.Hardswish(), nn.Sigmoid(), nn.Mish()), (8, 64)),
    "mlp": lambda: (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1)), (8, 64)),
    "swiglu": lambda: (Swiglu(), (8, 64)),
    "attention": lambda: (Attention(), (2, 16, 64)),
    "residuals": lambda: (Residuals(3, F.gelu), (4, 16, 64)),
    "residuals of relu": lambda: (Residuals(2, F.relu), (4, 16, 64)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()),
        (2, 3, 20, 20),
    ),
    "unet": lambda: (UNet(), (2, 3, 16, 16)),
}


def kept_bytes(model: nn.Module, x: torch.Tensor, table) -> int:
    """Bytes of what a forward graph returns, by PyTorch's min-cut partitioner."""
    sizes = []

    def forward(gm, example_inputs):
        (output,) = gm.graph.find_nodes(op="output")
        made = {node: node.meta["val"] for node in output.args[0] if isinstance(node, torch.fx.Node) and node.op != "placeholder"}
        sizes.append(sum(value.numel() * value.element_size() for value in made.values() if isinstance(value, torch.Tensor)))
        return gm.forward

    def keep(gm, example_inputs):
        return gm.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=forward, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition, decompositions=table)
    torch.compile(model, backend=backend)(x)
    (size,) = sizes
    return size


@pytest.mark.parametrize("name", KEPT)
def test_forward_keeps_no_more_than_with_the_tables_of_inductor(name):
    torch.manual_seed(0)
    model, shape = KEPT[name]()
    model.train()
    x = torch.randn(shape)
    assert kept_bytes(model, x, decompositions(training=True)) <= kept_bytes(model, x, select_decomp_table())


def saved_bytes(model: nn.Module, given: dict, backend: str) -> int:
    """Bytes of the memory that a compiled forward keeps for backward, but for parameters, buffers and inputs."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    compiled(**given)
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *given.values()) if isinstance(t, torch.Tensor)}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in known:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compiled(**given)
    assert result.requires_grad and kept
    return sum(kept.values())


@pytest.mark.parametrize("name", ["bert-base", "resnet-50", "llama-block-s32", *KEPT])
def test_forward_saves_no_more_than_with_the_partitioner_alone(name):
    torch.manual_seed(0)
    if name in KEPT:
        model, shape = KEPT[name]()
        given = {"input" if isinstance(model, nn.Sequential) else "x": torch.randn(shape)}
    else:
        model, inputs = build(name)
        given = inputs(0)
    with collect_records() as records:
        ours = saved_bytes(model.train(), given, "deplo")
    assert records and records[0].kind == "forward" and all(record.program is not None for record in records)
    assert ours <= saved_bytes(model, given, "aot_eager_decomp_partition")


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"), [(3, 2, 1, 1, False), ((2, 3), (1, 2), (0, 1), (2, 1), True), (12, 5, 0, 1, True)]
)
def test_max_pooling_with_indices_and_gradient(kernel, stride, padding, dilation, ceil):
    def fn(x):
        values, indices = F.max_pool2d(x, kernel, stride, padding, dilation, ceil, return_indices=True)
        return values * 2, indices

    x = torch.randn(2, 3, 26, 31, requires_grad=True)
    z, judge = (x.detach().to(dtype, copy=True).requires_grad_() for dtype in (torch.float32, torch.float64))
    got, wanted, exact = torch.compile(fn, backend="deplo", options=STRICT)(x), fn(z), fn(judge)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    for values, _ in (got, wanted, exact):
        (values * values).sum().backward()
    same(x.grad, z.grad, exact=judge.grad)


def test_checkpointing_keeps_less_and_draws_the_same_dropout():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 32)) for _ in range(3))

    def plain(x):
        for layer in layers:
            x = x + layer(x)
        return x.square().sum()

    def saving(x):
        for layer in layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x.square().sum()

    x = torch.randn(16, 32)
    gradients, next_numbers = [], []
    random = {"allow_library": ["aten.bernoulli", "deplo.generator_state"]}
    for fn in (plain, saving, torch.compile(saving, backend="deplo", options=STRICT | random), plain):
        judging = len(gradients) == 3
        layers.to(torch.float64 if judging else torch.float32).zero_grad()
        torch.manual_seed(5)
        loss = fn(x.double() if judging else x)
        drawn = [torch.rand(1)]  # between forward and backward, which must not notice
        loss.backward()
        next_numbers.append(torch.cat([*drawn, torch.rand(1)]))
        gradients.append([p.grad.clone() for p in layers.parameters()])
    layers.float()
    masks = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(5)
        masks.append(F.dropout(torch.ones(16, 128, dtype=dtype), 0.2) != 0)
    assert torch.equal(*masks), "float64 drops others, and cannot judge"
    same(gradients[2], gradients[0], exact=gradients[3])
    assert torch.equal(next_numbers[0], next_numbers[2]), "the generator stands elsewhere"
    table = decompositions(training=True)
    assert kept_bytes(saving, x, table) < kept_bytes(plain, x, table)


def test_dropout_draws_as_in_eager():
    def fn(x):
        y = F.dropout(x, 0.3)
        return y + F.dropout(x, 0.5) * torch.rand_like(x), F.dropout1d(x, 0.5), torch.nn.functional.alpha_dropout(x, 0.2, True)

    x = torch.randn(8, 16, 4)
    compiled = torch.compile(fn, backend="deplo", options=STRICT)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for seed in range(2):
                given = x.clone().requires_grad_(grad)
                torch.manual_seed(seed)
                got = compiled(given)
                after = torch.rand(1)
                torch.manual_seed(seed)
                wanted = fn(given)
                torch.testing.assert_close(got, wanted)
                assert torch.equal(after, torch.rand(1)), "the generator stands elsewhere"


DRAWS = {
    "dropout": lambda x: F.dropout(x.t() + 1, 0.5),
    "dropout of all": lambda x: F.dropout(x.t() * 2, 1.0),
    "dropout of a view": lambda x: F.dropout(x.t(), 0.5),
    "randn_like": lambda x: torch.randn_like(x.t()),
    "sum of noise": lambda x: x.t() * 1 + 0.1 * torch.randn_like(x.t() * 1),
    "rand_like of a slice": lambda x: torch.rand_like(x.t()[:, ::2] * 2),
    "rand_like of a slice itself": lambda x: torch.rand_like(x.t()[:, ::2]),
    "of copies": lambda x: torch.randn_like(x.t().expand(3, 16, 31)),
    "randint_like": lambda x: torch.randint_like(x.t() + 1, 0, 10),
    "exponential_": lambda x: torch.empty_like(x.t()).exponential_(),
    "uniform_ of a view": lambda x: x.clone().t().uniform_(),
    "multinomial": lambda x: torch.multinomial(x.t().abs(), 3),
    "three axes": lambda x: torch.randn_like(x.view(31, 4, 4).permute(1, 0, 2) * 2),
    "channels_last": lambda x: F.dropout(x.view(31, 2, 2, 4).to(memory_format=torch.channels_last).relu(), 0.5),
    "copies in the middle": lambda x: torch.rand_like(x.view(31, 4, 4).expand(2, 31, 4, 4).permute(3, 2, 0, 1)),
    "a slice of three axes": lambda x: torch.rand_like(x.view(31, 4, 4).permute(2, 1, 0).relu()[..., ::2]),
    "both orders": lambda x: F.dropout(x.t() + 1, 0.5) + F.dropout((x.t() + 1).contiguous(), 0.5),
    "rows after columns": lambda x: F.dropout((x.t() + 1).contiguous(), 0.5) * torch.rand_like(x.t() + 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_fill_memory_in_the_order_of_eager_mode(name, dynamic):
    fn = DRAWS[name]
    x = torch.randn(31, 16)
    compiled = torch.compile(fn, backend="deplo", dynamic=dynamic, options=STRICT)
    for grad in (False, True):
        results = []
        for call in (fn, compiled):
            given = x.clone().requires_grad_(grad)
            torch.manual_seed(1)
            y = call(given)
            if grad and y.requires_grad:
                y.backward(torch.arange(1.0, y.numel() + 1).view(y.shape))
            results.append((y.detach(), y.stride(), given.grad, torch.rand(1)))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_checkpointed_regions_draw_the_same_numbers_again(dynamic):
    def block(x):
        y = F.dropout(x + 1, 0.5) * torch.rand_like(x * 2) + torch.randn_like(x.t() * x.t()).t() * x
        image = x.view(1, 3, 3, 13).to(memory_format=torch.channels_last)
        return y + F.dropout(x.t().exp(), 0.4).t() + F.dropout(image.tanh(), 0.3).reshape(9, 13) + F.dropout(x[:, :1].expand(9, 13), 0.5)

    def fn(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sin().sum()

    results = []
    x = torch.randn(9, 13)
    for call in (fn, torch.compile(fn, backend="deplo", dynamic=dynamic, options=STRICT)):
        given = x.clone().requires_grad_()
        torch.manual_seed(3)
        y = call(given)
        y.backward()
        results.append((y.detach(), given.grad, torch.rand(1)))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("model", ["encoder", "convolution"])
def test_dropout_behind_other_layouts(model):
    torch.manual_seed(0)
    if model == "encoder":
        module = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        x = torch.randn(2, 7, 16)
    else:
        layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Dropout(0.5)]
        module = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
        x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    results = []
    for call in (module, torch.compile(module, backend="deplo")):
        module.zero_grad()
        torch.manual_seed(1)
        y = call(x)
        y.square().sum().backward()
        results.append((y.detach(), [p.grad.clone() for p in module.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True], ids=["alone", "training"])
@pytest.mark.parametrize("train", [None, True, False])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_dropout_called_by_itself(dtype, p, train, grad):
    """Of p that `F.dropout` never gives it: fake tensors take its result for its input where it drops nothing, and eager mode draws all the same.
    In 16 bits eager mode rounds the scale, too."""
    answers = []
    for backend in ("eager", "deplo"):
        torch._dynamo.reset()
        torch.manual_seed(4)
        x = torch.linspace(-2, 3, 12, dtype=dtype).view(3, 4).requires_grad_(grad)
        values, mask = torch.compile(lambda x: torch.native_dropout(x, p, train), backend=backend)(x)
        assert values.data_ptr() != x.data_ptr()
        if grad:
            values.sum().backward()
        answers.append([values.detach(), mask, x.grad if grad else mask])
        if p != 1 or train is False:  # F.dropout, which PyTorch traces as the same call, draws nothing there
            answers[-1].append(torch.rand(1))
        with torch.no_grad():
            values.add_(1)
            assert x[0, 0] == -2
    for got, want in zip(*answers, strict=True):
        torch.testing.assert_close(got, want, rtol=0 if dtype == torch.float32 else 2**-7, atol=0)


def test_backward_lets_activations_go_that_nobody_holds():
    """What forward saved goes while backward runs, unless the graph is retained or the caller has it."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = torch.zeros(())
        for at, layer in enumerate(layers):
            x = layer(x).sigmoid()  # whose gradient reads its result
            middle = x if at == 1 else middle
        return x.square().sum(), middle

    def run(step, x: torch.Tensor, parameters, retained: bool = False):
        loss, middle = step(x)
        gradients = [torch.autograd.grad(loss, parameters, retain_graph=retained)]
        if retained:
            gradients.append(torch.autograd.grad(loss, parameters))
        return gradients, middle

    x = torch.randn(2000, 96)
    given = x.clone()
    parameters = list(layers.parameters())
    expected = run(model, x, parameters)
    exact = run(model, x.double(), list(layers.double().parameters()))
    layers.float()
    compiled = torch.compile(model, backend="deplo", options=STRICT)
    for retained in (False, True, False):
        gradients, middle = run(compiled, x, parameters, retained)
        for got in gradients:
            same((got, middle), (expected[0][0], expected[1]), exact=(exact[0][0], exact[1]))
    assert torch.equal(x, given)


def test_backward_leaves_what_an_operator_keeps():
    """An operator of the user's keeps what it was given, or fails after others went."""
    kept: list[torch.Tensor] = []
    broken: list[bool] = []

    @torch.library.custom_op("deplo_test::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @torch.library.custom_op("deplo_test::square_backward", mutates_args=())
    def square_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        if broken:
            raise UnsupportedError("not today")
        return 2 * x * grad

    for operator in (square, square_backward):
        operator.register_fake(lambda x, *_: torch.empty_like(x))
    square.register_autograd(
        lambda ctx, grad: square_backward(*ctx.saved_tensors, grad), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (square((x @ w).sigmoid()) @ w).sigmoid().sum()

    x, w = torch.randn(2000, 96), torch.randn(96, 96, requires_grad=True)
    expected = torch.autograd.grad(model(x, w), w)[0]
    wanted = kept.pop()
    compiled = torch.compile(model, backend="deplo")
    loss = compiled(x, w)
    same(torch.autograd.grad(loss, w)[0], expected, 2000.0)
    same(kept.pop(), wanted, 64.0)
    broken.append(True)
    with pytest.raises(UnsupportedError, match="not today"):
        torch.autograd.grad(compiled(x, w), w)
    broken.clear()
    same(torch.autograd.grad(compiled(x, w), w)[0], expected, 2000.0)
