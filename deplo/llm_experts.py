"""Layers with experts of which each token takes a few: one formula in the place of the models' loops over experts, for a prepared model's programs.

transformers 4 keeps experts as modules and goes through those that tensors choose, which makes no single graph. Here their weights are one tensor a
layer, of which the modules' parameters are parts; in transformers 5 they are that already. Few tokens read the matrices that they chose; many are
gathered into blocks of one expert each.
"""

from __future__ import annotations

import ctypes
import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .errors import UnsupportedError
from .grouped import Blocks

_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # of an expert's layers: gate, up and down
_STACKED = ("deplo_up", "deplo_down")  # attributes of a block, where its experts are modules


@dataclasses.dataclass
class Weights:
    """Of E experts: `up` [E, 2I, H] (or [E, H, 2I], if `inner_last`) and `down` [E, H, I] ([E, I, H]), and maybe biases [E, 2I] and [E, H]."""

    up: torch.Tensor
    down: torch.Tensor
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of the products with both halves of `up`, [..., I] each
    inner_last: bool = False
    interleaved: bool = False  # the halves of `up` are its even and its odd places
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def halves(self, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the last dimension."""
        if self.interleaved:
            return up[..., ::2], up[..., 1::2]
        first, second = up.chunk(2, -1)
        return first, second


def mixture(x: torch.Tensor, places: torch.Tensor, shares: torch.Tensor, weights: Weights, few: bool) -> torch.Tensor:
    """[T, H] of tokens `x` [T, H] that go to the experts `places` [T, K], and add up their results times `shares` [T, K].

    `few` computes token by token, with the chosen matrices where they lie; otherwise each expert's tokens are gathered.
    """
    tokens, count = places.shape
    flat = places.reshape(-1).clamp(0, weights.up.shape[0] - 1)
    up, down = (w if weights.inner_last else w.transpose(1, 2) for w in (weights.up, weights.down))
    blocks = None
    if few:
        chosen, rows = flat, x[:, None].expand(tokens, count, x.shape[1]).reshape(-1, 1, x.shape[1])
    else:
        blocks = Blocks.of_choices(flat, up.shape[0])
        chosen, rows = blocks.groups, blocks.gather(x, count)
    # Two products of one number of columns are one kernel with the gate behind them.
    inner = [torch.bmm(rows, half[chosen]) for half in weights.halves(up)]
    if weights.up_bias is not None:
        inner = [x + bias[chosen][:, None] for x, bias in zip(inner, weights.halves(weights.up_bias), strict=True)]
    gated = weights.gate(*inner)
    result = torch.bmm(gated if blocks is None else blocks.only(gated), down[chosen])
    if weights.down_bias is not None:
        result = result + weights.down_bias[chosen][:, None]
    if blocks is None:
        result = result.reshape(-1, result.shape[2])
    else:
        result = blocks.only(result).reshape(-1, result.shape[2])[blocks.places]
    return (result.view(tokens, count, -1) * shares[..., None]).sum(1).to(x.dtype)


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda a, b: activation(a) * b


def _is_few(block: Any, hidden: torch.Tensor, chosen: int, experts: int) -> bool:
    """Single tokens, of no more sequences than there are experts to read for them anyway. The number of other tokens is not asked for."""
    if hidden.ndim == 3:
        return hidden.shape[1] == 1 and hidden.shape[0] * chosen <= experts
    return statically_known_true(hidden.shape[0] * chosen <= experts)


def _weights_of_modules(block: Any) -> Weights:
    return Weights(block.deplo_up, block.deplo_down, _gated(block.experts[0].act_fn))


# What a block with modules as experts does, by how it chooses: each gives shares and places [T, K], and the logits that the block returns.


def _by_softmax(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mixtral, Qwen2-, Qwen3-MoE, OLMoE, Jamba and their like: the greatest of a softmax, which then may add up to 1 again."""
    logits = (block.gate if hasattr(block, "gate") else block.router)(x)
    shares, places = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), block.top_k, dim=-1)
    if getattr(block, "norm_topk_prob", hasattr(block, "gate")):
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares.to(x.dtype), places, logits


