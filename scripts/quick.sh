#!/bin/bash
# quick.sh PYTHON BUILD JOBS: the tests that notice most mistakes in three minutes on two cores. docs/howto.md says how they were chosen.
set -euo pipefail
python=$1 build=$2 jobs=$3

echo "== C++ tests"
# Levels against each other and against compiled code are in the golden files and in test_cases; what has no text of IR is here.
"$build/tests/cpp/deplo_tests" "~[slow]" "[expr],[schedule],[memory_plan],[program],[divisions]" --allow-running-no-tests

echo "== golden files, and Python tests"
"$python" -m pytest -q -n "$jobs" tests/ir tests/python/test_core.py
