#!/usr/bin/env bash
# Time of `nrl-train plan --search` for models with published shapes on 8 to 16,384 H100, and of `plan` for one layout.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench/search.sh [--binary PATH] [REGEX]
  REGEX          only the rows "MODEL RANKS" and "plan RANKS" that match, e.g. '8b|plan'
  --binary PATH  nrl-train to measure (default: builds build/cpu/bin/nrl-train)
TEXT
}

binary=
while [[ ${1:-} == -* ]]; do
  take_option "" "" "$@"
  shift "$taken"
done
only=${1:-.}
[[ -n $binary ]] || build_binary
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Batches of 2048 sequences of 8192 tokens.
model() {
  cat >"$work/$1.yaml" <<YAML
policy:
  precision: bfloat16
  model: {$2, max_position_embeddings: 8192, tie_word_embeddings: false}
  train_global_batch_size: 2048
  max_total_sequence_length: 8192
  optimizer: {lr: 1.0e-4}
pretrain: {max_num_steps: 4}
data: {train: {data_path: none}}
YAML
}
llama() {
  model "$1" "model_type: llama, vocab_size: 128256, hidden_size: $2, intermediate_size: $3, num_hidden_layers: $4,
    num_attention_heads: $5, num_key_value_heads: 8"
}
llama llama-8b 4096 14336 32 32
llama llama-70b 8192 28672 80 64
llama llama-405b 16384 53248 126 128
model qwen3-30b-a3b "model_type: qwen3_moe, vocab_size: 151936, hidden_size: 2048, intermediate_size: 6144, moe_intermediate_size: 768,
    num_experts: 128, num_experts_per_tok: 8, norm_topk_prob: true, num_hidden_layers: 48, num_attention_heads: 32,
    num_key_value_heads: 4, head_dim: 128"

# row NAME RANKS ARGUMENT...: seconds by the clock and of all processors, and what the command found.
TIMEFORMAT='%R %U'
row() {
  local name=$1 ranks=$2 seconds found
  shift 2
  [[ "$name $ranks" =~ $only ]] || return 0
  seconds=$({ time "$binary" plan "$@" --world "$ranks" --device h100 >"$work/out" 2>"$work/err" || true; } 2>&1 | tail -n 1)
  found=$(sed -nE 's/^search +(.*)$/\1/p; s/^estimate +(.*): .*/\1/p; s/^error: (--search: )?(.*)\. Fix.*/\2/p' "$work/out" "$work/err" | head -n 1)
  # shellcheck disable=SC2086  # two numbers
  printf '%-14s %6s %8.1f %8.1f  %s\n' "$name" "$ranks" $seconds "$found"
}
printf '%-14s %6s %8s %8s  %s\n' model ranks seconds user found
for name in llama-8b llama-70b llama-405b qwen3-30b-a3b; do
  for ranks in 8 64 512 16384; do row "$name" "$ranks" "$work/$name.yaml" --search 5; done
done
for ranks in 1024 8192 16384; do
  row plan "$ranks" "$work/llama-405b.yaml" distributed.{tensor_parallel_size=8,pipeline_parallel_size=16,virtual_pipeline_size=4,shard_strategy=optim_grads} \
    policy.train_micro_batch_size=1
done
