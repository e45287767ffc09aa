"""pytest plugin: collects once, then runs tests on request in forked processes, which start with all modules imported and nothing compiled."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from shared import Shared, wait

MEMORY = 16 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants-server", help="descriptors to read requests from and to answer on, and the shared file")


def _warm() -> None:
    """Imports what the first compilation imports, without deplo."""
    if "torch" not in sys.modules:
        return
    import torch

    torch.set_num_threads(1)
    for dynamic in (False, True):
        torch._dynamo.reset()
        torch.compile(lambda x: (x * 2).relu().sum(), backend="aot_eager", dynamic=dynamic)(torch.ones(3, 4, requires_grad=True)).backward()
    torch._dynamo.reset()


def _in_child(items: list[Any], cpu_seconds: list[float], current: Path) -> None:
    """Runs the items; the exit status is 0 where all pass, 1 where one does not."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    status = 0
    for k, item in enumerate(items):
        current.write_text(item.nodeid)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + cpu_seconds[k]) + 1, resource.RLIM_INFINITY))
        following = items[k + 1] if k + 1 < len(items) else None
        reports = runtestprotocol(item, log=False, nextitem=following)
        if any(report.failed for report in reports):
            status = 1
            current.with_suffix(".failure").write_text("\n".join(str(report.longrepr) for report in reports if report.failed))
            break
    os._exit(status)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    reading, writing, path = session.config.getoption("--mutants-server").split(",", 2)
    shared = Shared(Path(path))
    _warm()
    items = {item.nodeid: item for item in session.items}
    with os.fdopen(int(reading)) as requests, os.fdopen(int(writing), "w", buffering=1) as answers:
        # What importing alone reaches: a process that starts with the mutant is needed for it.
        print(json.dumps({"tests": list(items), "at_import": shared.reached()}), file=answers)
        for line in requests:
            request = json.loads(line)
            shared.activate(request["mutant"])
            shared.forget()
            child = os.fork()
            if child == 0:
                try:
                    _in_child([items[name] for name in request["tests"]], request["cpu_seconds"], Path(path).with_suffix(".current"))
                finally:
                    os._exit(1)
            result, seconds = wait(child, request["wall_seconds"])
            reached = shared.reached()
            shared.activate(0)
            print(json.dumps({"result": result, "seconds": seconds, "reached": reached}), file=answers)
    sys.stdout.flush()
    return True
