"""The options of `torch.compile(..., backend="deplo", options={...})` and the DEPLO_* variables: checked and read here, nowhere else."""

from __future__ import annotations

import contextvars
import dataclasses
import difflib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import UserError

_MODES: dict[str | None, dict[str, Any]] = {
    None: {},
    "default": {},
    "reduce-overhead": {"replay": True},
    "lite": {},
    "max-autotune": {"tune": "full", "replay": True},
    "max-autotune-no-cudagraphs": {"tune": "full"},
}
# What stands for defaults while a framework that knows better compiles or calls: modes, variables and options win.
defaults: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("deplo_defaults", default=None)
_LEAST_ARCH = 75  # NVRTC 13 compiles for none before
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def _flag_of_text(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False, "": False}
    if text.lower() not in words:
        raise ValueError("1 or 0, true or false, yes or no, on or off")
    return words[text.lower()]


def _number_of_text(text: str) -> int:
    return _threads(int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else text)


def _nearest(value: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(value), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _one_of(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError("one of " + ", ".join(map(repr, choices)) + _nearest(value, choices))
        return str(value)

    return check


def _target(value: Any) -> str:
    from .targets import targets

    return "" if value == "" else _one_of(*(target.name for target in targets()))(value)


def _text(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError("a string")
    text = os.fspath(value)
    if not isinstance(text, str) or "\0" in text:
        raise ValueError("a string without a NUL character")
    return text


def _arch(value: Any) -> str:
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", value, re.ASCII) if isinstance(value, str) else None
    if match is None or int(match[1]) < _LEAST_ARCH:
        raise ValueError(f"an architecture from 'sm_{_LEAST_ARCH}' on, such as 'sm_80'")
    return match[0]


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in re.split(r"[,\s]+", value) if part]
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(name, str) and "\0" not in name for name in value):
        raise ValueError("a list of names, or one string with commas")
    return tuple(sorted(value)) if isinstance(value, (set, frozenset)) else tuple(value)


def _threads(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 4096:
        raise ValueError("a number from 0 (as torch.get_num_threads()) to 4096")
    return value


def _bytes(value: Any) -> int:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,19})\s*([KMGT]?)(?:i?B)?", value.strip(), re.ASCII | re.IGNORECASE)):
        value = int(match[1]) * _UNITS[match[2].upper()]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError("a number of bytes, as 1073741824 or '1G' (0: no limit)")
    return value


