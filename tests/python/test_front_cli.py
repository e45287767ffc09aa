"""`python -m deplo`: what it prints, and that bad input is one clear line."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
import types

import pytest
import torch
from engines import needs_core, same

import deplo
from deplo import backend, measure
from deplo.cli import main
from deplo.progress import progress

SOFTMAX = "torch @f(%x: f32[4, 8])\n  %y: f32[4, 8] = aten._softmax.default(self=%x, dim=-1, half_to_float=false)\n  return %y\n"


def run(capsys, *arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_torch_ir_of_an_expression(capsys):
    status, out, _ = run(capsys, "compile", "-c", "softmax(r(4, 8), -1)", "--ir", "torch")
    assert status == 0
    assert out.startswith("torch @inference(%x0: f32[4, 8] user)")


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
@pytest.mark.parametrize("arguments", [["run", "-c", "r(3)", "r(4)"], ["explain", "-c", "r(3)", "--ir", "loop"]])
def test_arguments_that_a_command_does_not_have(capsys, arguments):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "unrecognized arguments" in capsys.readouterr().err


@needs_core
def test_no_kernel_is_said(capsys):
    status, out, err = run(capsys, "compile", "-c", "torch.sort(r(4))[0]", "--ir", "asm")
    assert status == 0 and not out.strip() and "no kernel" in err


@needs_core
def test_compile_says_which_graphs_are_of_training(capsys, monkeypatch, tmp_path):
    lower, seen = backend.core().lower, []

    def noted(text, level, options, name):
        seen.append((text, json.loads(options)["training"]))
        return lower(text, level, options, name)

    monkeypatch.setattr("deplo.core.core", lambda: types.SimpleNamespace(lower=noted, level_of=backend.core().level_of))
    expression = "F.linear(r(4, 8), r(8, 8))"
    for arguments in ([], ["--backward"]):
        assert run(capsys, "compile", "-c", expression, "--ir", "torch", *arguments)[0] == 0
    assert [training for _, training in seen] == [False, True, True]
    for name, training in seen[:]:
        (tmp_path / "graph.ir").write_text(f"{name}(x: f32[2]) {{\n}}")
        run(capsys, "compile", str(tmp_path / "graph.ir"))
        assert seen[-1][1] == training


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
def test_dump_folder_marks_passes_that_changed_nothing(capsys, tmp_path):
    path = tmp_path / "softmax.ir"
    path.write_text(SOFTMAX)
    assert run(capsys, "compile", str(path), "--dump-dir", str(tmp_path / "dump"))[0] == 0
    files = sorted((tmp_path / "dump").iterdir())
    assert [int(file.name[:2]) for file in files] == list(range(len(files)))
    levels = [file.name.split("_")[1] for file in files]
    before = dict.fromkeys(levels, "")
    for file, level in zip(files, levels, strict=True):
        text = file.read_text()
        assert (text == before[level]) == file.stem.endswith("_unchanged"), file.name
        before[level] = text
    names = [file.stem for file in files]
    assert any(name.endswith("_fuse_nests") for name in names) and any(name.endswith("_split_axes_unchanged") for name in names)


@needs_core
def test_stop_after_and_disable(capsys):
    softmax = ("compile", "-c", "softmax(r(4, 8), -1)")
    status, fused, err = run(capsys, *softmax, "--stop-after", "fuse_nests")
    assert status == 0 and fused.count("\nloop @") == 1, err
    status, apart, err = run(capsys, *softmax, "--stop-after", "fuse_nests", "--disable", "fuse_nests")
    assert status == 0 and apart.count("\nloop @") > 1, err
    status, lowered, err = run(capsys, *softmax, "--stop-after", "lower_to_tensor")
    assert status == 0 and lowered.startswith("tensor @"), err
    for level in ("torch", "tensor", "loop", "tile", "kernel"):
        status, out, err = run(capsys, *softmax, "--stop-after", level)
        assert status == 0 and f"{level} @" in out, err
        assert out == run(capsys, *softmax, "--ir", level)[1]
    with pytest.raises(SystemExit):
        run(capsys, *softmax, "--stop-after", "loop", "--ir", "kernel")
    assert "not allowed with" in capsys.readouterr().err


@needs_core
def test_compile_shows_the_parts_of_a_graph_and_what_stays(capsys):
    parts = ("compile", "-c", "torch.fft.fft(r(8).exp()).abs() + 1")
    status, out, err = run(capsys, *parts, "--ir", "torch")
    assert status == 0 and "aten.exp" in out and "aten.add" in out and "fft" not in out
    assert "aten._fft_r2c.default stays in ATen: " in err and "complex" in err
    status, out, err = run(capsys, *parts, "--option", "strict=1")
    assert status == 1 and out == "" and "UnsupportedError" in err
    status, out, err = run(capsys, "compile", "-c", "torch.fft.fft(r(8))")
    assert status == 1 and out == "" and "UnsupportedError" in err


@needs_core
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stop-after", "fuse_nest"), "cannot stop after 'fuse_nest', did you mean 'fuse_nests'?"),
        (("--disable", "expand_maths"), "cannot disable 'expand_maths', did you mean 'expand_math'?"),
        (("--disable", "loop"), "cannot disable 'loop': expected one of share_calls, fold_constants"),
        (("--option", "dump=tenser"), "cannot dump 'tenser', did you mean 'tensor'?"),
    ],
)
def test_names_of_passes_are_checked(capsys, arguments, message):
    status, out, err = run(capsys, "compile", "-c", "r(4) + 1", *arguments)
    assert status == 1 and out == "" and message in err and err.count("\n") == 1


@needs_core
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%z: f32[4, 9] = aten.exp.default(self=%y)", "3:3: aten.exp.default gives %z the type f32[4, 8], not f32[4, 9]"),
        ("%z: f32[4, 8] = aten.gt.Scalar(self=%y, other=0)", "3:3: aten.gt.Scalar gives %z the type bool[4, 8], not f32[4, 8]"),
        ("%z: f32[4] = aten.sum.dim_IntList(self=%y, dim=[1], keepdim=true)", "3:3: aten.sum.dim_IntList gives %z the type f32[4, 1], not f32[4]"),
        ("%z: f32[8, 4], %i: i64[4, 8] = aten.sort.default(self=%y)", "3:3: aten.sort.default gives %z the type f32[4, 8], not f32[8, 4]"),
        ("%z: f32[4, 4] = aten.mm.default(self=%y, mat2=%y)", "3:3: aten.mm.default: a and b must have same reduction dim"),
        ("%z: f32[9] = aten.view.default(self=%y, size=[9])", "3:3: aten.view.default: shape '[9]' is invalid for input of size 32"),
        ("%z: f32[4, 8] = aten.sin.default(self=%y, axis=3)", "3:3: aten.sin.default has no argument 'axis'"),
        ("%z: f32[4, 8] = aten.expp.default(self=%y)", "3:3: this PyTorch has no operator aten.expp.default"),
    ],
)
def test_results_that_no_call_gives_are_refused(capsys, tmp_path, line, message):
    path = tmp_path / "wrong.ir"
    path.write_text(f"torch @f(%x: f32[4, 8])\n  %y: f32[4, 8] = aten.neg.default(self=%x)\n  {line}\n  return %z\n")
    for level in ("torch", "kernel"):
        status, _, err = run(capsys, "compile", str(path), "--ir", level)
        assert status == 1 and f"{path}:{message}" in err, err


@needs_core
def test_types_are_judged_for_symbolic_sizes_too(capsys, tmp_path):
    path = tmp_path / "net.ir"
    text = "torch @f(%x: f32[s0, 8]) where s0 in 2..\n  %y: f32[s0*8] = aten.view.default(self=%x, size=[s0*8])\n  return %y\n"
    path.write_text(text)
    assert run(capsys, "compile", str(path), "--ir", "loop")[0] == 0
    path.write_text(text.replace("f32[s0*8]", "f32[s0*4]"))
    status, _, err = run(capsys, "compile", str(path), "--ir", "loop")
    assert status == 1 and f"{path}:2:3: aten.view.default gives %y the type f32[1024] for s0 = 128, not f32[s0*4]" in err


def on_terminal(*arguments) -> str:
    """What a terminal gets to see of a command."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color", "COLUMNS": "200"}
    child = subprocess.Popen([sys.executable, "-m", "deplo", *arguments], stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert child.wait(timeout=120) == 0, shown
    return shown.decode()


def test_colour_on_a_terminal_and_plain_text_in_a_pipe(tmp_path):
    path = tmp_path / "softmax.ir"
    path.write_text(SOFTMAX)
    command = ("compile", str(path), "--ir", "tensor")
    coloured = on_terminal(*command)
    piped = subprocess.run([sys.executable, "-m", "deplo", *command], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "\x1b[" in coloured and "\x1b[" not in piped
    uncoloured = "".join(part.partition("m")[2] if number else part for number, part in enumerate(coloured.split("\x1b[")))
    assert uncoloured.replace("\r\n", "\n").split() == piped.split()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_line_of_long_compilations(monkeypatch):
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("compiling the graph", after=0.01):
        while "\rdeplo: compiling the graph ... " not in terminal.getvalue():
            time.sleep(0.01)
    assert terminal.getvalue().endswith("\r\x1b[K"), "the line is wiped at the end"
    terminal.truncate(0)
    with progress("compiling the graph", after=60):
        pass
    assert not terminal.getvalue().strip("\0")
    monkeypatch.setattr(sys, "stderr", pipe)
    with progress("compiling the graph", after=0.0):
        time.sleep(0.05)
    assert not pipe.getvalue()


@needs_core
def test_compilations_show_their_progress(monkeypatch, fresh_inference):
    seen = []
    monkeypatch.setattr(backend, "progress", lambda what: seen.append(what) or progress(what))
    torch.compile(lambda x: x.exp() + 1, backend="deplo")(torch.ones(3))
    assert seen == ["compiling the inference graph of 2 calls"]


def test_one_slow_call_does_not_decide_how_many_are_timed():
    calls = []

    def hiccup():
        calls.append(None)
        if len(calls) == 4:
            time.sleep(0.05)

    assert measure.quickest(hiccup) < 0.01
    measure.time_interleaved({"f": hiccup}, budget=0.02)
    assert len(calls) > 1000


@needs_core
def test_bench_shows_both_times(capsys):
    status, out, err = run(capsys, "run", "-c", "softmax(r(4, 8), -1)", "--bench")
    lines = out.splitlines()
    assert status == 0, err
    assert [line.split()[0] for line in lines[-3:-1]] == ["eager", "deplo"] and all(line.endswith(" a call") for line in lines[-3:-1])
    assert lines[-1].startswith("deplo is ") and lines[-1].endswith(" times as fast as eager") and float(lines[-1].split()[2]) > 0


@needs_core
def test_lists(capsys):
    assert "fuse" in run(capsys, "passes")[1]
    out = run(capsys, "env")[1]
    assert torch.__version__ in out and "cpu features" in out


@needs_core
def test_run_and_explain(capsys):
    status, out, err = run(capsys, "run", "-c", "softmax(r(4, 8), -1)")
    assert status == 0 and "largest error" in out, err
    status, out, err = run(capsys, "run", "-c", "softmax(r(4, 8), 5)")
    assert status == 1 and "IndexError: Dimension out of range" in err and len(err.splitlines()) == 1, err
    for random in ("torch.rand(4) + 1", "torch.randint(0, 99, (8,)) + r(8) * 0"):
        status, out, err = run(capsys, "run", "-c", random)
        assert status == 0 and "largest error: deplo 0, eager 0" in out, out + err
    status, out, err = run(capsys, "run", "-c", "nn.LSTM(3, 4)(r(2, 1, 3))[0] * 2")
    assert status == 0 and 0 < float(out.rpartition("eager ")[2]) < 1e-5, out + err
    status, out, err = run(capsys, "explain", "-c", "softmax(r(64, 128), -1) + torch.sort(r(64, 128), -1)[0]")
    assert status == 0 and "library call" in out and "aten.sort" in out, err


@needs_core
def test_explain_gives_figures():
    x = torch.randn(64, 128)
    explanation = deplo.explain(lambda x: torch.softmax(x * 2, -1), x)
    (graph,) = explanation.graphs
    assert not graph.fallback and graph.kernels and not graph.library
    assert sum(kernel.bytes for kernel in graph.kernels) >= 2 * 64 * 128 * 4
    layer = torch.nn.Linear(256, 512)
    with torch.no_grad():
        (packs,) = deplo.explain(layer, torch.randn(64, 256), options={"features": "avx2", "weights": "pack"}).graphs
    assert [kernel.bytes for kernel in packs.kernels if kernel.once] == [2 * 256 * 512 * 4]
    assert all(kernel.seconds > 0 and 0 < kernel.estimated < 1 for kernel in graph.kernels)
    text = str(explanation)
    assert graph.kernels[0].name in text and "cache:" in text
    same(explanation.result, torch.softmax(x * 2, -1), exact=torch.softmax(x.double() * 2, -1))


@needs_core
def test_kernels_are_named_after_what_the_user_called():
    net = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8), torch.nn.SiLU())
    with torch.no_grad():
        explanation = deplo.explain(lambda x: net(x) + x, torch.randn(4, 8))
    (graph,) = explanation.graphs
    assert re.fullmatch("k0_rms_norm(_| k1_)linear_silu_add", " ".join(k.name for k in graph.kernels if not k.once))
    for part in (r"rms_norm \(0,", r"linear \(1,", r"silu \(2,", r"add \(test_front_cli.py:"):
        assert re.search(part, str(explanation)), explanation


