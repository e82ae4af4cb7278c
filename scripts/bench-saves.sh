#!/usr/bin/env bash
# Measures how much of the time of a run its checkpoints take: steps that follow a save against as many that do not, in the
# same run, with saves beside the steps (checkpointing.is_async: true) and with saves that the steps wait for.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-saves.sh [--saves N] [--seconds N] [--ranks N] [--threads N] [--config FILE] [--binary PATH]
  --saves N       saves of a run (6)
  --seconds N     seconds of steps after a save, and again before the next (20)
  --ranks N       ranks of the run (1)
  --threads N     threads of a rank (all cores, divided by the ranks)
  --config FILE   the model and the batch (configs/llama-17m.yaml, with batches of 8 x 256 tokens)
  --binary PATH   nrl-train to measure (default: builds build/cpu/bin/nrl-train)
TEXT
}

saves=6
seconds=20
ranks=1
threads=
config=
binary=
while (($#)); do
  take_option "saves seconds ranks threads" "config" "$@"
  # shellcheck disable=SC2154  # take_option sets it
  shift "$taken"
done
cd "$root_dir"
[[ -n $binary ]] || build_binary
overrides=()
if [[ -z $config ]]; then
  config=configs/llama-17m.yaml
  overrides=(policy.train_global_batch_size=8 policy.max_total_sequence_length=256)
fi
[[ -n $threads ]] || threads=$(($(cores) / ranks > 0 ? $(cores) / ranks : 1))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$binary" prepare --input docs --tokenizer bytes --output "$work/corpus" >"$work/out" 2>&1 || die 70 "$(cat "$work/out")"

# train NAME STEPS PERIOD KEY...
train() {
  local mpi_run=() name=$1 steps=$2 period=$3
  shift 3
  ((ranks == 1)) || mpi_setup "$ranks"
  "${mpi_run[@]}" "$binary" "$config" "${overrides[@]}" "data.train.data_path=$work/corpus" data.split=null \
    pretrain.max_num_steps="$steps" pretrain.val_period=0 pretrain.val_at_end=false "kernels.num_threads=$threads" device=cpu \
    "checkpointing.checkpoint_dir=$work/$name/checkpoints" "checkpointing.save_period=$period" checkpointing.keep_latest_k=1 \
    "logger.log_dir=$work/$name/logs" logger.progress=plain logger.log_interval=1000000 "$@" >"$work/out" 2>&1 ||
    die 70 "$(cat "$work/out")"
}

# The number of steps in these seconds.
train warm-up 12 0
step_ms=$(awk -v key=step_ms -f scripts/metrics.awk "$work/warm-up/logs/metrics.jsonl" | sort -g | sed -n 6p)
half=$(awk -v ms="$step_ms" -v s="$seconds" 'BEGIN { n = int(s * 1e3 / ms + 0.5); print n < 3 ? 3 : n }')
du -sb "$work"/warm-up/checkpoints/step-12 | awk -v ranks="$ranks" -v threads="$threads" -v half="$half" -v ms="$step_ms" '{
  printf "%d ranks of %d threads, checkpoints of %.0f MB, %d steps of %.0f ms after a save and before the next\n", ranks, threads, $1 / 1e6, half, ms }'

# report NAME: the ratio of the steps without a save to those with one, by save and in the middle, and the longest step.
report() {
  awk -v key="step" -f scripts/metrics.awk "$work/$1/logs/metrics.jsonl" >"$work/steps"
  awk -v key="time" -f scripts/metrics.awk "$work/$1/logs/metrics.jsonl" >"$work/times"
  paste "$work/steps" "$work/times" | awk -v half="$half" -v name="$1" '
    { at[$1] = $2; last = $1 }
    END {
      for (s = 2 * half; s + 2 * half <= last; s += 2 * half) {
        with = at[s + half] - at[s]; without = at[s + 2 * half] - at[s + half]
        ratio[++n] = without / with; lost[n] = with - without
      }
      # Few: sorted by insertion.
      for (i = 2; i <= n; ++i)
        for (j = i; j > 1 && ratio[j] < ratio[j - 1]; --j) { x = ratio[j]; ratio[j] = ratio[j - 1]; ratio[j - 1] = x }
      printf "%-6s throughput after a save: %.1f %% (median of %d; %.1f to %.1f)\n", name, 100 * ratio[int((n + 1) / 2)], n, 100 * ratio[1], 100 * ratio[n]
    }'
  awk -v name="$1" '/^time .* ckpt / { sub(/.* ckpt /, ""); sub(/%.*/, ""); printf "%-6s the steps wait for saves %s %% of the run\n", name, $0 }' "$work/out"
  sed -nE 's/.*ckpt.* ([0-9.]+)s$/\1/p' "$work/out" | sort -g | awk -v name="$1" '{ s[NR] = $1 } END { printf "%-6s a save takes %.1f s\n", name, s[int((NR + 1) / 2)] }'
}
for name in sync async; do
  train "$name" $((2 * half * (saves + 1) + 1)) $((2 * half)) "checkpointing.is_async=$([[ $name == async ]] && echo true || echo false)"
  report "$name"
done
