#!/bin/bash
# make_venv.sh DIR: a virtual environment with what requirements-dev.txt lists. Pip takes packages from wherever it is configured to.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}

command -v "$python" >/dev/null || {
  echo "deplo: there is no $python; deplo needs Python 3.11 to 3.13. On Debian: apt-get install python3 python3-venv; elsewhere choose one: make PYTHON=/path/to/python3.11" >&2
  exit 1
}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "deplo: $python is $("$python" --version 2>&1); deplo needs 3.11 to 3.13. Choose one: make PYTHON=/path/to/python3.11" >&2
  exit 1
}
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv" || {
  echo "deplo: $python cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2
  exit 1
}

"$venv/bin/python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || {
  echo "deplo: the Python in $venv does not run, or is not one from 3.11 to 3.13. Remove it (rm -r $venv) and try again" >&2
  exit 1
}

# A virtual environment that has everything already needs no network.
if "$venv/bin/python" scripts/has_packages.py requirements.txt requirements-dev.txt; then
  exit 0
fi

echo "deplo: installing Python packages into $venv"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip --default-pip >/dev/null 2>&1 || {
  echo "deplo: $venv has no pip, and ensurepip cannot install it. Remove it (rm -r $venv) and try again; on Debian: apt-get install python3-venv" >&2
  exit 1
}
# torch alone first, so that nothing else chooses its version.
"$venv/bin/python" -m pip install -q -r requirements.txt && "$venv/bin/python" -m pip install -q -r requirements-dev.txt || {
  echo "deplo: pip could not install requirements-dev.txt (above). Check the network and 'pip config list': pip must reach an index that has torch 2.13.0, best its CPU build." >&2
  exit 1
}
