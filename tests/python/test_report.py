"""The page of `python -m deplo report`: it is XML, it needs nothing from elsewhere, and it says what `deplo.explain` and the core say."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from engines import needs_core

from deplo.cli import main
from deplo.core import core
from deplo.errors import UserError
from deplo.options import read_options
from deplo.report import LEVELS, load_model, report, spans_of, trace_of, write_report

pytestmark = needs_core

MODEL = """
import torch

layer = torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.GELU(), torch.nn.Linear(96, 48))

def model(x, *, scale):
    y = layer(x) * scale
    print("between <two> graphs & more")
    return torch.sort(y.softmax(-1))[0].cumsum(0)

def make():
    return model, {"x": torch.randn(32, 48), "scale": 2.0}

def broken():
    return model
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The written folder, its page as a tree, and its trace."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "some_model.py").write_text(MODEL)
    assert main(["report", f"{folder}/some_model.py:make", "-o", str(folder / "out")]) == 0
    text = (folder / "out/index.html").read_text()
    return text, ElementTree.fromstring(text), json.loads((folder / "out/trace.json").read_text())


def words(tree) -> str:
    return " ".join(tree.itertext())


def test_it_needs_nothing_from_elsewhere(page):
    text, tree, _ = page
    assert text.startswith("<!DOCTYPE html>") and tree.tag == "html"
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & {element.tag for element in tree.iter()}
    for element in tree.iter():
        assert not {"src", "href", "srcset", "data", "action", "style"} & {name.rpartition("}")[2] for name in element.attrib}
        assert not any(name.startswith("on") for name in element.attrib)
    style = "".join(element.text for element in tree.iter("style"))
    assert "url(" not in style and "@import" not in style


def test_it_names_breaks_and_calls_in_aten_with_reasons(page):
    _, tree, _ = page
    tables = {"".join(head.itertext()): table for head, table in zip(tree.find("body"), tree.find("body")[1:], strict=False) if head.tag == "h2"}
    breaks = words(tables["Breaks between graphs"])
    assert 'print("between <two> graphs & more")' in breaks and "builtin" in breaks
    left = words(tables["Left to ATen"])
    assert "aten.sort.default" in left and "sorting is left to ATen" in left


def test_it_shows_every_graph_in_figures_and_at_every_level(page):
    _, tree, _ = page
    figures = [svg.get("aria-label") for svg in tree.iter("svg")]
    assert figures == ["roofline", "timeline", "memory"] * 2
    assert all(float(circle.get("r")) > 0 for circle in tree.iter("circle"))
    levels = [section.find("h4").text for section in tree.iter("section")]
    assert levels[: len(levels) // 2] == levels[len(levels) // 2 :] and levels[:5] == list(LEVELS) and {"llvm", "asm"} <= set(levels)
    for section in tree.iter("section"):
        assert "Error:" not in section.find("pre").text and section.find("pre").text.strip()


def test_the_trace_is_the_timeline(page):
    _, tree, trace = page
    steps = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    bars = [element.find("title").text.partition(":")[0] for element in tree.iter("rect")]
    assert [event["name"] for event in steps] == bars and "aten.sort.default" in bars
    for graph in {event["pid"] for event in steps}:
        own = [event for event in steps if event["pid"] == graph]
        for before, after in zip(own, own[1:], strict=False):
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1e-6)
    assert all(event["dur"] > 0 for event in steps)


def test_what_it_says_is_what_the_core_says(tmp_path):
    x = torch.randn(64, 40)
    with torch.no_grad():
        found = report("softmax, twice", lambda x: torch.softmax(x @ x.mT, -1) @ x, (x,), dynamic=True, repeats=2)
    (page,) = found.graphs
    assert not found.breaks and torch.allclose(found.explanation.result, torch.softmax(x @ x.mT, -1) @ x, atol=1e-5)
    options = read_options().replace(target="cpu").to_json(page.report.hints, False)
    assert dict(page.texts)["loop"] == core().lower(page.report.torch_ir, "loop", options)
    # Versions for other sizes do not run; what runs holds the temporary from its first to its last step.
    steps = page.report.description["steps"]
    assert [span.name for span in page.spans] == [step["kernel"] for step in steps if step["runs"] and not step["once"]]
    memory = page.report.description["memory"]
    assert 0 < max(span.live for span in page.spans) <= min(memory["arena_bytes"], memory["bytes_without_reuse"])
    assert page.spans[0].live and sum(span.seconds for span in page.spans) == pytest.approx(sum(k.seconds for k in page.report.kernels), rel=1e-3)
    assert page.spans == spans_of(page.report)
    assert sum(event["ph"] == "X" for event in trace_of(found)["traceEvents"]) == len(page.spans)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        write_report(found, str(tmp_path / "file"))


def test_expressions_and_functions_without_graphs(tmp_path, capsys):
    assert main(["report", "-c", "torch.where(r(4, 8) < 0, 1.0, 2.0)", "--backward", "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [f"{tmp_path}/index.html", f"{tmp_path}/trace.json"]
    assert "r(4, 8) < 0" in words(ElementTree.fromstring((tmp_path / "index.html").read_text()))
    write_report(report("nothing", lambda: 3), str(tmp_path))
    assert "no graph" in words(ElementTree.fromstring((tmp_path / "index.html").read_text()))


def test_bad_names_are_the_user_s_errors(tmp_path, monkeypatch):
    (tmp_path / "some_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    for name, said in {
        "no_colon": "expected package.module:function",
        "no_such_module_at_all:make": "no such module",
        "missing.py:make": "no such file",
        "some_model:absent": "has no function absent",
        "some_model:broken": r"expected \(model, arguments\)",
    }.items():
        with pytest.raises(UserError, match=re.compile(said)):
            load_model(name)
