#!/usr/bin/env bash
# Speed of `nrl-train prepare` with each TOKENIZER on TEXT, all cores, the best of ROUNDS alternating rounds.
# usage: scripts/bench/prepare.sh [--binary PATH] [--rounds N] TEXT TOKENIZER...
#   e.g. scripts/bench/prepare.sh book.txt bytes hf:gpt2/tokenizer.json
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

binary=$root_dir/build/cpu/bin/nrl-train
rounds=3
while (($#)); do
  case $1 in
    --binary) binary=${2:-} ;;
    --rounds) rounds=${2:-} ;;
    *) break ;;
  esac
  shift 2 || die 64 "$1 takes a value"
done
[[ $rounds =~ ^[1-9][0-9]*$ ]] || die 64 "--rounds takes a number; found '$rounds'"
(($# >= 2)) || die 64 "usage: scripts/bench/prepare.sh [--binary PATH] [--rounds N] TEXT TOKENIZER..."
[[ -x $binary ]] || die 66 "build nrl-train first: scripts/quickstart.sh or scripts/test.sh"
text=$1
shift
bytes=$(stat -c %s "$text")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for ((round = 0; round < rounds; ++round)); do
  for tokenizer; do
    begin=$(date +%s.%N)
    "$binary" prepare --input "$text" --tokenizer "$tokenizer" --output "$work/out" >"$work/log" 2>&1 ||
      { cat "$work/log" >&2; die 70 "nrl-train prepare failed"; }
    awk -v begin="$begin" -v end="$(date +%s.%N)" -v bytes="$bytes" -v name="$tokenizer" \
      'BEGIN { printf "%.1f\t%s\n", bytes / (end - begin) / 1e6, name }' >>"$work/rates"
  done
done
echo "$((bytes / 1000000)) MB of text, $(nproc) cores, best and median of $rounds rounds"
for tokenizer; do
  awk -F '\t' -v name="$tokenizer" '$2 == name { print $1 }' "$work/rates" | LC_ALL=C sort -gr |
    awk -v name="$tokenizer" '{ v[NR] = $1 } END { printf "%-40s %6.1f MB/s, median %.1f\n", name, v[1], v[int((NR + 1) / 2)] }'
done
