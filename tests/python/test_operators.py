"""The table of ATen overloads, and docs/ops.md made from it."""

from __future__ import annotations

import pathlib

import pytest
import torch
from engines import needs_core

pytestmark = needs_core


@pytest.fixture(scope="module")
def table():
    from deplo.operators import operators

    return operators()


def test_docs_are_up_to_date(table):
    from deplo.operators import markdown

    written = pathlib.Path(__file__).parents[2] / "docs" / "ops.md"
    assert written.read_text() == markdown(table), "run: python -m deplo ops --markdown > docs/ops.md"


def test_each_rule_and_each_core_overload_has_one_row(table):
    from deplo.core import core

    names = [op.name for op in table]
    assert len(set(names)) == len(names)
    assert {name for name, _ in core().overload_files() if name.startswith("aten.")} <= set(names)
    assert "aten.add.Tensor" in names and torch.Tag.core in torch.ops.aten.add.Tensor.tags


def test_most_core_overloads_are_generated(table):
    from deplo.operators import core_share

    made, meant = core_share(table)
    assert made >= 0.95 * meant, [op.name for op in table if op.is_core and op.kind.startswith("library (no")]


def test_library_operands_lie_as_eager_lays_them():
    """Some ATen kernels read their operands as contiguous without a look at the strides."""
    from deplo.core import core

    head = "torch @g(%x: i64[5] strides [2] user)\n"
    copy = "  %c: i64[5] strides [1] = aten.clone.default(self=%x, memory_format=contiguous_format)\n"
    sort = "  %v: i64[5] strides [1], %i: i64[5] strides [1] = aten.sort.default(self=%{}, dim=0, descending=false)\n  return %v, %i\n"
    assert "aten.clone.default" in core().lower(head + copy + sort.format("c"), "tensor")
    assert "aten.clone.default" not in core().lower(head + sort.format("x"), "tensor")


def test_wrong_sizes_of_results_that_nobody_reads_do_no_harm():
    import json

    from deplo.core import core
    from deplo.options import read_options

    text = """torch @g(%x: f32[3] user)
  %v: f32[3], %i: i64[7] = aten.sort.default(self=%x, dim=0, descending=false)
  return %v
"""
    program = core().compile(text, read_options().to_json())
    assert json.loads(program.describe())["library"]
    torch.testing.assert_close(program.run([torch.tensor([3.0, 1.0, 2.0])])[0], torch.tensor([1.0, 2.0, 3.0]))


def test_integer_division_inside_of_a_concatenation():
    """Inlined into one kernel with the rest, it is evaluated only where its own elements are."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y, z: torch.cat([x // y, z, x % y]), backend="deplo")
    x, y = torch.arange(5), torch.arange(5) + 1
    torch.testing.assert_close(compiled(x, y, x), torch.cat([x // y, x, x % y]))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(x, y - 1, x)
