"""The search for schedules on a GPU, or on the device that stands in for one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from devices import Gpu, fetched
from devices import device as device

from deplo import tune
from deplo.backend import collect_records
from deplo.capture import capture
from deplo.core import core
from deplo.options import read_options

pytest.importorskip("deplo._C")


@pytest.fixture(autouse=True)
def folder(winners):
    return winners


def task_of(device: Gpu, fn: Any, *inputs: torch.Tensor) -> tune.Task:
    """Of the first kernel of fn's graph on the device."""
    given = read_options(options={**device.options, "target": "cuda"})
    (record,) = capture(fn, list(inputs), options=given)
    options = given.to_json(record.hints, device=0)
    return tune.tasks_of(record.torch_ir, options)[0]


def directions(task: tune.Task, schedule: str = "", wide: bool = False) -> dict[str, list[str]]:
    found = json.loads(core().tuning_directions(task.text, task.version, schedule or task.usual, wide, task.options))
    return {direction["name"]: direction["schedules"] for direction in found}


def number(text: str, word: str) -> int:
    match = re.search(rf"{re.escape(word)}\((?:\w+=)?(\d+)", text)
    return int(match[1]) if match else 1


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...], set[str]]] = {
    "rows": (lambda x: torch.softmax(x, -1), (torch.randn(24, 1024),), {"threads", "rows", "threads for rows", "lanes"}),
    "columns": (lambda x: x.sum(0), (torch.randn(512, 64),), {"threads", "split", "threads for split"}),
    "matrix": (torch.matmul, (bf16(16, 128), bf16(128, 64)), {"stages", "tile(r0.k0)", "warps(i1)"}),
    "float32": (torch.matmul, (torch.randn(64, 64), torch.randn(64, 64)), {"shape of tile", "register_block(i0)"}),
    "attention": (torch.nn.functional.scaled_dot_product_attention, (bf16(1, 2, 64, 32),) * 3, {"stages"}),
    "points": (lambda x: x.exp() + 1, (torch.randn(4096),), {"threads", "with or without unroll"}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_candidates_differ_in_one_decision_and_give_the_same(name: str, device: Gpu):
    fn, inputs, expected = CASES[name]
    task = task_of(device, fn, *inputs)
    found = directions(task)
    assert expected <= found.keys(), found.keys()
    every = [text for texts in found.values() for text in texts]
    assert len(every) == len(set(every)) and task.usual not in every
    assert all(len(json.dumps(texts)) for texts in directions(task, wide=True).values())
    # As many threads share a sum, so that none has a longer chain.
    shared = "threads" if name == "rows" else "split"
    if name in ("rows", "columns"):
        assert all(number(text, shared) >= number(task.usual, shared) for text in every)
    runner = tune.make_runner(task)
    assert runner is not None
    some = [texts[-1] for texts in found.values()][:4]
    made = runner.make([task.usual, *task.proposals[1:2], *some])  # programs whose results are others are none
    assert made[0] is not None and sum(program is not None for program in made) > 1
    assert all(seconds > 0 for seconds in runner.race([program for program in made if program is not None]))


@pytest.mark.gpu
def test_what_a_search_finds_is_used_and_is_the_devices(folder, device: Gpu):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    x = device.put(torch.randn(24, 300))
    with collect_records() as records:
        got = torch.compile(fn, backend="deplo", options={**device.options, "tune": "fast"})(x)
    torch.testing.assert_close(fetched(got), fetched(fn(x)))
    (entry,) = tune.entries(str(folder))
    (kernel,) = json.loads(records[0].program.describe())["kernels"]
    assert entry.done and entry.schedule == kernel["schedule"] and kernel["tuned_seconds"] <= kernel["usual_seconds"]
    on_host = read_options().to_json()
    assert entry.machine != core().winners_machine(on_host)
    # Of the same graph on the CPU nothing is known.
    with collect_records() as records:
        torch.compile(fn, backend="deplo")(torch.randn(24, 300))
    assert not json.loads(records[0].program.describe())["kernels"][0]["tuned_seconds"]


@pytest.mark.gpu
def test_kernels_that_read_places_and_hosts_copies(folder, device: Gpu, monkeypatch: pytest.MonkeyPatch):
    """Indices are made up within bounds; where calls copy from the host, there is nothing to measure."""

    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i] * 2

    task = task_of(device, fn, torch.randn(9, 64), torch.tensor([8, 0, 3]))
    runner = tune.make_runner(task)
    assert runner is not None and all(t > 0 for t in runner.race(runner.make([task.usual])))
    monkeypatch.setattr(tune, "make_runner", lambda task: pytest.fail("a search"))
    torch.compile(fn, backend="deplo", options={**device.options, "target": "cuda", "tune": "fast"})(torch.randn(9, 64), torch.tensor([8, 0, 3]))
    assert not tune.entries(str(folder))
