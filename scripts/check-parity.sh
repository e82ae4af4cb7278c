#!/usr/bin/env bash
# Trains a small model of every family with nrl-train and plain PyTorch, from the same weights on the same samples, and
# compares losses, gradient norms and learning rates of 20 steps (scripts/check-parity.py). Exits with 77 without
# python3-torch.
# usage: scripts/check-parity.sh [--device cpu|cuda] [--precision float32|bfloat16] [BINARY [FAMILY]...]
#   families: gpt2 llama mistral qwen2 qwen3 gemma3_text (default: all)
#   --device cuda         nrl-train on the GPU, at sizes that its libraries take; PyTorch uses the GPU if it can
#   --precision bfloat16  nrl-train in bf16, PyTorch too, with fp32 master weights; with float32 PyTorch computes in double
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

device=cpu precision=float32
while [[ ${1:-} == --* ]]; do
  case $1 in
    --device) device=${2:-} ;;
    --precision) precision=${2:-} ;;
    *) die 64 "unknown option $1" ;;
  esac
  shift 2 || die 64 "a value is missing"
done
[[ $device =~ ^(cpu|cuda)$ && $precision =~ ^(float32|bfloat16)$ ]] || die 64 "there is no $device in $precision"
binary=$(realpath -e "${1:-$root_dir/build/cpu/bin/nrl-train}") || die 66 "build nrl-train first: scripts/test.sh"
shift || true
families=("$@")
((${#families[@]})) || families=(gpt2 llama mistral qwen2 qwen3 gemma3_text)
python=$(find_torch) || {
  echo "skipped: PyTorch is not installed (package python3-torch)"
  exit 77
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# A text that does not change with the sources.
awk 'BEGIN { for (i = 0; i < 3000; ++i) print "int main(" i * i % 997 ") { return " i "; }" }' >text.txt
"$binary" prepare --input text.txt --tokenizer bytes --output corpus >prepare.txt

# No value is the default of both programs. The learning rate stays below the onset of gradient spikes, which amplify the
# rounding of earlier steps.
lr=2.0e-3 min_lr=3.0e-4 warmup=5 decay=18 betas=(0.85 0.97) eps=1.0e-5 weight_decay=0.3 clip=1.65

# The model section of a family: small, with grouped heads, an odd width, and the family's particular features.
hidden=48 ffn=88 heads=6 kv_heads=2 length=32 tolerances=()
if [[ $device == cuda ]]; then hidden=256 ffn=704 heads=4 length=256 lr=5.0e-4 min_lr=1.0e-4 clip=3.0; fi
# Two programs round to bf16 in different places. On CPUs losses differ by at most 7e-4, gradient norms by 2e-2 (at the sizes of a
# GPU; else by 2e-4 and 5e-3).
if [[ $precision == bfloat16 ]]; then
  tolerances=(--tolerance 2e-3 --norm-tolerance 3e-2)
elif [[ $device == cuda ]]; then
  tolerances=(--tolerance 1e-5 --norm-tolerance 1e-3) # as between a GPU and a CPU: scripts/gpu-validate/checks.sh
fi
model_of() {
  local sizes="vocab_size: 272, hidden_size: $hidden, intermediate_size: $ffn, num_hidden_layers: 2, num_attention_heads: $heads, num_key_value_heads: $kv_heads, max_position_embeddings: $length"
  case $1 in
    gpt2) echo "{model_type: gpt2, vocab_size: 272, n_embd: $hidden, n_layer: 2, n_head: $heads, n_positions: $length, activation_function: gelu_new, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}" ;;
    llama) echo "{model_type: llama, $sizes, rms_norm_eps: 1.0e-5, tie_word_embeddings: false}" ;;
    mistral) echo "{model_type: mistral, $sizes, sliding_window: 12, tie_word_embeddings: false}" ;;
    qwen2) echo "{model_type: qwen2, $sizes, rope_theta: 1000000.0, tie_word_embeddings: true}" ;;
    qwen3) echo "{model_type: qwen3, $sizes, head_dim: 16, rope_theta: 1000000.0, tie_word_embeddings: true}" ;;
    gemma3_text) echo "{model_type: gemma3_text, ${sizes/num_hidden_layers: 2/num_hidden_layers: 3}, head_dim: 16, sliding_window: 12, sliding_window_pattern: 3, query_pre_attn_scalar: 24}" ;;
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

for family in "${families[@]}"; do
  model=$(model_of "$family")
  cat >"$family.yaml" <<YAML
policy:
  model: $model
  precision: $precision
  train_global_batch_size: 8
  train_micro_batch_size: 4
  max_total_sequence_length: $length
  max_grad_norm: $clip
  optimizer: {lr: $lr, weight_decay: $weight_decay, betas: [${betas[0]}, ${betas[1]}], eps: $eps}
  scheduler: {lr_decay_style: cosine, lr_warmup_iters: $warmup, lr_decay_iters: $decay, min_lr: $min_lr}
pretrain: {max_num_steps: 20, seed: 11}
data: {train: {data_path: corpus}}
checkpointing: {checkpoint_dir: $family/run}
logger: {log_dir: $family/logs, log_interval: 10}
kernels: {num_threads: 1}
device: $device
YAML
  run "$family.yaml" pretrain.max_num_steps=0 "checkpointing.checkpoint_dir=$family/start" \
    "logger.log_dir=$family/start-logs"
  run "$family.yaml"
  "$binary" data show "$family.yaml" --steps 1:21 --json >"$family/samples.jsonl" 2>out.txt
done
status=0
PYTHONDONTWRITEBYTECODE=1 outside "$python" "$root_dir/scripts/check-parity.py" --lr $lr --min-lr $min_lr --warmup $warmup --decay $decay \
  --betas "${betas[@]}" --eps $eps --weight-decay $weight_decay --clip $clip --device "$device" --precision "$precision" "${tolerances[@]}" "${families[@]}" >table.txt || status=1
if ((status == 0)); then grep ': worst' table.txt; else cat table.txt; fi
exit "$status"
