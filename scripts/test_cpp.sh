#!/bin/bash
# test_cpp.sh BINARY JOBS [REGEX]: every test case of a Catch2 binary but those whose names match REGEX, in JOBS processes at a time. Prints what failed and
# the totals.
set -euo pipefail
binary=$1
jobs=$2
leave_out=${3:-^$}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$binary" --list-test-names-only >"$folder/names" || true # exits with the number of tests
sed -i -E "/$leave_out/d" "$folder/names"
sed -e 's/[][\\,"~*]/\\&/g' "$folder/names" | split --number="r/$((4 * jobs))" --elide-empty-files - "$folder/part."

run_part() {
  "$1" "$(paste -sd, "$2")" >"$2.out" 2>&1 || { cat "$2.out"; exit 1; }
}
export -f run_part
printf '%s\n' "$folder"/part.* | xargs -P "$jobs" -I{} bash -c 'run_part "$0" "$1"' "$binary" {} || exit 1

# A name that Catch2 does not find again would be a test that nobody runs.
ran=$(cat "$folder"/part.*.out | sed -nE 's/^All tests passed \(.* in ([0-9]+) test cases?\)$/\1/p' | awk '{ n += $1 } END { print n + 0 }')
expected=$(wc -l <"$folder/names")
[[ $ran -eq $expected ]] || { echo "$binary: $expected test cases, of which $ran ran" >&2; exit 1; }
echo "$ran passed, 0 failed"
