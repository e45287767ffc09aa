"""`python -m deplo`: what it prints, and that bad input is one clear line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from engines import needs_core

import deplo
from deplo.cli import main

SOFTMAX = "torch @f(%x: f32[4, 8])\n  %y: f32[4, 8] = aten._softmax.default(self=%x, dim=-1, half_to_float=false)\n  return %y\n"


def run(capsys, *arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_torch_ir_of_an_expression(capsys):
    status, out, _ = run(capsys, "compile", "-c", "softmax(r(4, 8), -1)", "--ir", "torch")
    assert status == 0
    assert out.startswith("torch @inference(%x0: f32[4, 8] strides [8, 1] user)")


def test_dynamic_and_backward(capsys):
    _, out, _ = run(capsys, "compile", "-c", "nn.Linear(3, 2)(r(4, 3)).relu()", "--ir", "torch", "--dynamic", "--backward")
    assert "torch @forward(" in out and "torch @backward(" in out and ": sym" in out and "parameter static" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compile", "-c", "softmax(r(4, 8)", "--ir", "torch"), "UserError: <expression>:1:8: '(' was never closed"),
        (("compile", "-c", "r(-1)", "--ir", "torch"), "UserError: <expression>: RuntimeError"),
        (("run", "-c", "nosuch(4)"), "UserError: <expression>: NameError: name 'nosuch' is not defined"),
        (("run", "-c", "r(4) @ r(5)"), "UserError: <expression>: RuntimeError"),
        (("compile", "no/such.ir", "--ir", "loop"), "UserError: no/such.ir: [Errno 2]"),
        (("compile", "-c", "r(3)", "--ir", "torch", "--option", "treads=3"), "unknown option 'treads'; did you mean 'threads'?"),
        (("compile", "-c", "r(3)", "--ir", "torch", "--option", "strict"), "expected KEY=VALUE"),
        (("compile", "-c", "r(3) + 1", "--ir", "torch", "-o", "no/such/folder/x"), "UserError: no/such/folder/x: No such file"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert status == 1 and out == ""
    assert message in err and err.count("\n") == 1


def test_bad_command_line_shows_usage(capsys):
    with pytest.raises(SystemExit):
        main(["compile", "--ir", "torch"])
    assert "usage: python -m deplo compile" in capsys.readouterr().err


@needs_core
def test_broken_file_names_line_and_column(capsys, tmp_path):
    path = tmp_path / "broken.ir"
    path.write_text(SOFTMAX.replace("dim=-1", "dim="))
    status, _, err = run(capsys, "compile", str(path), "--ir", "loop")
    assert status == 1 and f"{path}:2:" in err
    path.write_bytes(b"\xff\xfe\x00")
    assert run(capsys, "compile", str(path), "--ir", "loop")[0] == 1
    path.write_text("no IR at all")
    assert run(capsys, "compile", str(path), "--ir", "loop")[0] == 1


@needs_core
def test_every_level_of_a_file_and_of_what_it_printed(capsys, tmp_path):
    path = tmp_path / "softmax.ir"
    path.write_text(SOFTMAX)
    for level in ("tensor", "loop", "tile", "kernel"):
        status, text, err = run(capsys, "compile", str(path), "--ir", level)
        assert status == 0, err
        resumed = tmp_path / f"{level}.ir"
        resumed.write_text(text)
        status, below, err = run(capsys, "compile", str(resumed), "--ir", "asm")
        assert status == 0 and "ret" in below, err


@needs_core
def test_dump_folder_has_numbered_files(capsys, tmp_path):
    path = tmp_path / "softmax.ir"
    path.write_text(SOFTMAX)
    status, _, err = run(capsys, "compile", str(path), "--ir", "kernel", "--dump-dir", str(tmp_path / "dump"))
    assert status == 0, err
    names = sorted(item.name for item in (tmp_path / "dump").iterdir())
    assert names and all(name[:2].isdigit() and name.endswith(".ir") for name in names)


@needs_core
def test_lists(capsys):
    assert "fuse" in run(capsys, "passes")[1]
    out = run(capsys, "env")[1]
    assert torch.__version__ in out and "cpu features" in out


@needs_core
def test_run_and_explain(capsys):
    status, out, err = run(capsys, "run", "-c", "softmax(r(4, 8), -1)")
    assert status == 0 and "largest error" in out, err
    status, out, err = run(capsys, "explain", "-c", "softmax(r(64, 128), -1) + torch.sort(r(64, 128), -1)[0]")
    assert status == 0 and "library call" in out and "aten.sort" in out, err


@needs_core
def test_explain_gives_figures():
    explanation = deplo.explain(lambda x: torch.softmax(x * 2, -1), torch.randn(64, 128))
    (graph,) = explanation.graphs
    assert not graph.fallback and graph.kernels and not graph.library
    assert sum(kernel.bytes for kernel in graph.kernels) >= 2 * 64 * 128 * 4
    assert all(kernel.seconds > 0 for kernel in graph.kernels)
    text = str(explanation)
    assert graph.kernels[0].name in text and "cache:" in text
    torch.testing.assert_close(explanation.result, torch.softmax(explanation.result.log(), -1), rtol=1e-4, atol=1e-6)


def test_explain_shows_the_reason_of_a_fallback():
    with pytest.warns(deplo.FallbackWarning):
        explanation = deplo.explain(lambda x: x * 2, torch.randn(3, dtype=torch.complex64))
    assert "complex64" in str(explanation)


def test_reading_end_of_a_pipe_may_close():
    command = f"{sys.executable} -m deplo compile -c 'r(4) + 1' --ir torch | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in result.stderr


def test_backend_is_found_by_name_in_a_fresh_process():
    code = (
        "import json, torch\n"
        "names = torch._dynamo.list_backends(exclude_tags=())\n"
        "f = torch.compile(lambda x: torch.softmax(x, -1), backend='deplo')\n"
        "x = torch.randn(4, 8)\n"
        "print(json.dumps(['deplo' in names, bool(torch.allclose(f(x), x.softmax(-1), atol=1e-6))]))\n"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, cwd="/")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [True, True]
