#!/usr/bin/env bash
# Trains a small model on the texts of this tree with every rule of alerts and of the stability guard, several seeds in turn,
# and counts what they report of these healthy runs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT2'
usage: scripts/check-alerts.sh [--runs N] [--steps N] [--binary PATH] [KEY=VALUE...]
  --runs N        runs, each with a seed of its own (5)
  --steps N       steps of a run (2000)
  --binary PATH   nrl-train to test (default: builds build/cpu/bin/nrl-train)
  KEY=VALUE       overrides of all runs
Exits with 1 if there is an alert about the training. Alerts about speed (training_speed, slower, speed_trend,
step_ms_anomaly, data_wait, cpu_usage, no_step) are counted apart: other programs on the machine cause them, too.
TEXT2
}

runs=5 steps=2000 binary=
keys=()
while (($#)); do
  taken=1
  case $1 in
    *=*) keys+=("$1") ;;
    *) take_option "runs steps" "" "$@" ;;
  esac
  shift "$taken"
done
[[ -n $binary ]] || build_binary
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$binary" prepare --input "$root_dir/core" "$root_dir/docs" --tokenizer bytes --output "$work/corpus" >"$work/out" 2>&1 ||
  die 70 "cannot prepare the data: $(cat "$work/out")"
cat >"$work/run.yaml" <<YAML
algorithm: pretrain
policy:
  model: {model_type: llama, vocab_size: 272, hidden_size: 64, intermediate_size: 176, num_hidden_layers: 2,
          num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128}
  train_global_batch_size: 8
  train_micro_batch_size: 8
  max_total_sequence_length: 64
  optimizer: {lr: 2.0e-3, weight_decay: 0.1, betas: [0.9, 0.95]}
  scheduler: {lr_warmup_iters: 50, lr_decay_iters: $steps, lr_decay_style: cosine}
pretrain: {max_num_steps: $steps, val_period: 200, val_batches: 16}
data: {train: {data_path: $work/corpus}, split: [9, 1, 0]}
checkpointing: {enabled: false}
kernels: {num_threads: 1}
logger: {monitor_gpus: true, gpu_monitoring: {collection_interval: 1}, progress: plain, log_interval: 1000}
monitoring:
  interval: 1
  alerting: {enabled: true}
  analysis: {trend_analysis: true, anomaly_detection: true}
  stability: {on_instability: warn}
YAML

alarms=0
for ((run = 1; run <= runs; ++run)); do
  "$binary" "$work/run.yaml" pretrain.seed="$run" logger.log_dir="$work/logs-$run" "${keys[@]}" >"$work/out" 2>&1 ||
    die 70 "run $run failed: $(tail -n 20 "$work/out")"
  loss=$(awk -v key=loss -f "$root_dir/scripts/metrics.awk" "$work/logs-$run/metrics.jsonl" | tail -n 1)
  touch "$work/logs-$run/alerts.jsonl"
  awk -v run="$run" -v steps="$steps" -v loss="$loss" '
    /"severity": ?"cleared"/ { next }
    match($0, /"rule": ?"[^"]*"/) {
      rule = substr($0, RSTART, RLENGTH)
      gsub(/"rule": ?|"/, "", rule)
      ++count[rule]
      if (rule ~ /^(training_speed|slower|speed_trend|step_ms_anomaly|data_wait|cpu_usage|no_step)$/) ++speed
      else ++training
    }
    END {
      printf "run %d: %d steps, loss %.3f, %d alerts about the training, %d about speed", run, steps, loss, training, speed
      for (rule in count) printf "; %s %d", rule, count[rule]
      print ""
      exit training > 0
    }' "$work/logs-$run/alerts.jsonl" || alarms=1
done
exit $alarms
