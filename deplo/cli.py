"""`python -m deplo COMMAND`: looks at every level of IR, runs, measures; `--help` lists the commands."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from . import llm_arguments, topology_command
from .errors import Error, UserError
from .options import KEYS, Options, read_options

LEVELS = ("torch", "tensor", "loop", "tile", "kernel")  # of IR; texts of targets follow
MACHINE_LEVELS = ("ptx", "sass")  # what NVIDIA's compiler makes of the text before them


class _Levels:
    """All levels, asked of the core where one is given or shown."""

    def __iter__(self) -> Iterator[str]:
        from .targets import targets

        yield from LEVELS
        for target in targets():
            yield from target.levels
            if target.devices:
                yield from MACHINE_LEVELS

    def __contains__(self, level: object) -> bool:
        return level in list(self)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status. A deplo error is one line on stderr, not a traceback."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except Error as error:
        print(f"deplo: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # A reader such as head went away: nothing is left to say, not even at exit.
        _discard_output()
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        # PyTorch's own complaint about an expression. Dynamo's errors, and with DEPLO_DEBUG all, keep their traceback.
        if not getattr(options, "expression", None) or type(error).__module__ != "builtins" or os.environ.get("DEPLO_DEBUG"):
            raise
        print(f"deplo: <expression>: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"deplo: {error.strerror or error}", file=sys.stderr)
        _discard_output()
        return 1
    return 0


def _discard_output() -> None:
    """What is still buffered would fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Commands that take no file know one only to say what to do with it; beside an expression it is like any other word."""

    def error(self, message: str) -> NoReturn:
        if not self.prog.endswith(" compile"):
            message = message.replace("argument FILE.ir: not allowed with argument -c", "unrecognized arguments beside -c EXPR")
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m deplo", description="A compiler for PyTorch that generates all of its code.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    compile_ = _command(commands, "compile", "print an expression or a file of IR at one level", _compile)
    _program_arguments(compile_, file=True)
    shown = compile_.add_mutually_exclusive_group()
    shown.add_argument("--ir", metavar="LEVEL", choices=_Levels(), help="the level to print (default: kernel): %(choices)s")
    shown.add_argument("--stop-after", metavar="PASS", help="print the IR as it is after this level or pass")
    compile_.add_argument("--arch", metavar="ARCH", help="with --ir ptx and sass: the architecture, as sm_80 (default), sm_90a or sm_120")
    compile_.add_argument("--dump-dir", metavar="DIR", help="write one numbered file a pass; unchanged passes are marked")
    compile_.add_argument("-o", "--output", metavar="FILE", help="write to FILE, not to the terminal")

    run = _command(commands, "run", "run an expression by deplo and by eager PyTorch, and compare", _run)
    _program_arguments(run, file=False)
    run.add_argument("--bench", action="store_true", help="measure both, interleaved")

    explain = _command(commands, "explain", "show the kernels, the library calls and their reasons, memory and cache", _explain)
    _program_arguments(explain, file=False)
    explain.add_argument(
        "--device", metavar="NAME", help="judge the kernels for a GPU that need not be here: h100, a100, h200, l4, rtx4090, rtx5090, b200"
    )
    explain.add_argument("--json", action="store_true", help="with --device: the figures as JSON")

    report = _command(commands, "report", "write a page about a model: breaks, calls in ATen, kernels, roofline, timeline, memory, IR", _report)
    source = report.add_mutually_exclusive_group(required=True)
    source.add_argument("-c", metavar="EXPR", dest="expression", help="a torch expression; r is torch.randn, torch, F and nn are in scope")
    source.add_argument("model", metavar="MODULE:FUNCTION", nargs="?", help="a function of a module, or of FILE.py, that returns (model, arguments)")
    _compile_arguments(report)
    report.add_argument("-o", "--output", metavar="DIR", default="report", help="folder for index.html and trace.json (default: report)")

    _command(commands, "passes", "list the passes of each level in order", _passes)
    ops = _command(commands, "ops", "list the ATen overloads: generated by deplo, left to ATen (and why), or decomposed by PyTorch", _ops)
    ops.add_argument("--markdown", action="store_true", help="as docs/ops.md has it")
    numerics = _command(commands, "numerics", "measure the largest errors of functions and reductions in ulp, deplo's and eager's", _numerics)
    numerics.add_argument("names", nargs="*", metavar="NAME", help="functions or reductions (default: all)")
    numerics.add_argument("--dtype", default="float32,float64,bfloat16,float16", help="separated by commas")
    numerics.add_argument("--exhaustive", action="store_true", help="all 2^32 values of float32 (a minute or more for each function)")
    cache = _command(commands, "cache", "show or empty the cache of compiled kernels", _cache)
    cache.add_argument("action", nargs="?", choices=("show", "clear"), default="show")
    tune = _command(commands, "tune", "list the schedules that searches found (option tune), or remove them", _tune)
    tune.add_argument("action", nargs="?", choices=("show", "clear"), default="show")
    tune.add_argument("--schedules", action="store_true", help="with their text")
    inspect = _command(commands, "inspect", "print what a package of deplo.export holds, or all of its manifest", _inspect)
    inspect.add_argument("package", metavar="MODEL.deplo")
    inspect.add_argument("--json", action="store_true", help="the manifest as it stands in the file")
    topology = _command(commands, "topology", "rank what processes of a served language model may run on, on this or another machine", _topology)
    topology_command.add_arguments(topology)
    env = _command(commands, "env", "print versions, CPU features, topology, what the machine does at most, folders and options", _env)
    env.add_argument("--measure", action="store_true", help="measure the machine again; by default what was measured first is shown")
    bench = _command(commands, "bench-llm", "measure tokens a second of a language model's shape, beside eager mode and llama.cpp", _bench_llm)
    llm_arguments.add_arguments(bench, quant="bf16")
    return parser


def _command(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def _program_arguments(parser: argparse.ArgumentParser, file: bool) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-c", metavar="EXPR", dest="expression", help="a torch expression; r is torch.randn, torch, F and nn are in scope")
    source.add_argument("file", metavar="FILE.ir", nargs="?", help="Torch, Tensor, Loop, Tile or Kernel IR" if file else argparse.SUPPRESS)
    _compile_arguments(parser)


def _compile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dynamic", action="store_true", help="make all sizes symbolic")
    parser.add_argument("--backward", action="store_true", help="also the gradient of the sum of the outputs")
    parser.add_argument("--disable", metavar="PASS", action="append", default=[], help="skip a pass (may be repeated)")
    parser.add_argument("--schedule", metavar="FILE|TEXT", help="schedules by hand: lines 'schedule @name: ...' as --ir tile prints them")
    parser.add_argument("--option", metavar="KEY=VALUE", action="append", default=[], help="any option of the backend: " + ", ".join(KEYS))


def _options(arguments: argparse.Namespace, **more: Any) -> Options:
    given: dict[str, str] = {}
    for item in arguments.option:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"--option {item}: expected KEY=VALUE")
        given[key] = value
    options = read_options(texts=given)
    disable = (*options.disable, *arguments.disable)
    if arguments.schedule:
        more["schedule"] = _schedule_text(arguments.schedule)
    return options.replace(**{**more, "disable": disable})


def _schedule_text(given: str) -> str:
    """The text itself, or what is in the file of that name."""
    if given.lstrip().startswith("schedule"):
        return given
    try:
        with open(given, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise UserError(f"--schedule {given}: {error.strerror}; expected a file or text 'schedule @name: ...'") from None


# Commands


def _compile(arguments: argparse.Namespace) -> None:
    from .core import core
    from .targets import targets
    from .terminal import show_ir

    shown = arguments.ir or "kernel"
    more = {}
    machine = shown if shown in MACHINE_LEVELS else ""
    if arguments.arch and not machine:
        raise UserError(f"--arch {arguments.arch}: only --ir ptx and --ir sass have an architecture")
    for target in targets():
        if machine and target.devices:
            shown = target.levels[-1]
        if shown in target.levels and not target.is_default:
            more["target"] = target.name
    if arguments.arch:
        more["arch"] = arguments.arch
    if arguments.dump_dir:
        more["dump_dir"] = arguments.dump_dir
    if arguments.stop_after:
        more["stop_after"] = arguments.stop_after
    options = _options(arguments, **more)
    texts = []
    sources = _sources(arguments, options)
    levels = list(_Levels())
    if arguments.file and levels.index(shown) < levels.index(level := core().level_of(sources[0][0], arguments.file)):
        raise UserError(
            f"{arguments.file} holds {level} IR, which cannot be raised to {shown} IR; --ir takes {', '.join(levels[levels.index(level) :])}"
        )
    for number, (text, hints, training) in enumerate(sources):
        if options.dump_dir and len(sources) > 1:
            options = options.replace(dump_dir=os.path.join(arguments.dump_dir, str(number)))
        texts.append(core().lower(text, shown, options.to_json(hints, training), arguments.file or "<expression>"))
    if machine:
        from . import machine_code

        make = machine_code.ptx if machine == "ptx" else machine_code.sass
        texts = [make(text, options.arch, options) for text in texts if text.strip()]
    whole = "\n".join(texts)
    if not whole.strip():
        print(f"deplo: no kernel, so there is no {shown} text: `python -m deplo explain` names the library calls", file=sys.stderr)
    if arguments.output:
        with _writing(arguments.output) as file:
            file.write(whole)
    else:
        show_ir(whole)


def _sources(arguments: argparse.Namespace, options: Options) -> list[tuple[str, dict[str, int], bool]]:
    """Texts of IR, hints for their symbols, and whether they are a part of training: of a file, or of the graphs that an expression gives."""
    if arguments.file:
        try:
            with open(arguments.file, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{arguments.file}: {error}") from None
        return [(text, {}, re.match(r"torch @(forward|backward)\(", text) is not None)]
    from .capture import capture
    from .errors import UnsupportedError

    fn, inputs = _expression(arguments)
    with _gradients(arguments):
        records = capture(fn, inputs, dynamic=True if arguments.dynamic else None, backward=arguments.backward, options=options, parts=True)
    if not records:
        from .explanation import NO_GRAPH

        raise UserError(NO_GRAPH)
    refused = [why for record in records for why in [record.fallback, *(f"{op} stays in ATen: {why}" for op, why in record.left)] if why]
    if not any(record.torch_ir for record in records):
        raise UnsupportedError(refused[0])
    for why in refused:
        print(f"deplo: {why}", file=sys.stderr)
    return [(record.torch_ir, record.hints, record.kind != "inference") for record in records if record.torch_ir]


@contextlib.contextmanager
def _writing(path: str) -> Any:
    try:
        with open(path, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _expression(arguments: argparse.Namespace) -> tuple[Any, list[Any]]:
    from .expression import parse_expression

    if arguments.file:
        raise UserError(
            f"{arguments.command} takes an expression, as -c 'torch.softmax(r(4, 8), -1)'; a file has no inputs to run with: "
            f"`python -m deplo compile {arguments.file}` shows its IR at any level"
        )
    fn, inputs = parse_expression(arguments.expression)
    if arguments.backward:
        inputs = [x.requires_grad_(x.is_floating_point()) for x in inputs]
    return fn, inputs


def _gradients(arguments: argparse.Namespace) -> Any:
    import torch

    return contextlib.nullcontext() if arguments.backward else torch.no_grad()


def _run(arguments: argparse.Namespace) -> None:
    import torch

    from .capture import unwrapped_errors
    from .expression import in_float64
    from .measure import compare, time_interleaved
    from .terminal import seconds

    options = _options(arguments)
    fn, inputs = _expression(arguments)
    from .backend import compile_with

    compiled: Any = torch.compile(fn, backend=lambda gm, ex: compile_with(options, gm, ex), dynamic=True if arguments.dynamic else None)
    with _gradients(arguments), unwrapped_errors():
        torch.manual_seed(0)
        result = compiled(*inputs)
        print(result)
        print(compare(result, fn, inputs, in_float64(fn)))
        if arguments.bench:
            times = time_interleaved({"eager": lambda: fn(*inputs), "deplo": lambda: compiled(*inputs)})
            for name, value in times.items():
                print(f"{name:6} {seconds(value):>10} a call")
            print(f"deplo is {times['eager'] / times['deplo']:.2f} times as fast as eager")


def _explain(arguments: argparse.Namespace) -> None:
    from .explanation import explain

    options = _options(arguments)
    if arguments.device:
        _judge(arguments, options)
        return
    if arguments.json:
        raise UserError("--json needs --device")
    fn, inputs = _expression(arguments)
    with _gradients(arguments):
        explanation = explain(fn, *inputs, options=options, dynamic=True if arguments.dynamic else None, backward=arguments.backward)
    explanation.show()


def _report(arguments: argparse.Namespace) -> None:
    from .report import load_model, report, write_report

    options = _options(arguments)
    keywords: dict[str, Any] = {}
    if arguments.expression:
        arguments.file = None
        model, given = _expression(arguments)
        inputs = tuple(given)
    else:
        model, inputs, keywords = load_model(arguments.model)
    with _gradients(arguments):
        found = report(
            arguments.expression or arguments.model,
            model,
            inputs,
            keywords,
            options=options,
            dynamic=True if arguments.dynamic else None,
            backward=arguments.backward,
        )
    for path in write_report(found, arguments.output):
        print(path)


def _judge(arguments: argparse.Namespace, options: Options) -> None:
    import dataclasses
    import json

    from .machine_code import find_device, judge, rows
    from .terminal import show_table

    if arguments.file:
        raise UserError("explain --device takes an expression")
    target, device = find_device(arguments.device)
    options = options.replace(target=target.name, arch=device["arch"])
    found = []
    for text, hints, training in _sources(arguments, options):
        found += judge(text, hints, training, target, device, options)
    if arguments.json:
        print(json.dumps({"device": device, "kernels": [dataclasses.asdict(j) for j in found]}, indent=2))
        return
    header, table = rows(found)
    show_table("", header, table, list(range(1, len(header) - 1)))
    for j in found:
        print(f"schedule @{j.name}: {j.schedule}")


def _passes(arguments: argparse.Namespace) -> None:
    from .core import core
    from .terminal import show_table

    passes = core().passes()
    show_table("", ("level", "pass", "what it does"), [(p["level"], p["name"], p["doc"]) for p in passes])


def _ops(arguments: argparse.Namespace) -> None:
    from .operators import markdown, operators, summary
    from .terminal import show_table

    table = operators()
    if arguments.markdown:
        print(markdown(table), end="")
        return
    show_table(
        "",
        ("overload", "core", "how it runs", "rule's table, or reason"),
        [(op.name, "core" if op.is_core else "", op.kind, op.where) for op in table],
    )
    print(summary(table))


def _numerics(arguments: argparse.Namespace) -> None:
    from .numerics import DTYPES, report

    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    dtypes = arguments.dtype.split(",")
    for name in dtypes:
        if name not in known:
            raise UserError(f"--dtype {name}: expected one or more of {', '.join(known)}")

    def show(cells: tuple[str, ...]) -> None:
        widths = (13, 9, 9, 26, 9, 26, 0)
        print(" ".join(f"{cell:{width}}" if width else cell for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)

    if not report(arguments.names, [known[name] for name in dtypes], arguments.exhaustive, show):
        raise Error("some errors are beyond their bounds (docs/numerics.md)")


def _cache(arguments: argparse.Namespace) -> None:
    from .cache import cache_folder, clear, entries
    from .terminal import quantity

    folder = cache_folder(read_options())
    if arguments.action == "clear":
        print(f"removed {clear(folder)} entries from {folder}")
        return
    found = entries(folder)
    print(f"{folder}: {len(found)} entries, {quantity(sum(size for _, size in found), 'B')}")


def _tune(arguments: argparse.Namespace) -> None:
    from .cache import cache_folder
    from .core import core
    from .terminal import seconds, show_table
    from .tune import clear, entries

    options = read_options()
    folder = cache_folder(options)
    if arguments.action == "clear":
        print(f"removed {clear(folder)} schedules from {folder}")
        return
    found = entries(folder)
    here = core().winners_machine(options.to_json())
    rows = []
    for entry in found:
        state = entry.level if entry.done else f"{entry.level}, interrupted"
        gain = f"{entry.usual_seconds / entry.seconds:.2f} x" if entry.seconds else ""
        rows.append((entry.kernel, seconds(entry.usual_seconds), seconds(entry.seconds), gain, state, "" if entry.machine == here else entry.machine))
    if rows:
        show_table("", ("kernel", "heuristics", "found", "speed", "search", "other machine or device"), rows, [1, 2, 3])
    for entry in found if arguments.schedules else []:
        print(f"schedule @{entry.kernel}: {entry.schedule}")
    print(f"{folder}: schedules of {len(found)} kernels; this machine: {here}")


def _bench_llm(arguments: argparse.Namespace) -> None:
    from .llm_bench import measure, show

    rows: list[dict[str, Any]] = []
    for quant in arguments.quant.split(","):
        rows += measure(arguments.shape, quant, **llm_arguments.settings_of(arguments))
    show(rows)


def _inspect(arguments: argparse.Namespace) -> None:
    from .packages import describe, read_manifest

    manifest = read_manifest(arguments.package)
    if arguments.json:
        json.dump(manifest, sys.stdout, indent=1)
        print()
        return
    for name, value in describe(manifest):
        print(f"{name:18} {value}")


def _topology(arguments: argparse.Namespace) -> None:
    topology_command.run(arguments)


def _env(arguments: argparse.Namespace) -> None:
    from .environment import environment

    for name, value in environment(arguments.measure):
        print(f"{name:18} {value}")
