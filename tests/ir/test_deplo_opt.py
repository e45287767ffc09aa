"""tools/deplo_opt: its options, what it prints, and its exit statuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TOOL = Path(os.environ.get("DEPLO_BUILD", Path(__file__).resolve().parents[2] / "build")) / "tools" / "deplo_opt"
SOFTMAX = "torch @f(%x: f32[s0, 8]) where s0 in 2..\n  %y: f32[s0, 8] = aten._softmax.default(self=%x, dim=-1, half_to_float=false)\n  return %y\n"
POINT = "tensor @f(%x: f32[64] user)\n  %y: f32[64] = exp(%x)\n  %z: f32[64] = neg(%y)\n  return %z strides [1]\n"

TRANSPOSED = "torch @f(%x: f32[4, 8])\n  %t: f32[8, 5] = aten.t.default(self=%x)\n  return %t\n"


def run(*arguments: str, source: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(TOOL), *arguments], input=source, capture_output=True, text=True, timeout=120, check=False)


def test_text_is_parsed_verified_and_printed(tmp_path: Path) -> None:
    path = tmp_path / "f.ir"
    path.write_text(SOFTMAX)
    from_file, from_input = run(str(path)), run("-", source=SOFTMAX)
    assert from_file.returncode == 0 and from_file.stdout == from_input.stdout
    assert from_file.stdout.startswith("torch @f(%x: f32[s0, 8] user) where s0 in 2..\n")


def test_passes_run_alone_and_in_the_order_given() -> None:
    lowered = run("-", "--pass", "lower_to_tensor", source=SOFTMAX)
    assert lowered.returncode == 0 and lowered.stdout.startswith("tensor @f(")
    both = run("-", "--pass", "lower_to_loop", "--pass", "fuse_producers", source=POINT)
    assert both.stdout == run("-", "--pass", "fuse_producers", source=run("-", "--pass", "lower_to_loop", source=POINT).stdout).stdout
    assert both.stdout.count("loop @") == 1 and run("-", "--pass", "lower_to_loop", source=POINT).stdout.count("loop @") == 2


@pytest.mark.parametrize("level", ["torch", "tensor", "loop", "tile", "kernel"])
def test_the_whole_pipeline_stops_at_a_level(level: str) -> None:
    done = run("-", "--lower", level, source=SOFTMAX)
    assert done.returncode == 0 and f"{level} @" in done.stdout, done.stderr
    assert run("-", source=done.stdout).stdout == done.stdout


def test_targets_widths_hints_schedules_and_disabled_passes() -> None:
    assert "f32x4" in run("-", "--lower", "kernel", "--vector-bytes", "16", source=POINT).stdout
    assert "f32x16" in run("-", "--lower", "kernel", "--vector-bytes", "64", source=POINT).stdout
    for option, value in (("--vector-bytes", "48"), ("--vector-bytes", "-32"), ("--vector-registers", "0")):
        refused = run("-", "--lower", "kernel", option, value, source=POINT)
        assert refused.returncode == 1 and f"{option} {value}: " in refused.stderr
    assert "block_x" in run("-", "--lower", "tile", "--target", "cuda", source=POINT).stdout
    assert "__global__" in run("-", "--lower", "cuda", "--target", "cuda", source=POINT).stdout
    apart = run("-", "--lower", "loop", "--disable", "fuse_producers", "--disable", "fuse_nests", source=POINT)
    assert apart.stdout.count("\nloop @") == 2
    assert run("-", "--lower", "tile", "--hint", "s0=100000", source=SOFTMAX).returncode == 0
    by_hand = run("-", "--lower", "tile", "--schedule", "k0=nest parallel(work=64) vectorize(i0, by=2)", source=POINT)
    assert "schedule @k0: nest parallel(work=64) vectorize(i0, by=2)\n" in by_hand.stdout, by_hand.stderr


def test_dumps_name_each_pass_and_say_what_changed_nothing() -> None:
    done = run("-", "--lower", "loop", "--dump", source=SOFTMAX)
    heads = [line for line in done.stderr.splitlines() if line.startswith("# ")]
    assert heads[0] == "# torch/import" and heads[1] == "# torch/share_calls (unchanged)" and heads[2] == "# tensor/lower"
    assert heads[-1].startswith("# loop/share_kernels")


def test_list_shows_level_name_and_meaning() -> None:
    rows = [line.split("\t") for line in run("--list").stdout.splitlines()]
    assert all(len(row) == 3 and all(row) for row in rows)
    assert [row[:2] for row in rows][0] == ["torch", "share_calls"] and ["kernel", "expand_math"] in [row[:2] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "source", "status", "message"),
    [
        ((), "", 1, "error: no file"),
        (("no/such.ir",), "", 1, "error: cannot read no/such.ir"),
        (("-", "--pas", "x"), POINT, 1, "error: unknown option '--pas'"),
        (("-", "--pass"), POINT, 1, "error: --pass needs a value"),
        (("-", "--hint", "s0"), POINT, 1, "error: --hint takes NAME=VALUE, not 's0'"),
        (("-", "--hint", "s0=many"), POINT, 1, "error: --hint takes an integer, not 'many'"),
        (("-", "--target", "tpu"), POINT, 1, "error: unknown target 'tpu'"),
        (("-", "--pass", "fuse_nests"), POINT, 1, "error: no pass 'fuse_nests' at this module's level (tensor)"),
        (("-", "--lower", "lop"), POINT, 1, "error: cannot stop after 'lop', did you mean 'loop'?"),
        (("-", "--lower", "loop", "--disable", "fuse"), POINT, 1, "error: cannot disable 'fuse'"),
        (("-",), POINT.replace("neg(%y)", "neg(%q)"), 1, "error: -:3:3: tensor @f: %z: the value %q is not defined here"),
        (("-", "--lower", "tensor"), TRANSPOSED, 1, "error: -:2:3: "),
        (("-", "--lower", "cuda", "--target", "cuda"), POINT.replace("64", "s0").replace(" user)", " user) where s0 in 2.."), 0, ""),
    ],
)
def test_exit_status_says_whose_fault_it_is(arguments: tuple[str, ...], source: str, status: int, message: str) -> None:
    done = run(*arguments, source=source)
    assert done.returncode == status and message in done.stderr, done.stderr
