"""The benchmark scripts run, check numbers and write what they print; no figure is judged here."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path

import harness
import models
import peak
import peers
import pytest
import temporaries
import torch
import zoo
from engines import needs_core, same
from torch._dynamo.backends import registry
from torch._inductor import config

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--rounds", "1", "--seconds", "0.001", "--pause", "0", "--threads", "1")
PEERS = tuple(name for name in peers.NAMES if all(map(peers.installed, peers.NEEDS[name])))


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "benchmarks" / name, *arguments], capture_output=True, text=True, timeout=500, cwd=ROOT)


@needs_core
@pytest.mark.parametrize(
    ("name", "match", "more"), [("operators.py", "conv2d 1x1", []), ("families.py", "electra", []), ("families.py", "electra", ["--train"])]
)
def test_single_operators_and_families(name, match, more, tmp_path):
    path = tmp_path / "figures.json"
    result = script(name, "--match", match, *more, *QUICK, "--json", str(path))
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["vs eager"] > 0 and row.get("aten", "none") == "none" and "slower than eager mode:" in result.stdout


@needs_core
def test_layers_beside_eager_and_inductor(tmp_path):
    path = tmp_path / "run.json"
    picture = tmp_path / "run.svg"
    more = ("--peers", ",".join(PEERS)) if PEERS else ()
    more += ("--plot", str(picture)) if peers.installed("matplotlib") else ()
    result = script("run.py", "--suite", "tiny", "--match", "rms norm", *QUICK, *more, "--json", str(path))
    assert result.returncode == 0, result.stderr
    written = json.loads(path.read_text())
    (row,) = written["rows"]
    assert written["machine"]["flops"] > 0 and written["machine"]["bandwidth"] > 0
    assert written["machine"]["processor"] and set(written["machine"]["peers"]) == set(PEERS) and written["machine"]["pause"] == 0
    ran = [name for name in PEERS if f"{name} us" in row]
    # What a peer cannot run on this processor is said under the table.
    assert all(f"{row['case']}: {name}: " in result.stdout for name in PEERS if name not in ran)
    for name in ("eager", "inductor", "deplo", *ran):
        assert row[f"{name} us"] > 0 and row[f"{name} %"] > 0 and len(row["rounds"][name]) == 1
        assert not picture.exists() or f">{name}</text>" in picture.read_text()
        # A sum of 64 terms and a few functions in any order; of the others, no more than eager mode.
        allowed = (64 + 8) * row["eps"] / 2 if name == "eager" else harness.allowed_error(row["error eager"], row["eps"])
        assert row[f"error {name}"] <= allowed
    assert row["aten"] == 0 and row["others"] >= 0 and "vs inductor" in result.stdout
    fastest = min(seconds[0] for name, seconds in row["rounds"].items() if name != "deplo")
    assert row["rounds"][row["best peer"]] == [fastest] and row["vs best peer"] == pytest.approx(fastest / row["rounds"]["deplo"][0])
    assert "geometric mean vs best peer" in result.stdout and picture.exists() == ("--plot" in more)


@needs_core
def test_every_kind_of_layer(tmp_path):
    path = tmp_path / "run.json"
    result = script("run.py", "--suite", "tiny", "--no-inductor", *QUICK, "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 5 and all(row["aten"] == 0 for row in rows)


@needs_core
def test_models(tmp_path):
    path = tmp_path / "models.json"
    result = script("models.py", "--models", "bert-base,llama-block-s1", "--size", "tiny", "--no-inductor", *QUICK, "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert "vs inductor" not in result.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["model"] for row in rows] == ["bert-base", "llama-block-s1"]
    assert all(row["aten"] == "none" and row["deplo %"] > 0 and row["eager %"] > 0 for row in rows)


def test_what_a_call_leaves_in_the_cache_is_judged():
    case = zoo.build("llama-block-s1", "tiny")
    inputs = case.inputs(0)
    with torch.no_grad():
        case.model(**inputs)
        output, state = zoo.reference_and_state("llama-block-s1", "tiny", torch.float32)
        calls = {"eager": lambda k: case.model(**inputs)}
        assert models.errors_of(case, calls, (output, state), 0)["error eager"] < 1e-5
        state[-1][0, 0, 0, 0] += 1
        assert models.errors_of(case, calls, (output, state), 0)["error eager"] > 0.1


@needs_core
def test_first_calls_compile_nothing_where_the_cache_is_warm(tmp_path):
    path = tmp_path / "first.json"
    names = ("bert-base", "llama-block-s1")
    result = script("first_call.py", "--models", ",".join(names), "--size", "tiny", "--threads", "1", "--warm", "--json", str(path))
    assert result.returncode == 0, result.stderr
    *rows, per_call = json.loads(path.read_text())["rows"]
    assert [(row["model"], row["cache"]) for row in rows] == [(name, cache) for cache in ("cold", "warm") for name in names]
    for row in rows:
        assert row["deplo s"] == pytest.approx(row["import s"] + row["compile s"])
        assert row["import s"] > 0 and row["compile s"] > 0 and row["deplo s"] < row["first call s"] and row["call 3 ms"] > 0
        assert row["later graphs"] == 0 and (row["compiled"] == 0) == (row["cache"] == "warm")
        assert row["error deplo"] <= harness.allowed_error(row["error eager"], row["eps"])
    assert all(per_call[f"{name} us"] > 0 for name in ("eager", "empty", "deplo")) and "deplo beyond empty us" in per_call
    assert all(name in result.stdout for name in names) and "one call, eight elements" in result.stdout


@needs_core
def test_what_was_compiled_before_is_not_made_again(tmp_path):
    path = tmp_path / "starts.json"
    engines = ("loaded", "training cache")
    result = script("starts.py", "--models", "bert-base", "--size", "tiny", "--rounds", "1", "--engines", ",".join(engines), "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == [f"bert-base {engine}" for engine in engines]
    assert all(row["s"] > 0 and row["compiled"] == 0 and row["imported"] == 0 and row["programs"] > 0 for row in rows)


@needs_core
def test_what_a_call_takes_is_seen_from_outside():
    bytes, near = 64 << 20, 1 << 20  # Linux counts pages of each thread in batches
    assert bytes - near <= temporaries.most_beyond(lambda: torch.ones(bytes // 4)) < bytes + 8 * near
    assert bytes - near <= temporaries.most_beyond(lambda: torch.ones(bytes // 4).sum()) < bytes + 8 * near
    assert temporaries.most_beyond(lambda: torch.ones(4)) < 8 * near


@needs_core
def test_growth(tmp_path):
    path = tmp_path / "growth.json"
    result = script("growth.py", "--calls", "30,60", "--rounds", "1", "--json", str(path))
    assert result.returncode == 0, result.stderr
    written = json.loads(path.read_text())
    assert set(written) == {"chain", "norms", "siblings", "slices"} and all(name in result.stdout for name in written)
    assert all(row["seconds"]["30"] > 0 and row["seconds"]["60"] > 0 for row in written.values())


@needs_core
def test_training(tmp_path):
    path = tmp_path / "training.json"
    names = ("bert-base", "gpt2")
    result = script("training.py", "--models", ",".join(names), "--size", "tiny", *QUICK, "--json", str(path))
    assert result.returncode == 0, result.stderr
    written = json.loads(path.read_text())
    assert written["machine"]["flops"] > 0 and written["machine"]["bandwidth"] > 0 and written["machine"]["threads"] == 1
    assert [row["model"] for row in written["rows"]] == list(names)
    for row in written["rows"]:
        assert row["eager ms"] > 0 and row["deplo ms"] > 0 and row["vs eager"] > 0
        assert row["aten"] == "fill_x1 ones_likex1"  # the gradient of the loss itself
        assert 0 < row["error deplo"] <= harness.allowed_error(row["error eager"], torch.finfo(torch.float32).eps)
    assert "geometric mean vs eager" in result.stdout


@needs_core
def test_the_demo_shows_models_and_levels():
    demo = ROOT / "examples" / "demo.py"
    done = subprocess.run([sys.executable, demo, "--size", "tiny", "--threads", "1"], capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for text in ("TinyLlama block", "ResNet-50", "eager ms", "deplo ms", "kernels", "library calls", "error deplo"):
        assert text in done.stdout
    for text in ("aten._softmax", "tensor @", "loop @k0_softmax", "tile @k0_softmax", "kernel @k0_softmax"):
        assert text in done.stdout


def test_wrong_numbers_fail_the_run(capsys):
    good = {"case": "a", "eps": 1e-7, "error eager": 1e-7, "error deplo": 2e-7}
    assert harness.report_wrong([good]) == 0
    assert harness.report_wrong([good, {**good, "case": "b", "error deplo": 1e-3}]) == 1
    assert "WRONG: b" in capsys.readouterr().err
    assert harness.report_wrong([{**good, "error deplo": float("nan")}]) == 1


def test_bad_names_are_told():
    result = script("run.py", "--suite", "tyni")
    assert result.returncode == 2 and "the suites are" in result.stderr
    for name in ("models.py", "training.py", "first_call.py"):
        result = script(name, "--models", "bert")
        assert result.returncode == 2 and "bert-base" in result.stderr


@pytest.mark.parametrize("name", ["resnet-50", "t5-small"])
def test_peers_run_models_on_rotating_inputs(name):
    case = zoo.build(name, "tiny")
    sets = [case.inputs(seed) for seed in range(3)]
    with torch.no_grad():
        judge = harness.double_copy(case.model)
        model = peers.export(case.model, sets[0]) if set(PEERS) & set(peers.ONNX) else b""
        for peer in peers.ONNX:
            if peer not in PEERS:
                with pytest.raises(peers.Unavailable, match=peer):
                    peers.contestant(peer, model, sets, threads=1)
                continue
            run = peers.contestant(peer, model, sets, threads=1)
            for k in range(3):
                same(run(k), case.model(**sets[k]), exact=judge(**harness.to_double(sets[k])))


@pytest.mark.parametrize("asked", [["--peers"], ["--peers", "openvino"], ["--plot", "speed.svg"]])
def test_what_is_not_installed_is_told_with_the_remedy(asked, monkeypatch, capsys):
    monkeypatch.setattr(peers, "installed", lambda package: False)
    parser = argparse.ArgumentParser()
    peers.add_options(parser)
    with pytest.raises(SystemExit):
        peers.check_options(parser, parser.parse_args(asked))
    assert "make peers" in capsys.readouterr().err
    with pytest.raises(peers.Unavailable, match="the peers are onnxruntime"):
        peers.chosen("onxruntime")


def test_zentorch_changes_nothing_for_inductor(monkeypatch, fresh_inference):
    """A stand-in that behaves as zentorch does: its pass goes into Inductor's configuration and stays there."""
    seen = []

    def compile_graph(graph, inputs):
        seen.append(config.freezing)
        config.joint_custom_post_pass = print
        return graph.forward

    monkeypatch.setitem(sys.modules, "zentorch", types.SimpleNamespace(_C=types.SimpleNamespace(is_avx512_supported=lambda: True)))
    monkeypatch.setattr(registry, "lookup_backend", lambda backend: compile_graph if backend == "zentorch" else backend)
    module = torch.nn.Linear(8, 4)
    sets = [(torch.randn(2, 8),), (torch.randn(2, 8),)]
    run = peers.zentorch(module, sets)
    assert torch.equal(run(1), module(*sets[1])) and seen == [True]
    assert config.joint_custom_post_pass is None and not config.freezing
    with torch.enable_grad(), pytest.raises(peers.Unavailable, match="gradients"):
        peers.zentorch(module, sets)


