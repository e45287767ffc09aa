#!/bin/bash
# gpu.sh carry [FOLDER]: puts into FOLDER (default .gpu) what a GPU machine lacks, on one that has it: headers, the archives of deplo's core (built
# without LLVM), and transformers with what it needs, as wheels for Python 3.12.
# gpu.sh [FOLDER]: on a machine with a GPU, a PyTorch for it, pytest, and no network: compiles what sees PyTorch, links it with the core (or builds all
# by CMake and ninja where FOLDER has no archives), tries one kernel of each kind in a process of its own, runs the tests that a GPU runs, and measures.
# What it writes goes to $OUT (default gpu-results): build.log, kinds.txt, tests.log, launches.txt, gpu.json, gpu.txt, gpu.err, objects.tar.xz (what it compiled).
# GPU_PYTHON is the Python that holds PyTorch (default python3). GPU_DRY=1 takes a build folder with the tests' stand-in for a GPU (DEPLO_BUILD), and
# tries what can be tried without one. GPU_BUDGET: seconds that gpu.py may take (150), GPU_FLAGS: its further arguments (--neighbours --profile);
# GPU_TESTS: seconds that tests may take (60; 0: none). All its limits together are less than ten minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
KINDS="points rows float32 tiles matrix groups attention decoding convolution"

carry() {
  mkdir -p "$1"/{include,cmake,lib,wheels}
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
  cmake -G Ninja -S . -B build-gpu-core -DCMAKE_BUILD_TYPE=Release -DDEPLO_LLVM=OFF -DDEPLO_TESTS=OFF -DDEPLO_PYTHON=OFF >/dev/null
  ninja -C build-gpu-core deplo_package deplo_targets deplo_fmt >/dev/null
  find build-gpu-core -name 'libdeplo_*.a' ! -name '*no_llvm*' -exec cp {} "$1/lib/" \;
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
    --platform manylinux2014_x86_64 -d "$1/wheels" $(grep -h '^transformers==' requirements-dev.txt) 'tokenizers==0.22.*' 'huggingface_hub==0.36.*'
  echo "$1: $(du -sh "$1" | cut -f1)"
}

# What an installed deplo tells PyTorch: that there is such a backend.
name_backend() {
  local folder=$1/deplo-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml).dist-info
  mkdir -p "$folder"
  printf 'Metadata-Version: 2.1\nName: deplo\nVersion: %s\n' "$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)" >"$folder/METADATA"
  printf '[torch_dynamo_backends]\ndeplo = deplo.backend:deplo\n' >"$folder/entry_points.txt"
}

