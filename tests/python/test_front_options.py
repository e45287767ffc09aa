"""Options, modes and DEPLO_* variables."""

from __future__ import annotations

import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch

import deplo
from deplo import options, targets
from deplo.core import INTERFACE, check_interface
from deplo.errors import UserError
from deplo.options import KEYS, OF_GRAPHS, OF_PYTHON, read_options


def test_defaults_are_complete_json():
    assert set(json.loads(read_options().to_json({"s0": 3}))) == {*KEYS, *OF_GRAPHS} - set(OF_PYTHON)


def test_unknown_key_suggests_and_lists():
    with pytest.raises(UserError, match="unknown option 'treads'; did you mean 'threads'.*cache_dir.*tune"):
        read_options(options={"treads": 2})


@pytest.mark.parametrize(
    "options",
    [{"target": "tpu"}, {"threads": -1}, {"threads": True}, {"threads": "2"}, {"threads": 2.0}, {"disable": 3}, {"disable": ["a\0b"]}]
    + [{"memory_limit": value} for value in ("lots", 1.5, True, 10**30, "9999999999T")]
    + [{"tune": value} for value in ("yes", None)]
    + [{name: value} for name in ("strict", "verify", "time", "debug", "guard", "replay") for value in ("maybe", "yes", "", 1, None)]
    + [{name: value} for name in ("dump", "dump_dir", "cache_dir", "features", "stop_after") for value in (3, b"x", "a\0b", None)]
    + [{"arch": value} for value in ("sm_1", "sm_70", "sm_12345", "sm_80x", "compute_80", 80)]
    + [{"schedule": value} for value in (3, {"k0": 3}, {3: "nest"}, "a\0b", {"k0": "a\0b"})],
    ids=str,
)
def test_bad_values_name_the_option(options):
    ((name, value),) = options.items()
    with pytest.raises(UserError, match=re.escape(f"option {name!r} is {value!r}, expected ")):
        read_options(options=options)


@pytest.mark.parametrize("options", [["strict"], "strict", 3, {3: True}], ids=str)
def test_options_are_a_dict_of_names(options):
    with pytest.raises(UserError, match="expected a dict from option to value|unknown option 3"):
        read_options(options=options)


def test_texts_of_the_command_line_are_read_as_variables_are():
    options = read_options(texts={"strict": "yes", "threads": "2", "verify": "0", "memory_limit": "1K", "disable": "a,b"})
    assert (options.strict, options.threads, options.verify, options.memory_limit, options.disable) == (True, 2, False, 1024, ("a", "b"))
    for name, text in (("strict", "maybe"), ("threads", "two"), ("threads", "²"), ("nosuch", "1")):
        with pytest.raises(UserError, match=name):
            read_options(texts={name: text})


def test_errors_of_options_reach_the_caller_as_they_are():
    compiled = torch.compile(lambda x: x + 1, backend="deplo", options={"strict": "yes"})
    with pytest.raises(UserError, match="option 'strict' is 'yes', expected True or False"):
        compiled(torch.ones(3))


def test_values_are_normalised():
    options = read_options(options={"memory_limit": "2G", "disable": "a, b", "schedule": "tile m 4"})
    assert (options.memory_limit, options.disable, options.schedule) == (2 << 30, ("a", "b"), {"": "tile m 4"})


def test_modes(monkeypatch):
    monkeypatch.delenv("DEPLO_TUNE")
    assert read_options("max-autotune").tune == "full"
    assert read_options("reduce-overhead").replay and not read_options().replay
    assert read_options("max-autotune", {"tune": "off"}).tune == "off"
    with pytest.raises(UserError, match="unknown mode 'fastest'"):
        read_options("fastest")


