"""Configurations of machines for serving, computed by hand from docs/topology.md for two-socket machines: EPYC (NPS4) and Xeon (SNC2)."""

from __future__ import annotations

import dataclasses
import os
import random
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import deplo
from deplo import topology, topology_measure
from deplo.cli import main
from deplo.topology_cost import SHAPES, Model, Rates, Work, cost, model_of, services_of
from deplo.topology_tree import group, key_of, read_tree, remove

EPYC = "package:2 numa:4 l3:3 core:8 pu:2"  # 2 x 96 cores, four nodes a socket, three chiplets a node
XEON = "package:2 numa:2 l3:1 core:24 pu:2"
MODEL = Model("small", 1e9, 10, 1000, 100)
LARGE = SHAPES["llama-3.1-8b"]


@pytest.fixture(scope="module")
def epyc():
    return read_tree(EPYC)


@pytest.fixture(scope="module")
def xeon():
    return read_tree(XEON)


@pytest.fixture(scope="module")
def found(epyc):
    return topology.candidates(epyc)


def count(tree, kind):
    return len(list(tree.of_kind(kind)))


def test_trees_have_what_the_text_says(epyc, xeon):
    assert [count(epyc, kind) for kind in ("package", "numa", "l3", "core", "pu")] == [2, 8, 24, 192, 384]
    assert [count(xeon, kind) for kind in ("package", "numa", "l3", "core", "pu")] == [2, 4, 4, 96, 192]
    assert epyc.numbers("numa") == list(range(8)) and epyc.numbers("pu") == list(range(384))
    here = read_tree()
    assert count(here, "pu") >= len(os.sched_getaffinity(0)) and count(here, "core") >= 1


def test_steps(epyc):
    assert count(remove(epyc, "core", 5), "core") == 24 * 5 and count(remove(epyc, "pu", 1), "pu") == 192
    assert count(remove(epyc, "numa", 3), "numa") == 6
    assert [count(group(epyc, "l3", size), "service") for size in (1, 3)] == [24, 8]
    assert group(epyc, "l3", 2) is None and group(epyc, "die", 1) is None
    # Three caches are a node, four nodes a package, two packages the machine.
    assert key_of(group(epyc, "l3", 3)) == key_of(group(epyc, "numa", 1))
    assert key_of(group(epyc, "numa", 4)) == key_of(group(epyc, "package", 1))
    assert key_of(group(epyc, "package", 2)) == key_of(group(epyc, "machine", 1))
    assert key_of(group(epyc, "numa", 2)) != key_of(group(epyc, "numa", 1))


def test_keys_do_not_depend_on_order_and_numbers(epyc):
    def shuffled(node):
        children = [shuffled(child) for child in node.children]
        random.Random(node.index).shuffle(children)
        return dataclasses.replace(node, index=node.index + 1000, children=tuple(children))

    assert key_of(shuffled(epyc)) == key_of(epyc) != key_of(remove(epyc, "pu", 1))


def test_candidates_are_told_apart(found, xeon):
    assert len({key_of(candidate.tree) for candidate in found}) == len(found)
    assert {candidate.processes for candidate in found} == {1, 2, 3, 4, 6, 8, 12, 24}
    by_nodes = [candidate for candidate in found if candidate.steps == ("group numa by 1",)]
    assert len(by_nodes) == 1 and by_nodes[0].processes == 8
    assert {candidate.processes for candidate in topology.candidates(xeon)} == {1, 2, 4}
    assert {c.processes for c in topology.candidates(read_tree("core:6 pu:2"))} == {1, 2, 3, 4, 6}


