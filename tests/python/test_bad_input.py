"""Bad input: text that is wrong, disks that are full, tensors that Torch IR cannot say. A clear error or eager's result, never a crash."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import warnings

import pytest
import torch
from engines import needs_core
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deplo
from deplo.capture import capture
from deplo.cli import main
from deplo.errors import FallbackWarning, UnsupportedError, UserError
from deplo.expression import parse_expression
from deplo.options import read_options

_C = pytest.importorskip("deplo._C")

LEVELS = ("torch", "tensor", "loop", "tile", "kernel")
EXPRESSIONS = (
    "torch.softmax(r(4, 8) @ r(8, 16), -1).relu() * r(4, 16).exp()",
    "F.conv2d(r(1, 3, 8, 8), r(4, 3, 3, 3), padding=1).amax((2, 3))",
    "r(8, 5).cumsum(0).t().contiguous()[1:, ::2]",
    "torch.zeros(4, 6).index_add(0, torch.arange(3), r(3, 6)) + torch.arange(6) // 2",
    "F.scaled_dot_product_attention(r(1, 2, 9, 8), r(1, 2, 9, 8), r(1, 2, 9, 8), is_causal=True)",
    "torch.sort(r(4, 7))[0].sum(-1)",
)
OPTIONS = {"cache_dir": ""}

# Text that was changed

TOKEN = re.compile(r'"[^"\n]*"|[%@$]?[A-Za-z_][\w.]*|\d+\.\d+(?:e[+-]?\d+)?|\d+|->|<=|>=|==|!=|\.\.|//|[^\sA-Za-z0-9]')
NUMBERS = ("0", "1", "2", "3", "7", "-1", "64", "100000", str(2**31), str(2**62), str(2**63 - 1), str(-(2**63)), str(2**64), "1.5", "s0")
DTYPES = ("bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "c64", "f32x8", "i64x3")
PLACE = re.compile(r"f\.ir:\d+:\d+: .")


class Texts(list):
    """Not shown when a test fails: what it drew says it all."""

    def __repr__(self):
        return f"{len(self)} texts"


@pytest.fixture(scope="module")
def texts():
    """The programs at every level, with constant and with symbolic sizes."""
    made = Texts()
    for expression in EXPRESSIONS:
        for dynamic in (None, True):
            torch._dynamo.reset()
            fn, inputs = parse_expression(expression)
            with torch.no_grad():
                records = capture(fn, inputs, dynamic=dynamic, backward=False, options=read_options())
            for record in records:
                made += [_C.lower(record.torch_ir, level, json.dumps(OPTIONS), "f.ir") for level in LEVELS]
                # Before the passes: fusion, too, sees what was changed.
                made.append(_C.lower(record.torch_ir, "loop", json.dumps({**OPTIONS, "stop_after": "lower_to_loop"}), "f.ir"))
    return made


def changed(text, rng):
    """One slip of an editor: a token or a line that is lost, doubled, moved or replaced, or a file that ends too early."""
    tokens = list(TOKEN.finditer(text))
    if not tokens:
        return text

    def one_of(fits):
        return rng.choice([t for t in tokens if fits(t.group())] or tokens)

    def replaced(token, by):
        return text[: token.start()] + by + text[token.end() :]

    kind = rng.choice(("delete", "double", "swap", "number", "name", "dtype", "cut", "line", "indent"))
    token, other = rng.choice(tokens), rng.choice(tokens)
    if kind == "delete":
        return replaced(token, "")
    if kind == "double":
        return replaced(token, f"{token.group()} {token.group()}")
    if kind == "swap":
        if token.start() == other.start():
            return text
        first, second = sorted((token, other), key=lambda t: t.start())
        return text[: first.start()] + second.group() + text[first.end() : second.start()] + first.group() + text[second.end() :]
    if kind == "number":
        return replaced(one_of(lambda t: t[0].isdigit()), rng.choice(NUMBERS))
    if kind == "name":
        return replaced(one_of(lambda t: t[0].isalpha() or t[0] in "%@"), one_of(lambda t: t[0].isalpha() or t[0] in "%@").group())
    if kind == "dtype":
        return replaced(one_of(lambda t: t in DTYPES), rng.choice(DTYPES))
    if kind == "cut":
        return text[: rng.randrange(len(text))]
    lines = text.splitlines()
    at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
    if kind == "indent":
        lines[at] = rng.choice(("  " + lines[at], lines[at].lstrip(), lines[at][2:]))
    elif rng.random() < 0.5:
        del lines[at]
    else:
        lines[at], lines[to] = lines[to], lines[at]
    return "\n".join(lines) + "\n"


def taken(text, target="kernel"):
    """Whether the core takes the text. It may refuse it: where it is wrong (UserError), or as what it does not compile (UnsupportedError)."""
    options = {**OPTIONS, "target": "cuda" if target == "cuda" else "cpu"}
    try:
        _C.lower(text, target, json.dumps(options), "f.ir")
    except UserError as error:
        assert PLACE.match(str(error)), str(error)
        return False
    except UnsupportedError:
        return False
    return True


@needs_core
@pytest.mark.parametrize("seed", range(6))
def test_text_that_was_changed_is_taken_or_refused_where_it_is_wrong(texts, seed):
    rng = random.Random(seed)
    results = []
    for _ in range(150):
        text = rng.choice(texts)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            text = changed(text, rng)
        results.append(taken(text, rng.choice(("kernel", "cuda", "asm"))))
    assert results.count(True) > 3 and results.count(False) > 75


@needs_core
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_text_of_an_editor_that_went_mad(texts, data):
    text = data.draw(st.sampled_from(texts))
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 40)))
    taken(text[:at] + data.draw(st.text(st.sampled_from('()[]{},:=-><*/%@"\\\n #;.0123456789abcfixs_é\0'), max_size=12)) + text[until:])


@needs_core
@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "\0",
        "torch @f(%x: f32[2])\n  return \0%x\n",
        'torch @f(%x: f32[2])\n  %y: f32[2] = aten.neg.default(self=%x) in "a\0b"\n  return %y\n',
        "torch",
        "program",
        "tensor @f(%x: f32[" + "(" * 100_000,
        "tensor @f(%x: f32[" + "-" * 100_000 + "1])\n  return %x\n",
        "torch @f(%x: f32[2])\n  %y: f32[2] = aten.neg.default(self=" + "[" * 100_000,
        "kernel @k() symbols () chunks 1 scratch 0\n" + "".join("  " * (n + 1) + f"for i{n} in 0..2 step 1:\n" for n in range(5000)),
        "tensor @f(%x: f32[" + "*".join(["(s0 + s1 + s2 + s3)"] * 40) + "]) where s0 in 1..\n  return %x\n",
        "tensor @f(%x: f32[9223372036854775807, 9223372036854775807])\n  %y: f32[9223372036854775807, 9223372036854775807] = neg(%x)\n  return %y\n",
        "tensor @f(%x: f32[(-9223372036854775808) // (-1)])\n  return %x\n",
        "tensor @f(%x: f32[4 // 0])\n  return %x\n",
        "tensor @f(%x: f32[4])\n  %x: f32[4] = neg(%x)\n  return %x\n",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_extreme_text_is_refused(text):
    assert not taken(text)


@needs_core
def test_a_nul_does_not_cut_the_message():
    with pytest.raises(UserError, match=r"f.ir:2:10: the character 0x00 is no text"):
        _C.lower("torch @f(%x: f32[2])\n  return \0%x\n", "kernel", json.dumps(OPTIONS), "f.ir")


@needs_core
def test_a_wrong_type_in_torch_ir_is_the_texts_fault(tmp_path, capsys):
    text = "torch @f(%x: f32[4, 8])\n  %t: f32[8, 4] = aten.t.default(self=%x)\n  %y: f16[4, 8] = aten.t.default(self=%t)\n  return %y\n"
    path = tmp_path / "f.ir"
    path.write_text(text)
    assert main(["compile", str(path)]) == 1
    error = capsys.readouterr().err
    assert f"UserError: {path}:3:3: aten.t.default gives %y the type f32[4, 8], not f16[4, 8]" in error


# Folders and disks


def run_softmax(folder, *limit, warning=""):
    """A softmax compiled in a process of its own, maybe under limits; whether it is right, and the lines with the only warning that is allowed."""
    lines = (
        *limit,
        "import json, torch, deplo, warnings",
        "warnings.simplefilter('error')",
        f"warnings.filterwarnings('default', message={warning!r})" if warning else "",
        "x = torch.randn(40, 80)",
        "f = torch.compile(lambda x: torch.softmax(x, -1), backend='deplo', options={'strict': True})",
        "print(bool((f(x).double() - torch.softmax(x.double(), -1)).abs().max() <= 8 * torch.finfo(x.dtype).eps))",
    )
    # -B: a limit on files must not leave half of a .pyc behind.
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "DEPLO_CACHE_DIR": str(folder), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run([sys.executable, "-B", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), [line for line in done.stderr.splitlines() if warning and warning in line]


@needs_core
def test_a_full_disk_costs_only_the_cache(tmp_path):
    # What a full disk does to a write, without one: no file may grow beyond 64 bytes, and the signal for it is off, as everywhere in Python.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))"
    assert run_softmax(tmp_path, limit)[0] == "True"
    assert not list(tmp_path.glob("*.o")) and not list(tmp_path.glob("*.tmp"))
    assert run_softmax(tmp_path)[0] == "True"
    assert len(list(tmp_path.glob("*.o"))) == 1


@needs_core
def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path):
    # Root may write anywhere but here.
    folder = "/proc/deplo-cache"
    right, lines = run_softmax(folder, warning="compiled kernels are not kept in")
    assert right == "True" and len(lines) == 1 and f"{folder}: No such file or directory" in lines[0]
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    right, lines = run_softmax(shared, warning="compiled kernels are not kept in")
    assert right == "True" and len(lines) == 1 and f"{shared}: others may write to it" in lines[0]
    file = tmp_path / "file"
    file.write_text("")
    right, lines = run_softmax(file, warning="compiled kernels are not kept in")
    assert right == "True" and len(lines) == 1 and f"{file}: it is no folder" in lines[0]
    read_only = tmp_path / "read-only"
    read_only.mkdir(mode=0o500)
    right, lines = run_softmax(read_only, warning="compiled kernels are not kept in")
    assert right == "True" and len(lines) == (os.geteuid() != 0)


@needs_core
def test_dumps_that_cannot_be_written_are_user_errors(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", "/proc/deplo-dump"):
        assert main(["compile", "-c", "r(4).exp()", "--dump-dir", str(folder)]) == 1
        error = capsys.readouterr().err
        assert "UserError" in error and str(folder) in error


@needs_core
@pytest.mark.parametrize("arguments", [("-o", "/dev/full"), ()])
def test_output_on_a_full_disk_is_one_line(arguments):
    command = [sys.executable, "-m", "deplo", "compile", "-c", "r(4).exp()", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 1
    assert "No space left" in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") == 1


# Tensors


class Logged(torch.Tensor):
    """A subclass that only changes what functions return."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Scaled(torch.Tensor):
    """Values times a factor, as low-precision tensors keep them: every op runs on the product."""

    @staticmethod
    def __new__(cls, inner, factor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner, factor):
        self.inner, self.factor = inner, factor

    def __tensor_flatten__(self):
        return ["inner"], self.factor

    @staticmethod
    def __tensor_unflatten__(inner, factor, size, stride):
        return Scaled(inner["inner"], factor)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def product(x):
            return x.inner * x.factor if isinstance(x, Scaled) else x

        return func(*torch.utils._pytree.tree_map(product, args), **torch.utils._pytree.tree_map(product, kwargs or {}))


