"""The option `guard`: kernels between guard pages. `make guard` runs most of the tests so."""

from __future__ import annotations

import subprocess
import sys

import torch
from fuzz.check import check
from fuzz.programs import Program, programs
from hypothesis import given, settings
from test_fuzz import SAMPLE

from deplo import _C
from deplo.options import read_options

GUARDED = read_options(options={"guard": True})


@settings(SAMPLE, max_examples=25)
@given(programs(dynamic=False))
def test_random_programs(program: Program) -> None:
    check(program, GUARDED)


def test_a_layer_with_packed_weights_and_threads() -> None:
    torch._dynamo.reset()
    net = torch.nn.Sequential(torch.nn.Linear(70, 130), torch.nn.GELU(), torch.nn.LayerNorm(130), torch.nn.Linear(130, 33))
    compiled = torch.compile(net, backend="deplo", options={"guard": True, "strict": True, "threads": 2}, dynamic=True)
    for rows in (5, 2, 37):
        x = torch.randn(rows, 70)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-5, atol=1e-5)


FAR = """
import json, torch
from deplo import _C

text = '''program @far(x: f32[1024] user)
  buffer y: f32[1024] output
  call @shift(x, y)
  return y

kernel @shift(a: ptr f32, out b: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..1024 step 1:
    v: f32 = load a[i + 1]
    store b[i] = v
'''
_C.compile(text, json.dumps({"guard": True, "cache_dir": ""})).run([torch.ones(1024)])
"""


def test_an_access_past_a_guard_page_ends_the_process_and_names_the_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", FAR], capture_output=True, text=True, check=False)
    assert done.returncode == -11, done.stderr
    assert "touched memory outside of its buffers: kernel shift of program far" in done.stderr


SQUARES = """tensor @squares(%x: f32[s0, s0] user) where s0 in 1..64
  %a: f32[s0, s0, s0] = map (i0, i1, i2) -> %x[i0, i2]
  %b: f32[s0, s0, s0] = map (i0, i1, i2) -> %x[i1, i2]
  %c: f32[s0, s0, s0] = mul(%a, %b)
  %d: f32[s0, s0] = reduce sum(%c) axes=[2]
  return %d strides [s0, 1], %c strides [s0*s0, s0, 1]
"""


def test_a_loop_that_runs_at_most_once_reads_nothing_where_it_does_not() -> None:
    for features in ("sse", "avx2", "avx512"):
        program = _C.compile(SQUARES, read_options(options={"guard": True, "features": features}).to_json())
        for n in (1, 3, 17, 40, 63, 64):
            x = torch.randn(n, n)
            sums, products = program.run([x])
            wanted = x[:, None, :] * x[None]
            assert torch.equal(products, wanted)
            torch.testing.assert_close(sums, wanted.sum(-1), rtol=1e-5, atol=1e-5)