def test_bandwidth_of_services(epyc, xeon):
    def bandwidths(tree, kind, size):
        return [service.bandwidth for service in services_of(group(tree, kind, size), Rates())]

    # A chiplet reads 60 GB/s, three of them 180, of which the node gives 100.
    assert bandwidths(epyc, "numa", 1) == pytest.approx([100e9] * 8)
    assert bandwidths(epyc, "l3", 1) == pytest.approx([100e9 / 3] * 24)
    # Pages of four nodes of a socket: one in four is local, three are read at 0.8.
    assert bandwidths(epyc, "package", 1) == pytest.approx([4 * 100e9 * 4 / (1 + 3 / 0.8)] * 2)
    assert bandwidths(epyc, "machine", 1) == pytest.approx([8 * 100e9 * 8 / (1 + 3 / 0.8 + 4 / 0.5)])
    # Behind the only cache of a node cores read 20 GB/s each: three do not fill it, six do.
    assert bandwidths(remove(xeon, "core", 3), "numa", 1) == pytest.approx([60e9] * 4)
    assert bandwidths(remove(xeon, "core", 6), "numa", 1) == pytest.approx([100e9] * 4)
    # One memory node for both sockets is shared by their processes.
    assert bandwidths(read_tree("package:2 l3:1 core:8 pu:1"), "package", 1) == pytest.approx([50e9] * 2)


def test_cost_of_steps(epyc):
    services = services_of(group(epyc, "numa", 1), Rates())
    work = Work(batch=1, prompt=100, generate=0)
    decode = cost(services, 8, "decode", MODEL, work, Rates())
    assert decode.memory == pytest.approx((2e9 + 2 * 10 * 100 * 2 * 100) / 8 / 100e9)
    assert decode.compute == pytest.approx((2e9 + 4 * 10 * 1000 * 100) / 8 / 24 / 100e9)
    assert decode.synchronize == pytest.approx(10 * 6 * 6 * 1e-6)  # 48 threads meet in six rounds
    assert decode.reduce == pytest.approx(2 * 10 * (2 * 3 * 4e-6 + 2 * 7 / 8 * 2000 / 20e9))
    assert decode.seconds == pytest.approx(decode.memory + decode.synchronize + decode.reduce)
    prefill = cost(services, 8, "prefill", MODEL, work, Rates())
    assert prefill.compute == pytest.approx((2e9 * 100 + 2 * 10 * 1000 * 100 * 100) / 8 / 24 / 100e9)
    assert prefill.reduce == pytest.approx(2 * 10 * (2 * 3 * 4e-6 + 2 * 7 / 8 * 2000 * 100 / 20e9))
    # Two copies of four processes each, in one socket each: half of the sequences, near exchanges.
    copies = cost(services, 4, "decode", MODEL, dataclasses.replace(work, batch=2), Rates())
    assert copies.reduce == pytest.approx(2 * 10 * (2 * 2 * 2e-6 + 2 * 3 / 4 * 2000 / 40e9)) and copies.memory == pytest.approx(2 * decode.memory)


def test_prefill_is_wide_and_decode_stays_at_its_memory(found, xeon):
    prefill, decode = (topology.rank(found, phase, LARGE)[0] for phase in ("prefill", "decode"))
    assert (len(prefill.services), prefill.services[0].cores, len(prefill.services[0].processors)) == (1, 192, 192)
    assert (len(decode.services), decode.parallel, {len(service.nodes) for service in decode.services}) == (8, 8, {1})
    assert decode.services[0].cores < 24  # that many more would only wait for each other
    decode = topology.rank(topology.candidates(xeon), "decode", LARGE)[0]
    assert [(s.cores, len(s.processors), s.node_numbers) for s in decode.services] == [(6, 6, (n,)) for n in range(4)]
    # A few sequences share the weights that they read; with very many, which compute longer than they read, copies have nothing to exchange.
    few, many = (topology.rank(found, "decode", SHAPES["qwen3-0.6b"], Work(batch=batch))[0] for batch in (8, 1024))
    assert few.copies == 1 and many.copies == len(many.services) > 1 and many.decode.reduce == 0


