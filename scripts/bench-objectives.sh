#!/usr/bin/env bash
# Benchmarks the objectives by what their loss of a token depends on: nothing else (sft), its log-probability (grpo with
# clipping), the log-probabilities of its sequence (grpo with ratios of sequences, GSPO). A Llama of 17 million parameters
# trains on the same records in all of them. The programs take turns; the ratio to sft is the median over the rounds.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-objectives.sh [--rounds N] [--steps N] [--length N] [--micro N] [--binary PATH] [key=value...]
  --rounds N     rounds of all objectives (7)
  --steps N      timed steps per round (6), after two others
  --length N     tokens of a sequence (256)
  --micro N      sequences of a microbatch (8); a step has two
  --binary PATH  nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  key=value      overrides of all runs
TEXT
}

rounds=7 steps=6 length=256 micro=8
binary=
keys=()
while (($#)); do
  taken=1
  case $1 in
    *=*) keys+=("$1") ;;
    *) take_option "rounds steps length micro" "" "$@" ;;
  esac
  shift "$taken"
done
[[ -n $binary ]] || build_binary

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Bytes are tokens; a prompt of 16, and an end token after the completion.
awk -v length_="$length" 'BEGIN {
  for (r = 0; r < 64; ++r) {
    prompt = completion = ""
    for (i = 0; i < 16; ++i) prompt = prompt sprintf("%c", 97 + (r * 7 + i * 5) % 26)
    for (i = 17; i < length_; ++i) completion = completion sprintf("%c", 97 + (r * 11 + i * i) % 26)
    logprobs = "-9.0"  # about that of the model before training
    for (i = 17; i < length_; ++i) logprobs = logprobs ",-9.0"
    printf "{\"prompt\":\"%s\",\"completion\":\"%s\",\"advantage\":%.2f,\"logprobs\":[%s]}\n", prompt, completion,
      (r % 5 - 2) / 2, logprobs
  }
}' >"$work/records.jsonl"

# write NAME ALGORITHM FORMAT SECTION...: the configuration of an objective.
write() {
  local name=$1 algorithm=$2 format=$3
  shift 3
  {
    cat <<YAML
algorithm: $algorithm
policy:
  model: {model_type: llama, vocab_size: 8192, hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 6,
          num_attention_heads: 6, num_key_value_heads: 6, max_position_embeddings: $length, tie_word_embeddings: false}
  tokenizer: {name: bytes}
  logits_dtype: float32
  train_global_batch_size: $((2 * micro))
  train_micro_batch_size: $micro
  max_total_sequence_length: $length
  optimizer: {lr: 1.0e-6}
  scheduler: {lr_decay_style: constant}
$algorithm: {max_num_steps: $((steps + 2))}
data: {train: {data_path: $work/records.jsonl, format: $format}, cache_dir: $work}
checkpointing: {enabled: false}
logger: {log_dir: $work/$name, log_interval: 1000}
YAML
    printf '%s\n' "$@"
  } >"$work/$name.yaml"
}
write none sft instruction
write token grpo rollouts 'loss_fn: {reference_policy_kl_penalty: 0}'
write sequence grpo rollouts 'loss_fn: {reference_policy_kl_penalty: 0, sequence_level_importance_ratios: true, token_level_loss: false}'

# Milliseconds of a step: the median of those timed.
median() { sort -g | awk '{ x[NR] = $1 } END { print NR % 2 ? x[(NR + 1) / 2] : (x[NR / 2] + x[NR / 2 + 1]) / 2 }'; }
time_of() {
  rm -rf "${work:?}/$1"
  "$binary" "$work/$1.yaml" "${keys[@]}" >"$work/out.txt" 2>&1 || {
    cat "$work/out.txt" >&2
    die 70 "$1 failed"
  }
  sed -nE 's/.*"step_ms":([0-9.e+]+).*/\1/p' "$work/$1/metrics.jsonl" | tail -n "$steps" | median
}

names=(none token sequence)
for ((round = 0; round < rounds; ++round)); do
  for ((i = 0; i < 3; ++i)); do
    name=${names[(i + round) % 3]}
    time_of "$name" >>"$work/$name.ms"
  done
done
printf '%-10s %-28s %10s %10s   %s\n' depends objective 'step ms' ratio 'of the rounds'
for name in "${names[@]}"; do
  paste "$work/$name.ms" "$work/none.ms" | awk '{ print $1 / $2 }' | sort -g >"$work/ratios"
  case $name in
    none) objective='sft' ;;
    token) objective='grpo, clip' ;;
    *) objective='grpo, ratios of sequences' ;;
  esac
  printf '%-10s %-28s %10.1f %10.3f   %.3f to %.3f\n' "$name" "$objective" "$(median <"$work/$name.ms")" \
    "$(median <"$work/ratios")" "$(head -n 1 "$work/ratios")" "$(tail -n 1 "$work/ratios")"
done
