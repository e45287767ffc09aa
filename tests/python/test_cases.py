"""The cases of program_cases.py: compiled at full size, compiled once for many sizes, and run by the interpreters of all levels."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines import Compiler, same
from program_cases import CASES, Case, w
from torch.utils._pytree import tree_leaves

import deplo
from deplo import backend
from deplo.backend import Record, collect_records
from deplo.capture import capture

pytestmark = pytest.mark.usefixtures("fresh_inference")

_C = pytest.importorskip("deplo._C")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import harness  # noqa: E402

LEVELS = ("torch", "tensor", "loop", "tile", "kernel")
# Units in the last place of the largest result that a kernel may be off by on top of eager's own error.
ULPS = 4
# Names of FX nodes that hold one contraction each.
MATMUL = re.compile(r"(mm|addmm|bmm|baddbmm):")
# Calls that show memory in another way and compute nothing: outputs that are views of inputs are made of them.
VIEWS = {"aten::permute", "aten::slice"}


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name.replace(" ", "_") for case in cases])


class Layer(torch.nn.Module):
    """A function with its last inputs as parameters."""

    def __init__(self, fn: Callable[..., Any], weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.fn = fn
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(weight, requires_grad=False) for weight in weights)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.fn(*inputs, *self.weights)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit, but for the bits of a NaN."""
    return torch.equal(a, b) or a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