def test_what_does_not_fit_is_left_out():
    tree = read_tree("package:2 numa:2(memory=8GB) l3:1 core:8 pu:1")
    assert {choice.parallel for choice in topology.rank(topology.candidates(tree), "both", LARGE)} <= {1, 2, 4}
    assert all(
        len(choice.services) // choice.copies * len(choice.services[0].nodes) >= 3
        for choice in topology.rank(topology.candidates(tree), "both", LARGE)
    )
    assert topology.rank(topology.candidates(tree), "both", SHAPES["llama-3.1-70b"]) == []


def test_what_was_measured_counts(xeon):
    found = [candidate for candidate in topology.candidates(xeon) if candidate.steps == ("group numa by 1",)]
    (choice,) = [c for c in topology.rank(found, "decode", LARGE) if c.parallel == 4]
    seen = {tuple(service.processors for service in choice.services): [50e9, 60e9, 70e9, 80e9]}
    (measured,) = [c for c in topology.rank(found, "decode", LARGE, measured=seen) if c.parallel == 4]
    assert measured.decode.memory == pytest.approx(2 * choice.decode.memory)


def test_measuring_this_machine():
    (candidate, *_) = topology.candidates(read_tree())
    services = services_of(candidate.tree, Rates())
    before, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
    values = topology_measure.measure_services(services)
    if set(services[0].processors) <= allowed:
        assert len(values) == len(services) and all(value > 0 for value in values)
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (before, allowed)
    nowhere = [dataclasses.replace(services[0], processors=(100_000,))]
    assert topology_measure.measure_services(nowhere) is None


def test_pinning(epyc, monkeypatch):
    given = {}
    monkeypatch.setattr(topology, "read_tree", lambda: epyc)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, places: given.update({thread: places}))
    monkeypatch.setattr(topology, "set_memory_policy", lambda nodes: f"on {nodes}")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: given.update(threads=threads))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    pinned = deplo.topology.pin("prefill", model=LARGE)
    # All cores of node 3, which has 144 to 191 of the 384 processors: the first of each two.
    assert pinned == topology.Pinned(3, 8, tuple(range(144, 192, 2)), (3,), "on (3,)")
    assert given[os.getpid()] == pinned.processors and given["threads"] == 24 and os.environ["OMP_NUM_THREADS"] == "24"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    with pytest.raises(deplo.UserError, match="does not divide into 5 equal services; it does into 1, 2, 3, 4, 6, 8, 12, 24"):
        topology.pin()
    monkeypatch.setenv("LOCAL_RANK", "two")
    with pytest.raises(deplo.UserError, match="LOCAL_RANK is 'two'"):
        topology.pin()
    with pytest.raises(deplo.UserError, match="rank 2 of 2 processes"):
        topology.pin(rank=2, processes=2)


def test_the_variable_pins_processes_of_torchrun_alone(monkeypatch):
    pinned = []
    monkeypatch.setattr(topology, "pin", pinned.append)
    monkeypatch.setattr(topology, "_pinned", topology.threading.Event())
    monkeypatch.setenv("DEPLO_PIN", "decode")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    deplo.artifacts.register()
    assert pinned == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    for _ in range(2):
        deplo.artifacts.register()
    assert pinned == ["decode"]

    def refuse(phase):
        raise deplo.UserError("no such phase")

    monkeypatch.setattr(topology, "pin", refuse)
    monkeypatch.setattr(topology, "_pinned", topology.threading.Event())
    with pytest.warns(UserWarning, match="DEPLO_PIN=decode: no such phase"):
        deplo.artifacts.register()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("package:2 nuna:2", "'nuna' is no kind of level"),
        ("package:0 core:4 pu:1", "'package:0' has no parts"),
        ("package core:4", "'package' has no count"),
        ("package:2 core:x", "'core:x' is no level"),
        ("package:-1", "'package:-1' is no level"),
        ("package:100 core:100 pu:2", "more than 8192 processors"),
        ("pu:2 core:2", "hwloc does not take"),
    ],
)
def test_bad_synthetic_text(text, message, capsys):
    assert main(["topology", "--topology", text]) == 1
    error = capsys.readouterr().err
    assert error.startswith("deplo: UserError: ") and message in error and error.count("\n") == 1


