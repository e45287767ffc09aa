"""deplo._C: programs given as Kernel IR, so that what is tested is the runtime and the bindings."""

import copy
import json
import multiprocessing
import threading

import pytest
import torch
from engines import same
from torch.utils._python_dispatch import TorchDispatchMode

from deplo.errors import UnsupportedError, UserError

_C = pytest.importorskip("deplo._C")

OPTIONS = json.dumps({"cache_dir": "", "strict": True})

TWICE = """program @twice(x: f32[s0, 4] user) where s0 in 0..100000
  buffer t: f32[s0, 4]
  buffer y: f32[s0, 4] output
  call @double(x, t)
  call @double(t, y)
  return y, s0*4, none

kernel @double(a: ptr f32, out b: ptr f32) symbols (s0) chunks s0 scratch 0
  for i in (s0*thread // threads)*4..(s0*(thread + 1) // threads)*4 step 1:
    v: f32 = load a[i]
    w: f32 = add(v, v)
    store b[i] = w
"""

PACKED = """program @net(x: f32[4] user, w: f32[4] parameter static)
  buffer p: f32[4] packed
  buffer y: f32[4] output
  once call @pack(w, p)
  call @sum(x, p, y)
  return y

kernel @pack(a: ptr f32, out b: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..4 step 1:
    v: f32 = load a[i]
    w: f32 = add(v, v)
    store b[i] = w

kernel @sum(a: ptr f32, b: ptr f32, out c: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..4 step 1:
    v: f32 = load a[i]
    w: f32 = load b[i]
    s: f32 = add(v, w)
    store c[i] = s
"""


def compiled(text, **options):
    return _C.compile(text, json.dumps({"cache_dir": "", "verify": True, **options}))


def test_an_example_that_is_taken_while_a_call_leaves_it():
    program = compiled(PACKED.replace("x: f32[4] user, w: f32[4] parameter static", "w: f32[4] parameter static, x: f32[4] user"))
    w, x = torch.randn(4), torch.randn(4)
    taken = []

    class Takes(TorchDispatchMode):  # as another thread may, when a mode of PyTorch's has Python's lock change hands
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            taken.append(program.take_example())
            return func(*args, **(kwargs or {}))

    program.want_example()
    with Takes():
        (y,) = program.run([w, x])
    assert torch.equal(y, x + 2 * w)
    assert taken == [None] and program.take_example() is None
    program.want_example()
    program.run([w, x])
    static, other = program.take_example()
    assert static.data_ptr() == w.data_ptr() and other.shape == x.shape and program.take_example() is None


def test_inputs_that_nobody_else_holds_end_in_the_call():
    program = compiled(TWICE)
    x = torch.randn(30000, 4)
    expected = x * 4
    kept, alone = x, x.clone()
    storage = alone.untyped_storage()
    for given, ends in (([kept], False), ([alone], False), ([x.clone()], True)):
        y = program.run(given, 1)[0]  # `kept` and `alone` have names, and one a storage that somebody looks at
        assert torch.equal(y, expected)
        assert (not given) == ends
    assert torch.equal(kept * 4, expected) and torch.equal(alone * 4, expected) and storage.nbytes() == x.nbytes
    small = [x[:3].clone()]
    program.run(small, 1)
    assert len(small) == 1  # not worth it
    inputs = [torch.randn(30000, 5)]
    with pytest.raises(UserError):
        program.run(inputs, 1)
    assert inputs[0].shape == (30000, 5)  # nothing ran: whoever called may go on with it


def test_outputs_are_new_tensors_integers_and_none():
    program = compiled(TWICE)
    for n in (0, 1, 3, 5000):
        x = torch.randn(n, 4)
        y, size, nothing = program.run([x])
        assert torch.equal(y, 4 * x)
        assert size == 4 * n and nothing is None
    first = program.run([torch.ones(2, 4)])[0]
    program.run([torch.zeros(2, 4)])
    assert torch.equal(first, torch.full((2, 4), 4.0))


def test_sizes_that_were_seen_keep_their_plan():
    program = compiled(TWICE)
    for _ in range(3):
        for n in range(1, 40):
            assert torch.equal(program.run([torch.ones(n, 4)])[0], torch.full((n, 4), 4.0))
    memory = json.loads(program.describe())["memory"]
    assert memory["arena_bytes"] >= 39 * 16 and memory["temporaries"] == 1