@pytest.mark.parametrize("compile_with", [deplo.jit, lambda fn, mode: torch.compile(fn, backend="deplo", mode=mode)], ids=["jit", "torch.compile"])
def test_every_mode_of_torch_compile_is_taken(compile_with, fresh_inference, monkeypatch, tmp_path):
    monkeypatch.delenv("DEPLO_TUNE")
    monkeypatch.setenv("DEPLO_CACHE_DIR", str(tmp_path))
    searched = []
    monkeypatch.setattr("deplo.tune.tune", lambda text, options, level, figures: searched.append(level))
    x = torch.arange(5.0)
    for mode in (None, "default", "reduce-overhead", "lite", "max-autotune", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(compile_with(lambda x: x * 2 + 1, mode=mode)(x), x * 2 + 1)
        assert not caught
        assert searched == (["full"] if mode and "autotune" in mode else [])
        searched.clear()
    with pytest.raises(UserError, match="unknown mode 'reduce-overheads'; did you mean 'reduce-overhead'\\? Known modes: 'default', "):
        compile_with(lambda x: x + 1, mode="reduce-overheads")(x)


@pytest.mark.parametrize("given", [{}, {"tune": "off"}], ids=str)
def test_options_beside_a_mode_win(given, fresh_inference, monkeypatch, tmp_path):
    monkeypatch.delenv("DEPLO_TUNE")
    monkeypatch.setenv("DEPLO_CACHE_DIR", str(tmp_path))
    searched = []
    monkeypatch.setattr("deplo.tune.tune", lambda text, options, level, figures: searched.append(level))
    deplo.jit(lambda x: x + 1, mode="max-autotune", options={"strict": True, **given})(torch.ones(2))
    assert searched == ([] if given else ["full"])


def test_modes_of_torch_compile_are_all_known():
    known = set(torch._inductor.list_mode_options())
    assert known <= set(options._MODES)


def test_variables_are_defaults_and_checked(monkeypatch):
    monkeypatch.setenv("DEPLO_STRICT", "1")
    monkeypatch.setenv("DEPLO_DISABLE", "fuse_loops,unroll")
    assert read_options().strict
    assert not read_options(options={"strict": False}).strict
    assert read_options().disable == ("fuse_loops", "unroll")
    monkeypatch.setenv("DEPLO_STRICT", "perhaps")
    with pytest.raises(UserError, match="DEPLO_STRICT"):
        read_options()


def test_a_variable_that_nothing_reads_is_named_once(monkeypatch):
    monkeypatch.setattr(options, "_named", set())
    monkeypatch.setenv("DEPLO_STRCIT", "1")
    monkeypatch.setenv("DEPLO_ZZZZZZZZZZZZ", "1")
    monkeypatch.setenv("DEPLO_BLESS", "0")
    with pytest.warns(UserWarning) as warned:
        assert not read_options().strict
        read_options()
    texts = sorted(str(warning.message) for warning in warned)
    assert len(texts) == 2 and texts[0] == "nothing reads the variable DEPLO_STRCIT; did you mean DEPLO_STRICT?"
    assert texts[1].startswith("nothing reads the variable DEPLO_ZZZZZZZZZZZZ. Known variables: DEPLO_CACHE_DIR")


def test_an_extension_of_other_sources_is_refused():
    names = ", ".join(sorted({*KEYS, *OF_GRAPHS} - set(OF_PYTHON)))
    check_interface(SimpleNamespace(interface=lambda: f"{INTERFACE} {names}"))
    others = [
        SimpleNamespace(),
        *(SimpleNamespace(interface=lambda text=text: text) for text in (f"{INTERFACE + 1} {names}", f"{INTERFACE} threads")),
    ]
    for other in others:
        with pytest.raises(UserError, match="rebuild it: make build"):
            check_interface(other)


def test_cache_folder_is_shown_and_cleared_without_touching_other_files(tmp_path, monkeypatch):
    from deplo import cache

    monkeypatch.setenv("DEPLO_CACHE_DIR", str(tmp_path))
    folder = cache.cache_folder(read_options())
    assert folder == str(tmp_path)
    ours, theirs = tmp_path / ("0" * 64 + ".o"), tmp_path / "main.o"
    ours.write_bytes(b"deplo-kernel-1\nrest")
    theirs.write_bytes(b"ELF")
    (tmp_path / ("1" * 64 + ".o")).write_bytes(b"ELF")
    assert cache.entries(folder) == [(str(ours), 19)]
    assert cache.clear(folder) == 1 and theirs.exists() and not ours.exists()
    assert cache.entries(str(tmp_path / "nowhere")) == []
    monkeypatch.setenv("DEPLO_CACHE_DIR", "off")
    with pytest.raises(UserError, match="switched off"):
        cache.cache_folder(read_options())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_after": "xyz"}, "option 'stop_after' is 'xyz': cannot stop after 'xyz': expected one of share_calls, "),
        (
            {"stop_after": "fuse_nest"},
            "option 'stop_after' is 'fuse_nest': cannot stop after 'fuse_nest', did you mean 'fuse_nests'? Expected one of ",
        ),
        (
            {"disable": ["compose_map", "fuse_nests"]},
            "option 'disable' is 'compose_map, fuse_nests': cannot disable 'compose_map', did you mean 'compose_maps'?",
        ),
        ({"disable": ["lower_to_loop"]}, "cannot disable 'lower_to_loop': expected one of share_calls, "),
        ({"dump": "kernels"}, "option 'dump' is 'kernels': cannot dump 'kernels', did you mean 'kernel'?"),
        ({"dump": "nolevel"}, "cannot dump 'nolevel': expected one of"),
        (
            {"features": "avx9"},
            "option 'features' is 'avx9': no CPU features are called 'avx9', did you mean 'avx2'? Expected one of native, avx512, avx2, sse",
        ),
        ({"features": "neon,sve"}, "no CPU features are called 'neon,sve': expected one of native, avx512, avx2, sse"),
        ({"schedule": "tile m 4"}, "option 'schedule': <schedule>:1:8: expected '(', found '4'"),
        ({"schedule": {"k0": "nest tile(m=)"}}, "option 'schedule': <schedule of k0>:1:13: expected "),
        ({"target": "cdua"}, "option 'target' is 'cdua', expected one of 'cpu', 'cuda'; did you mean 'cuda'?"),
        ({"tune": "fats"}, "option 'tune' is 'fats', expected one of 'auto', 'off', 'fast', 'full', 'background'; did you mean 'fast'?"),
        ({"arch": "sm_1"}, "option 'arch' is 'sm_1', expected an architecture from 'sm_75' on"),
        ({"guard": 1}, "option 'guard' is 1, expected True or False"),
        ({"allow_library": ["aten.sorrt"]}, "option 'allow_library' names 'aten.sorrt', which is no operator of PyTorch; did you mean aten.sort"),
    ],
    ids=str,
)
def test_one_line_names_option_and_value(options, message):
    with pytest.raises(UserError, match=re.escape(message)) as at_once:
        deplo.jit(lambda x: x + 1, options=options)
    with pytest.raises(UserError, match=re.escape(message)) as at_first_call:
        torch.compile(lambda x: x + 1, backend="deplo", options=options)(torch.ones(3))
    assert str(at_first_call.value) == str(at_once.value) and "\n" not in str(at_once.value)