def dense(x):
    if isinstance(x, Scaled):
        x = x.inner * x.factor
    if x.layout is not torch.strided:
        x = x.to_dense()
    return x.dequantize() if x.is_quantized else x.as_subclass(torch.Tensor)


TENSORS = [
    pytest.param(lambda: torch.randn(4, 4).as_subclass(Logged), id="function subclass"),
    pytest.param(lambda: torch.nn.Parameter(torch.randn(4, 4)), id="parameter"),
    pytest.param(lambda: Scaled(torch.randn(4, 4), 3.0), id="dispatch subclass"),
    pytest.param(lambda: torch.eye(4).to_sparse(), id="sparse COO"),
    pytest.param(lambda: torch.eye(4).to_sparse_csr(), id="sparse CSR"),
    pytest.param(lambda: torch.randn(4, 4, dtype=torch.complex64), id="complex64"),
    pytest.param(lambda: torch.randn(4, 4, dtype=torch.complex128), id="complex128"),
    pytest.param(lambda: torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.quint8), id="quantised"),
    pytest.param(lambda: torch.ones(4, 4, device="meta"), id="meta"),
    pytest.param(lambda: torch.randn(4, 4).conj().neg(), id="negated view"),
    pytest.param(lambda: torch._neg_view(torch.randn(4, 4)), id="lazily negated"),
    pytest.param(lambda: torch.randn(4, 4, dtype=torch.complex64).conj(), id="lazily conjugated"),
    pytest.param(lambda: torch.randn(4, 4).to(torch.float8_e4m3fn).to(torch.float32), id="float32 of float8"),
    pytest.param(lambda: torch.ones(4, 4, dtype=torch.uint16), id="uint16"),
    pytest.param(lambda: torch.empty(0, 4), id="empty"),
]


