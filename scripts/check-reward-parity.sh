#!/usr/bin/env bash
# Trains reward models of several families with nrl-train and with transformers, from the same start on the same pairs,
# with and without adapters, and compares losses, gradient norms and scores of 20 steps (scripts/check-reward-parity.py).
# Exits with 77 without torch, transformers and peft.
# usage: PYTHON=VENV/bin/python scripts/check-reward-parity.sh [BINARY [FAMILY]...]
#   families: gpt2 llama mistral qwen2 qwen3 lora (a llama with adapters; default: all)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

binary=$(realpath -e "${1:-$root_dir/build/cpu/bin/nrl-train}") || die 66 "build nrl-train first: scripts/test.sh"
shift || true
families=("$@")
((${#families[@]})) || families=(gpt2 llama mistral qwen2 qwen3 lora)
python=${PYTHON:-python3}
"$python" -c 'import torch, transformers, peft' 2>/dev/null || {
  echo "skipped: torch, transformers or peft is not installed (give a virtual environment's python as PYTHON)"
  exit 77
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
awk 'BEGIN { for (i = 0; i < 3000; ++i) print "int main(" i * i % 997 ") { return " i "; }" }' >text.txt
"$binary" prepare --input text.txt --tokenizer bytes --output corpus >prepare.txt
# Answers of unequal lengths; the right one is longer or shorter. Every step trains on all pairs, so that their order
# does not matter.
awk 'BEGIN { for (i = 0; i < 16; ++i) printf "{\"prompt\": \"Square of %d: \", \"chosen\": \"%d\", \"rejected\": \"%d%s\"}\n",
  i, i * i, i * 7 % 13, i % 3 ? "" : " or so" }' >pairs.jsonl

sizes="vocab_size: 272, hidden_size: 48, intermediate_size: 88, num_hidden_layers: 2, num_attention_heads: 6, num_key_value_heads: 2, max_position_embeddings: 64, initializer_range: 0.1"
model_of() {
  case $1 in
    gpt2) echo "{model_type: gpt2, vocab_size: 272, n_embd: 48, n_layer: 2, n_head: 6, n_positions: 64, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0, initializer_range: 0.1}" ;;
    llama | lora) echo "{model_type: llama, $sizes}" ;;
    mistral) echo "{model_type: mistral, $sizes, sliding_window: 12}" ;;
    qwen2) echo "{model_type: qwen2, $sizes, tie_word_embeddings: true}" ;;
    qwen3) echo "{model_type: qwen3, $sizes, head_dim: 16, tie_word_embeddings: true}" ;;
    *) die 64 "unknown family $1" ;;
  esac
}

for family in "${families[@]}"; do
  mkdir -p "$family"
  printf 'policy: {model: %s, train_global_batch_size: 4, max_total_sequence_length: 32}\ndata: {train: {data_path: corpus}}\npretrain: {max_num_steps: 0}\ncheckpointing: {checkpoint_dir: %s/base}\nlogger: {log_dir: %s/logs}\ndevice: cpu\n' \
    "$(model_of "$family")" "$family" "$family" >"$family/base.yaml"
  "$binary" "$family/base.yaml" >"$family/base.txt" 2>&1
  cat >"$family/rm.yaml" <<EOF
algorithm: rm
policy:
  model_name: $family/base/step-0
  tokenizer: {name: bytes}
  precision: float32
  train_global_batch_size: 16
  max_total_sequence_length: 48
  max_grad_norm: 2.0
  sequence_packing: {enabled: true, train_mb_tokens: 192}
  optimizer: {lr: 1.0e-4, betas: [0.85, 0.97], eps: 1.0e-5, weight_decay: 0.3}
  scheduler: {lr_decay_style: constant}
data: {train: {data_path: pairs.jsonl}}
rm: {max_num_steps: 20, center_rewards_coefficient: 0.01}
checkpointing: {checkpoint_dir: $family/rm, save_period: 0}
logger: {log_dir: $family/logs, log_interval: 1}
device: cpu
EOF
  if [[ $family == lora ]]; then
    sed -i 's/^  precision/  lora: {enabled: true, dim: 4, alpha: 8}\n&/' "$family/rm.yaml"
  fi
  # The model at the start, so that both programs begin with the same head.
  "$binary" "$family/rm.yaml" rm.max_num_steps=0 checkpointing.checkpoint_dir="$family/start" >"$family/start.txt" 2>&1
  "$binary" "$family/rm.yaml" >"$family/rm.txt" 2>&1
  if [[ $family == lora ]]; then
    "$binary" checkpoint merge "$family/rm" --output "$family/merged" >"$family/merged.txt" 2>&1
  fi
done
"$python" "$root_dir/scripts/check-reward-parity.py" "${families[@]}"
