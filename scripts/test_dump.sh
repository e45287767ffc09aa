#!/bin/bash
# test_dump.sh PYTHON: one compilation with everything that can be shown shown, so that dump code cannot rot.
set -euo pipefail
python=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

DEPLO_DUMP=all DEPLO_DUMP_DIR=$folder/passes DEPLO_TIME=1 DEPLO_CACHE_DIR=$folder/cache DEPLO_STRICT=1 \
  "$python" -m deplo run -c "torch.softmax(r(4, 8) @ r(8, 16), -1).relu() * r(4, 16).exp()" >"$folder/out" 2>"$folder/err" ||
  { tail -n 40 "$folder/out" "$folder/err"; exit 1; }
for level in torch tensor loop tile kernel; do
  ls "$folder"/passes/*/*_"$level"_* >/dev/null || { echo "no dump of level $level" >&2; exit 1; }
done
for level in torch tensor loop tile kernel llvm asm cuda; do
  "$python" -m deplo compile -c "torch.softmax(r(4, 8), -1)" --ir "$level" >"$folder/$level.txt" || { echo "--ir $level failed" >&2; exit 1; }
  [[ -s $folder/$level.txt ]] || { echo "--ir $level printed nothing" >&2; exit 1; }
done
"$python" -m deplo explain -c "torch.softmax(r(4, 8), -1)" >"$folder/explain.txt"
"$python" -m deplo passes >/dev/null
"$python" -m deplo env >/dev/null
echo "dumps: $(find "$folder/passes" -type f | wc -l) files"
