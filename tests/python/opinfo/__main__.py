"""`python -m opinfo`: units in worker processes, which may crash or hang. Each becomes a line of JSON in a file, after which a new run goes on."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fnmatch
import json
import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any

UNITS_PER_WORKER = 150  # then a fresh process: code that was compiled is never freed


def main() -> int:
    arguments = _arguments()
    if arguments.worker:
        return _work(arguments)
    from opinfo.units import ENGINES, all_units

    assert arguments.engine in ENGINES
    done = {} if arguments.fresh else _read(arguments.output)
    wanted = [unit for unit in all_units(_dtypes(arguments), tuple(arguments.direction.split(","))) if _matches(unit.op, arguments.only)]
    wanted = [unit for k, unit in enumerate(wanted) if k % arguments.shards == arguments.shard]
    if arguments.fresh and os.path.exists(arguments.output):
        os.remove(arguments.output)
    again = [unit for unit in wanted if arguments.again and done.get(unit.name, {}).get("status") in arguments.again.split(",")]
    todo = again or [unit for unit in wanted if unit.name not in done]
    if arguments.again and not again:
        todo = []
    _Run(arguments, todo).finish()
    results = _read(arguments.output)
    shown = [results[unit.name] for unit in wanted if unit.name in results]
    report(shown, arguments.verbose)
    shares(shown, _read(arguments.beside) if arguments.beside else {})
    if arguments.beside and not os.path.exists(arguments.beside):
        print(f"(no results of another engine in {arguments.beside}: make opinfo-inductor writes them)")
    if arguments.engine == "deplo":
        from opinfo.overloads import print_share

        print_share(shown)
    return 1 if any(result["status"] in ("failed", "wrong", "crashed", "timeout") for result in shown) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m opinfo", description=__doc__)
    parser.add_argument("--only", default="", help="names of operators with * and ?, separated by commas")
    parser.add_argument("--dtype", default="", help="dtypes, separated by commas; by default all")
    parser.add_argument("--direction", default="forward,backward")
    parser.add_argument("--limit", type=int, default=None, help="about so many samples of each unit; by default all")
    parser.add_argument("--engine", default="deplo", help="deplo (without Dynamo), dynamo (deplo behind torch.compile), inductor or aot_eager")
    parser.add_argument("-n", type=int, default=1, help="worker processes")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one sample")
    parser.add_argument("--output", default="opinfo.jsonl", help="one line of JSON a unit; units found there are not run again")
    parser.add_argument("--fresh", action="store_true", help="forget what the output holds")
    parser.add_argument("--again", default="", help="run only the units that ended so (as failed,wrong)")
    parser.add_argument("--beside", default="", help="the output of another engine, shown beside")
    parser.add_argument("--special", action="store_true", help="NaN, infinities, zeros, subnormals and extremes in a third of the elements")
    parser.add_argument("-v", "--verbose", action="store_true", help="every problem in full")
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _dtypes(arguments: argparse.Namespace) -> Any:
    import torch

    from opinfo.units import DTYPES

    return tuple(getattr(torch, name) for name in arguments.dtype.split(",")) if arguments.dtype else DTYPES


def _matches(name: str, patterns: str) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(","))


def _read(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.endswith("\n")]
    return {row["unit"]: row for row in rows}


# Worker: reads a unit a line, answers with its position in the samples and then the result.


def _work(arguments: argparse.Namespace) -> int:
    answers = os.fdopen(arguments.worker, "w", buffering=1)
    import torch

    from opinfo.units import Unit, run_unit

    torch.set_num_threads(1)
    for line in sys.stdin:
        unit = Unit(*json.loads(line))
        result = run_unit(unit, arguments.limit, arguments.engine, lambda k: print(k, file=answers, flush=True), arguments.special)
        print(json.dumps(dataclasses.asdict(result)), file=answers, flush=True)
    return 0


class _Worker:
    def __init__(self, arguments: argparse.Namespace) -> None:
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "opinfo", "--worker", str(writing), "--engine", arguments.engine]
        command += ["--limit", str(arguments.limit)] if arguments.limit else []
        command += ["--special"] if arguments.special else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[writing], text=True
        )
        os.close(writing)
        self.lines: queue.Queue[str] = queue.Queue()
        self.answers = os.fdopen(reading)
        threading.Thread(target=self._listen, daemon=True).start()
        self.units = 0

    def _listen(self) -> None:
        for line in self.answers:
            self.lines.put(line)
        self.lines.put("")

    def run(self, unit: Any, timeout: float) -> dict[str, Any]:
        self.units += 1
        assert self.process.stdin is not None
        at, status = -1, "crashed"
        try:
            self.process.stdin.write(json.dumps(dataclasses.astuple(unit)) + "\n")
            self.process.stdin.flush()
            while line := self.lines.get(timeout=timeout):
                if line.startswith("{"):
                    result: dict[str, Any] = json.loads(line)
                    return result
                at = int(line)
        except queue.Empty:
            status = "timeout"
        except OSError:
            pass
        self.end()
        text = f"{status}: sample {at}" + ("" if status == "timeout" else f": the process ended with {self.process.returncode}")
        return {"unit": unit.name, "status": status, "samples": at + 1, "library": {}, "excused": {}, "problems": [text], "seconds": 0.0}

    @property
    def usable(self) -> bool:
        return self.process.poll() is None and self.units < UNITS_PER_WORKER

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class _Run:
    def __init__(self, arguments: argparse.Namespace, units: list[Any]) -> None:
        self.arguments = arguments
        self.waiting: queue.Queue[Any] = queue.Queue()
        for unit in units:
            self.waiting.put(unit)
        self.total = len(units)
        self.count = 0
        self.statuses: collections.Counter[str] = collections.Counter()
        self.start = time.time()
        self.lock = threading.Lock()

    def finish(self) -> None:
        threads = [threading.Thread(target=self._serve) for _ in range(max(1, self.arguments.n))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self) -> None:
        worker: _Worker | None = None
        while True:
            try:
                unit = self.waiting.get_nowait()
            except queue.Empty:
                break
            if worker is None or not worker.usable:
                if worker is not None:
                    worker.end()
                worker = _Worker(self.arguments)
            self._note(worker.run(unit, self.arguments.timeout))
        if worker is not None:
            worker.end()

    def _note(self, result: dict[str, Any]) -> None:
        with self.lock:
            self.count += 1
            self.statuses[result["status"]] += 1
            with open(self.arguments.output, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            bad = result["status"] in ("failed", "wrong", "crashed", "timeout")
            if bad:
                print(f"{result['unit']}: {result['problems'][0][:300]}", flush=True)
            if self.count % 50 == 0 or self.count == self.total:
                counts = ", ".join(f"{number} {status}" for status, number in self.statuses.most_common())
                print(f"[{self.count}/{self.total}, {time.time() - self.start:.0f} s] {counts}", flush=True)


# Report


def report(results: list[dict[str, Any]], verbose: bool = False) -> None:
    from opinfo.units import STATUSES

    kinds = sorted({result["unit"].split("/", 1)[1] for result in results})
    print(f"\n{'':20}" + "".join(f"{status:>10}" for status in STATUSES))
    for kind in kinds:
        counts = collections.Counter(result["status"] for result in results if result["unit"].split("/", 1)[1] == kind)
        print(f"{kind:20}" + "".join(f"{counts[status] or '':>10}" for status in STATUSES))
    library: collections.Counter[tuple[str, str]] = collections.Counter()
    for result in results:
        library.update(set(result["library"].items()))
    print("\nunits  stays in ATen, and why")
    for (op, reason), count in library.most_common(None if verbose else 60):
        print(f"{count:5}  {op}: {reason[:160]}")
    excused: collections.Counter[str] = collections.Counter()
    for result in results:
        excused.update(set(result["excused"]))
    print("\nunits  not judged, and why")
    for reason, count in excused.most_common(None if verbose else 40):
        print(f"{count:5}  {reason}")
    print()
    for result in results:
        if result["status"] in ("failed", "wrong", "crashed", "timeout"):
            for problem in result["problems"] if verbose else result["problems"][:1]:
                print(f"{result['unit']}: {problem if verbose else problem[:400]}")


def shares(results: list[dict[str, Any]], beside: dict[str, Any]) -> None:
    """How much of each operator is generated: of its units, those without a call of ATen; of those of another engine, those that pass, too."""
    bad = ("failed", "wrong", "crashed", "timeout")
    by_op: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for result in results:
        by_op[result["unit"].split("/")[0]].append(result)

    def counts(rows: list[dict[str, Any]]) -> str:
        ran = [row for row in rows if row["status"] != "none"]
        generated = sum(row["status"] == "generated" for row in ran)
        failed = sum(row["status"] in bad for row in ran)
        return f"{generated:4} of {len(ran):3}" + (f", {failed} failed" if failed else "")

    print(f"\n{'generated, by operator':44}{'this engine':24}{'beside' if beside else ''}")
    for op, rows in sorted(by_op.items()):
        others = [beside[row["unit"]] for row in rows if row["unit"] in beside]
        print(f"{op:44}{counts(rows):24}{counts(others) if others else ''}")
    both = [(row, beside[row["unit"]]) for row in results if row["unit"] in beside]
    print(f"{'all':44}{counts(results):24}{counts(list(beside.values())) if beside else ''}")
    if both:
        print(f"{'units that both ran':44}{counts([a for a, _ in both]):24}{counts([b for _, b in both])}")


if __name__ == "__main__":
    sys.exit(main())
