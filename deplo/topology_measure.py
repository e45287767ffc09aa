"""What the services of this machine read a second: for `python -m deplo topology --measure`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import torch

from .topology import set_memory_policy
from .topology_cost import Service

_BYTES = 64 << 20  # that each thread reads: beyond its share of any cache
_SECONDS = 0.3


def measure_services(services: Sequence[Service]) -> list[float] | None:
    """Bytes a second that each service reads while the others do, with a thread on each of its cores. None if this process may not run there.

    Each thread stays on one processor and touches its own block first; torch's sum reads it. A block of a service on several nodes has
    its pages on them in turn, as the cost model takes it.
    """
    if not {processor for service in services for processor in service.processors} <= os.sched_getaffinity(0):
        return None
    places = [(k, place) for k, service in enumerate(services) for place in service.processors[:: len(service.processors) // service.cores]]
    ready, done = threading.Barrier(len(places) + 1), threading.Barrier(len(places) + 1)
    stop = threading.Event()
    read = [0] * len(places)

    def work(at: int) -> None:
        torch.set_num_threads(1)  # OpenMP keeps the number for each thread
        k, place = places[at]
        os.sched_setaffinity(threading.get_native_id(), {place})
        set_memory_policy(services[k].node_numbers)
        block = torch.ones(_BYTES // 4)
        block.sum()
        ready.wait()
        while not stop.is_set():
            block.sum()
            read[at] += _BYTES
        done.wait()

    threads = [threading.Thread(target=work, args=(at,), name="deplo-measure") for at in range(len(places))]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    time.sleep(_SECONDS)
    stop.set()
    done.wait()
    elapsed = time.perf_counter() - start
    for thread in threads:
        thread.join()
    return [sum(count for (of, _), count in zip(places, read, strict=True) if of == k) / elapsed for k in range(len(services))]