def test_turns_rotate_pause_and_drop_their_first_calls(monkeypatch):
    slept, calls = [], []
    monkeypatch.setattr(harness.time, "sleep", slept.append)
    monkeypatch.setattr(harness, "quickest", lambda f: 0.1)
    timings = harness.interleave({name: lambda k, name=name: calls.append(name + str(k)) for name in "abc"}, rounds=6, min_seconds=0.6, pause=0.25)
    assert slept == [0.25] * 18 and all(len(timing.rounds) == 6 for timing in timings.values())
    # One call of each set before all rounds; then in each turn a call that is dropped, and six.
    turns = [calls[i : i + 7] for i in range(9, len(calls), 7)]
    assert all(turn == [turn[0][0] + str(k) for k in (0, 0, 1, 2, 0, 1, 2)] for turn in turns)
    orders = ["".join(turn[0][0] for turn in turns[i : i + 3]) for i in range(0, 18, 3)]
    assert sorted(orders) == ["abc", "acb", "bac", "bca", "cab", "cba"]
    assert [harness.turns(["a", "b"], r) for r in range(3)] == [["a", "b"], ["b", "a"], ["b", "a"]]


def test_work_of_other_processes_is_seen(monkeypatch):
    # Seconds on the wall, of all processors, of this process: two busy for two seconds, half of that here.
    readings = iter([(10.0, 100.0, 7.0), (12.0, 104.0, 9.0), (12.0, 100.5, 9.0)])
    monkeypatch.setattr(harness.OtherWork, "_read", staticmethod(lambda: next(readings)))
    work = harness.OtherWork()
    assert work.processors() == 1.0 and work.processors() == 0.0
    monkeypatch.undo()
    begin, later = harness.OtherWork._read(), harness.OtherWork._read()
    assert len(begin) == 3 and all(b >= a >= 0 for a, b in zip(begin, later))


def test_who_did_other_work_is_no_best_peer():
    timings = {name: harness.Timing(name, [seconds]) for name, seconds in (("eager", 3.0), ("deplo", 2.0), ("fast", 1.0), ("peer", 2.5))}
    row = {"eps": 1e-7, "error eager": 1e-7, "error deplo": 1e-7, "error fast": 1e-3, "error peer": 2e-7}
    columns = harness.contestant_columns(row, timings, 1.0, 1.0, peak.Limits(1.0, 1.0))
    assert columns["best peer"] == "peer" and columns["vs best peer"] == 1.25 and "0.001" in columns["fast error note"]
    assert columns["vs fast"] == 0.5 and columns["peer us"] == 2.5e6 and columns["rounds"]["deplo"] == [2.0]
