"""`deplo.export`: a model compiled ahead of time into one file, which `deplo.load` and the C++ runtime run. docs/packages.md describes the file."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import math
import os
import struct
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import torch

from .backend import check_library_calls, check_options, compile_text
from .core import core
from .decompositions import decompositions
from .eager_calls import calls_as_in_eager_mode
from .errors import UnsupportedError, UserError
from .flex_attention import write_out_attention
from .fx_import import DTYPES, import_graph
from .fx_nodes import storage_of
from .imported import Imported
from .inputs import InputInfo
from .options import Options, read_options
from .subgraphs import inline_regions

MAGIC = b"\x89deplo package\r\n"
HEADER = struct.Struct(
    "<16sIIQQQ64s"
)  # magic, format, reserved, bytes of the file, offset and bytes of the manifest, its SHA-256; that of all this follows
PAGE = 4096
SETS = ("sse", "avx2", "avx512", "native")  # of CPU features, from the least


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    path: str | os.PathLike[str],
    dynamic_shapes: Any = None,
    features: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compiles a model for inference and writes it to `path` as one file.

    A module is captured by torch.export with `args`, `kwargs` and `dynamic_shapes`; an ExportedProgram has these. `features` are the sets of CPU
    features that the file has code for, of `sse`, `avx2`, `avx512` and `native` (all of this CPU); by default each that this CPU has. Weights are
    packed for each set. `options` are those of the backend. The file replaces one that is there when it's complete. Raises UserError for bad
    arguments, UnsupportedError for what deplo does not compile in full or a package cannot say, and torch.export's own errors.
    """
    path = os.fspath(path)
    checked = read_options(None, options)
    if checked.target not in ("", "cpu"):
        raise UserError(f"option 'target' is {checked.target!r}: packages hold programs for CPUs")
    check_options(checked)
    with torch.no_grad():
        program = _exported(model, args, kwargs, dynamic_shapes)
        graph = _Graph(program)
        with _replaced(path) as file:
            writer = _Writer(file)
            about = _Package(graph, writer, checked)
            for name in _sets_of(features, checked):
                about.add_variant(name)
            writer.finish(about.manifest())


def _exported(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any) -> torch.export.ExportedProgram:
    if isinstance(model, torch.export.ExportedProgram):
        if args or kwargs or dynamic_shapes is not None:
            raise UserError("an ExportedProgram has its arguments and dynamic shapes already: pass none")
        return model
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"export takes a torch.nn.Module or an ExportedProgram, not {type(model).__name__}")
    if not isinstance(args, tuple | list):
        raise UserError(f"args is a {type(args).__name__}, expected a tuple of example arguments")
    return torch.export.export(model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes)


def _features_of(name: str, options: Options) -> list[str]:
    found: list[str] = json.loads(core().env(options.replace(features=name).to_json()))["cpu features"]
    return sorted(found)


