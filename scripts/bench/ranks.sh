#!/usr/bin/env bash
# What grows with the number of ranks: time of `plan` for a 70B model, and the bookkeeping of starts and saves,
# simulated on this machine; then the time and memory to build a sample order.
# usage: scripts/bench/ranks.sh [BIN_DIRECTORY]
# NRL_BENCH_SAMPLES=1.8e9 also builds the order of 15 T tokens at 8,192, which needs 20 GB in TMPDIR or /var/tmp and as
# much memory for the comparison.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

bin=$(realpath -e "${1:-$root_dir/build/cpu/bin}") || die 66 "build nrl-train, io_tests and data_tests first: scripts/test.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/70b.yaml" <<'YAML'
policy:
  precision: bfloat16
  model: {model_type: llama, vocab_size: 128256, hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80,
          num_attention_heads: 64, num_key_value_heads: 8, max_position_embeddings: 8192}
  train_global_batch_size: 2048
  train_micro_batch_size: 1
  max_total_sequence_length: 8192
  optimizer: {lr: 1.0e-4}
distributed: {tensor_parallel_size: 8, sequence_parallel: true, pipeline_parallel_size: 4, shard_strategy: optim}
cluster: {gpus_per_node: 8}
pretrain: {max_num_steps: 1000}
data: {train: {data_path: random-tokens}}
YAML

# Prints the time of a command, and of its work, which counts on a busy machine.
measure() {
  local TIMEFORMAT="%R s, %U s of work"
  time "$@" >"$work/out.txt"
}
say "nrl-train plan: 70B, tensor parallelism 8, pipeline 4, ZeRO-1 over the rest"
for ranks in 64 1024 16384; do
  printf '%6d ranks: ' "$ranks"
  measure "$bin/nrl-train" plan "$work/70b.yaml" --world "$ranks" --device h100
done
say "starts and saves"
"$bin/io_tests" "bookkeeping of a start and a save by number of ranks" | grep -v '^\(Filters\|Randomness\|===\|All tests\)'
say "sample order, once per node, for any number of ranks"
"$bin/data_tests" "time and memory to build*" | grep -v '^\(Filters\|Randomness\|===\|All tests\)'
