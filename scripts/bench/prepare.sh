#!/usr/bin/env bash
# Speed of `nrl-train prepare` with each TOKENIZER on TEXT, all cores, the best of ROUNDS alternating rounds.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench/prepare.sh [--rounds N] [--binary PATH] TEXT TOKENIZER...
  e.g. scripts/bench/prepare.sh book.txt bytes hf:gpt2/tokenizer.json
  --rounds N     rounds in which every tokenizer is timed once (3)
  --binary PATH  nrl-train to measure (default: builds build/cpu/bin/nrl-train)
TEXT
}

rounds=3 binary=
while [[ ${1:-} == -* ]]; do
  take_option "rounds" "" "$@"
  shift "$taken"
done
(($# >= 2)) || die 64 "a text and a tokenizer are needed; see --help"
[[ -n $binary ]] || build_binary
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
  awk -F '\t' -v name="$tokenizer" '$2 == name { print $1 }' "$work/rates" >"$work/one"
  printf '%-40s %6.1f MB/s, median %.1f\n' "$tokenizer" "$(LC_ALL=C sort -g "$work/one" | tail -n 1)" "$(median <"$work/one")"
done
