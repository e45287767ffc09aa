#!/bin/bash
# test_wheel.sh PYTHON: makes the wheel, installs it into an environment of its own, and uses it as someone would who has neither LLVM
# nor a compiler: what it links and shows, beside another LLVM in the same process, through torch.compile.
set -euo pipefail
python=$(readlink -f "$(dirname "$1")")/$(basename "$1")
root=$(pwd -P)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "wheel: $*" >&2
  exit 1
}

"$python" -m pip wheel -q --no-build-isolation --no-deps -w "$work/dist" . >"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2; fail "does not build"; }
wheel=$(echo "$work"/dist/deplo-*.whl)

# Its own environment, which sees torch where it is installed already.
"$python" -m venv --without-pip "$work/venv"
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -m pip --python "$work/venv/bin/python" install -q --no-deps --no-index "$wheel"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/shared.pth"
cd "$work"
user() { env -u PYTHONPATH PATH="$work/venv/bin" HOME="$work" DEPLO_STRICT=1 "$@"; }
extension=$(user python -c 'import deplo.core; print(deplo.core.core().__file__)')
[[ $extension == "$work"/venv/* ]] || fail "$extension was imported in place of the wheel's extension"

# What it links: torch and the C++ run-time libraries.
while read -r library; do
  case $library in
    libtorch_python.so | libtorch.so | libtorch_cpu.so | libc10.so | libstdc++.so.6 | libgcc_s.so.1 | libm.so.6 | libc.so.6 | ld-linux-x86-64.so.2) ;;
    *) fail "links $library" ;;
  esac
done < <(readelf -d "$extension" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
shown=$(nm -D --defined-only "$extension" | awk '{print $3}' | sort | xargs)
[[ $shown == "PyInit__C __jit_debug_descriptor __jit_debug_register_code" ]] || fail "shows other symbols than Python's and the debuggers': $shown"
! nm -D --undefined-only "$extension" | grep -q -i llvm || fail "takes symbols of LLVM from elsewhere"
! readelf -d "$extension" | grep -E 'R(UN)?PATH' | grep -q "$root" || fail "remembers the folder where it was built"

cat >use.py <<'USE'
import sys, torch
import deplo
f = torch.compile(lambda x, w: torch.softmax(x @ w, -1).relu().sum(0), backend="deplo")
x, w = torch.randn(64, 48), torch.randn(48, 80)
torch.testing.assert_close(f(x, w), torch.softmax(x @ w, -1).relu().sum(0))
print(deplo.__file__, *{line.split()[-1] for line in open("/proc/self/maps") if "libLLVM" in line})
USE
user python use.py >/dev/null || fail "does not work"
other=0
for llvm in /usr/lib/llvm-*/lib/libLLVM.so.*.* /usr/lib/x86_64-linux-gnu/libLLVM-*.so.1; do
  [[ -e $llvm ]] || continue
  # Its symbols are global and come first, as if another extension had loaded it with RTLD_GLOBAL.
  user LD_PRELOAD="$llvm" python use.py >out 2>err || { cat out err >&2; fail "does not work beside $llvm"; }
  grep -q libLLVM out || fail "$llvm was not loaded"
  other=$((other + 1))
done
((other > 0)) || fail "found no other LLVM to run beside (apt-get installs llvm-22)"
user python -m deplo env | grep -q '^codegen  *llvm' || fail "python -m deplo env does not name its LLVM"
echo "wheel: $(du -h "$wheel" | cut -f1), beside $other other LLVMs"
