#!/usr/bin/env bash
# Trains adapters of a small model of every family with nrl-train and with PEFT, from the same base model and adapter on
# the same samples, and compares losses, gradient norms and adapters of 20 steps (scripts/check-lora-parity.py).
# Exits with 77 without torch, transformers and peft.
# usage: PYTHON=VENV/bin/python scripts/check-lora-parity.sh [BINARY [FAMILY]...]
#   families: gpt2 llama qwen2 qwen3 (default: all)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

binary=$(realpath -e "${1:-$root_dir/build/cpu/bin/nrl-train}") || die 66 "build nrl-train first: scripts/test.sh"
shift || true
families=("$@")
((${#families[@]})) || families=(gpt2 llama qwen2 qwen3)
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

sizes="vocab_size: 272, hidden_size: 48, intermediate_size: 88, num_hidden_layers: 2, num_attention_heads: 6, num_key_value_heads: 2, max_position_embeddings: 32"
model_of() {
  case $1 in
    gpt2) echo "{model_type: gpt2, vocab_size: 272, n_embd: 48, n_layer: 2, n_head: 6, n_positions: 32, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0, initializer_range: 0.1}" ;;
    llama) echo "{model_type: llama, $sizes, tie_word_embeddings: false, initializer_range: 0.1}" ;;
    qwen2) echo "{model_type: qwen2, $sizes, tie_word_embeddings: true, initializer_range: 0.1}" ;;
    qwen3) echo "{model_type: qwen3, $sizes, head_dim: 16, tie_word_embeddings: true, initializer_range: 0.1}" ;;
    *) die 64 "unknown family $1" ;;
  esac
}
# Some modules of fused matrices, some of all layers, and rank-stabilized scales.
lora_of() {
  case $1 in
    gpt2) echo "{enabled: true, dim: 4, alpha: 8}" ;;
    llama) echo "{enabled: true, dim: 4, alpha: 8}" ;;
    qwen2) echo "{enabled: true, dim: 3, alpha: 5, target_modules: [k_proj, up_proj, o_proj]}" ;;
    qwen3) echo "{enabled: true, dim: 4, alpha: 3, use_rslora: true, exclude_modules: ['layers.0.*', v_proj]}" ;;
  esac
}

for family in "${families[@]}"; do
  mkdir -p "$family"
  common="  train_global_batch_size: 4
  train_micro_batch_size: 2
  max_total_sequence_length: 32
  max_grad_norm: 0.4
  optimizer: {lr: 1.0e-2, betas: [0.85, 0.97], eps: 1.0e-6, weight_decay: 0.3}
  scheduler: {lr_decay_style: constant}
data: {train: {data_path: corpus}}
pretrain: {max_num_steps: 20}
checkpointing: {checkpoint_dir: $family/lora, save_period: 0}
logger: {log_dir: $family/logs, log_interval: 1}
device: cpu"
  printf 'policy:\n  model: %s\n%s\n' "$(model_of "$family")" "$common" >"$family/base.yaml"
  "$binary" "$family/base.yaml" pretrain.max_num_steps=0 checkpointing.checkpoint_dir="$family/base" >"$family/base.txt"
  printf 'policy:\n  model_name: %s/base/step-0\n  lora: %s\n%s\n' "$family" "$(lora_of "$family")" "$common" >"$family/lora.yaml"
  # The adapter at the start, so that both programs begin with the same A.
  "$binary" "$family/lora.yaml" pretrain.max_num_steps=0 checkpointing.checkpoint_dir="$family/start" >"$family/start.txt"
  "$binary" "$family/lora.yaml" >"$family/lora.txt"
  "$binary" data show "$family/lora.yaml" --steps 1:21 --json >"$family/samples.jsonl"
  "$binary" checkpoint merge "$family/lora" --output "$family/merged" >"$family/merged.txt" 2>&1
done
"$python" "$root_dir/scripts/check-lora-parity.py" "${families[@]}"
