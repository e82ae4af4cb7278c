#!/usr/bin/env bash
# Trains one model on real text in policy.precision and with every FP8 recipe, and compares the losses.
# Writes build/bench/fp8-losses.md. Exit code 1 if a recipe's loss is farther away than allowed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/fp8-losses.sh [--config FILE] [--data PREFIX] [--steps N] [--allowed PERCENT] [--recipe NAME]...
                             [--binary PATH] [KEY=VALUE...]
  --config FILE      configuration of the model (configs/llama-17m.yaml)
  --data PREFIX      token files of `nrl-train prepare` (default: the one of the configuration)
  --steps N          optimizer steps (300); the schedule is as long
  --allowed PERCENT  largest difference of the loss, the mean of the last tenth of the steps (1)
  --recipe NAME      tensorwise, delayed, blockwise, mxfp8; tensorwise+attention, delayed+attention: with FP8
                     attention (default: all)
  --binary PATH      nrl-train to run (default: builds build/cpu/bin/nrl-train)
  KEY=VALUE          overrides of all runs
TEXT
}

config=configs/llama-17m.yaml
data=
steps=300
allowed=1
recipes=()
binary=
keys=()
while (($#)); do
  case $1 in
    --steps)
      take_number "$@"
      shift
      ;;
    --allowed)
      [[ ${2:-} =~ ^[0-9.]+$ ]] || die 64 "$1 takes a number"
      allowed=$2
      shift
      ;;
    --config | --data)
      take_path "$@"
      shift
      ;;
    --recipe)
      [[ ${2:-} =~ ^(tensorwise|delayed|blockwise|mxfp8|tensorwise\+attention|delayed\+attention)$ ]] || die 64 "--recipe: found '${2:-}'"
      recipes+=("$2")
      shift
      ;;
    --binary)
      take_program "$@"
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *=*) keys+=("$1") ;;
    *)
      usage >&2
      exit 64
      ;;
  esac
  shift
done
((${#recipes[@]})) || recipes=(tensorwise delayed blockwise mxfp8 tensorwise+attention delayed+attention)
[[ -z $data ]] || keys+=("data.train.data_path=$(realpath -m "$data")")

cd "$root_dir"
[[ -n $binary ]] || build_binary
work=build/bench/fp8-losses
rm -rf "$work"
mkdir -p "$work"

# run NAME KEY=VALUE...: prints the mean loss of the last tenth of the steps.
run() {
  local name=$1
  shift
  "$binary" "$config" "${keys[@]}" "pretrain.max_num_steps=$steps" "pretrain.val_period=0" "pretrain.val_at_end=false" \
    "checkpointing.enabled=false" "logger.log_dir=$work/$name" "logger.log_interval=1" "$@" >"$work/$name.log" 2>&1 ||
    die $? "the run $name failed: $work/$name.log"
  awk -v key=loss -f scripts/metrics.awk "$work/$name/metrics.jsonl" |
    tail -n "$(((steps + 9) / 10))" | awk '{ sum += $1 } END { printf "%.5f\n", sum / NR }'
}

base=$(run base)
{
  printf '| operands of GEMMs | loss | difference |\n|---|---|---|\n'
  printf '| as policy.precision | %s | |\n' "$base"
} | tee "$work.md"
failed=0
for recipe in "${recipes[@]}"; do
  options=("policy.fp8_cfg.enabled=true" "policy.fp8_cfg.fp8_recipe=${recipe%+attention}")
  [[ $recipe != *+attention ]] || options+=("policy.fp8_cfg.fp8_dot_product_attention=true")
  [[ $recipe != delayed* ]] || options+=("policy.fp8_cfg.fp8_amax_history_len=16" "policy.fp8_cfg.fp8_amax_compute_algo=max")
  loss=$(run "$recipe" "${options[@]}")
  awk -v name="$recipe" -v loss="$loss" -v base="$base" -v allowed="$allowed" 'BEGIN {
      d = 100 * (loss / base - 1)
      printf "| FP8, %s | %s | %+.2f %% |\n", name, loss, d
      exit (d > allowed || d < -allowed || loss != loss + 0)
    }' | tee -a "$work.md" || failed=1
done
exit "$failed"
