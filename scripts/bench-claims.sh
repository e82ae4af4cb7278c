#!/usr/bin/env bash
# Measures what guides for other trainers promise of memory and precision features, and writes docs/claims.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-claims.sh [--config FILE] [--steps N] [--binary PATH] [--json DIRECTORY] [--page FILE] [KEY=VALUE...]
  --config FILE     configuration that is trained on random tokens (the suite's, configs/llama-17m.yaml for most comparisons)
  --steps N         timed steps of each variant and round (5)
  --binary PATH     nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  --json DIRECTORY  results (build/bench/claims)
  --page FILE       the page to write (docs/claims.md)
  KEY=VALUE         overrides of all runs
TEXT
}

config=
steps=5
binary=
json=build/bench/claims
page=docs/claims.md
keys=()
while (($#)); do
  taken=1
  case $1 in
    *=*) keys+=("$1") ;;
    *) take_option "steps" "config json page" "$@" ;;
  esac
  shift "$taken"
done
cd "$root_dir"
[[ -n $binary ]] || build_binary
mkdir -p "$json"
status=0
suite=configs/suites/claims.yaml
compare=("$binary" bench compare "$suite" ${config:+--config "$config"} --steps "$steps" "${keys[@]}")
# measure RESULTS COMMAND...: a missed promise is left for the end.
measure() {
  rm -f "$1"
  "${@:2}" --json "$1" || status=$?
  [[ -f $1 ]] || exit "$status"
}
with=()
mapfile -t pairs < <(awk '/^  - name: / { name = $3 } /^    ranks: 2$/ { print name }' "$suite")
for name in "${pairs[@]}"; do
  measure "$json/$name.json" mpirun -n 2 --oversubscribe "${compare[@]}" --only "$name"
  with+=(--with "$json/$name.json")
done
measure "$json/one-rank.json" "${compare[@]}" --page "$page" "${with[@]}"
echo "written: $page"
exit "$status"
