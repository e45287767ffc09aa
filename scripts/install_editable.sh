#!/bin/bash
# install_editable.sh PYTHON: makes this tree importable in the environment, with its entry points; the extension is built by CMake.
set -euo pipefail
python=$1
here=$(pwd -P)
installed=$("$python" -c '
import importlib.metadata, json, urllib.parse
try:
    url = json.loads(importlib.metadata.distribution("deplo").read_text("direct_url.json") or "{}").get("url", "")
    print(urllib.parse.unquote(urllib.parse.urlparse(url).path))
except importlib.metadata.PackageNotFoundError:
    print()
' 2>/dev/null || true)
[[ $installed == "$here" ]] && exit 0
DEPLO_SKIP_BUILD=1 "$python" -m pip install -q --no-build-isolation --no-deps --editable .
