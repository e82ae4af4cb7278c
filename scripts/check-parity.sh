#!/usr/bin/env bash
# Trains a small model of every family here and in plain PyTorch, from the same weights on the same samples, and compares
# losses and gradient norms of 20 steps (scripts/check-parity.py). Needs python3-torch.
# usage: scripts/check-parity.sh [BINARY [FAMILY]...]      families: gpt2 llama mistral qwen2 qwen3 (default: all)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

binary=$(realpath -e "${1:-$root_dir/build/cpu/bin/nrl-train}") || die 66 "build nrl-train first: scripts/test.sh"
shift || true
families=("$@")
((${#families[@]})) || families=(gpt2 llama mistral qwen2 qwen3)
python=
for candidate in python3 /usr/bin/python3; do
  if "$candidate" -c 'import torch' 2>/dev/null; then python=$candidate && break; fi
done
[[ -n $python ]] || die 69 "PyTorch is not installed (package python3-torch)"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"$binary" prepare --input "$root_dir/apps" "$root_dir/core" --tokenizer bytes --output corpus >prepare.txt

# The model section of a family: small, with grouped heads, an odd width, and everything else that tells it apart.
model_of() {
  local sizes='vocab_size: 272, hidden_size: 96, intermediate_size: 176, num_hidden_layers: 3, num_attention_heads: 6, num_key_value_heads: 2, max_position_embeddings: 64'
  case $1 in
    gpt2) echo '{model_type: gpt2, vocab_size: 272, n_embd: 96, n_layer: 3, n_head: 6, n_positions: 64, activation_function: gelu_new, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}' ;;
    llama) echo "{model_type: llama, $sizes, rms_norm_eps: 1.0e-5, tie_word_embeddings: false}" ;;
    mistral) echo "{model_type: mistral, $sizes, sliding_window: 24, tie_word_embeddings: false}" ;;
    qwen2) echo "{model_type: qwen2, $sizes, rope_theta: 1000000.0, tie_word_embeddings: true}" ;;
    qwen3) echo "{model_type: qwen3, $sizes, head_dim: 32, rope_theta: 1000000.0, tie_word_embeddings: true}" ;;
    *) die 64 "unknown family $1" ;;
  esac
}

# run ARGS...: trains; the output is shown only when it fails.
run() {
  "$binary" "$@" >out.txt 2>&1 || {
    cat out.txt >&2
    die 70 "nrl-train failed: $*"
  }
}

status=0
for family in "${families[@]}"; do
  cat >"$family.yaml" <<YAML
policy:
  model: $(model_of "$family")
  precision: float32
  train_global_batch_size: 8
  train_micro_batch_size: 4
  max_total_sequence_length: 64
  max_grad_norm: 1.0
  optimizer: {lr: 3.0e-3, weight_decay: 0.1, betas: [0.9, 0.95], eps: 1.0e-8}
  scheduler: {lr_decay_style: cosine, lr_warmup_iters: 5, lr_decay_iters: 20, min_lr: 3.0e-4}
pretrain: {max_num_steps: 20, seed: 11}
data: {train: {data_path: corpus}}
checkpointing: {checkpoint_dir: $family/run}
logger: {log_dir: $family/logs, log_interval: 10}
YAML
  run "$family.yaml" pretrain.max_num_steps=0 "checkpointing.checkpoint_dir=$family/start" \
    "logger.log_dir=$family/start-logs" policy.scheduler.lr_warmup_iters=0
  run "$family.yaml"
  "$binary" data show "$family.yaml" --steps 1:21 --json >"$family.jsonl"
  "$python" "$root_dir/scripts/check-parity.py" --start "$family/start/step-0" --samples "$family.jsonl" \
    --metrics "$family/logs/metrics.jsonl" >"$family.parity" || {
    status=1
    cat "$family.parity"
    continue
  }
  tail -n 1 "$family.parity"
done
exit "$status"