_XML = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0xf" complete_cpuset="0xf" allowed_cpuset="0xf"
  nodeset="0x3" complete_nodeset="0x3" allowed_nodeset="0x3">
  {packages}
 </object>
</topology>
"""
_PACKAGE = """<object type="Package" os_index="{n}" cpuset="{set}" complete_cpuset="{set}" nodeset="{node}" complete_nodeset="{node}">
 <object type="NUMANode" os_index="{n}" cpuset="{set}" complete_cpuset="{set}" nodeset="{node}" complete_nodeset="{node}" local_memory="68719476736"/>
 {cores}</object>"""
_CORE = """<object type="Core" os_index="{n}" cpuset="{set}" complete_cpuset="{set}" nodeset="{node}" complete_nodeset="{node}">
 <object type="PU" os_index="{n}" cpuset="{set}" complete_cpuset="{set}" nodeset="{node}" complete_nodeset="{node}"/></object>"""


def test_xml(tmp_path, capfd):
    packages = [
        _PACKAGE.format(
            n=p,
            set=hex(3 << 2 * p),
            node=hex(1 << p),
            cores="".join(_CORE.format(n=c, set=hex(1 << c), node=hex(1 << p)) for c in (2 * p, 2 * p + 1)),
        )
        for p in range(2)
    ]
    path = tmp_path / "machine.xml"
    path.write_text(_XML.format(packages="".join(packages)))
    tree = read_tree(xml=path)
    assert [count(tree, kind) for kind in ("package", "numa", "core", "pu")] == [2, 2, 4, 4]
    assert {node.bytes for node in tree.of_kind("numa")} == {64 << 30}
    assert main(["topology", "--xml", str(path), "--env", "vllm", "--processes", "2"]) == 0
    assert "VLLM_CPU_OMP_THREADS_BIND='0-1|2-3'" in capfd.readouterr().out
    assert main(["topology", "--xml", str(tmp_path / "none.xml")]) == 1
    assert "none.xml: no such file" in capfd.readouterr().err
    for text in ("", "<topology>", "no xml", path.read_text()[:700]):
        path.write_text(text)
        assert main(["topology", "--xml", str(path)]) == 1
        assert "machine.xml" in capfd.readouterr().err


def test_the_command_prints_and_draws(tmp_path, capsys):
    drawing = tmp_path / "machine.svg"
    assert main(["topology", "--topology", EPYC, "--shape", "llama-3.1-8b", "--svg", str(drawing), "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert "4 x numa" in text and "best: remove pu to 1, then group all" in text and text.count("tokens/s") == 3
    root = ElementTree.parse(drawing).getroot()
    colours = [rect.get("fill") for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("width") == rect.get("height") == "16"]
    assert len(colours) == 3 * 192
    prefill, decode = (set(colours[at : at + 192]) for at in (0, 192))
    assert len(prefill) == 1 and len(decode) == 9  # all cores in one process; eight processes, and cores that are idle


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "12"], "12 parameters: expected a million or more"),
        (["--bytes", "0"], "0.0 bytes a weight"),
        (["--batch", "0"], "--batch 0"),
        (["--node-gbs", "-3"], "--node-gbs -3"),
        (["--processes", "7"], "divides into 1, 2, 3, 4, 6, 8, 12, 24 equal services"),
        (["--measure"], "--measure is of this machine"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert main(["topology", "--topology", EPYC, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_models_by_their_number_of_parameters():
    model = model_of(parameters=8e9, weight_bytes=0.5)
    assert model.bytes == 4e9 and 12 * model.layers * model.hidden**2 == pytest.approx(8e9, rel=0.05)
    with pytest.raises(deplo.UserError, match="unknown shape 'gpt'"):
        model_of("gpt")
