"""`python -m deplo topology`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import UserError
from .topology_cost import SHAPES, Model, Rates, Work, model_of

if TYPE_CHECKING:
    from .topology import Candidate

Measured = dict[tuple[tuple[int, ...], ...], list[float]]  # topology.rank reads it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--topology", metavar="TEXT", help="another machine, as hwloc's synthetic text: 'package:2 numa:2 l3:4 core:4 pu:2'")
    machine.add_argument("--xml", metavar="FILE", help="another machine, as `lstopo FILE.xml` writes it there")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--shape", choices=sorted(SHAPES), help="the model (default: qwen3-0.6b)")
    shape.add_argument("--params", metavar="N", type=float, help="a model of that many parameters, as 8e9")
    parser.add_argument("--bytes", metavar="N", type=float, default=2.0, help="of one weight: 4, 2 (default), 1, 0.5")
    parser.add_argument("--batch", metavar="N", type=int, default=1, help="sequences at once (default: 1)")
    parser.add_argument("--prompt", metavar="N", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--generate", metavar="N", type=int, default=128, help="tokens of an answer (default: 128)")
    for name, about in (
        ("node-gbs", "GB/s of a memory node"),
        ("core-gbs", "GB/s of a core"),
        ("l3-gbs", "GB/s of the cores behind one of several L3"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=float, help=f"{about} (default: {_default(name):g})")
    parser.add_argument("--core-gflops", metavar="N", type=float, help=f"GFLOP/s of a core (default: {Rates().core_flops / 1e9:g})")
    parser.add_argument("--processes", metavar="N", type=int, help="only configurations of so many processes")
    parser.add_argument("--top", metavar="N", type=int, default=5, help="rows of each table (default: 5)")
    parser.add_argument("--measure", action="store_true", help="measure what the best of this machine read, and rank by that")
    parser.add_argument("--env", choices=("torchrun", "vllm"), help="only print the commands that start processes pinned by the best choice")
    parser.add_argument("--svg", metavar="FILE", help="draw the machine with the best choices for prefill and decode")


_RATES = {"node-gbs": "node_bandwidth", "core-gbs": "core_bandwidth", "l3-gbs": "l3_bandwidth", "core-gflops": "core_flops"}


def _default(name: str) -> float:
    return float(getattr(Rates(), _RATES[name])) / 1e9


def run(arguments: argparse.Namespace) -> None:
    """Prints the tree and the ranked configurations. Raises UserError for what arguments do not allow."""
    from .terminal import quantity, show_table
    from .topology import candidates, rank, read_tree
    from .topology_draw import HEADER, environment_lines, rows, steps_text, svg, tree_text

    if arguments.measure and (arguments.topology is not None or arguments.xml):
        raise UserError("--measure is of this machine: without --topology and --xml")
    tree = read_tree(arguments.topology or "", arguments.xml or "") if arguments.topology != "" else read_tree(" ")
    model = model_of(arguments.shape or ("" if arguments.params else "qwen3-0.6b"), arguments.params or 0, arguments.bytes)
    work, rates = _work(arguments), _rates(arguments)
    found = candidates(tree)
    counted = len(found)
    if arguments.processes is not None:
        if not (chosen := [candidate for candidate in found if candidate.processes == arguments.processes]):
            known = sorted({candidate.processes for candidate in found})
            raise UserError(f"--processes {arguments.processes}: this machine divides into {', '.join(map(str, known))} equal services")
        found = chosen
    seen: Measured = {}
    if arguments.measure:
        rates = _measure(found, model, work, rates, arguments.top, seen)
    best = {phase: rank(found, phase, model, work, rates, seen) for phase in ("prefill", "decode", "both")}
    if not best["both"]:
        raise UserError(f"{model.name} ({quantity(model.bytes, 'B')} of weights) does not fit into any configuration's memory")
    if arguments.env:
        print("\n".join(environment_lines(best["both"][0], arguments.env)))
        return
    print("\n".join(["machine", *tree_text(tree, 1)]))
    print(
        f"{model.name}: {quantity(model.bytes, 'B')} of weights, {work.batch} sequences of {work.prompt} + {work.generate} tokens; "
        f"a node {quantity(rates.node_bandwidth, 'B/s')}, a core {quantity(rates.core_bandwidth, 'B/s')} and {quantity(rates.core_flops, 'FLOP/s')}"
    )
    print(f"{counted} configurations differ\n")
    for phase, choices in best.items():
        right = [i for i in range(len(HEADER)) if i != 1]
        show_table(phase, HEADER, rows(choices[: arguments.top], phase), right)
        print(f"best: {steps_text(choices[0])}\n")
    if seen:
        print(f"the bandwidth of {len(seen)} configurations was measured, that of others follows from the rates")
    if arguments.svg:
        drawn = [(f"{phase}: {len(best[phase][0].services)} processes, {best[phase][0].rate(phase):.4g} tokens/s", best[phase][0]) for phase in best]
        with open(arguments.svg, "w", encoding="utf-8") as file:
            file.write(svg(tree, drawn))
        print(arguments.svg)


def _work(arguments: argparse.Namespace) -> Work:
    for name in ("batch", "prompt", "generate", "top"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} {getattr(arguments, name)}: expected a number from 1 on")
    return Work(arguments.batch, arguments.prompt, arguments.generate)


def _rates(arguments: argparse.Namespace) -> Rates:
    given = {}
    for name, field in _RATES.items():
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None:
            if not 0 < value < 1e9:
                raise UserError(f"--{name} {value:g}: expected a number above 0")
            given[field] = value * 1e9
    return dataclasses.replace(Rates(), **given)


def _measure(found: Sequence[Candidate], model: Model, work: Work, rates: Rates, top: int, seen: Measured) -> Rates:
    """Measures a core, and what the best configurations of both phases read. Raises UserError where this process may not run there."""
    from .calibration import calibration
    from .options import read_options
    from .topology import rank
    from .topology_measure import measure_services

    rates = dataclasses.replace(rates, core_flops=calibration(read_options()).f32)
    for phase in ("prefill", "decode"):
        for choice in rank(found, phase, model, work, rates)[:top]:
            key = tuple(service.processors for service in choice.services)
            if key in seen:
                continue
            if (values := measure_services(choice.services)) is None:
                raise UserError("--measure: this process may not run on all processors of the machine")
            seen[key] = values
    return rates