def test_a_target_brings_options_of_its_own(monkeypatch):
    toy = targets.Target("toy", False, "abacus", "cpu", False, False, ("tally",), {"beads": []})
    known = [*targets.targets(), toy]
    monkeypatch.setattr(targets, "targets", lambda: known)
    checked = read_options(options={"target": "toy", "beads": "7"})
    assert json.loads(checked.to_json())["beads"] == "7" and "beads='7'" in repr(checked) and checked != read_options(options={"target": "toy"})
    with pytest.raises(UserError, match="option 'beads' is 7, expected a string"):
        read_options(options={"beads": 7})


def test_a_variable_s_value_is_judged_too(monkeypatch):
    monkeypatch.setenv("DEPLO_FEATURES", "avx9")
    with pytest.raises(UserError, match="^DEPLO_FEATURES is 'avx9'.*did you mean 'avx2'"):
        deplo.jit(lambda x: x + 1)


def test_text_of_a_gpu_is_dumped_for_a_gpu_only():
    deplo.jit(lambda x: x + 1, options={"dump": "cuda", "target": "cuda"})
    with pytest.raises(UserError, match="cannot dump 'cuda'"):
        deplo.jit(lambda x: x + 1, options={"dump": "cuda"})


def test_dumps_stop_where_they_are_told_to(capfd, fresh_inference):
    torch.compile(lambda x: (x + 1).exp(), backend="deplo", options={"dump": "all", "stop_after": "fuse_producers"})(torch.ones(3))
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("# ")]
    assert shown[0].startswith("# torch/import") and shown[-1].startswith("# loop/fuse_producers")
