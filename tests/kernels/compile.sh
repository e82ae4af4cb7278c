#!/usr/bin/env bash
# compile.sh DIRECTORY COMMAND...: runs the command, which compiles .../OP/cuda.cu.o with --no-compress and
# --resource-usage, and writes the kernels' PTX and ptxas' report next to each other: DIRECTORY/OP.ptx, DIRECTORY/OP.ptxas.
set -euo pipefail
directory=$1
shift
object=
for ((i = 1; i < $#; ++i)); do
  if [[ ${!i} == -o ]]; then
    next=$((i + 1))
    object=${!next}
  fi
done
op=$(basename "$(dirname "$object")")
mkdir -p "$directory"
output=$directory/$op
trap 'rm -f "$output".{errors,fatbin}' EXIT

# ptxas' report has several lines for each kernel, the last one is "Compile time"; everything else is for people.
status=0
"$@" 2>"$output.errors" || status=$?
grep -E '^ptxas info|^ +[0-9]+ bytes stack frame' "$output.errors" >"$output.ptxas" || true
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$output.errors" >&2 || true
((status == 0)) || exit "$status"

# The texts end with NULs. Lines for sed are what lies between two NULs.
objcopy -O binary --only-section=.nv_fatbin "$object" "$output.fatbin"
tr '\000\n' '\n\001' <"$output.fatbin" | LC_ALL=C sed -nE 's/^.*(\.version [0-9.]+\x01\.target )/\1/p' | tr '\001' '\n' >"$output.ptx"