@pytest.mark.parametrize(
    "bad, text",
    [
        (torch.ones(3, 5), "input x: expected f32 of sizes (3, 4)"),
        (torch.ones(4, 3).t(), "strides (1, 3)"),
        (torch.ones(3, 4, dtype=torch.float64), "got f64"),
        (torch.ones(12), "got f32 of sizes (12)"),
        (7, "expected a tensor"),
        ("seven", "input 0 is a str"),
        (None, "input 0 is a NoneType"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(bad, text):
    with pytest.raises(UserError) as caught:
        compiled(TWICE).run([bad])
    assert text in str(caught.value)


def test_other_tensors_are_refused():
    program = compiled(TWICE)
    for bad in (torch.ones(3, 4).to_sparse(), torch.ones(3, 4, dtype=torch.complex64), torch.ones(3, 4, device="meta")):
        with pytest.raises((UnsupportedError, UserError)):
            program.run([bad])
    with pytest.raises(UserError, match="takes 1 inputs, got 2"):
        program.run([torch.ones(1, 4)] * 2)


def test_bad_options_and_bad_text_are_user_errors():
    with pytest.raises(UserError, match="unknown option 'no_such'.*known options"):
        compiled(TWICE, no_such=1)
    with pytest.raises(UserError, match="<graph>:1:"):
        compiled("kernel @")
    with pytest.raises(UserError, match="cannot disable 'no_pass'"):
        compiled(TWICE, disable=["no_pass"])


def test_packed_weights_follow_versions_and_identities():
    program = compiled(PACKED)
    x = torch.zeros(4)
    w = torch.arange(4.0)

    def packed():
        return program.run([x, w])[0]

    assert torch.equal(packed(), 2 * w)
    w.add_(1)
    assert torch.equal(packed(), 2 * w)
    w = w.clone()
    assert torch.equal(packed(), 2 * w)
    parameter = torch.nn.Parameter(w)
    for _ in range(3):
        parameter.data = torch.randn(4)
        assert torch.equal(program.run([x, parameter])[0], 2 * parameter.detach())
    with torch.inference_mode():
        frozen = torch.ones(4)
        assert torch.equal(program.run([x, frozen])[0], torch.full((4,), 2.0))
        frozen.add_(1)
        assert torch.equal(program.run([x, frozen])[0], torch.full((4,), 4.0))
    w.numpy()[:] = 9
    _C.forget_packed()
    assert torch.equal(packed(), torch.full((4,), 18.0))


def test_freed_weights_are_not_mistaken_for_new_ones():
    program = compiled(PACKED)
    for value in range(50):
        w = torch.full((4,), float(value))
        assert torch.equal(program.run([torch.zeros(4), w])[0], 2 * w)
        del w


def test_several_python_threads_call_one_program():
    program = compiled(TWICE)
    wrong = []

    def work(seed):
        x = torch.full((1000 + seed, 4), float(seed))
        for _ in range(200):
            if not torch.equal(program.run([x])[0], 4 * x):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _child(program, queue):
    x = torch.ones(5000, 4)
    queue.put(bool(torch.equal(program.run([x])[0], 4 * x)))


def test_a_forked_child_calls_a_compiled_program():
    program = compiled(TWICE)
    program.run([torch.ones(5000, 4)])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(program, queue))
    child.start()
    assert queue.get(timeout=60)
    child.join()


def test_memory_limit():
    with pytest.raises(UserError, match="more than memory_limit"):
        compiled(TWICE, memory_limit=1000).run([torch.ones(1000, 4)])


def test_library_steps_call_aten():
    program = compiled("""program @sorted(x: f32[s0, 4] user) where s0 in 1..100
  buffer v: f32[s0, 4] output
  buffer i: i64[s0, 4]
  buffer t: i64[4, s0] strides [1, 4] output
  library aten.sort.default(self=x, dim=-1, descending=true) -> v, i reason "sort"
  library aten.t.default(self=i) -> t reason "a test"
  return v, t
""")
    x = torch.randn(5, 4)
    values, indices = program.run([x])
    expected = x.sort(-1, descending=True)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices.t())
    calls = json.loads(program.describe())["library"]
    assert [call["op"] for call in calls] == ["aten.sort.default", "aten.t.default"] and calls[0]["reason"] == "sort"


def test_library_arguments_are_checked_when_compiled():
    text = 'program @f(x: f32[4] user)\n  buffer y: f32[4] output\n  library {} -> y reason "a test"\n  return y\n'
    with pytest.raises(UnsupportedError, match="no operator"):
        compiled(text.format("aten.no_such_op.default(self=x)"))
    with pytest.raises(UnsupportedError, match="no argument 'nope'"):
        compiled(text.format("aten.neg.default(self=x, nope=1)"))
    with pytest.raises(UnsupportedError, match="needs the argument 'self'"):
        compiled(text.format("aten.neg.default()"))
    with pytest.raises(UnsupportedError, match="writes its arguments"):
        compiled(text.format("aten.neg_.default(self=x)"))


def test_kernel_errors_are_eager_ones():
    text = """program @check(x: f32[4] user)
  buffer y: f32[4] output
  call @fail(x, y)
  return y

kernel @fail(a: ptr f32, out b: ptr f32) symbols () chunks 1 scratch 0
  v: f32 = load a[0]
  z: f32 = constant 0.0
  c: bool = lt(v, z)
  error {} if c
  store b[0] = v
"""
    for code, kind in (("index_out_of_range", IndexError), ("division_by_zero", RuntimeError), ("assertion", RuntimeError)):
        program = compiled(text.format(code))
        program.run([torch.ones(4)])
        with pytest.raises(kind):
            program.run([-torch.ones(4)])


def test_checks_of_sizes_fail_before_anything_ran():
    """At every level, and in a program that is restored; a size that fulfils them is as good as any afterwards."""
    text = """torch @f(%x: f32[s0], s1: sym) where s0 in 2.., s1 in ..
  check s1 - 5 != 0 else "integer division or modulo by zero"
  %y: f32[s0] = aten.roll.default(self=%x, shifts=[7 // s1], dims=[0])
  %z: f32[s0 + s1] = aten.constant_pad_nd.default(self=%y, pad=[s1, 0], value=0)
  %w: f32[s0] = aten.add.Tensor(self=%x, other=1)
  write %w to %x
  return %z
"""
    program = compiled(text)
    restored = _C.restore(*program.text(), json.dumps({"cache_dir": "", "verify": True}))
    runs = [program.run, restored.run]
    runs += [lambda inputs, level=level: _C.interpret(_C.lower(text, level), inputs) for level in ("torch", "tensor", "loop", "tile", "kernel")]
    for run in runs:
        for value, error in ((0, "(?i)division"), (5, "integer division or modulo by zero"), (-5, "negative")):
            x = torch.arange(4.0)
            with pytest.raises((RuntimeError, UserError), match=error):
                run([x, value])
            assert torch.equal(x, torch.arange(4.0))
        assert torch.equal(run([torch.arange(4.0), -2])[0], torch.tensor([2.0, 3.0]))


def test_environment_and_passes():
    about = json.loads(_C.env())
    assert about["cpu"] and about["vector bytes"] in (16, 32, 64)
    assert "expand_math" in [row["name"] for row in _C.passes()]
    assert _C.overload_files() == sorted(_C.overload_files())
    assert dict(_C.library_packets())["aten.sort"] == "sorting is left to ATen"
    assert _C.level_of(TWICE) == "kernel"


def test_repack_after_a_write_that_pytorch_does_not_count():
    import deplo

    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48)
    compiled = torch.compile(layer, backend="deplo", options={"strict": True})
    x = torch.randn(16, 64)
    with torch.no_grad():
        compiled(x)
        layer.weight.data.mul_(2)
        deplo.repack(layer)
        same(compiled(x), layer(x), exact=copy.deepcopy(layer).double()(x.double()))
    with pytest.raises(deplo.UserError, match="torch.nn.Module, not Tensor"):
        deplo.repack(x)


@pytest.mark.parametrize("k", [0, 1])
def test_sums_of_nothing_before_a_row_kernel(k):
    f = torch.compile(lambda x, y: (x @ y).softmax(-1), backend="deplo", options={"strict": True})
    x, y = torch.ones(3, k), torch.ones(k, 2)
    same(f(x, y), (x @ y).softmax(-1), exact=(x.double() @ y.double()).softmax(-1))