def _by_statistics(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ernie 4.5: chosen with a correction that the shares lack."""
    logits = block.gate(x.float())
    all_shares = F.softmax(logits, dim=1, dtype=torch.float)
    places = torch.topk(block.moe_statics(all_shares), block.top_k, dim=-1)[1]
    shares = torch.gather(all_shares, -1, places)
    return (shares / torch.clamp(shares.sum(dim=-1, keepdim=True), min=block.norm_min)).to(x.dtype), places, logits


def _by_router(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    """DeepSeek V2 and V3, GLM 4, dots: a module that gives places and shares."""
    places, shares = block.gate(x[None])  # some ask for the batch
    return shares, places, None


def _by_thresholds(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PhiMoE (sparsemixer of arXiv:2409.12136, without its noise): one after the other, each with its share of those that come near it."""
    scores = block.gate(x)
    left, shares, places = scores, [], []
    for _ in range(block.top_k):
        greatest, place = left.max(dim=-1, keepdim=True)
        far = (greatest - scores) / scores.abs().clamp(min=greatest) > 2 * block.router_jitter_noise
        shares.append(torch.softmax(left.masked_fill(far, float("-inf")), dim=-1).gather(-1, place))
        places.append(place)
        left = torch.scatter(scores, -1, place, float("-inf"))
    return torch.cat(shares, -1), torch.cat(places, -1), scores


def _block_of_modules(choose: Callable[[Any, torch.Tensor], Any]) -> Callable[..., Any]:
    def forward(block: Any, hidden_states: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():
            return type(block).forward(block, hidden_states)
        return compute(block, hidden_states)

    def compute(block: Any, hidden_states: torch.Tensor, few: bool | None = None) -> Any:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        shares, places, logits = choose(block, x)
        if few is None:
            few = _is_few(block, hidden_states, places.shape[1], len(block.experts))
        result = mixture(x, places, shares, _weights_of_modules(block), few)
        shared = getattr(block, "shared_expert", None)
        if shared is not None:
            result = result + F.sigmoid(block.shared_expert_gate(x)) * shared(x)
        if getattr(block, "shared_experts", None) is not None:
            result = result + block.shared_experts(x)
        result = result.view(hidden_states.shape)
        return result if logits is None else (result, logits)

    forward.compute = compute  # type: ignore[attr-defined]
    return forward


def _gpt_oss(experts: Any, hidden_states: torch.Tensor, router_indices: Any = None, routing_weights: Any = None) -> torch.Tensor:
    """The experts' module of gpt-oss in transformers 4, whose shares are those of all experts."""
    if not torch.compiler.is_compiling():
        result: torch.Tensor = type(experts).forward(experts, hidden_states, router_indices, routing_weights)
        return result
    return _gpt_oss_compute(experts, hidden_states, router_indices, routing_weights)


def _gpt_oss_compute(experts: Any, hidden_states: torch.Tensor, router_indices: Any, routing_weights: Any, few: bool | None = None) -> torch.Tensor:
    def gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = a.clamp(max=experts.limit), b.clamp(min=-experts.limit, max=experts.limit)
        return (b + 1) * (a * torch.sigmoid(a * experts.alpha))

    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if few is None:
        few = _is_few(experts, hidden_states, router_indices.shape[1], experts.gate_up_proj.shape[0])
    weights = Weights(experts.gate_up_proj, experts.down_proj, gate, True, True, experts.gate_up_proj_bias, experts.down_proj_bias)
    return mixture(x, router_indices, routing_weights.gather(1, router_indices), weights, few).view(hidden_states.shape)


_gpt_oss.compute = _gpt_oss_compute  # type: ignore[attr-defined]


def _granite(block: Any, layer_input: torch.Tensor) -> Any:
    """GraniteMoE: shares are a softmax of the chosen logits, and experts lie in one tensor."""
    if not torch.compiler.is_compiling():
        return type(block).forward(block, layer_input)
    return _granite_compute(block, layer_input)


def _granite_compute(block: Any, layer_input: torch.Tensor, few: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    weights = Weights(block.input_linear.weight, block.output_linear.weight, _gated(block.activation))
    logits = block.router.layer(x).float()
    chosen, places = logits.topk(block.router.top_k, dim=1)
    if few is None:
        few = _is_few(block, layer_input, places.shape[1], weights.up.shape[0])
    return mixture(x, places, torch.softmax(chosen, dim=1).type_as(x), weights, few).view(layer_input.shape), logits


_granite.compute = _granite_compute  # type: ignore[attr-defined]


def _stacked(experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """The experts' module of transformers 5, which is told what tokens take of whom, whatever chose that."""
    if not torch.compiler.is_compiling():
        result: torch.Tensor = type(experts).forward(experts, hidden_states, top_k_index, top_k_weights)
        return result
    return _stacked_compute(experts, hidden_states, top_k_index, top_k_weights)


def _stacked_compute(experts: Any, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, few: bool | None = None) -> torch.Tensor:
    def gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The module's own, of both halves as it has them."""
        both = torch.cat((a, b), -1) if experts.is_concatenated else torch.stack((a, b), -1).flatten(-2)
        gated: torch.Tensor = experts._apply_gate(both)
        return gated

    biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)
    weights = Weights(experts.gate_up_proj, experts.down_proj, gate, experts.is_transposed, not experts.is_concatenated, *biases)
    if few is None:
        few = _is_few(experts, x, top_k_index.shape[1], experts.gate_up_proj.shape[0])
    return mixture(x, top_k_index, top_k_weights, weights, few)


_stacked.compute = _stacked_compute  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Family:
    """Modules that a formula stands for: those of which `fits` says so by their parts, and whose results it gives (`_check` compares them)."""

    fits: Callable[[Any], bool]
    forward: Any
    modules: bool = True  # the experts are modules, whose weights are to lie together
    told: str = ""  # which experts the tokens take: with the shares of "all" experts, or of the "chosen" ones


def _has_modules(block: Any) -> bool:
    experts = getattr(block, "experts", None)
    return isinstance(experts, torch.nn.ModuleList) and len(experts) > 1 and _names_of(experts[0]) is not None


def _has_stacked_layers(block: Any) -> bool:
    weights = [getattr(getattr(block, name, None), "weight", None) for name in ("input_linear", "output_linear")]
    stacked = all(isinstance(w, torch.Tensor) and w.ndim == 3 for w in weights)
    router = getattr(block, "router", None)
    return stacked and hasattr(router, "layer") and hasattr(router, "top_k") and hasattr(block, "activation") and not hasattr(block, "bias")


def _is_stacked(block: Any) -> bool:
    weights = [getattr(block, name, None) for name in ("gate_up_proj", "down_proj")]
    names = ("_apply_gate", "is_transposed", "is_concatenated", "has_bias")
    return (
        getattr(block, "has_gate", False)
        and all(hasattr(block, n) for n in names)
        and all(type(w) is torch.nn.Parameter and w.ndim == 3 for w in weights)
    )


def _names_of(expert: Any) -> tuple[str, str, str] | None:
    return next((names for names in _NAMES if all(isinstance(getattr(expert, n, None), torch.nn.Linear) for n in names)), None)


FAMILIES = (
    Family(_is_stacked, _stacked, False, "chosen"),
    Family(lambda m: _has_modules(m) and hasattr(m, "moe_statics"), _block_of_modules(_by_statistics)),
    Family(lambda m: _has_modules(m) and hasattr(m, "moe") and hasattr(m, "gate"), _block_of_modules(_by_router)),
    Family(lambda m: _has_modules(m) and hasattr(m, "router_jitter_noise") and hasattr(m, "input_jitter_noise"), _block_of_modules(_by_thresholds)),
    Family(lambda m: _has_modules(m) and hasattr(m, "top_k") and (hasattr(m, "gate") or hasattr(m, "router")), _block_of_modules(_by_softmax)),
    Family(lambda m: all(hasattr(m, n) for n in ("gate_up_proj", "gate_up_proj_bias", "down_proj_bias", "limit", "alpha")), _gpt_oss, False, "all"),
    Family(_has_stacked_layers, _granite, False),
)


def install(model: torch.nn.Module) -> None:
    """Lets blocks of experts compile by a formula; in eager mode they stay what they are. UnsupportedError for those that no formula serves."""
    for name, block in list(model.named_modules()):
        family = next((f for f in FAMILIES if f.fits(block)), None)
        if family is None:
            continue
        if family.modules:
            _stack(name, block)
            _give_back()
        block.forward = types.MethodType(_named_forward(family.forward), block)
        _check(name, block, family)


def _named_forward(function: Any) -> Any:
    function.__name__ = "forward"  # as copies of the bound method look for it
    return function


def remove(model: torch.nn.Module) -> None:
    """Takes the formulas away; parameters stay parts of one tensor."""
    for block in model.modules():
        forward = block.__dict__.get("forward")
        if isinstance(forward, types.MethodType) and any(forward.__func__ is f.forward for f in FAMILIES):
            for name in ("forward", *_STACKED):
                block.__dict__.pop(name, None)


def are_in_place(model: torch.nn.Module) -> bool:
    """Whether the parameters of experts are still parts of what the programs read: who assigns `.data` puts others in their place."""
    for block in model.modules():
        up = block.__dict__.get(_STACKED[0])
        if up is not None and any(p.data_ptr() != part.data_ptr() for p, part in _parts(block, up, block.__dict__[_STACKED[1]])):
            return False
    return True


def restack(model: torch.nn.Module) -> None:
    """Copies the parameters' values into what the programs read, and makes them parts of it again."""
    for block in model.modules():
        if _STACKED[0] in block.__dict__:
            _fill(block, block.__dict__[_STACKED[0]], block.__dict__[_STACKED[1]])


def _parts(block: Any, up: torch.Tensor, down: torch.Tensor) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    found = []
    inner = up.shape[1] // 2
    for number, expert in enumerate(block.experts):
        gate, other, last = (getattr(expert, n).weight for n in _names_of(expert) or ())
        found += [(gate, up[number, :inner]), (other, up[number, inner:]), (last, down[number])]
    return found


def _stack(name: str, block: Any) -> None:
    layers: Sequence[Any] = [[getattr(e, n) for n in _names_of(e) or ()] for e in block.experts]
    weights = [layer.weight for expert in layers for layer in expert]
    if any(type(w.data) is not torch.Tensor for w in weights) or any(type(layer) is not torch.nn.Linear for expert in layers for layer in expert):
        raise UnsupportedError(f"the experts of {name} ({type(block).__name__}) are quantised: prepare reads those of plain dtypes")
    if any(layer.bias is not None for expert in layers for layer in expert):
        raise UnsupportedError(f"the experts of {name} ({type(block).__name__}) have biases, which deplo knows no formula of")
    gate, _, last = layers[0]
    if len({w.dtype for w in weights}) > 1 or any(e[0].weight.shape != gate.weight.shape or e[2].weight.shape != last.weight.shape for e in layers):
        raise UnsupportedError(f"the experts of {name} ({type(block).__name__}) are not of one size and dtype")
    count, (inner, outer) = len(layers), gate.weight.shape
    up, down = (gate.weight.data.new_empty(count, *shape) for shape in ((2 * inner, outer), (outer, inner)))
    _fill(block, up, down)
    block.__dict__.update(zip(_STACKED, (up, down), strict=True))


def _give_back() -> None:
    """Returns freed memory to the system, where the C library has a call for it: pieces of a few MB would stay in its heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _fill(block: Any, up: torch.Tensor, down: torch.Tensor) -> None:
    for parameter, part in _parts(block, up, down):
        part.copy_(parameter.data)
        parameter.data = part


@torch.no_grad()
def _check(name: str, block: Any, family: Family) -> None:
    """Compares the formula with the block's own results for a few tokens."""
    parameter = next(p for p in block.parameters() if p.is_floating_point())
    x = torch.randn(1, 3, _hidden_size(block), generator=torch.Generator().manual_seed(0)).to(parameter.dtype)
    more: tuple[Any, ...] = ()
    if family.told:
        experts = block.gate_up_proj.shape[0]
        places = torch.tensor([[0, 1], [1, 0], [experts - 1, 0]]).clamp(max=experts - 1)
        if family.told == "chosen":
            x, more = x[0], (places, torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.5]], dtype=x.dtype))
        else:
            more = (places, torch.zeros(3, experts, dtype=x.dtype).scatter(1, places, 0.5))
    wanted = type(block).forward(block, x, *more)
    for few in (True, False):
        got = family.forward.compute(block, x, *more, few=few)
        same = isinstance(got, tuple) == isinstance(wanted, tuple)
        a, b = (t[0] if isinstance(t, tuple) else t for t in (got, wanted))
        scale = float(b.abs().max())
        if not same or a.shape != b.shape or float((a - b).abs().max()) > 32 * torch.finfo(x.dtype).eps * max(scale, 1e-30):
            raise UnsupportedError(f"{type(block).__name__} ({name}) chooses or adds its experts in a way that deplo knows no formula of")


def _hidden_size(block: Any) -> int:
    if _STACKED[1] in block.__dict__:
        return int(block.deplo_down.shape[1])
    if hasattr(block, "down_proj"):
        return int(block.down_proj.shape[2 if getattr(block, "is_transposed", True) else 1])
    return int(block.input_linear.weight.shape[2])
