"""Other engines as contestants: ONNX Runtime and OpenVINO, which run one ONNX export of the module, and zentorch, AMD's backend of torch.compile.

`make peers` installs them; they are looked for on the path and in .peers/ in the project's root, which this file alone puts on the path, last.
What a peer cannot do (an operator, a dtype, state that changes) is an Unavailable error with its own words, shown beside the figures.

zentorch is Inductor with passes of its own. Importing it adds operators and their lowerings, and touches no operator, lowering, decomposition or
flag of PyTorch's. Compiling with it leaves its pass in Inductor's configuration, for whatever Inductor compiles next: here that pass and the
freezing of weights, without which zentorch does not pack them, are set while zentorch compiles and put back. It takes the number of threads that
torch has when it packs a weight, and shares torch's OpenMP threads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import logging
import platform
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ONNX = ("onnxruntime", "openvino")
NAMES = (*ONNX, "zentorch")
NEEDS = {"onnxruntime": ("onnxruntime", "onnx", "onnxscript"), "openvino": ("openvino", "onnx", "onnxscript"), "zentorch": ("zentorch", "deprecated")}
# Columns for which a table has no room; files have them.
DETAILS = [text for name in NAMES for text in (f"error {name}", f"{name} %")]
FOLDER = Path(__file__).resolve().parents[1] / ".peers"

Inputs = Sequence[torch.Tensor] | Mapping[str, Any]


class Unavailable(Exception):
    """A peer is not installed, or cannot run this module."""


def installed(package: str) -> bool:
    """Whether the package is on the path or in .peers/."""
    return importlib.util.find_spec(package) is not None or importlib.machinery.PathFinder.find_spec(package, [str(FOLDER)]) is not None


def reach() -> None:
    """Puts .peers/ on the path, last: what is installed elsewhere stays what it is."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def chosen(text: str) -> tuple[str, ...]:
    """The peers of `--peers`: all that there are for this machine where the text is "all", else those named, by commas.

    Raises Unavailable with the remedy where one is unknown or not installed.
    """
    if text == "all":
        names = NAMES if (sys.platform, platform.machine()) == ("linux", "x86_64") else ONNX
    else:
        names = tuple(text.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise Unavailable(f"unknown peer {unknown[0]}: the peers are {', '.join(NAMES)}")
    missing = dict.fromkeys(package for name in names for package in NEEDS[name] if not installed(package))
    if missing:
        raise Unavailable(f"{', '.join(missing)}: not installed. Run `make peers` (requirements-peers.txt and requirements-zentorch.txt)")
    return names


def add_options(parser: argparse.ArgumentParser) -> None:
    """--peers, --json and --plot of run.py and models.py."""
    parser.add_argument("--peers", nargs="?", const="all", help=f"also these, by commas, of {', '.join(NAMES)}; all of them where none is named")
    parser.add_argument("--json", help="all figures, with the machine's description")
    parser.add_argument("--plot", metavar="FILE.svg", help="bars of each contestant's speed")


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Makes args.peers a tuple of names; ends the program with the remedy where something that is asked for is not installed."""
    try:
        args.peers = chosen(args.peers) if args.peers else ()
        if args.plot and not installed("matplotlib"):
            raise Unavailable("matplotlib: not installed. Run `make peers` (requirements-peers.txt)")
    except Unavailable as error:
        parser.error(str(error))


def described(args: argparse.Namespace) -> dict[str, Any]:
    """For the machine's description: the release of each peer, and how the times were taken."""
    reach()
    releases = {name: importlib.metadata.version(name) for name in args.peers}
    return {"peers": releases, "rounds": args.rounds, "seconds of a turn": args.seconds, "pause": args.pause}


def add(
    names: Sequence[str],
    contestants: dict[str, Any],
    row: dict[str, Any],
    module: torch.nn.Module,
    sets: Sequence[Inputs],
    judge: Callable[[torch.Tensor], float],
    threads: int,
) -> None:
    """Adds the peers to the contestants and their errors to the row, or a note why not."""
    model: bytes | None = None
    onnx = [name for name in names if name in ONNX]
    try:
        model = export(module, sets[0]) if onnx else None
    except Unavailable as error:
        row["export note"] = str(error)
        names = [name for name in names if name not in ONNX]
    for name in names:
        try:
            run = zentorch(module, sets) if name == "zentorch" else contestant(name, model or b"", sets, threads, is_bf16(module))
            contestants[name] = run
            row[f"error {name}"] = judge(run(0))
        except Unavailable as error:
            row[f"{name} note"] = str(error)


def is_bf16(module: torch.nn.Module) -> bool:
    return any(p.dtype == torch.bfloat16 for p in module.parameters())


def zentorch(module: torch.nn.Module, sets: Sequence[Inputs]) -> Callable[[int], torch.Tensor]:
    """f(k) runs the module compiled by zentorch on input set k; both under torch.no_grad(), where alone weights are frozen and packed."""
    reach()
    from torch._dynamo.backends.registry import lookup_backend
    from torch._inductor import config

    if torch.is_grad_enabled():
        raise Unavailable("zentorch: gradients are on")
    try:
        import zentorch as package

        if not package._C.is_avx512_supported():
            raise Unavailable("zentorch: no AVX-512, without which it leaves all to Inductor")
        compile_graph = lookup_backend("zentorch")

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            with config.patch(freezing=True, joint_custom_post_pass=config.joint_custom_post_pass):
                return compile_graph(graph, inputs)

        compiled = torch.compile(module, backend=backend)

        def run(k: int) -> torch.Tensor:
            inputs = sets[k]
            return compiled(**inputs) if isinstance(inputs, Mapping) else compiled(*inputs)

        # Dynamo too asks whether weights are frozen, while it traces.
        with config.patch(freezing=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(0)
    except Unavailable:
        raise
    except Exception as error:  # whatever it meets: a peer's limit, not ours
        raise Unavailable(f"zentorch: {_first_line(error)}") from error
    return run


def export(module: torch.nn.Module, inputs: Inputs) -> bytes:
    """The module as an ONNX model for inputs of these sizes; its parameters are constants of the model, as deplo and zentorch see them."""
    keywords = dict(inputs) if isinstance(inputs, Mapping) else {}
    reach()
    positional = () if isinstance(inputs, Mapping) else tuple(inputs)
    others = [name for name, value in keywords.items() if not isinstance(value, torch.Tensor | bool)]
    if others:
        raise Unavailable(f"input {others[0]} is a {type(keywords[others[0]]).__name__}: no ONNX type holds state that the model changes")
    buffer = io.BytesIO()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(module, positional, kwargs=keywords, dynamo=True, optimize=True, verbose=False)
            program.save(buffer)
    except Exception as error:  # whatever the exporter meets: a peer's limit, not ours
        raise Unavailable(f"ONNX export: {_first_line(error)}") from error
    return buffer.getvalue()


def contestant(name: str, model: bytes, sets: Sequence[Inputs], threads: int, bf16: bool = False) -> Callable[[int], torch.Tensor]:
    """f(k) runs the ONNX model on input set k, without copies of inputs where the peer allows it, and returns its first output."""
    feeds = [[value for value in (s.values() if isinstance(s, Mapping) else s) if isinstance(value, torch.Tensor)] for s in sets]
    try:
        return {"onnxruntime": _onnxruntime, "openvino": _openvino}[name](model, feeds, threads, bf16)
    except Exception as error:
        raise Unavailable(f"{name}: {_first_line(error)}") from error


def _onnxruntime(model: bytes, feeds: list[list[torch.Tensor]], threads: int, bf16: bool) -> Callable[[int], torch.Tensor]:
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    types = {
        torch.float32: onnx.TensorProto.FLOAT,
        torch.float64: onnx.TensorProto.DOUBLE,
        torch.bfloat16: onnx.TensorProto.BFLOAT16,
        torch.int64: onnx.TensorProto.INT64,
        torch.bool: onnx.TensorProto.BOOL,
    }
    bindings = []
    for feed in feeds:
        binding = session.io_binding()
        for name, tensor in zip(names, feed, strict=True):
            binding.bind_input(name, "cpu", 0, types[tensor.dtype], list(tensor.shape), tensor.data_ptr())
        for output in session.get_outputs():
            binding.bind_output(output.name, "cpu")
        bindings.append(binding)

    def run(k: int) -> torch.Tensor:
        session.run_with_iobinding(bindings[k])
        return torch.from_dlpack(bindings[k].get_outputs()[0])

    run(0)
    return run


def _openvino(model: bytes, feeds: list[list[torch.Tensor]], threads: int, bf16: bool) -> Callable[[int], torch.Tensor]:
    import openvino

    core = openvino.Core()
    # By default it computes float32 models in bfloat16 where the CPU can: not the same work.
    config = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32", "PERFORMANCE_HINT": "LATENCY"}
    request = core.compile_model(core.read_model(io.BytesIO(model)), "CPU", config).create_infer_request()
    tensors = [[_shared(openvino, tensor) for tensor in feed] for feed in feeds]

    def run(k: int) -> torch.Tensor:
        request.infer(tensors[k], share_inputs=True)
        output = request.get_output_tensor(0)
        if output.element_type == openvino.Type.bf16:
            return torch.from_numpy(output.data.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(output.data)

    run(0)
    return run


def _shared(openvino: Any, tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return openvino.Tensor(tensor.view(torch.int16).numpy(), tensor.shape, openvino.Type.bf16)
    return openvino.Tensor(tensor.numpy(), shared_memory=True)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]