# What sees PyTorch, beside the core's archives.
link() {
  local folder=$1 python=$2 torch python_include suffix
  torch=$("$python" -c "import os, torch; print(os.path.dirname(torch.__file__))")
  python_include=$("$python" -c "import sysconfig; print(sysconfig.get_paths()['include'])")
  suffix=$("$python" -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
  mkdir -p build-gpu
  export CXXFLAGS="-DNDEBUG -O2 -std=c++20 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -DTORCH_API_INCLUDE_EXTENSION_H -DFMT_HEADER_ONLY=1
    -DDEPLO_INTERFACE=$(sed -n 's/^INTERFACE = \([0-9]*\)$/\1/p' deplo/core.py)
    -Icsrc -isystem $folder/include -isystem $torch/include -isystem $torch/include/torch/csrc/api/include -isystem $python_include"
  ls csrc/bindings/*.cpp csrc/library/aten/*.cpp | xargs -P "$(nproc)" -I{} bash -c 'file={}; g++ $CXXFLAGS -c "$file" -o "build-gpu/${file//\//_}.o"' ||
    return 1
  g++ -shared -o "deplo/_C$suffix" build-gpu/*.o -Wl,--gc-sections -Wl,-Bsymbolic -Wl,--version-script=csrc/bindings/exports.map \
    -L"$torch/lib" -Wl,-rpath,"$torch/lib" -Wl,--start-group "$folder"/lib/*.a -Wl,--end-group -ltorch_python -ltorch -ltorch_cpu -lc10 -ldl -lpthread
}

build() {
  local folder=$1 python=$2 out=$3
  if compgen -G "$folder/lib/*.a" >/dev/null; then
    link "$folder" "$python" >"$out/build.log" 2>&1
    return
  fi
  cmake -G Ninja -S . -B build-gpu -DCMAKE_BUILD_TYPE=Release -DDEPLO_LLVM=OFF -DDEPLO_TESTS=OFF -DDEPLO_WERROR=OFF \
    -DPython3_EXECUTABLE="$(command -v "$python")" -DDEPLO_EXTENSION_DIR="$PWD/deplo" \
    -Dfmt_DIR="$folder/cmake" -Dnlohmann_json_DIR="$folder/cmake" -DHWLOC_INCLUDE_DIR="$folder/include" >"$out/build.log" 2>&1
  ninja -C build-gpu >>"$out/build.log" 2>&1
}

# One kernel of each kind, so that one that hangs or breaks the device is known by name.
try_kinds() {
  local kind
  for kind in $KINDS; do
    (timeout -k 1 50 "$1" benchmarks/gpu_kinds.py "$kind" "${@:3}" >"$2/$kind.log" 2>&1 || echo "$kind: failed ($?)" >>"$2/$kind.log") &
  done
  wait
  for kind in $KINDS; do
    if grep -qa "^$kind: failed" "$2/$kind.log"; then
      tail -n 6 "$2/$kind.log" | cut -c1-400
    else
      grep -a "^$kind: " "$2/$kind.log" || tail -n 3 "$2/$kind.log"
    fi
  done
}

if [[ ${1:-} == carry ]]; then
  carry "${2:-.gpu}"
  exit
fi
folder=$(readlink -m "${1:-.gpu}")
python=${GPU_PYTHON:-python3}
out=$(readlink -m "${OUT:-gpu-results}")
local_files=$(mktemp -d)
trap 'rm -rf "$local_files"' EXIT
mkdir -p "$out"
export PYTHONPATH=$PWD DEPLO_CACHE_DIR=$local_files/cache TORCHINDUCTOR_CACHE_DIR=$local_files/inductor TORCHINDUCTOR_COMPILE_THREADS=3 PYTHONUNBUFFERED=1
failed=0
dry=()
: >"$out/kinds.txt"
if [[ ${GPU_DRY:-} ]]; then
  dry=(--dry)
else
  SECONDS=0
  if ! "$python" -c "import transformers, sys; sys.exit(int(transformers.__version__[0]) > 4)" 2>/dev/null && compgen -G "$folder/wheels/*" >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$local_files/site" "$folder"/wheels/*.whl
    PYTHONPATH=$PYTHONPATH:$local_files/site
  fi
  if ! timeout 180 bash -c "$(declare -f build link); build '$folder' '$python' '$out'"; then
    tail -n 40 "$out/build.log"
    echo "the build failed" >&2
    exit 1
  fi
  echo "built in $SECONDS s"
  (cd build-gpu && tar cJf "$out/objects.tar.xz" *.o 2>/dev/null) &
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.total --format=csv,noheader | tee -a "$out/kinds.txt"
  name_backend "$local_files/names"
  PYTHONPATH=$PYTHONPATH:$local_files/names
fi
SECONDS=0
try_kinds "$python" "$local_files" "${dry[@]}" | tee -a "$out/kinds.txt"
grep -q "^points: right" "$out/kinds.txt" || exit 1
echo "kinds in $SECONDS s"
if [[ ${GPU_TESTS:-60} != 0 ]]; then
  SECONDS=0
  DEPLO_VERIFY=0 timeout -k 2 "${GPU_TESTS:-60}" "$python" -m pytest -q -n "$(nproc)" -p no:cacheprovider ${GPU_DRY:+-m gpu -k test_resident} \
    tests/python/test_resident.py tests/python/test_cuda.py tests/python/test_cuda_chains.py tests/python/test_cuda_quantized.py -rfE \
    >"$out/tests.log" 2>&1 || failed=1
  tail -n 30 "$out/tests.log"
  echo "tests in $SECONDS s"
fi
for replay in "" --replay; do
  timeout 30 "$python" benchmarks/launches.py $replay || failed=1
done >"$out/launches.txt" 2>&1
cat "$out/launches.txt"
SECONDS=0
timeout -k 2 "$((${GPU_BUDGET:-150} + 60))" "$python" benchmarks/gpu.py "${dry[@]}" --budget "${GPU_BUDGET:-150}" --json "$out/gpu.json" --log "$out/gpu.err" \
  ${GPU_FLAGS:---neighbours --profile} >"$out/gpu.txt" || failed=1
grep -v '^    ' "$out/gpu.txt"
echo "measured in $SECONDS s"
exit $failed
