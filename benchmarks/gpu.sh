#!/bin/bash
# gpu.sh carry [FOLDER]: puts the headers that a GPU machine lacks into FOLDER (default .gpu), on a machine that has them.
# gpu.sh [FOLDER]: on a machine with a GPU, a PyTorch for it, CMake, ninja and pytest, and no network: builds deplo without LLVM, runs the tests that
# a GPU runs, and measures. What it writes goes to $OUT (default gpu-results): build.log, tests.log, launches.txt, gpu.json, gpu.txt.
# GPU_PYTHON is the Python that holds PyTorch (default python3). GPU_DRY=1 takes a build folder with the tests' stand-in for a GPU (DEPLO_BUILD), and
# tries what can be tried without one. GPU_BUDGET: seconds after which gpu.py starts no further row (170).
set -euo pipefail
cd "$(dirname "$0")/.."

carry() {
  mkdir -p "$1"/{include,cmake}
  cp -rL /usr/include/fmt /usr/include/nlohmann /usr/include/hwloc /usr/include/hwloc.h "$1/include/"
  # Debian keeps a part of its headers by architecture.
  [[ ! -d /usr/include/x86_64-linux-gnu/hwloc ]] || cp -rL /usr/include/x86_64-linux-gnu/hwloc "$1/include/"
  cat >"$1/cmake/fmt-config.cmake" <<'CMAKE'
add_library(fmt::fmt-header-only INTERFACE IMPORTED)
set_target_properties(fmt::fmt-header-only PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES ${CMAKE_CURRENT_LIST_DIR}/../include INTERFACE_COMPILE_DEFINITIONS FMT_HEADER_ONLY=1)
CMAKE
  cat >"$1/cmake/nlohmann_json-config.cmake" <<'CMAKE'
add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
set_target_properties(nlohmann_json::nlohmann_json PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${CMAKE_CURRENT_LIST_DIR}/../include)
CMAKE
  for package in fmt nlohmann_json; do
    echo 'set(PACKAGE_VERSION_COMPATIBLE TRUE)' >"$1/cmake/$package-config-version.cmake"
  done
  echo "$1: $(du -sh "$1" | cut -f1)"
}

build() {
  local folder=$1 python=$2 out=$3
  cmake -G Ninja -S . -B build-gpu -DCMAKE_BUILD_TYPE=Release -DDEPLO_LLVM=OFF -DDEPLO_TESTS=OFF -DDEPLO_WERROR=OFF \
    -DPython3_EXECUTABLE="$(command -v "$python")" -DDEPLO_EXTENSION_DIR="$PWD/deplo" \
    -Dfmt_DIR="$folder/cmake" -Dnlohmann_json_DIR="$folder/cmake" -DHWLOC_INCLUDE_DIR="$folder/include" >"$out/build.log" 2>&1
  ninja -C build-gpu >>"$out/build.log" 2>&1
}

if [[ ${1:-} == carry ]]; then
  carry "${2:-.gpu}"
  exit
fi
folder=$(readlink -m "${1:-.gpu}")
python=${GPU_PYTHON:-python3}
out=$(readlink -m "${OUT:-gpu-results}")
mkdir -p "$out"
export PYTHONPATH=$PWD DEPLO_CACHE_DIR=$out/cache
failed=0
if [[ ${GPU_DRY:-} ]]; then
  dry=(--dry)
else
  dry=()
  SECONDS=0
  if ! timeout 240 bash -c "$(declare -f build); build '$folder' '$python' '$out'"; then
    tail -n 40 "$out/build.log"
    echo "the build failed" >&2
    exit 1
  fi
  echo "built in $SECONDS s"
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.total --format=csv,noheader | tee "$out/machine.txt"
fi
SECONDS=0
timeout 150 "$python" -m pytest -q -m gpu -n 4 -p no:cacheprovider ${GPU_DRY:+-k test_resident} tests/python/test_resident.py tests/python/test_cuda.py \
  >"$out/tests.log" 2>&1 || failed=1
tail -n 30 "$out/tests.log"
echo "tests in $SECONDS s"
for replay in "" --replay; do
  timeout 60 "$python" benchmarks/launches.py $replay || failed=1
done 2>&1 | tee "$out/launches.txt"
SECONDS=0
timeout 200 "$python" benchmarks/gpu.py "${dry[@]}" --budget ${GPU_BUDGET:-170} --json "$out/gpu.json" 2>"$out/gpu.err" | tee "$out/gpu.txt" || failed=1
tail -n 5 "$out/gpu.err"
echo "measured in $SECONDS s"
rm -rf "$out/cache"
exit $failed