@needs_core
@pytest.mark.parametrize("make", TENSORS)
def test_unusual_tensors_give_what_eager_gives(make):
    def fn(x):
        return x * 2 if x.layout is torch.strided and not x.is_quantized else x.clone()

    x = make()
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = fn(x)
        except (RuntimeError, NotImplementedError) as error:
            # What eager refuses, the compiled function refuses, too.
            with pytest.raises(Exception, match=re.escape(str(error).splitlines()[0][:40])):
                torch.compile(fn, backend="deplo")(x)
            return
        compiled = torch.compile(fn, backend="deplo")
        for _ in range(2):
            result = compiled(x)
            assert type(result) is type(expected) and result.dtype == expected.dtype and result.shape == expected.shape
            assert result.layout == expected.layout and result.device == expected.device
            if not result.is_meta:
                torch.testing.assert_close(dense(result), dense(expected), rtol=0, atol=0)


@needs_core
@pytest.mark.parametrize("make", [p for p in TENSORS if p.id in ("complex64", "meta")])
def test_strict_names_what_is_refused(make):
    torch._dynamo.reset()
    x = make()
    with torch.no_grad(), warnings.catch_warnings(), pytest.raises(Exception, match="complex64|meta"):
        warnings.simplefilter("error", FallbackWarning)
        torch.compile(lambda x: x * 2, backend="deplo", options={"strict": True})(x)


