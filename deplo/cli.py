"""`python -m deplo compile|run|explain|passes|ops|cache|env`: looks at every level of IR, runs and measures expressions."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from .errors import Error, UserError
from .options import KEYS, Options, read_options

LEVELS = ("torch", "tensor", "loop", "tile", "kernel", "llvm", "asm", "cuda")


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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deplo", description="A compiler for PyTorch that generates all of its code.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    compile_ = _command(commands, "compile", "print an expression or a file of IR at one level", _compile)
    _program_arguments(compile_, file=True)
    compile_.add_argument("--ir", choices=LEVELS, default="kernel", help="the level to print (default: kernel)")
    compile_.add_argument("--dump-dir", metavar="DIR", help="write one numbered file a pass; unchanged passes are marked")
    compile_.add_argument("--stop-after", metavar="PASS", help="print the IR as it is after this level or pass")
    compile_.add_argument("-o", "--output", metavar="FILE", help="write to FILE, not to the terminal")

    run = _command(commands, "run", "run an expression by deplo and by eager PyTorch, and compare", _run)
    _program_arguments(run, file=False)
    run.add_argument("--bench", action="store_true", help="measure both, interleaved")

    explain = _command(commands, "explain", "show the kernels, the library calls and their reasons, memory and cache", _explain)
    _program_arguments(explain, file=False)

    _command(commands, "passes", "list the passes of each level in order", _passes)
    _command(commands, "ops", "list the ATen operators that deplo breaks down", _ops)
    cache = _command(commands, "cache", "show or empty the cache of compiled kernels", _cache)
    cache.add_argument("action", nargs="?", choices=("show", "clear"), default="show")
    _command(commands, "env", "print versions, CPU features, topology, folders and options", _env)
    return parser


def _command(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.set_defaults(run=run)
    return parser


def _program_arguments(parser: argparse.ArgumentParser, file: bool) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-c", metavar="EXPR", dest="expression", help="a torch expression; r is torch.randn, torch, F and nn are in scope")
    if file:
        source.add_argument("file", metavar="FILE.ir", nargs="?", help="IR of any level")
    parser.add_argument("--dynamic", action="store_true", help="make all sizes symbolic")
    parser.add_argument("--backward", action="store_true", help="also the gradient of the sum of the outputs")
    parser.add_argument("--disable", metavar="PASS", action="append", default=[], help="skip a pass (may be repeated)")
    parser.add_argument("--schedule", metavar="FILE|TEXT", help="schedules by hand: lines 'schedule @name: ...' as --ir tile prints them")
    parser.add_argument("--option", metavar="KEY=VALUE", action="append", default=[], help="any option of the backend: " + ", ".join(KEYS))


def _options(arguments: argparse.Namespace, **more: Any) -> Options:
    given: dict[str, Any] = {}
    for item in arguments.option:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"--option {item}: expected KEY=VALUE")
        given[key] = int(value) if key == "threads" and value.isdigit() else value
    options = read_options(options=given)
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
    from .terminal import show_ir

    more = {"target": "cuda"} if arguments.ir == "cuda" else {}
    if arguments.dump_dir:
        more["dump_dir"] = arguments.dump_dir
    if arguments.stop_after:
        more["stop_after"] = arguments.stop_after
    options = _options(arguments, **more)
    texts = []
    sources = _sources(arguments, options)
    for number, (text, hints) in enumerate(sources):
        if options.dump_dir and len(sources) > 1:
            options = options.replace(dump_dir=os.path.join(arguments.dump_dir, str(number)))
        if arguments.ir != "torch" or arguments.file or options.dump_dir:
            text = core().lower(text, arguments.ir, options.to_json(hints), arguments.file or "<expression>")
        texts.append(text)
    whole = "\n".join(texts)
    if arguments.output:
        with _writing(arguments.output) as file:
            file.write(whole)
    else:
        show_ir(whole)


def _sources(arguments: argparse.Namespace, options: Options) -> list[tuple[str, dict[str, int]]]:
    """Texts of IR with hints for their symbols: of a file, or of the graphs that an expression gives."""
    if arguments.file:
        try:
            with open(arguments.file, encoding="utf-8") as file:
                return [(file.read(), {})]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{arguments.file}: {error}") from None
    from .capture import capture

    fn, inputs = _expression(arguments)
    with _gradients(arguments):
        records = capture(fn, inputs, dynamic=True if arguments.dynamic else None, backward=arguments.backward, options=options.replace(target="cpu"))
    return [(record.torch_ir, record.hints) for record in records]


@contextlib.contextmanager
def _writing(path: str) -> Any:
    try:
        with open(path, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _expression(arguments: argparse.Namespace) -> tuple[Any, list[Any]]:
    from .expression import parse_expression

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
    from .measure import compare, time_interleaved
    from .terminal import seconds

    options = _options(arguments)
    fn, inputs = _expression(arguments)
    from .backend import compile_with

    compiled: Any = torch.compile(fn, backend=lambda gm, ex: compile_with(options, gm, ex), dynamic=True if arguments.dynamic else None)
    with _gradients(arguments), unwrapped_errors():
        result = compiled(*inputs)
        print(result)
        print(compare(result, fn, inputs))
        if arguments.bench:
            times = time_interleaved({"eager": lambda: fn(*inputs), "deplo": lambda: compiled(*inputs)})
            for name, value in times.items():
                print(f"{name:6} {seconds(value):>10} a call")
            print(f"deplo is {times['eager'] / times['deplo']:.2f} times as fast as eager")


def _explain(arguments: argparse.Namespace) -> None:
    from .explanation import explain

    options = _options(arguments)
    fn, inputs = _expression(arguments)
    with _gradients(arguments):
        explanation = explain(fn, *inputs, options=options, dynamic=True if arguments.dynamic else None, backward=arguments.backward)
    explanation.show()


def _passes(arguments: argparse.Namespace) -> None:
    from .core import core
    from .terminal import show_table

    passes = core().passes()
    show_table("", ("level", "pass", "what it does"), [(p["level"], p["name"], p["doc"]) for p in passes])


def _ops(arguments: argparse.Namespace) -> None:
    from .core import core

    print("\n".join(core().ops()))


def _cache(arguments: argparse.Namespace) -> None:
    from .cache import cache_folder, clear, entries
    from .terminal import quantity

    folder = cache_folder(read_options())
    if arguments.action == "clear":
        print(f"removed {clear(folder)} entries from {folder}")
        return
    found = entries(folder)
    print(f"{folder}: {len(found)} entries, {quantity(sum(size for _, size in found), 'B')}")


def _env(arguments: argparse.Namespace) -> None:
    from .environment import environment

    for name, value in environment():
        print(f"{name:18} {value}")
