#!/bin/bash
# test_dump.sh PYTHON: models and cases with everything that can be shown shown, so that dump code cannot rot: dumps are complete and read back.
set -euo pipefail
python=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# One process: each numbers its graphs' folders by itself.
DEPLO_DUMP=all DEPLO_DUMP_DIR=$folder/passes DEPLO_TIME=1 DEPLO_CACHE_DIR=$folder/cache \
  "$python" -m pytest -q -p no:xdist tests/python/test_models.py tests/python/test_cases.py \
  -k "(test_model and float32) or (test_one_compilation and (softmax or norm or gelu or attention))" >"$folder/out" 2>&1 || { tail -n 40 "$folder/out"; exit 1; }
tail -n 1 "$folder/out"
"$python" scripts/check_dumps.py "$folder/passes" 20

DEPLO_DUMP=all DEPLO_TIME=1 "$python" -m deplo run -c "torch.softmax(r(4, 8), -1)" >"$folder/out" 2>"$folder/err"
for pass in torch/import torch/share_calls tensor/lower loop/fuse_nests tile/lower kernel/expand_math; do
  grep -q "^# $pass" "$folder/err" || { echo "DEPLO_DUMP=all does not show $pass" >&2; exit 1; }
  grep -Eq "^deplo: +[0-9.]+ ms  $pass" "$folder/err" || { echo "DEPLO_TIME=1 does not show $pass" >&2; exit 1; }
done
for level in torch tensor loop tile kernel llvm asm cuda; do
  "$python" -m deplo compile -c "torch.softmax(r(4, 8), -1)" --ir "$level" >"$folder/$level.txt" || { echo "--ir $level failed" >&2; exit 1; }
  [[ -s $folder/$level.txt ]] || { echo "--ir $level printed nothing" >&2; exit 1; }
done
"$python" -m deplo explain -c "torch.softmax(r(4, 8), -1)" >"$folder/explain.txt"
"$python" -m deplo passes >/dev/null
"$python" -m deplo env >/dev/null
