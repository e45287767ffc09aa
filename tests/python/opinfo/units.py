"""One operator of OpInfo in one dtype and direction: its samples compiled, run and judged."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import hashlib
import itertools
import json
import math
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mpmath
import torch
from functorch.compile import make_boxed_func
from torch._decomp import decomposition_table
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal import common_methods_invocations, common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from deplo.backend import Compilation, collect_records, compile_with
from deplo.decompositions import decompositions
from deplo.errors import FallbackWarning
from deplo.numerics import exact_value, functions
from deplo.options import read_options
from opinfo.exceptions import FATAL, SPECIAL, UNINITIALISED
from opinfo.judge import ULPS, complaint

# Samples ask which unittest wants them, for which PyTorch reads the sources of the whole stack, a fifth of a second each time: it is none.
common_utils.extract_test_fn = lambda: None

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
)  # fmt: skip
DIRECTIONS = ("forward", "backward")
ENGINES = ("deplo", "dynamo", "inductor", "aot_eager")

# Calls around a program that AOTAutograd makes, and those that give memory or metadata: no work, like all views.
_NO_WORK = re.compile(r"aten\.(empty|empty_strided|new_empty_strided|copy_|_unsafe_view|is_pinned)\.|prim\.device")

# From the best to the worst.
STATUSES = ("none", "generated", "partly", "eager", "failed", "wrong", "timeout", "crashed")


@dataclasses.dataclass(frozen=True)
class Unit:
    op: str  # with its variant, as "var.unbiased"
    dtype: str
    direction: str

    @property
    def name(self) -> str:
        return f"{self.op}/{self.dtype}/{self.direction}"


@dataclasses.dataclass
class Result:
    """What became of a unit. `library` maps overloads that ran in ATen to the reason, `excused` a reason to a count of samples."""

    unit: str
    status: str = "none"
    samples: int = 0
    library: dict[str, str] = dataclasses.field(default_factory=dict)
    excused: dict[str, int] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def worsen(self, status: str) -> None:
        self.status = max(self.status, status, key=STATUSES.index)

    def excuse(self, reason: str) -> None:
        self.excused[reason] = self.excused.get(reason, 0) + 1


def op_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS = {op_name(op): op for op in op_db}

# OpInfo seeds the generator inside some of its calls, which a trace would not do; here each run seeds it.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


def all_units(dtypes: tuple[torch.dtype, ...] = DTYPES, directions: tuple[str, ...] = DIRECTIONS) -> Iterator[Unit]:
    for direction in directions:
        for dtype in dtypes:
            for name, op in OPS.items():
                if direction == "forward" and dtype in op.supported_dtypes("cpu"):
                    yield Unit(name, str(dtype).removeprefix("torch."), direction)
                if direction == "backward" and dtype.is_floating_point and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
                    yield Unit(name, str(dtype).removeprefix("torch."), direction)


# Samples


@dataclasses.dataclass
class Sample:
    """A call as a function of its tensors alone."""

    op: Any
    leaves: list[Any]
    spec: Any
    places: list[int]
    text: str
    is_special: bool = False

    def call(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return self.call_by(lambda head, args, kwargs: self.op.op(head, *args, **kwargs), tensors)

    def call_by(self, fn: Callable[[Any, Any, Any], Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that fn(input, args, kwargs) gives."""
        filled = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            filled[place] = tensor
        return [leaf for leaf in tree_leaves(fn(*tree_unflatten(filled, self.spec))) if isinstance(leaf, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.leaves[k] for k in self.places]

    def in_float(self, dtype: torch.dtype) -> Sample:
        """The same call with `dtype` in place of every float."""

        def converted(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return leaf.to(dtype) if leaf.is_floating_point() else leaf.to(dtype.to_complex()) if leaf.is_complex() else leaf
            return dtype if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

        return dataclasses.replace(self, leaves=[converted(leaf) for leaf in self.leaves])

    def nearby(self, generator: torch.Generator) -> Sample:
        return dataclasses.replace(self, leaves=[moved(leaf, generator) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves])

    def special(self, dtype: torch.dtype, generator: torch.Generator) -> Sample:
        """The same call with special values in about a third of the elements of the tensors of `dtype`."""

        def replaced(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != dtype or leaf.layout != torch.strided:
                return leaf
            return laid_out(leaf, lambda values: with_special_values(values, generator))

        return dataclasses.replace(self, leaves=[replaced(leaf) for leaf in self.leaves], text=f"{self.text}, special values", is_special=True)


def _sample(op: Any, given: Any, text: str) -> Sample:
    leaves, spec = tree_flatten((given.input, given.args, given.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return Sample(op, [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec, places, text)


def samples_of(op: Any, dtype: torch.dtype, limit: int | None) -> list[Sample]:
    """All samples, or about `limit` spread over the list (or its beginning), and the last one with inputs that are not contiguous."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(op_name(op).encode()).digest()[:4], "little"))
    found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 60 * limit if limit else None))
    step = max(1, -(-len(found) // limit)) if limit else 1
    chosen = list(range(0, len(found), step))
    samples = [_sample(op, found[k], f"sample {k}") for k in chosen]
    with_dims = [k for k in chosen if isinstance(found[k].input, torch.Tensor) and found[k].input.dim() > 1 and found[k].input.numel()]
    if with_dims:
        samples.append(_sample(op, found[with_dims[-1]].noncontiguous(), f"sample {with_dims[-1]}, not contiguous"))
    return samples


def shown(sample: Sample) -> str:
    def show(leaf: Any) -> str:
        return f"{str(leaf.dtype).removeprefix('torch.')}{tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)

    head, args, kwargs = tree_unflatten([_Shown(show(leaf)) for leaf in sample.leaves], sample.spec)
    parts = [str(head), *[str(a) for a in args], *[f"{key}={value}" for key, value in kwargs.items()]]
    return f"{sample.text}: {op_name(sample.op)}({', '.join(parts)})"


class _Shown:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def laid_out(t: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """fn, which works on single elements, of t's memory, laid out as t: what is a view of t, and which of its elements are one, stays so."""
    if t.layout != torch.strided or t.is_conj() or t.is_neg():
        return fn(t.clone())
    memory = fn(torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()))
    return torch.empty(0, dtype=memory.dtype).set_(memory.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def copied(t: torch.Tensor) -> torch.Tensor:
    """A copy with memory of its own, laid out as t's."""
    return laid_out(t, torch.clone)


def moved(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """t with every float moved by at most ULPS ulp, laid out as t."""
    if not t.is_floating_point():
        return t

    def move(values: torch.Tensor) -> torch.Tensor:
        shares = torch.rand(values.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (values.double() * (1 + shares * ULPS * torch.finfo(t.dtype).eps)).to(t.dtype)

    return laid_out(t, move)


def with_special_values(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """NaN, infinities, zeros, a subnormal and plain numbers, or what whole numbers can be at most, put into about a third of `values`."""
    dtype = values.dtype
    if dtype.is_floating_point:
        numbers = [math.nan, math.inf, -math.inf, 0.0, -0.0, torch.finfo(dtype).tiny / 8, 0.5, 2.5, -3.0, 100.0, -1.0]
    elif dtype == torch.bool:
        return values
    else:
        limits = torch.iinfo(dtype)
        numbers = [limits.min, limits.min + 1, limits.max - 1, limits.max, 0, 1, 2, 3, 7]
    chosen = torch.tensor(numbers, dtype=dtype)[torch.randint(len(numbers), values.shape, generator=generator)]
    return torch.where(torch.rand(values.shape, generator=generator) < 0.35, chosen, values)


def cotangents_of(outputs: Sequence[torch.Tensor], turn: int = 0) -> list[torch.Tensor]:
    """The random directions along which a sample is differentiated, moved a little for each `turn` after 0."""
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.dtype) for t in outputs]
    return [moved(t, generator.manual_seed(turn)) for t in cotangents] if turn else cotangents


# Functions of two numbers whose values mpmath judges: eager's formula loses digits.
CANCELLING = ("logaddexp", "logaddexp2")
# Functions of single numbers that mpmath judges, by name.
FUNCTIONS = {fn.name: fn for fn in functions()}
FUNCTIONS |= {f"modified_bessel_{name}": FUNCTIONS[name] for name in ("i0", "i1")}


def _replaced(t: torch.Tensor, values: list[Any]) -> torch.Tensor:
    """t with `values` that are not None in place of its own."""
    flat = [float(v) if v is not None else old for v, old in zip(values, t.flatten().tolist(), strict=True)]
    return torch.tensor(flat, dtype=t.dtype).reshape(t.shape)


# Running


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")
REDUCTIONS = ("sum", "mean", "var", "std", "var_mean", "std_mean", "logsumexp", "linalg_vector_norm")
SEVERAL_STEPS = ("_softmax", "_log_softmax")  # one kernel that rounds more than its result: each step is moved


class Noise(TorchDispatchMode):
    """Moves every float that an operator gives by at most an ulp, but for whole numbers, which are seldom rounded, and sums in another order.
    Products of matrices also add two parts, here and there: the order changes nothing where all terms are equal."""

    supports_higher_order_operators = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else ""
        if name in SEVERAL_STEPS:
            with self:
                return decomposition_table[func](*args, **(kwargs or {}))
        if name in PRODUCTS:
            *rest, a, b = args
            order = self._order(a.shape[-1])
            args = (*rest, a[..., order], b[order] if b.dim() == 1 else b[..., order, :])
            if a.shape[-1] > 1 and a.is_floating_point():
                return self._moved(self._in_parts(func, args, kwargs or {}))
        elif name in REDUCTIONS:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
            x, dims = given["self"], given.get("dim")
            for dim in [dims] if isinstance(dims, int) else dims or range(x.dim()):
                x = x.index_select(dim, self._order(x.shape[dim])) if x.dim() else x
            args = (x, *args[1:])
        results = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload) or func.is_view or func._schema.is_mutable:
            return results
        return tree_map(self._moved, results)

    def _in_parts(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        *rest, a, b = args
        at = int(torch.randint(1, a.shape[-1], (), generator=self.generator))
        upper, lower = (b[:at], b[at:]) if b.dim() == 1 else (b[..., :at, :], b[..., at:, :])
        whole = func(*args, **kwargs)
        parts = func(*rest, a[..., :at], upper, **kwargs) + kwargs.get("alpha", 1) * torch.matmul(a[..., at:], lower)
        return torch.where(torch.rand(whole.shape, generator=self.generator) < 0.5, whole, parts)

    def _order(self, terms: int) -> torch.Tensor:
        return torch.randperm(terms, generator=self.generator)

    def _moved(self, t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.layout != torch.strided:
            return t
        shares = torch.rand(t.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
        return torch.where(t == t.round(), t, t * (1 + shares.to(t.dtype) * torch.finfo(t.dtype).eps))


class _Calls(TorchDispatchMode):
    """Counts the ATen calls that happen, compiled or not."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without it Dynamo runs what it has compiled op by op while the mode is on."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and not func.is_view:
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Answer:
    """Outputs, and inputs after the call or gradients; the ATen calls that ran; whether random numbers were drawn, and the generator's state then."""

    tensors: list[torch.Tensor]
    calls: _Calls
    random: bool = False
    state: torch.Tensor | None = None


def run(fn: Callable[..., list[torch.Tensor]], sample: Sample, backward: bool, watched: bool = True, turn: int = 0, noisy: bool = False) -> Answer:
    """Calls `fn` with copies of the sample's tensors, and differentiates it along random directions, moved a little for each `turn` after 0.

    `noisy` makes the rounding errors of its operators larger, in another way for each `turn`.
    """
    tensors = [copied(t) for t in sample.tensors]
    torch.manual_seed(0)
    seeded = torch.get_rng_state()
    calls = _Calls()
    watch: Any = Noise(turn) if noisy else calls if watched else contextlib.nullcontext()
    inputs = [t.requires_grad_(t.is_floating_point()) for t in tensors] if backward else tensors
    with watch, torch.set_grad_enabled(backward):
        outputs = fn(*inputs)
    if not backward:
        state = torch.get_rng_state()
        return Answer([*outputs, *tensors], calls, not torch.equal(seeded, state), state)
    differentiable = [t for t in outputs if t.requires_grad]
    if not differentiable:
        return Answer([], calls)
    cotangents = cotangents_of(differentiable, turn)
    with watch:
        grads = torch.autograd.grad(differentiable, [t for t in inputs if t.requires_grad], cotangents, allow_unused=True)
    results = [*[t.detach() for t in outputs], *[g for g in grads if g is not None]]
    state = torch.get_rng_state()
    return Answer(results, calls, not torch.equal(seeded, state), state)


def compiled_by(engine: str, sample: Sample) -> Callable[..., list[torch.Tensor]]:
    """The sample's call by an engine. `deplo` and `aot_eager` go without Dynamo, which takes most of the time. What bears witness for deplo has none
    of its formulas."""
    if engine in ("dynamo", "inductor"):
        return _compiled_by_dynamo(engine, sample)
    compilation = Compilation(read_options(), [])
    pair: dict[str, Any] = {"fw_compiler": compilation.forward, "bw_compiler": compilation.backward, "inference_compiler": compilation.inference}
    if engine == "aot_eager":
        pair = {name: lambda gm, _: make_boxed_func(gm.forward) for name in pair}
    if engine == "traced":
        pair = {name: lambda gm, _: make_boxed_func(laid_out_as_traced(gm)) for name in pair}
    return aot_function(
        sample.call,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decompositions(formulas=engine != "aot_eager"),
        keep_inference_input_mutations=True,
        **pair,
    )


def laid_out_as_traced(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """The graph run op by op, with the strides of the results that its nodes carry."""
    (results,) = next(node for node in gm.graph.nodes if node.op == "output").args

    def relaid(t: Any, node: Any) -> Any:
        said = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(t, torch.Tensor) or not isinstance(said, torch.Tensor) or t.layout != torch.strided or said.stride() == t.stride():
            return t
        return torch.empty_strided(t.shape, [int(stride) for stride in said.stride()], dtype=t.dtype).copy_(t)

    return lambda *inputs: [relaid(t, node) for t, node in zip(gm.forward(*inputs), results, strict=True)]


def _compiled_by_dynamo(engine: str, sample: Sample) -> Callable[..., list[torch.Tensor]]:
    torch._dynamo.reset()
    options = read_options()
    backend: Any = "inductor" if engine == "inductor" else lambda gm, inputs: compile_with(options, gm, inputs)
    op = sample.op.op
    compiled = torch.compile(lambda head, args, kwargs: op(head, *args, **kwargs), backend=backend, dynamic=False)
    return lambda *tensors: sample.call_by(compiled, tensors)


class Judge:
    """Runs samples of one unit and notes what became of them."""

    def __init__(self, unit: Unit, engine: str = "deplo") -> None:
        self.unit = unit
        self.op = OPS[unit.op]
        self.dtype: torch.dtype = getattr(torch, unit.dtype)
        self.backward = unit.direction == "backward"
        self.engine = engine
        self.result = Result(unit.name)
        self.single_elements = isinstance(self.op, (UnaryUfuncInfo, BinaryUfuncInfo)) and not self.backward

    def check(self, sample: Sample) -> None:
        try:
            expected = run(sample.call, sample, self.backward)
        except Exception as error:  # noqa: BLE001 (each operator refuses in its own way)
            self.result.excuse(f"eager refuses: {_line(error)}")
            return
        if not expected.tensors:
            self.result.excuse("nothing to compare")
            return
        self.result.samples += 1
        try:
            got = self._compiled(sample, self.engine)
        except Exception as error:  # noqa: BLE001 (whatever it raises is to be judged)
            self._raised(sample, expected, error)
            return
        text = self._complaint(sample, got, expected)
        if text and not self._excused(sample, got, expected):
            self._problem("wrong", sample, text)

    def _compiled(self, sample: Sample, engine: str) -> Answer:
        with warnings.catch_warnings(record=True) as caught, collect_records() as records:
            warnings.simplefilter("always")
            fn = compiled_by(engine, sample)
            run(fn, sample, self.backward, watched=False)  # compiles: only what happens afterwards is the program's doing
            answer = run(fn, sample, self.backward)
        seen = [op for op in answer.calls.seen if not _NO_WORK.match(op)]
        if engine == "inductor":
            self._note_library([], seen)
        if engine not in ("deplo", "dynamo"):
            return answer
        for warning in caught:
            if issubclass(warning.category, FallbackWarning):
                text = re.sub(r" at \S+\.py:\d+", "", str(warning.message))
                if "deplo has a bug there" in text:
                    self._problem("failed", sample, text)
                else:
                    self.result.worsen(
                        "eager" if "graph runs in eager mode" in text and "calls of" not in text and "one call" not in text else "partly"
                    )
                    self.result.library.setdefault("(" + re.sub(r" in eager mode.*?: ", ") ", text, count=1), "no Torch IR")
        self._note_library(records, seen)
        return answer

    def _note_library(self, records: list[Any], seen: list[str]) -> None:
        known = {}
        for record in records:
            if record.program is not None:
                known.update({call["op"]: call["reason"] for call in json.loads(record.program.describe())["library"]})
        for op in {*known, *seen}:
            self.result.library.setdefault(op, known.get(op, "outside of the program"))
            self.result.worsen("partly")
        self.result.worsen("generated")

    def _complaint(self, sample: Sample, got: Answer, expected: Answer, judged_places: Sequence[torch.Tensor] = ()) -> str:
        """What is wrong with `got`, or nothing; float64's answer counts as 0 outside of `judged_places`, as both answers then are."""
        if len(got.tensors) != len(expected.tensors):
            return f"{len(got.tensors)} tensors where eager gives {len(expected.tensors)}"
        if got.state is not None and expected.state is not None and not torch.equal(got.state, expected.state):
            return "the generator is not where eager mode leaves it"
        judged = self.dtype != torch.float64 and not expected.random  # other dtypes draw other random numbers
        exact: Answer | None = None if judged else self._by_mpmath(sample, expected)
        proven = exact is not None and exact is not expected
        wide = sample.in_float(torch.float64)
        if judged:
            try:
                exact = run(wide.call, wide, self.backward)
            except Exception:  # noqa: BLE001 (not defined for float64)
                exact = None
        if exact is not None and judged and ("polygamma" in self.unit.op or not self.dtype.is_floating_point):
            # Integers stay what they are in float64, and eager's trigamma has 9 digits there and no poles.
            plain, exact = exact, self._by_mpmath(wide, exact)
            proven = exact is not plain
        if exact is not None and judged_places and len(exact.tensors) == len(judged_places):
            exact = dataclasses.replace(exact, tensors=[_masked(t, at) for t, at in zip(exact.tensors, judged_places, strict=True)])
        nearby: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

        def pairs(k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
            if not nearby and exact is not None:
                generator = torch.Generator().manual_seed(2)
                for turn in range(1, 5 if judged else 9):
                    near = sample if self.single_elements and not judged else sample.nearby(generator)
                    wide_near = near.in_float(torch.float64)
                    # Whole numbers cannot be moved by an ulp: what comes of them is.
                    noisy = not judged or not self.dtype.is_floating_point
                    answers = [run(s.call, s, self.backward, turn=turn, noisy=noisy).tensors for s in ((near, wide_near) if judged else (near,))]
                    nearby.append((answers[0], answers[-1]))
            return [(a[k].detach(), b[k].detach()) for a, b in nearby if k < len(a) and k < len(b)]

        for k, (mine, theirs) in enumerate(zip(got.tensors, expected.tensors, strict=True)):
            if self.unit.op in UNINITIALISED:
                mine, theirs = mine.clone().fill_(0), theirs.clone().fill_(0)
            true = exact.tensors[k] if exact is not None and k < len(exact.tensors) else None
            text = complaint(
                mine.detach(),
                theirs.detach(),
                None if true is None else true.detach(),
                self.single_elements,
                lambda k=k: pairs(k),
                proven,
            )
            if text:
                return f"result {k}: {text}"
        return ""

    def _by_mpmath(self, sample: Sample, expected: Answer) -> Answer:
        """Eager's answer in float64, with mpmath's values and derivatives in place of eager's for functions of one number, and values of two
        that cancel."""
        if sample.is_special and "polygamma" in self.unit.op:  # mpmath raises there, or takes minutes
            return expected
        fn = FUNCTIONS.get(self.unit.op.rpartition(".")[2])
        if "polygamma" in self.unit.op:
            order = int(next(leaf for leaf in sample.leaves if not isinstance(leaf, torch.Tensor)))
            fn = dataclasses.replace(FUNCTIONS["digamma"], exact=lambda x: mpmath.polygamma(order, x))
        elif self.unit.op == "logit" and len(sample.leaves) == 2:
            (eps,) = (leaf for leaf in sample.leaves if not isinstance(leaf, torch.Tensor))
            unbounded = FUNCTIONS["logit"].exact
            fn = dataclasses.replace(FUNCTIONS["logit"], exact=lambda x: unbounded(min(max(x, eps), 1 - eps)))
        elif len(sample.leaves) == 2 and self.unit.op in CANCELLING and not self.backward:
            value = expected.tensors[0].detach()
            operands = [t.broadcast_to(value.shape).flatten().tolist() for t in sample.tensors]
            values = [exact_value(FUNCTIONS[self.unit.op], pair) for pair in zip(*operands, strict=True)]
            return Answer([_replaced(value, values)], expected.calls)
        elif len(sample.leaves) != 1:
            return expected
        if fn is None or fn.arity != 1 or expected.random:
            return expected
        x = sample.tensors[0].flatten().tolist()
        value = expected.tensors[0].detach()
        values = [exact_value(fn, (v,)) for v in x]
        if "polygamma" in self.unit.op and order == 1:
            values = [math.inf if v <= 0 and v == round(v) else y for v, y in zip(x, values, strict=True)]
        tensors = [_replaced(value, values), *expected.tensors[1:]]
        if self.backward and len(tensors) == 2:
            (cotangent,) = cotangents_of([value])
            slopes = [exact_value(fn, (v,), slope=True) for v in x]
            products = [None if s is None else s * c for s, c in zip(slopes, cotangent.flatten().tolist(), strict=True)]
            tensors[1] = _replaced(tensors[1], products)
        return Answer(tensors, expected.calls)

    def _excused(self, sample: Sample, got: Answer, expected: Answer) -> bool:
        return self._special(sample, got, expected) or self._traced_strides(sample, got, expected) or self._witness_agrees(sample, got, expected)

    def _special(self, sample: Sample, got: Answer, expected: Answer) -> bool:
        """True for a listed difference at special values: what is finite in both answers, where the input is a number, must be right all the same."""
        name = f"{self.unit.op}/{self.unit.direction}"
        reason = next((reason for pattern, reason in SPECIAL.items() if fnmatch.fnmatchcase(name, pattern)), "")
        if not reason or not sample.is_special or len(got.tensors) != len(expected.tensors):
            return False
        plain: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        places: list[torch.Tensor] = []
        for mine, theirs in zip(got.tensors, expected.tensors, strict=True):
            judged = torch.ones((), dtype=torch.bool)
            if mine.is_floating_point() and mine.shape == theirs.shape:
                judged = mine.isfinite() & theirs.isfinite()
                for x in sample.tensors:
                    judged = judged & ~x.isnan() if x.shape == mine.shape else judged
            places.append(judged)
            for side, t in zip(plain, (mine, theirs), strict=True):
                side.append(_masked(t, judged))
        if self._complaint(sample, dataclasses.replace(got, tensors=plain[0]), dataclasses.replace(expected, tensors=plain[1]), places):
            return False
        self.result.excuse(reason)
        return True

    def _traced_strides(self, sample: Sample, got: Answer, expected: Answer) -> bool:
        """True if all that differs are strides, and `got` has those that PyTorch's trace promises to its caller."""
        if len(got.tensors) != len(expected.tensors):
            return False
        try:
            traced = run(compiled_by("traced", sample), sample, self.backward, watched=False)
        except Exception:  # noqa: BLE001
            return False
        if len(traced.tensors) != len(expected.tensors) or any(a.stride() != b.stride() for a, b in zip(got.tensors, traced.tensors, strict=True)):
            return False
        if self._complaint(sample, _contiguous(got), _contiguous(expected)):
            return False
        self.result.excuse("PyTorch's trace promises other strides than its kernels give")
        return True

    def _witness_agrees(self, sample: Sample, got: Answer, expected: Answer) -> bool:
        """True if PyTorch's own trace, run op by op, differs from eager as well, and equals `got`."""
        if self.engine == "aot_eager":
            return False
        try:
            witness = run(compiled_by("aot_eager", sample), sample, self.backward, watched=False)
        except Exception:  # noqa: BLE001
            return False
        text = self._complaint(sample, witness, expected)
        if not text or self._complaint(sample, got, witness):
            return False
        self.result.excuse("PyTorch's trace, run op by op, differs from eager in the same way")
        return True

    def _raised(self, sample: Sample, expected: Answer, error: Exception) -> None:
        try:
            run(compiled_by("aot_eager", sample), sample, self.backward, watched=False)
        except Exception as other:  # noqa: BLE001
            self._through_dynamo(sample, expected, other)
            return
        place = "".join(traceback.format_exception(error)[-3:])[-1500:]
        self._problem("failed", sample, f"{type(error).__name__}: {error}\n{place}")

    def _through_dynamo(self, sample: Sample, expected: Answer, error: Exception) -> None:
        """PyTorch cannot trace the call as one graph: Dynamo breaks the graph there, or asks for the size at run time."""
        try:
            got = self._compiled(sample, "dynamo")
        except Exception as other:  # noqa: BLE001
            self.result.excuse(f"PyTorch does not trace it: {_line(other)}")
            return
        text = self._complaint(sample, got, expected)
        if text and not self._excused(sample, got, expected):
            self._problem("wrong", sample, text)
        self.result.library.setdefault(self.unit.op, _line(error))
        self.result.worsen("partly")

    def _problem(self, status: str, sample: Sample, text: str) -> None:
        self.result.worsen(status)
        self.result.problems.append(f"{status}: {shown(sample)}: {text}")


def _contiguous(answer: Answer) -> Answer:
    """With the same values, whose strides say nothing."""
    return dataclasses.replace(answer, tensors=[t.detach().clone(memory_format=torch.contiguous_format) for t in answer.tensors])


def _masked(t: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """t, laid out as it is, with 0 outside of `places`."""
    return t if places.all() or t.shape != places.shape else copied(t.detach()).masked_fill_(~places, 0)


def _line(error: Any) -> str:
    kind = f"{type(error).__name__}: " if isinstance(error, Exception) else ""
    return kind + str(error).strip().split("\n")[0][:160]


def run_unit(unit: Unit, limit: int | None, engine: str = "deplo", progress: Callable[[int], None] = lambda k: None, special: bool = False) -> Result:
    """All samples of a unit, or about `limit` of them, with special values in their tensors if asked. `progress` is called before each with its
    position."""
    judge = Judge(unit, engine)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        progress(-1)
        try:
            samples = samples_of(judge.op, judge.dtype, limit)
        except Exception as error:  # noqa: BLE001 (an OpInfo that has no samples on this build)
            judge.result.excuse(f"no samples: {_line(error)}")
            samples = []
        if special and f"{unit.op}/{unit.direction}" in FATAL:
            judge.result.excuse("eager ends the process, or takes minutes")
            samples = []
        generator = torch.Generator().manual_seed(3)
        for k, sample in enumerate(samples):
            progress(k)
            judge.check(sample.special(judge.dtype, generator) if special else sample)
    judge.result.seconds = time.perf_counter() - start
    return judge.result
