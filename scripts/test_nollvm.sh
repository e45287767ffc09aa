#!/bin/bash
# test_nollvm.sh PYTHON BUILD: a build without LLVM lowers, interprets and writes CUDA text; what it cannot compile runs in eager mode.
set -euo pipefail
python=$(readlink -f "$(dirname "$1")")/$(basename "$1")
build=$(readlink -f "$2")
fail() {
  echo "without LLVM: $*" >&2
  exit 1
}

scripts/test_cpp.sh "$build/tests/cpp/deplo_tests" "$(nproc)"
! nm "$build"/deplo/_C*.so | grep -q -i '_ZN4llvm' || fail "LLVM is linked"

# The package beside this build's extension.
cp deplo/*.py "$build/deplo/"
cd "$build"
export PYTHONPATH=$build DEPLO_CACHE_DIR=off
for level in torch tensor loop tile kernel cuda; do
  [[ -n $("$python" -m deplo compile -c "torch.softmax(r(4, 8), -1)" --ir "$level") ]] || fail "--ir $level printed nothing"
done
! "$python" -m deplo compile -c "r(4) + 1" --ir asm 2>asm.txt || fail "--ir asm did not fail"
grep -q 'built without LLVM' asm.txt || fail "--ir asm does not say why"
"$python" - <<'USE'
import warnings, torch, deplo
from deplo.capture import capture
from deplo.core import core

assert deplo.__file__.startswith(__import__("os").getcwd()), deplo.__file__
def f(x):
    return torch.softmax(x, -1)
x = torch.randn(4, 8)
for level in ("torch", "tensor", "loop", "tile", "kernel"):
    (record,) = capture(f, [x])
    text = record.torch_ir if level == "torch" else core().lower(record.torch_ir, level)
    torch.testing.assert_close(core().interpret(text, [x])[0], f(x))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    torch.testing.assert_close(torch.compile(f, backend="deplo")(x), f(x))
assert any("built without LLVM" in str(w.message) for w in told), told
torch._dynamo.reset()
try:
    torch.compile(f, backend="deplo", options={"strict": True})(x)
except Exception as error:
    assert "built without LLVM" in str(error), error
else:
    raise AssertionError("strict compiled a kernel without LLVM")
USE
echo "without LLVM: works"
