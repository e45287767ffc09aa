#!/bin/bash
# quick.sh PYTHON BUILD JOBS: the tests that notice most mistakes for their time; docs/howto.md says how they were chosen.
set -euo pipefail
python=$1 build=$2 jobs=$3

# Those that call NVIDIA's compiler or the emulated GPU for every kernel, and those that change texts at random.
echo "== C++ tests"
scripts/test_cpp.sh "$build/tests/cpp/deplo_tests" "$jobs" "NVRTC|CUDA|emulator|stages both operands|fit nowhere|changed at random"

echo "== golden files"
"$python" -m pytest -q -n "$jobs" tests/ir

echo "== Python tests"
DEPLO_VERIFY=1 "$python" -m pytest -q -n "$jobs" $(printf 'tests/python/test_%s.py ' core front_import front_schedules mutation)