def judge(case: Case, got: Any, eager: Any, wanted: Any, slack: float = 0) -> float:
    """`got` may be as far from the float64 result `wanted` as eager is, and a few units in the last place more (`slack` times as many).

    Returns the largest error that was allowed.
    """
    largest = 0.0
    for mine, theirs, exact in zip(tree_leaves(got), tree_leaves(eager), tree_leaves(wanted), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        if case.bitwise or not theirs.is_floating_point():
            assert equal(mine, theirs)
            continue
        error, usual = harness.max_error(mine, exact), harness.max_error(theirs, exact)
        allowed = usual + max(slack, 1) * ULPS * torch.finfo(theirs.dtype).eps
        assert error <= allowed, f"error {error} against float64, eager's is {usual}"
        largest = max(largest, allowed)
    return largest


def judge_parts(case: Case, got: torch.Tensor, eager: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    """Judges some slices by float64. Everywhere else, results and eager's may both be as wrong as there, with a margin of two."""
    assert case.judged is not None
    dim, positions = case.judged
    allowed = 0.0
    for at in positions:
        part = inputs[0].narrow(dim, at, 1)
        wanted = in_float64(case, [part, *inputs[1:]])
        allowed = max(allowed, judge(case, got.narrow(dim, at, 1), eager.narrow(dim, at, 1), wanted))
    assert got.dtype == eager.dtype and got.shape == eager.shape
    assert float((got - eager).abs_().max()) <= 4 * allowed * float(eager.abs().max())


def in_float64(case: Case, inputs: Sequence[torch.Tensor]) -> Any:
    return (case.reference or case.fn)(*[harness.to_double(x) for x in inputs])


def condition(case: Case, inputs: Sequence[torch.Tensor]) -> float:
    return float(case.condition(*[harness.to_double(x) for x in inputs])) if case.condition else 0


def check(case: Case, got: Any, written: Sequence[torch.Tensor], dims: tuple[int, ...]) -> None:
    """Compares results, and the inputs after the call, with those of eager."""
    inputs = case.inputs(dims)
    eager = case.fn(*inputs)
    assert all(equal(mine, theirs) for mine, theirs in zip(written, inputs, strict=True))
    for mine, theirs in zip(tree_leaves(got), tree_leaves(eager), strict=True):
        assert mine.stride() == theirs.stride()
    if case.judged and dims == case.full:
        judge_parts(case, got, eager, case.inputs(dims))
    else:
        judge(case, got, eager, eager if case.bitwise else in_float64(case, case.inputs(dims)), condition(case, case.inputs(dims)))


MATRIX_UNIT = "amx-bf16" in json.loads(_C.env(""))["cpu features"]


def kernels_of(records: list[Record]) -> list[list[str]]:
    """For each kernel that one call runs, the ops that it implements. ATen runs nothing. Packing weights does not count, nor packing the operand of a
    matrix unit, which takes the three parts of float32 from a kernel of its own."""
    ran = []
    for record in records:
        about = json.loads(record.program.describe())
        assert not about["library"], about["library"]
        ops = {kernel["name"]: kernel["ops"] for kernel in about["kernels"]}
        called = [step["kernel"] for step in about["steps"] if "kernel" in step and not step["once"]]
        ran += [ops[name] for name in called if not (MATRIX_UNIT and name.startswith("pack_") and not ops[name])]
    return ran


@each(CASES)
def test_full_size(case: Case):
    inputs = case.inputs(case.full)
    data = inputs[: len(inputs) - case.weights]
    compiled = Compiler()(Layer(case.fn, inputs[len(data) :]), {"threads": case.threads})
    with collect_records() as records:
        got = compiled(*data)
    check(case, got, inputs, case.full)
    kernels = kernels_of(records)
    if case.kernels is not None:
        assert len(kernels) == case.kernels, kernels
    contractions = [[name for name in ops if MATMUL.match(name)] for ops in kernels]
    if case.matmuls:
        assert sorted(len(names) for names in contractions if names) == [1] * case.matmuls, kernels
    left = harness.aten_calls(lambda: compiled(*data))
    assert set(left) <= VIEWS, left


@each([case for case in CASES if case.sizes])
def test_one_compilation_serves_all_sizes(case: Case):
    compiler = Compiler()
    compiled = compiler(case.fn, {"threads": case.threads}, dynamic=True)
    with collect_records() as records:
        for dims in case.sizes:
            inputs = case.inputs(dims)
            check(case, compiled(*inputs), inputs, dims)
    assert compiler.graphs == 1
    kernels_of(records)
    for record in records:
        given = record.torch_ir.partition(") where ")[0].partition("\n")[0]
        assert not re.search(r"\[([^\]]*, )?(?![01]\b)\d+[],]", given), f"a size is fixed: {given}"


class Interpreted:
    """A program that runs by the interpreter of every level; they must agree. Stands where a compiled program stands."""

    def __init__(self, case: Case, text: str, options: str) -> None:
        self.case = case
        self.options = {**json.loads(options), "verify": True, "stop_after": ""}
        self.texts = {level: self._lower(text, level) for level in LEVELS}
        # What expand_math makes of functions holds for float32 rounding only.
        self.exact_texts = {**self.texts, "kernel": self._lower(text, "kernel", disable=["expand_math"])}
        self._resume(text)
        signature, *lines = text.splitlines()
        self.inputs = re.findall(r"(%\w+|\b\w+(?=: sym)):", signature)
        self.writes = [line.split()[-1] for line in lines if line.startswith("  write ")]
        self.returns = [item for item in lines[-1].removeprefix("  return").strip().split(", ") if item]

    def missing(self) -> str:
        return ""

    def images(self) -> dict[str, bytes]:
        return {}  # no machine code

    def _lower(self, text: str, level: str, **changes: Any) -> str:
        return str(_C.lower(text, level, json.dumps({**self.options, **changes})))

    def _resume(self, text: str) -> None:
        """What follows from the text of a level is what follows from the module itself: printing loses nothing."""
        assert self._lower(self.texts["torch"], "torch") == self.texts["torch"]
        entered = {level: self._lower(text, "kernel", stop_after=f"lower_to_{level}") for level in LEVELS[1:]}
        for level, below in itertools.pairwise(entered):
            assert self._lower(entered[level], "kernel", stop_after=f"lower_to_{below}") == entered[below], level
        assert self._lower(entered["kernel"], "kernel") == self.texts["kernel"]

    def run(self, inputs: Sequence[Any], holders: int = 0) -> list[Any]:
        typed = {level: _C.interpret(text, list(inputs), "typed") for level, text in self.texts.items()}
        exact = {level: _C.interpret(text, list(inputs), "exact") for level, text in self.exact_texts.items()}
        scale = max(1, condition(self.case, [x for x in inputs if isinstance(x, torch.Tensor)]))
        for level in LEVELS[1:]:
            self._compare(level, typed, exact, scale)
        results = typed["kernel"]
        by_name = dict(zip(self.inputs, inputs, strict=True))
        written = [name for name in self.inputs if name in self.writes]
        for name, value in zip(written, results[len(self.returns) :], strict=True):
            by_name[name].copy_(value)
        return [self._returned(item, value) for item, value in zip(self.returns, results, strict=False)]

    def _compare(self, level: str, typed: dict[str, list[torch.Tensor]], exact: dict[str, list[torch.Tensor]], scale: float) -> None:
        where = f"{level}:\n{self.texts[level]}"
        assert len(typed[level]) == len(typed["torch"]) and len(exact[level]) == len(exact["tensor"]), where
        for mine, theirs, true_mine, true in zip(typed[level], typed["torch"], exact[level], exact["tensor"], strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, where
            if self.case.bitwise or not theirs.is_floating_point():
                assert equal(mine, theirs), where
                continue
            # Below Torch IR, constants have the dtype of what they meet, also in exact mode.
            assert harness.max_error(true_mine, true) <= 1e-12, where
            allowed = harness.max_error(theirs, true) + scale * ULPS * torch.finfo(theirs.dtype).eps
            assert harness.max_error(mine, true) <= allowed, where

    @staticmethod
    def _returned(item: str, value: torch.Tensor) -> Any:
        return value if item.startswith("%") else None if item == "none" else int(value)


class Interpreters:
    """Stands where `deplo._C` stands."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.programs: list[Interpreted] = []

    def compile(self, text: str, options: str) -> Interpreted:
        self.programs.append(Interpreted(self.case, text, options))
        return self.programs[-1]


@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
@each([case for case in CASES if case.small is not None])
def test_interpreters_agree(case: Case, symbolic: bool, monkeypatch: pytest.MonkeyPatch):
    """Of the program as it is, and of the same function of float64 inputs, where all may differ by a few units of float64 only."""
    dims = case.sizes[0] if symbolic and case.sizes else case.small
    core = Interpreters(case)
    monkeypatch.setattr(backend, "core", lambda: core)
    compiled = Compiler()(case.fn, dynamic=True if symbolic else None)
    inputs = case.inputs(dims)
    check(case, compiled(*inputs), inputs, dims)
    if case.bitwise:
        return
    torch._dynamo.reset()
    compiled = Compiler()(case.fn, dynamic=True if symbolic else None)
    got = compiled(*[harness.to_double(x) for x in case.inputs(dims)])
    wanted = case.fn(*[harness.to_double(x) for x in case.inputs(dims)])
    for mine, theirs in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        assert harness.max_error(mine, theirs) <= 1e-12
    assert core.programs or case.kernels == 0 or symbolic and not case.sizes


def test_softmax_of_any_length_compiles_once_and_for_zero_and_one():
    compiler = Compiler()
    compiled = compiler(lambda x: torch.softmax(x, 1), dynamic=True)
    for count, lengths in ((1, (700, 31, 64, 512, 513)), (2, (1,)), (3, (0,)), (3, (2, 31, 1, 0))):
        for length in lengths:
            x = torch.randn(8, length)
            same(compiled(x), torch.softmax(x, 1), exact=torch.softmax(x.double(), 1))
        assert compiler.graphs == count


def loop_ir_of(name: str) -> str:
    (case,) = [case for case in CASES if case.name == name]
    (record,) = capture(case.fn, case.inputs(case.full))
    return str(_C.lower(record.torch_ir, "loop"))


def test_a_slice_computes_what_it_shows():
    text = loop_ir_of("2 slice of exp of neg")
    assert re.findall(r"for \w+ in (\S+):", text) == ["3"] and text.count("= exp(") == 1, text


def test_chained_stencils_recompute_what_each_point_reads():
    """Without a buffer in between, a point of the second stencil computes the five of the first that it reads, and no others."""
    text = loop_ir_of("43 two stencils")
    assert text.count("loop @") == 1 and "local" not in text and text.count("  buffer") == 1
    assert text.count("= load") <= 25 and text.count("= add(") <= 24, text


BATCHED = {
    "linear and relu": lambda x, w, b: F.relu(F.linear(x, w, b)),
    "linear": lambda x, w, b: F.linear(x, w),
    "linear, gelu and residual": lambda x, w, b: F.gelu(F.linear(x, w, b)) + x.mean(-1, keepdim=True),
    "product and view": lambda x, w, b: (x.flatten(0, 1) @ w.t()).view(*x.shape[:2], 4, 10),
    "einsum": lambda x, w, b: torch.einsum("bsi,oi->bso", x, w),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_of_sequences_is_one_contraction(name, dynamic):
    torch.manual_seed(0)
    fn, inputs = BATCHED[name], [torch.randn(2, 24, 64), torch.randn(40, 64), torch.randn(40)]
    graph = deplo.explain(fn, *inputs, dynamic=dynamic, options={"strict": True}).graphs[0]
    assert sum(k.calls for k in graph.kernels if any(MATMUL.match(op) for op in k.implements)) == 1
    packs = [k for k in graph.kernels if k.name.startswith("pack_") and not k.implements]
    assert len(packs) <= 1
    assert sum(k.calls for k in graph.kernels if k not in packs) == (2 if "residual" in name else 1), [k.name for k in graph.kernels]
    wanted, eager = fn(*[x.double() for x in inputs]), fn(*inputs)
    error, theirs = ((y.double() - wanted).abs().max() for y in (Compiler()(fn, dynamic=dynamic)(*inputs), eager))
    assert error <= theirs + 4 * torch.finfo(torch.float32).eps * wanted.abs().max()


HEADS = {
    "heads": lambda x, w, b: F.linear(x, w, b).unflatten(-1, (3, 32)).transpose(1, 2).contiguous(),
    "heads and positions": lambda x, w, b: F.gelu(F.linear(x, w, b).unflatten(-1, (3, 32)).transpose(1, 2)) + x.mean(-1)[:, None, :, None],
    "heads of two layers": lambda x, w, b: (F.linear(x, w).unflatten(-1, (6, 16)).permute(2, 0, 1, 3) + b[-1]).contiguous(),
    "positions outside of sequences": lambda x, w, b: F.linear(x, w, b).transpose(0, 1).contiguous(),
    "columns": lambda x, w, b: F.linear(x, w, b).transpose(1, 2).contiguous(),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", HEADS)
def test_a_layer_stores_its_result_where_a_permutation_wants_it(name, dynamic):
    torch.manual_seed(0)
    layer = Layer(HEADS[name], [torch.randn(96, 64), torch.randn(96)])
    kernels = 2 if name == "heads and positions" or (name == "columns" and dynamic) else 1
    for length in (24, 7):
        x = torch.randn(2, length, 64)
        graph = deplo.explain(layer, x, dynamic=dynamic, options={"strict": True}).graphs[0]
        assert sum(k.calls for k in graph.kernels if not k.name.startswith("pack")) == kernels, [k.name for k in graph.kernels]
        wanted, eager = layer.double()(x.double()), layer.float()(x)
        error, theirs = ((y.double() - wanted).abs().max() for y in (Compiler()(layer, dynamic=dynamic)(x), eager))
        assert error <= theirs + 4 * torch.finfo(torch.float32).eps * wanted.abs().max()


CONCATENATIONS = {  # kernels, packing aside, and the module
    "columns": (2, lambda x, v, w: torch.cat([F.linear(x, v), F.linear(x, w).relu()], -1)),
    "rows": (2, lambda x, v, w: torch.cat([F.linear(x, v), F.linear(x * 2, v)], 1).sigmoid()),
    "beside an input": (3, lambda x, v, w: torch.cat([F.linear(x, v), x.relu(), F.linear(x, w)], -1)),
    "stacked": (2, lambda x, v, w: torch.stack([F.linear(x, v), F.linear(x + 1, v)], 1)),
    "nested": (3, lambda x, v, w: torch.cat([torch.cat([F.linear(x, v), F.linear(x, w)], -1), F.linear(x - 1, v)], -1)),
    "rows of a part": (2, lambda x, v, w: torch.cat([F.linear(x[0], v)[:3], F.linear(x[1], v)], 0)),
    "batched": (2, lambda x, v, w: torch.cat([x @ x.transpose(1, 2), (x * 2) @ x.transpose(1, 2)], -1)),
    "images": (2, lambda x, v, w: torch.cat([F.conv1d(x.mT, v.unflatten(1, (64, 1))), F.conv1d(x.mT, w.unflatten(1, (64, 1))).relu()], 1)),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", CONCATENATIONS)
def test_contractions_store_their_parts_of_a_concatenation(name, dynamic):
    torch.manual_seed(0)
    kernels, join = CONCATENATIONS[name]
    layer = Layer(join, [torch.randn(48, 64), torch.randn(80, 64)])
    for length in (24, 7):
        x = torch.randn(2, length, 64)
        graph = deplo.explain(layer, x, dynamic=dynamic, options={"strict": True}).graphs[0]
        names = [k.name for k in graph.kernels if not k.name.startswith("pack") and not k.name.endswith("_small")]  # of two versions, one
        assert len(names) == kernels, names
        wanted, eager = layer.double()(x.double()), layer.float()(x)
        error, theirs = ((y.double() - wanted).abs().max() for y in (Compiler()(layer, dynamic=dynamic)(x), eager))
        assert error <= theirs + 4 * torch.finfo(torch.float32).eps * wanted.abs().max()


ROWS = {
    "layer": lambda x, v, w, b: F.linear(x, w, b),
    "gate": lambda x, v, w, b: F.silu(F.linear(x, v)) * F.linear(x, w, b),
    "batch": lambda x, v, w, b: torch.stack([v, w]).bmm(torch.stack([x[0], x[0].cos()]).unsqueeze(-1)).squeeze(-1) + b,
    "scaled": lambda x, v, w, b: (w * x * 0.25).sum(1) + b,
}


@pytest.mark.parametrize("features", ["native", "sse"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_sums_side_by_side_of_any_length(name, dtype, dynamic, features):
    torch.manual_seed(0)
    compiled = Compiler()(ROWS[name], {"guard": True, "features": features}, dynamic=dynamic)
    for n, k in ((37, 300), (64, 4200), (130, 257), (3, 40)) if dtype == torch.float32 else ((37, 300), (64, 512)):
        inputs = [torch.randn(1, k), w(n, k), w(n, k), torch.randn(n)]
        inputs = [x.to(dtype) for x in inputs]
        same(compiled(*inputs), ROWS[name](*inputs), exact=ROWS[name](*[x.double() for x in inputs]))