def _schedules(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        value = {"": value}
    if not isinstance(value, Mapping) or not all(isinstance(text, str) and "\0" not in text for pair in value.items() for text in pair):
        raise ValueError("schedule text, or a dict from kernel name to schedule text")
    return dict(value)


@dataclasses.dataclass(frozen=True)
class Key:
    """One option: how it is checked, its default, its variable, and a line of help."""

    check: Callable[[Any], Any]
    default: Any
    variable: str
    help: str

    def read(self, text: str) -> Any:
        """The value of a variable or of the command line's --option. Raises ValueError with what is expected."""
        if self.check is _flag:
            return _flag_of_text(text)
        return _number_of_text(text) if self.check is _threads else self.check(text)


KEYS: dict[str, Key] = {
    "target": Key(_target, "", "", "what the kernels are made for, and where they run; empty: this machine's processors"),
    "strict": Key(_flag, False, "DEPLO_STRICT", "raise instead of running a graph in eager mode when deplo cannot compile it"),
    "allow_library": Key(_names, None, "", "with strict: the only ATen calls that programs may keep, as aten.sort; by default any"),
    "threads": Key(_threads, 0, "", "threads of a program; 0 follows torch.get_num_threads()"),
    "disable": Key(_names, (), "DEPLO_DISABLE", "names of passes to skip"),
    "dump": Key(_text, "", "DEPLO_DUMP", "print the IR after this level or pass, or 'all'; cuda with that target: the text of the kernels"),
    "dump_dir": Key(_text, "", "DEPLO_DUMP_DIR", "write one numbered file a pass into this folder"),
    "stop_after": Key(_text, "", "DEPLO_STOP_AFTER", "stop after this level or pass; a program compiles to its end, and its dumps stop there"),
    "verify": Key(_flag, False, "DEPLO_VERIFY", "check the IR after every pass, and that its text reads back (off: at level boundaries only)"),
    "time": Key(_flag, False, "DEPLO_TIME", "print the time that each pass takes"),
    "debug": Key(_flag, False, "DEPLO_DEBUG", "name kernels for perf (/tmp/perf-PID.map) and for gdb"),
    "guard": Key(_flag, False, "DEPLO_GUARD", "run each kernel on copies of its buffers between pages that it must not touch (slow; of the CPU)"),
    "schedule": Key(_schedules, {}, "", "schedules by hand: lines as --ir tile prints them, or a dict from kernel name to schedule"),
    "cache_dir": Key(_text, "", "DEPLO_CACHE_DIR", "folder of compiled kernels; empty: the user's cache folder; off: none on disk"),
    "arch": Key(_arch, "sm_80", "", "the GPU that CUDA text is for"),
    "cuda_driver": Key(_text, "", "DEPLO_CUDA_DRIVER", "path of the CUDA driver's library; empty: libcuda.so.1 as the system finds it"),
    "nvrtc": Key(_text, "", "DEPLO_NVRTC", "path of NVRTC; empty: of the package nvidia-cuda-nvrtc, else as the system finds it"),
    "replay": Key(
        _flag, False, "DEPLO_REPLAY", "record what a call starts on a device, and repeat it as a whole (CUDA graphs); mode reduce-overhead"
    ),
    "features": Key(_text, "", "DEPLO_FEATURES", "use no more CPU features than these, as avx2"),
    "weights": Key(
        _one_of("auto", "pack", "own", "original"),
        "auto",
        "DEPLO_WEIGHTS",
        "original: kernels read the model's weights; pack: layers keep copies in the order in which they are read; auto: where that is much faster; "
        "own: the same, and what a copy stands for leaves memory until somebody reads it",
    ),
    "weight_checks": Key(
        _one_of("sampled", "versions"),
        "sampled",
        "DEPLO_WEIGHT_CHECKS",
        "sampled: a call also compares some elements of packed weights, for writes through .data; versions: PyTorch's counters alone tell of writes",
    ),
    "memory_limit": Key(_bytes, 0, "", "largest arena and packed weights in bytes, as '4G'; 0: no limit"),
    "tier": Key(_one_of("now", "background"), "now", "", "background: calls run in eager mode while a graph compiles in another thread"),
    "tune": Key(
        _one_of("auto", "off", "fast", "full", "background"),
        "auto",
        "DEPLO_TUNE",
        "fast, full: search schedules by measuring; background: while calls are served; auto: use what was found before; off: heuristics only",
    ),
}

OF_PYTHON = ("allow_library", "tier")  # what the backend judges, or does, itself
OF_GRAPHS = ("hints", "training", "device", "deterministic")  # what the core reads beside options: of the graph, or of PyTorch's state

# Variables of the build and the tests.
_OTHER_VARIABLES = ("DEPLO_BLESS", "DEPLO_BUILD", "DEPLO_FAKE_CUDA", "DEPLO_MUTANTS", "DEPLO_PIN", "DEPLO_SKIP_BUILD", "DEPLO_VLLM")
_named: set[str] = set()


class Options:
    """Checked options. Attributes are the names in KEYS, and options of targets that were given; two equal sets of options compare equal."""

    target: str
    strict: bool
    allow_library: tuple[str, ...] | None
    threads: int
    disable: tuple[str, ...]
    dump: str
    dump_dir: str
    stop_after: str
    verify: bool
    time: bool
    debug: bool
    guard: bool
    schedule: dict[str, str]
    cache_dir: str
    arch: str
    cuda_driver: str
    nvrtc: str
    replay: bool
    features: str
    weights: str
    weight_checks: str
    memory_limit: int
    tier: str
    tune: str

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update({name: key.default for name, key in KEYS.items()} | dict(values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and vars(self) == vars(other)

    def __repr__(self) -> str:
        changed = [f"{name}={value!r}" for name, value in vars(self).items() if name not in KEYS or value != KEYS[name].default]
        return f"Options({', '.join(changed)})"

    def replace(self, **changes: Any) -> Options:
        """A copy with some options changed; the new values are checked like given ones."""
        return Options({**vars(self), **{name: _checked(name, value, f"option {name!r}") for name, value in changes.items()}})

    def origin(self, name: str) -> str:
        """What a message calls an option: by its variable where the value is that of the environment."""
        key = KEYS[name]
        text = os.environ.get(key.variable) if key.variable else None
        return key.variable if text is not None and key.read(text) == getattr(self, name) else f"option {name!r}"

    def to_json(self, hints: Mapping[str, int] | None = None, training: bool = False, device: int = -1, weights: str = "") -> str:
        """What the core reads. For costs only, `hints` are example values of symbols, and parameters change between calls if it is `training`.

        `device` is the ordinal of the target's device that the tensors are on; -1: they are on the CPU. `weights` stands in the option's place.
        What it says of deterministic algorithms is PyTorch's switch, as it is now.
        """
        import torch

        from .targets import find_target, packaged

        values: dict[str, Any] = {**vars(self), "cache_dir": self.cache_folder(), "disable": list(self.disable)}
        values |= {"hints": dict(hints or {}), "training": training, "device": device, "weights": weights or self.weights}
        values["deterministic"] = torch.are_deterministic_algorithms_enabled()
        for name, places in find_target(self.target).packages.items():
            if places and not values.get(name):
                values[name] = packaged(places)
        for name in OF_PYTHON:
            del values[name]
        return json.dumps(values, sort_keys=True)

    def cache_folder(self) -> str:
        """Where compiled kernels are kept; empty for nowhere."""
        if self.cache_dir == "off":
            return ""
        if self.cache_dir:
            return os.path.abspath(os.path.expanduser(self.cache_dir))
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return os.path.join(base, "deplo")


def pin_phase() -> str:
    """DEPLO_PIN: what processes of torchrun pin themselves for when they import torch (`deplo.topology.PHASES`); empty: they do not."""
    return os.environ.get("DEPLO_PIN", "")


def _option_of_target(name: str) -> Key | None:
    """One that a target declares and KEYS does not have."""
    from .targets import targets

    return Key(_text, "", "", "") if any(name in target.packages for target in targets()) else None


def _checked(name: str, value: Any, where: str, text: bool = False) -> Any:
    """`value` as option `name` has it; `text`: it's from a variable or the command line."""
    key = KEYS.get(name) or _option_of_target(name)
    if name == "guards":
        raise UserError("'guards' is no option: torch.compile itself decides how calls reach a backend. Use deplo.jit(fn, guards=\"inputs\").")
    if key is None:
        raise UserError(f"unknown option {name!r}{_nearest(name, KEYS) or '.'} Known options: {', '.join(sorted(KEYS))}.")
    try:
        return key.read(value) if text else key.check(value)
    except ValueError as error:
        raise UserError(f"{where} is {value!r}, expected {error}") from None


def read_options(mode: str | None = None, options: Mapping[str, Any] | None = None, texts: Mapping[str, str] | None = None) -> Options:
    """Defaults (and `defaults`), then `mode`, then the DEPLO_* variables, then `options`, then `texts` (of the command line), each checked.

    Raises UserError for an unknown key (with a suggestion and the known ones), a value out of range, or an unknown mode.
    """
    if mode not in _MODES:
        known = [m for m in _MODES if m]
        raise UserError(f"unknown mode {mode!r}{_nearest(mode, known) or '.'} Known modes: {', '.join(map(repr, known))}.")
    _name_unknown_variables()
    values: dict[str, Any] = {**(defaults.get() or {}), **_MODES[mode]}
    for name, key in KEYS.items():
        text = os.environ.get(key.variable) if key.variable else None
        if text is not None:
            values[name] = _checked(name, text, key.variable, text=True)
    if not isinstance(options, Mapping | None):
        raise UserError(f"options is {options!r}, expected a dict from option to value")
    for name, value in (options or {}).items():
        values[name] = _checked(name, value, f"option {name!r}")
    for name, text in (texts or {}).items():
        values[name] = _checked(name, text, f"--option {name}", text=True)
    return Options(values)


def _name_unknown_variables() -> None:
    """One warning for each DEPLO_* variable that nothing reads: a misspelt one would go unseen."""
    known = [key.variable for key in KEYS.values() if key.variable]
    for name in sorted(os.environ):
        if not name.startswith("DEPLO_") or name in known or name in _OTHER_VARIABLES or name in _named:
            continue
        _named.add(name)
        close = difflib.get_close_matches(name.removeprefix("DEPLO_"), [other.removeprefix("DEPLO_") for other in known], n=1)
        hint = f"; did you mean DEPLO_{close[0]}?" if close else f". Known variables: {', '.join(sorted(known))}."
        warnings.warn(f"nothing reads the variable {name}{hint}", stacklevel=3)
