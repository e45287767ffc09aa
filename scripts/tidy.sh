#!/bin/bash
# tidy.sh PYTHON BUILD JOBS: clang-tidy on all C++ but the tests, as the build compiles it: files that it unites share what takes longest, their headers.
set -euo pipefail
python=$1 build=$2 jobs=$3

"$python" - "$build" <<'LIST' | xargs -P "$jobs" -n 1 clang-tidy-22 -p "$build" --quiet --checks=-bugprone-suspicious-include \
  --extra-arg=-Wno-deprecated-declarations 2> >(grep -v -E 'warnings? (generated|treated)|Suppressed|Use -header-filter' >&2 || true)
import json, pathlib, sys

root, build = pathlib.Path.cwd(), pathlib.Path(sys.argv[1])
files = {pathlib.Path(entry["file"]) for entry in json.loads((build / "compile_commands.json").read_text())}
ours = [f for f in files if any(f.is_relative_to(base / part) for base in (root, root / build) for part in ("csrc", "tools"))]
assert len(ours) > 20, f"{build} compiles {len(ours)} files of csrc and tools"
print(*sorted(ours, key=lambda f: -f.stat().st_size), sep="\n")
LIST
