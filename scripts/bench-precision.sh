#!/usr/bin/env bash
# Training steps in bfloat16 and float32 on this machine's CPU, in alternation: speed and memory as ratios of one run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-precision.sh [--rounds N] [--steps N] [--case MODEL-bBATCH-tLENGTH]... [--binary PATH]
  --rounds N      rounds of both precisions per case (3); the ratios are medians over the rounds
  --steps N       timed steps per round (5), after four warm-up steps; the fastest counts
  --case NAME     models: gpt2-124m, llama-17m (default: gpt2-124m-b4-t256, gpt2-124m-b1-t1024, llama-17m-b16-t256)
  --binary PATH   nrl-train to measure (default: builds build/cpu/bin/nrl-train)
TEXT
}

rounds=3
steps=5
cases=()
binary=
while (($#)); do
  taken=2
  case $1 in
    --case)
      [[ ${2:-} =~ ^(gpt2-124m|llama-17m)-b([0-9]+)-t([0-9]+)$ ]] || die 64 "--case takes MODEL-bBATCH-tLENGTH; found '${2:-}'"
      cases+=("$2")
      ;;
    *) take_option "rounds steps" "" "$@" ;;
  esac
  shift "$taken"
done
((${#cases[@]})) || cases=(gpt2-124m-b4-t256 gpt2-124m-b1-t1024 llama-17m-b16-t256)

cd "$root_dir"
[[ -n $binary ]] || build_binary
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# run MODEL BATCH LENGTH PRECISION: prints the best ms, planned and resident bytes.
run() {
  "$binary" bench step "configs/$1.yaml" --device cpu --steps "$steps" --json "$work/step.json" "policy.train_global_batch_size=$2" \
    "policy.train_micro_batch_size=$2" "policy.max_total_sequence_length=$3" "policy.precision=$4" >"$work/out" 2>&1 ||
    { cat "$work/out" >&2 && die 70 "bench step failed on $1 in $4"; }
  awk '{ while (match($0, /"(planned_bytes|peak_resident_bytes|step_ms|step)":[0-9.e+-]+/)) {
      split(substr($0, RSTART, RLENGTH), pair, /[":]+/); $0 = substr($0, RSTART + RLENGTH)
      if (pair[2] == "step") step = pair[3]
      else if (pair[2] != "step_ms") bytes[pair[2]] = pair[3]
      else if (step > 4 && (best == 0 || pair[3] < best)) best = pair[3] } }
    END { print best, bytes["planned_bytes"], bytes["peak_resident_bytes"] }' "$work/step.json"
}

"$binary" doctor | awk '$1 == "processor" || $1 == "bf16" || /^fp32 peak/'
for entry in "${cases[@]}"; do
  [[ $entry =~ ^(.*)-b([0-9]+)-t([0-9]+)$ ]]
  model=${BASH_REMATCH[1]} batch=${BASH_REMATCH[2]} length=${BASH_REMATCH[3]}
  : >"$work/rounds"
  for ((round = 1; round <= rounds; ++round)); do
    echo "$(run "$model" "$batch" "$length" bfloat16) $(run "$model" "$batch" "$length" float32)" | tee -a "$work/rounds" |
      awk -v name="$entry" -v round="$round" -v tokens="$((batch * length))" '{
        printf "%-20s round %d: bfloat16 %.0f tokens/s, float32 %.0f: x %.2f\n", name, round, tokens / $1 * 1e3, tokens / $4 * 1e3, $4 / $1 }'
  done
  ratio() { awk -v above="$1" -v below="$2" '{ print $above / $below }' "$work/rounds" | median; }
  printf '%-20s speed x %.2f, planned memory x %.2f, peak resident x %.2f\n' "$entry" "$(ratio 4 1)" "$(ratio 2 5)" "$(ratio 3 6)"
done
