"""The option `guard`: kernels between guard pages. `make guard` runs the tests so."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
from engines import same
from fuzz.check import check
from fuzz.programs import Program, programs
from hypothesis import given, settings
from test_fuzz import SAMPLE

from deplo import _C
from deplo.errors import InternalError
from deplo.options import read_options

GUARDED = read_options(options={"guard": True})


@settings(SAMPLE, max_examples=25)
@given(programs(dynamic=False))
def test_random_programs(program: Program) -> None:
    check(program, GUARDED)


def test_a_layer_with_packed_weights_and_threads() -> None:
    torch._dynamo.reset()
    net = torch.nn.Sequential(torch.nn.Linear(70, 130), torch.nn.GELU(), torch.nn.LayerNorm(130), torch.nn.Linear(130, 33))
    exact = copy.deepcopy(net).double()
    compiled = torch.compile(net, backend="deplo", options={"guard": True, "strict": True, "threads": 2}, dynamic=True)
    for rows in (5, 2, 37):
        x = torch.randn(rows, 70)
        same(compiled(x), net(x), exact=exact(x.double()))


FAR = """
import json, torch
from deplo import _C

text = '''program @far(x: f32[1024] user, p: i64[1024] user)
  buffer y: f32[1024] output
  call @shift(x, p, y)
  return y

kernel @shift(a: ptr f32, p: ptr i64, out b: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..1024 step 1:
    k: i64 = load p[i]
    v: f32 = load a[0] gather k
    store b[i] = v
'''
_C.compile(text, json.dumps({"guard": True, "cache_dir": ""})).run([torch.ones(1024), torch.arange(1, 1025)])
"""


def test_an_access_past_a_guard_page_ends_the_process_and_names_the_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", FAR], capture_output=True, text=True, check=False)
    assert done.returncode == -11, done.stderr
    assert "touched memory outside of its buffers: kernel shift of program far" in done.stderr


UNWRITTEN = """program @short(x: f32[64] user)
  buffer y: f32[64] output
  call @copy(x, y)
  return y

kernel @copy(a: ptr f32, out b: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..63 step 1:
    v: f32 = load a[i]
    store b[i] = v
"""


def test_an_element_that_no_kernel_wrote_is_named() -> None:
    options = json.dumps({"guard": True, "cache_dir": ""})
    with pytest.raises(InternalError, match="kernel copy of program short never wrote byte 252 of y"):
        _C.compile(UNWRITTEN, options).run([torch.ones(64)])
    # What happens to hold the same bytes as memory that nobody wrote is no matter.
    whole = UNWRITTEN.replace("0..63", "0..64")
    pattern = torch.full((64 * 4,), 0x3C, dtype=torch.uint8).view(torch.float32)
    assert torch.equal(_C.compile(whole, options).run([pattern])[0], pattern)