def _sets_of(features: Sequence[str] | None, options: Options) -> list[str]:
    """The sets to compile for, the most capable first. Those that were not asked for by name are left out where the CPU has no more than the last."""
    if features is not None:
        if isinstance(features, str) or not features:
            raise UserError(f"features is {features!r}, expected a list of {', '.join(SETS)}")
        for name in features:
            if name not in SETS:
                raise UserError(f"features has {name!r}, expected some of {', '.join(SETS)}")
            _features_of(name, options)  # refuses what this CPU lacks: weights are packed by the code that is made for it
        return [name for name in reversed(SETS) if name in features]
    found: dict[str, list[str]] = {}
    for name in SETS:
        with contextlib.suppress(UserError):
            if (has := _features_of(name, options)) not in found.values():
                found[name] = has
    return list(reversed(found))


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` if nothing is raised: who has mapped the one before keeps that."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor from its first to its last element, as bytes."""
    count = 0 if tensor.numel() == 0 else 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((count,), (1,)).view(torch.uint8)


class _Writer:
    """The sections of a file, one after the other; the manifest comes last."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.at = 0
        self._write(bytes(HEADER.size + 64))

    def _write(self, content: Any) -> None:
        self.at += self.file.write(content)

    def add(self, content: Any, alignment: int = PAGE) -> dict[str, Any]:
        """Writes bytes; where they lie, and their checksum."""
        self._write(bytes(-self.at % alignment))
        section = {"offset": self.at, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        self._write(content)
        return section

    def add_tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        span = _span(tensor)
        content = memoryview((ctypes.c_char * span.numel()).from_address(span.data_ptr())) if span.numel() else b""
        section = self.add(content, PAGE if span.numel() >= PAGE else 64)
        return {**section, "quick": core().quick_checksum(span)}

    def finish(self, manifest: dict[str, Any]) -> None:
        text = json.dumps(manifest, indent=1).encode()
        place = self.add(text)
        header = HEADER.pack(MAGIC, core().package_format(), 0, self.at, place["offset"], len(text), place["sha256"].encode())
        self.file.seek(0)
        self.file.write(header + hashlib.sha256(header).hexdigest().encode())


def _storage(value: Any) -> int | None:
    return storage_of(value) if isinstance(value, torch.Tensor) and value.layout == torch.strided else None


def _decompositions() -> dict[Any, Any]:
    """What a backend of torch.compile gets: deplo's own, and what ATen itself breaks down into other calls, which exports leave whole."""
    all_of_export: Any = torch.export.default_decompositions()
    # Those that Python alone breaks down need no formula here, and PyTorch may have mislaid what it does with them after another export.
    key = "CompositeImplicitAutograd"
    composite = {op: formula for op, formula in all_of_export.items() if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)}
    bilinear, nearest = torch.ops.aten.upsample_bilinear2d, torch.ops.aten.upsample_nearest2d
    # These two PyTorch keeps whole even in that table.
    composite[bilinear.vec] = lambda x, size, align, scales: bilinear.default(x, _resized(x, size, scales), align, *(scales or ()))
    composite[nearest.vec] = lambda x, size, scales: nearest.default(x, _resized(x, size, scales), *(scales or ()))
    return {**composite, **decompositions(False)}


def _resized(image: torch.Tensor, size: Sequence[Any] | None, scales: Sequence[float] | None) -> list[Any]:
    """Height and width of an interpolated image."""
    rounded: Any = torch.sym_int
    return list(size) if size is not None else [rounded(extent * scale) for extent, scale in zip(image.shape[2:], scales or (), strict=True)]


class _Graph:
    """The graph of an ExportedProgram as deplo compiles it: it writes its buffers, and returns what the user sees, in memory of its own."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        with calls_as_in_eager_mode(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)  # of PyTorch, to itself
            self.program = program.run_decompositions(_decompositions())
        self.gm: torch.fx.GraphModule = self.program.graph_module
        inline_regions(self.gm)
        write_out_attention(self.gm, training=False)
        self.placeholders = self.gm.graph.find_nodes(op="placeholder")
        self.specs = self.program.graph_signature.input_specs
        self.written: set[int] = set()  # places of inputs
        self._returns_what_users_see()
        self.infos = [self._info(at, node.name) for at, node in enumerate(self.placeholders)]
        for at, node in enumerate(self.placeholders):
            node.meta["desc"] = torch._functorch._aot_autograd.descriptors.PlainAOTInput(at)
        self._widen_ranges()
        self.imported = import_graph(self.gm, "inference", self.infos, splits=False)
        if self.imported.derived or self.imported.offsets or self.imported.nonnegative:
            raise UnsupportedError("a package cannot say a size that floats round to, nor a view by strides of an input's storage")

    def _widen_ranges(self) -> None:
        """Lets symbols have all values that the exported program takes: the tracer takes no size for 0 or 1, whatever it exports."""
        for node in self.placeholders:
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    known = size.node.shape_env.var_to_range
                    for symbol, values in self.program.range_constraints.items():
                        if symbol in known:
                            known[symbol] = values

    def value(self, place: int) -> torch.Tensor:
        """The tensor of an input that is not the user's."""
        target = self.specs[place].target
        found = self.program.state_dict.get(target) if self.specs[place].persistent is not False else None
        found = self.program.constants.get(target) if found is None else found
        if type(found) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedError(f"{target} is a {type(found).__name__}, not a tensor")
        tensor: torch.Tensor = found.detach()
        return tensor

    def is_users(self, place: int) -> bool:
        return bool(self.specs[place].kind.name == "USER_INPUT")

    def _info(self, place: int, name: str) -> InputInfo:
        spec = self.specs[place]
        kind = {"USER_INPUT": "user", "PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}.get(spec.kind.name)
        if kind is None:
            raise UnsupportedError(f"the model has the input {spec.target}, a {spec.kind.name.lower()}, which a package cannot hold")
        return InputInfo(name if kind == "user" else str(spec.target), kind, kind != "user" and place not in self.written)

    def _returns_what_users_see(self) -> None:
        """Writes buffers and inputs that the model writes, leaves the other outputs, and copies those that share memory."""
        (output,) = self.gm.graph.find_nodes(op="output")
        of_inputs = {storage for node in self.placeholders if (storage := _storage(node.meta.get("val"))) is not None}
        names = {node.name: at for at, node in enumerate(self.placeholders)}
        targets = {spec.target: at for at, spec in enumerate(self.specs) if spec.target is not None}
        returned: list[Any] = []
        taken: dict[int, Any] = {}
        with self.gm.graph.inserting_before(output):
            for spec, item in zip(self.program.graph_signature.output_specs, output.args[0], strict=True):
                storage = _storage(item.meta.get("val")) if isinstance(item, torch.fx.Node) else None
                kind = spec.kind.name
                if kind in ("BUFFER_MUTATION", "USER_INPUT_MUTATION", "PARAMETER_MUTATION"):
                    place = names[spec.target] if kind == "USER_INPUT_MUTATION" else targets[spec.target]
                    self.written.add(place)
                    returned.append((place, self._copied(item) if storage in of_inputs else item))
                elif kind != "USER_OUTPUT":
                    raise UnsupportedError(f"the model returns a {kind.lower()}, which a package cannot say")
                elif storage is None or (item in self.placeholders and self.is_users(self.placeholders.index(item))):
                    returned.append(item)
                else:
                    shares = storage in of_inputs or taken.setdefault(storage, item) is not item
                    returned.append(self._copied(item) if shares else item)
            for place, value in [entry for entry in returned if isinstance(entry, tuple)]:
                copy = self.gm.graph.call_function(torch.ops.aten.copy_.default, (self.placeholders[place], value))
                copy.meta["val"] = self.placeholders[place].meta["val"]
        output.args = (tuple(entry for entry in returned if not isinstance(entry, tuple)),)
        self.gm.recompile()

    def _copied(self, node: torch.fx.Node) -> torch.fx.Node:
        copy = self.gm.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = torch.ops.aten.clone.default(node.meta["val"])
        return copy


@dataclasses.dataclass
class _Package:
    """What the manifest says, gathered while sections are written."""

    graph: _Graph
    writer: _Writer
    options: Options

    def __post_init__(self) -> None:
        self.tensors: list[dict[str, Any]] = []
        self._tensor_places: dict[Any, int] = {}
        self.variants: list[dict[str, Any]] = []
        self.inputs: list[dict[str, Any]] = []
        self._input_places: dict[int, int] = {}  # by place among the graph's inputs
        self.leaves = [self._leaf(place) for place in range(len(self.graph.placeholders)) if self.graph.is_users(place)]

    def _leaf(self, place: int) -> dict[str, Any]:
        """What a call gives at one place of its arguments."""
        node = self.graph.placeholders[place]
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor | torch.SymInt):
            if place not in self.graph.imported.arguments:
                raise UnsupportedError(f"the input {node.name} is {value}, which follows from other inputs")
            about: dict[str, Any] = {"name": node.name, "is_tensor": isinstance(value, torch.Tensor)}
            if isinstance(value, torch.Tensor):
                about |= {"dtype": DTYPES[value.dtype], "sizes": [str(size) for size in value.shape]}
                about["is_written"] = place in self.graph.written
            else:
                about["value"] = str(value)
            self._input_places[place] = len(self.inputs)
            self.inputs.append(about)
            return {"input": self._input_places[place]}
        about_it = self.graph.specs[place].arg
        given = about_it.value if value is None and isinstance(about_it, torch.export.graph_signature.ConstantArgument) else value
        return {"constant": _plain(given, f"the input {node.name}")}

    def add_variant(self, name: str) -> None:
        options = self.options.replace(features=name, strict=True)
        imported = self.graph.imported
        program = compile_text(imported, options)
        if options.allow_library is not None:
            check_library_calls(program, options.allow_library)
        parts = core().package_parts(program, self._holding(imported, program))
        packed: list[torch.Tensor] = []
        if parts["packing"] is not None:
            packed = parts["packing"].run([self._given(imported, at) for at in parts["packs_from"]])
        arguments = []
        for is_packed, at in parts["arguments"]:
            place = imported.arguments[at] if not is_packed and at < len(imported.arguments) else None
            if is_packed:
                arguments.append({"tensor": self._add_tensor(f"packed {at}", packed[at], False, by_content=True)})
            elif place is not None and self.graph.is_users(place):
                arguments.append({"input": self._input_places[place]})
            else:
                label = self.graph.infos[place].name if place is not None else f"constant {at}"
                arguments.append({"tensor": self._add_tensor(label, self._given(imported, at), place in self.graph.written)})
        code = parts["code"]
        self.variants.append(
            {
                "name": name,
                "features": _features_of(name, self.options),
                "program": self.writer.add(parts["program"].encode(), 64),
                "code": self.writer.add(code),
                "text_bytes": parts["text_bytes"],
                "entries": parts["entries"],
                "externals": parts["externals"],
                "arguments": arguments,
                "library": sorted(set(parts["library"])),
            }
        )

    def _holding(self, imported: Imported, program: Any) -> set[str]:
        """The facts that hold of the model's constants, which nobody writes."""
        holding = set()
        for symbol, at, least, most in core().package_facts(program):
            elements = self._given(imported, at)
            if elements.numel() and least <= int(elements.min()) and int(elements.max()) <= most:
                holding.add(symbol)
        return holding

    def _given(self, imported: Imported, at: int) -> torch.Tensor:
        """The program's input number `at`, which is not the user's."""
        known = len(imported.arguments)
        return self.graph.value(imported.arguments[at]) if at < known else imported.constants[at - known].detach()

    def _add_tensor(self, name: str, tensor: torch.Tensor, is_written: bool, by_content: bool = False) -> int:
        """The place of a tensor in the file; what has the same bytes and type lies there once, unless calls write it."""
        layout = (tensor.dtype, tuple(tensor.shape), tensor.stride())
        if by_content:
            span = _span(tensor)
            key: Any = (layout, hashlib.sha256(memoryview((ctypes.c_char * span.numel()).from_address(span.data_ptr()))).digest())
        else:
            key = (layout, name if is_written else "", tensor.data_ptr())
        if key not in self._tensor_places:
            self._tensor_places[key] = len(self.tensors)
            about = {"name": name, "dtype": DTYPES[tensor.dtype], "sizes": list(tensor.shape), "strides": list(tensor.stride())}
            self.tensors.append({**about, "is_written": is_written, **self.writer.add_tensor(tensor)})
        return self._tensor_places[key]

    def _outputs(self) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = []
        for output in self.graph.imported.outputs:
            if output.kind == "result":
                outputs.append({"kind": "result", "index": output.index})
            elif output.kind == "input" and output.index in self._input_places:
                outputs.append({"kind": "input", "index": self._input_places[output.index]})
            elif output.kind in ("constant", "input"):
                value = output.value if output.kind == "constant" else self.graph.placeholders[output.index].meta.get("val")
                outputs.append({"kind": "constant", "value": _plain(value, "an output")})
            else:
                raise UnsupportedError("an output shares memory with another one in a way that a package cannot say")
        return outputs

    def manifest(self) -> dict[str, Any]:
        from . import __version__

        spec = self.graph.program.call_spec
        ranges = self.graph.program.range_constraints
        return {
            "deplo": __version__,
            "torch": torch.__version__,
            "machine": "x86_64 linux",
            "inputs": self.inputs,
            "outputs": self._outputs(),
            "symbols": {str(symbol): [_bound(values.lower), _bound(values.upper)] for symbol, values in ranges.items()},
            "tensors": self.tensors,
            "variants": self.variants,
            "python": {"in_spec": _spec_text(spec.in_spec), "out_spec": _spec_text(spec.out_spec), "leaves": self.leaves},
        }


def _spec_text(spec: torch.utils._pytree.TreeSpec) -> str:
    """A structure as JSON, which names types and holds no code."""
    try:
        return torch.utils._pytree.treespec_dumps(spec)
    except NotImplementedError as error:
        raise UnsupportedError(f"arguments or outputs have a structure without a name: {error}") from None


def _bound(value: Any) -> int | None:
    """A number of a range; none where it's infinite."""
    return int(value) if getattr(value, "is_Integer", False) else None


def _plain(value: Any, what: str) -> Any:
    """A value that JSON holds as it is."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise UnsupportedError(f"{what} is {value!r}, which a package cannot hold")