@needs_core
def test_explain_says_that_there_is_no_graph(capsys):
    explanation = deplo.explain(lambda: 3)
    explanation.show()
    assert capsys.readouterr().out == str(explanation) and "no graph: Dynamo found no tensor operation" in str(explanation)
    assert main(["compile", "-c", "3"]) == 1
    assert "no graph: Dynamo found no tensor operation" in capsys.readouterr().err


def test_a_file_is_not_run(capsys):
    for command in ("run", "explain"):
        status, out, err = run(capsys, command, "softmax.ir")
        assert status == 1 and not out and f"{command} takes an expression" in err and "python -m deplo compile softmax.ir" in err


def test_unknown_functions_are_refused_before_anything_is_shown(capsys):
    status, out, err = run(capsys, "numerics", "nosuch")
    assert status == 1 and not out and "nosuch is no function or reduction" in err


def test_explain_puts_back_what_its_runs_change():
    x = torch.zeros(3)
    deplo.explain(lambda x: x.add_(1), x)
    assert x.eq(0).all()
    measure.measure_machine.cache_clear()
    norm, state = torch.nn.BatchNorm1d(3), torch.get_rng_state()
    norm.weight.grad = torch.full((3,), 7.0)
    deplo.explain(torch.nn.Sequential(norm, torch.nn.Dropout()), torch.randn(4, 3), backward=True)
    assert norm.running_mean.eq(0).all() and norm.num_batches_tracked == 0 and norm.weight.grad.eq(7).all() and norm.bias.grad is None
    deplo.explain(torch.nn.Dropout(), torch.ones(8))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randn(4, 3)
    assert torch.equal(after, torch.get_rng_state())


def test_explain_names_the_dtype_of_what_stays_in_aten():
    with pytest.warns(deplo.FallbackWarning):
        report = deplo.explain(lambda x: torch.fft.fft(x).abs().sin(), torch.randn(4))
    assert "uses a tensor of complex64" in str(report)


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
        "error = (f(x).double() - x.double().softmax(-1)).abs().max().item()\n"
        "print(json.dumps(['deplo' in names, error <= 8 * torch.finfo(x.dtype).eps]))\n"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, cwd="/")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [True, True]


def test_a_file_is_not_raised_to_an_earlier_level(capsys, tmp_path):
    file = tmp_path / "softmax.kernel"
    assert not main(["compile", "-c", "torch.softmax(r(4, 5), -1)", "--ir", "kernel", "-o", str(file)])
    assert main(["compile", str(file), "--ir", "tensor"]) == 1
    assert "holds kernel IR, which cannot be raised to tensor IR; --ir takes kernel, llvm" in capsys.readouterr().err