@needs_core
@pytest.mark.parametrize("make", [p for p in TENSORS if p.id not in ("empty", "parameter", "negated view", "float32 of float8", "function subclass")])
def test_a_compiled_program_refuses_them(make):
    program = _C.compile("torch @f(%x: f32[4, 4] user)\n  %y: f32[4, 4] = aten.exp.default(self=%x)\n  return %y\n", json.dumps(OPTIONS))
    x = torch.randn(4, 4)
    torch.testing.assert_close(program.run([x])[0], x.exp())
    with pytest.raises(deplo.Error):
        program.run([make()])


@needs_core
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "fn", [lambda x: x.max(0), lambda x: x.max(), lambda x: x.min(), lambda x: x.min(0)], ids=["max_dim", "max", "min", "min_dim"]
)
def test_extremes_of_nothing_raise_as_eager_does(fn, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="deplo", dynamic=dynamic)
    torch.testing.assert_close(compiled(torch.ones(4, 3)), fn(torch.ones(4, 3)), rtol=0, atol=0)
    empty = torch.ones(0, 3)
    with pytest.raises((IndexError, RuntimeError)) as wanted:
        fn(empty)
    with pytest.raises(wanted.type, match=re.escape(str(wanted.value).splitlines()[0])):
        compiled(empty)
