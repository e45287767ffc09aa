"""What PyTorch's AOTAutogradCache must know of deplo: what beside the graph changes a program, and which graphs it must not keep.

PyTorch's key holds the graph of Dynamo, its inputs' types, autocast, PyTorch's options and version, but neither the backend nor what that reads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch._inductor.config

from .core import core
from .fx_import import home_of
from .inputs import InputInfo
from .options import KEYS, Options
from .sizes import example_of, unguarded
from .targets import find_target, target_of_tensors

# Options that no program holds: one that is restored gets those of its call.
_OF_THE_CALL = ("cache_dir", "threads", "memory_limit", "tier")
# Options whose work a restored program would not do.
_OF_A_COMPILATION = ("dump", "dump_dir", "stop_after", "verify", "time", "guard")
# Inductor's options that PyTorch's key holds and no graph of deplo depends on: its code is made for a number of threads unless the first one is on,
# and users' passes, of which torchao sets one, run in Inductor alone.
_PASSES = ("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass")
_OF_INDUCTOR: dict[str, Any] = {"cpp.dynamic_threads": True, **{name: None for name in _PASSES if hasattr(torch._inductor.config, name)}}
_SEARCHED = (torch.dtype, torch.layout, torch.memory_format)
_ATTRIBUTE = "_deplo_cache_key"
_key_lock = threading.RLock()


def reason_to_bypass(options: Options, gm: torch.fx.GraphModule, shares_memory: bool, packaged: bool = False) -> str:
    """Why this graph is neither looked for in the cache nor kept there; empty: nothing. `shares_memory`: some of its inputs do.

    A package is nobody's but its maker's, so what its operators do need not be in a key.
    """
    target = target_of_tensors(home_of(gm).type) if not options.target else find_target(options.target)
    if target is None or not target.has_disk_cache:
        return "its target keeps no machine code"
    if target.device:
        return "its kernels run on a device"
    if options.cache_dir == "off":
        return "the option cache_dir is off"
    for name in _OF_A_COMPILATION:
        if getattr(options, name) != KEYS[name].default:
            return f"the option {name} asks for a compilation"
    if options.tune in ("fast", "full", "background"):
        return "the option tune asks for a search"
    if shares_memory:
        return "inputs share memory: where they lie is in the program, but not in PyTorch's key"
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.op == "get_attr" and isinstance(_attribute(module, str(node.target)), torch.Tensor):
                return "the graph holds a tensor, whose values are not in PyTorch's key"
            if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) and not packaged and not _is_pytorchs(node.target):
                return f"what {node.target} does is not in PyTorch's key"
    return ""


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _is_pytorchs(target: Any) -> bool:
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    return str(packet).partition(".")[0] in ("aten", "prims", "prim")


def key_of(options: Options, inputs: Sequence[InputInfo], example_inputs: Sequence[Any], training: bool, packaged: bool) -> str:
    """A digest of what beside the graph changes what deplo makes of it. `packaged`: for aot_compile, whose entries hold machine code."""
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    given = [*example_inputs, *(size for x in tensors for size in x.shape)]
    about = {
        "deplo": _identity(),
        "options": {name: value for name, value in vars(options).items() if name not in _OF_THE_CALL},
        "machine": core().target(options.to_json()),
        "inputs": [(info.name, info.kind, info.is_static) for info in inputs],
        "training": training,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "sizes": [_magnitude(size) for size in given if isinstance(size, torch.SymInt)],
        "attention": [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")],
        "packaged": packaged,
        "tuned": _state_of_winners(options),
        "unguarded": unguarded.get(),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def _state_of_winners(options: Options) -> list[int] | None:
    """Changes with the schedules that a compilation may find, which are those of a number of threads."""
    folder = options.cache_folder()
    if options.tune == "off" or not folder:
        return None
    try:
        return [os.stat(os.path.join(folder, "tuned")).st_mtime_ns, options.threads or torch.get_num_threads()]
    except OSError:
        return None


def _magnitude(size: torch.SymInt) -> int:
    """Sizes of the first call reach schedules: graphs share a program if theirs have the same number of bits."""
    return (example_of(size) or 0).bit_length()


@functools.cache
def _identity() -> list[str]:
    """Which deplo this is: its version, its extension, its Python files."""
    from . import __version__

    folder = os.path.dirname(os.path.abspath(__file__))
    digest = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), "rb") as file:
                digest.update(file.read())
    extension = core().build_id()
    if not extension:
        about = os.stat(core().__file__)
        extension = f"{core().__file__} {about.st_size} {about.st_mtime_ns}"
    return [__version__, extension, digest.hexdigest()]


@contextlib.contextmanager
def keyed(gm: torch.fx.GraphModule, key: str) -> Iterator[None]:
    """While AOTAutograd looks into its cache inside, `key` is a part of the graph's; without one, no other graph has the same."""
    setattr(gm, _ATTRIBUTE, f"deplo {key or uuid.uuid4().hex}")
    try:
        with _brief_key(), torch._inductor.config.patch(_OF_INDUCTOR):
            yield
    finally:
        delattr(gm, _ATTRIBUTE)


@contextlib.contextmanager
def _brief_key() -> Iterator[None]:
    """Has PyTorch make its key in a third of the time; a first call that the cache answers does little else.

    Its key names the passes of Inductor's code generators, which no graph of deplo goes through: importing them all takes as long as the rest. (They
    do enter the key where another backend has imported them before.) It holds each file of PyTorch, read in every process: names, sizes and times
    stand for them here. It holds the way to each parameter, spelled out from the model down as some twenty objects: its name says as much. And pickle
    looks through all modules of the process for the home of each dtype.
    """
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import codecache

    codecache_: Any = codecache
    pickler: Any = autograd_cache.AOTAutogradCachePickler  # without a reducer before torch 2.13
    with _key_lock:
        ours = threading.get_ident()
        register, torch_key = codecache_.init_backend_registration, codecache_.torch_key
        reduce: Any = getattr(pickler, "reducer_override", None)

        def reduce_to_name(self: Any, value: Any) -> Any:
            if threading.get_ident() == ours:
                if isinstance(value, torch._guards.Source):
                    return str, (f"{type(value).__name__} {value.name}",)
                if isinstance(value, _SEARCHED):
                    return str, (str(value),)
            return reduce(self, value)

        codecache_.init_backend_registration = lambda: None if threading.get_ident() == ours else register()
        codecache_.torch_key = lambda: files_of_torch() if threading.get_ident() == ours else torch_key()
        if reduce is not None:
            pickler.reducer_override = reduce_to_name
        try:
            yield
        finally:
            codecache_.init_backend_registration, codecache_.torch_key = register, torch_key
            if reduce is not None:
                pickler.reducer_override = reduce


@functools.cache
def files_of_torch() -> bytes:
    """A digest of names, sizes and times of all Python files of PyTorch, and of its version."""
    found: list[tuple[str, int, int]] = []
    folders = [os.path.dirname(torch.__file__)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
        if all(entry.name != "__init__.py" for entry in inside):
            continue
        folders += [entry.path for entry in inside if entry.is_dir() and entry.name.isidentifier()]
        for entry in inside:
            if entry.name.endswith((".py", ".so")):
                about = entry.stat()
                found.append((entry.path, about.st_size, about.st_mtime_ns))
    return hashlib.sha256(repr((torch.__version__, torch.version.git_version, found)).encode()).digest()
