"""ONNX Runtime and OpenVINO as contestants: one ONNX export of the module runs in both. `make peers` installs them.

What a peer cannot do (an operator, a dtype, state that changes) is an Unavailable error with its own words, shown beside the figures.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

NAMES = ("onnxruntime", "openvino")


class Unavailable(Exception):
    """A peer is not installed, or cannot run this module."""


def require() -> None:
    """Raises Unavailable with the remedy unless all peers are installed."""
    missing = [name for name in (*NAMES, "onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)}: not installed. Run `make peers` (or pip install -r requirements-peers.txt)")


def export(module: torch.nn.Module, inputs: Sequence[torch.Tensor] | Mapping[str, Any]) -> bytes:
    """The module as an ONNX model for inputs of these sizes; its parameters are constants of the model, as deplo and Inductor see them."""
    keywords = dict(inputs) if isinstance(inputs, Mapping) else {}
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


def contestant(
    name: str, model: bytes, sets: Sequence[Sequence[torch.Tensor] | Mapping[str, Any]], threads: int, bf16: bool = False
) -> Callable[[int], torch.Tensor]:
    """f(k) runs the model on input set k, without copies of inputs where the peer allows it, and returns its first output."""
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
