#!/usr/bin/env bash
# Runs small training runs of 27 configurations and compares what `nrl-train plan` prints with what the runs used: the
# arena of every rank to the byte, and the peak resident memory of the process within 5 %. Exits with 1 if one differs.
# usage: scripts/check-memory.sh [BINARY [NAME]...]      default: all configurations
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

binary=$(realpath -e "${1:-$root_dir/build/cpu/bin/nrl-train}") || die 66 "build nrl-train first: scripts/test.sh"
shift || true
wanted=" $* "
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
awk 'BEGIN { for (i = 0; i < 60000; ++i) print "int main(" i * i % 997 ") { return " i "; }" }' >text.txt
"$binary" prepare --input text.txt --tokenizer bytes --output corpus >prepare.txt

llama='model_type: llama, vocab_size: 4096, hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 6, num_attention_heads: 6, num_key_value_heads: 6, max_position_embeddings: 4096'
grouped='model_type: llama, vocab_size: 8192, hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 8, num_attention_heads: 8, num_key_value_heads: 4, max_position_embeddings: 1024, tie_word_embeddings: true'
gpt2='model_type: gpt2, vocab_size: 8192, n_embd: 384, n_layer: 6, n_head: 6, n_positions: 1024, activation_function: gelu_new'
qwen3='model_type: qwen3, vocab_size: 4096, hidden_size: 256, intermediate_size: 1024, num_hidden_layers: 8, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 64, max_position_embeddings: 1024'
experts='model_type: qwen3_moe, vocab_size: 4096, hidden_size: 256, intermediate_size: 512, moe_intermediate_size: 384, num_experts: 8, num_experts_per_tok: 2, norm_topk_prob: true, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 64, max_position_embeddings: 512'

failed=0 count=0
printf '%-14s %5s %14s %14s %14s %14s %7s\n' configuration ranks arena measured 'peak planned' measured ratio

# check NAME RANKS MODEL OVERRIDE...
check() {
  local name=$1 ranks=$2 model=$3
  shift 3
  [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
  cat >"$name.yaml" <<YAML
policy:
  model: {$model}
  train_global_batch_size: 8
  train_micro_batch_size: 4
  max_total_sequence_length: 256
pretrain: {max_num_steps: 3, seed: 7}
data: {train: {data_path: corpus}}
checkpointing: {enabled: false}
kernels: {num_threads: 1}
logger: {log_dir: logs/$name}
YAML
  "$binary" plan "$name.yaml" --world "$ranks" "$@" >plan.txt 2>&1 || { cat plan.txt; die 1 "$name: no plan"; }
  mpi_setup "$ranks"
  local command=("$binary")
  ((ranks == 1)) || command=("${mpi_run[@]}" "$binary")
  timeout 300 "${command[@]}" "$name.yaml" "$@" >run.txt 2>&1 || { tail -20 run.txt; die 1 "$name: the run failed"; }
  # The plan is that of the ranks with the largest arena, and of those with it the largest peak counts.
  awk -v name="$name" -v ranks="$ranks" '
    function number(text) { gsub(/,/, "", text); return text + 0 }
    FILENAME == "plan.txt" && $1 == "arena" && !arena { arena = number($2) }
    FILENAME == "plan.txt" && $1 == "peak" && !peak { peak = number($2) }
    FILENAME != "plan.txt" {
      n = split($0, parts, /[^0-9]+/)
      for (i = 2; i + 1 <= n; i += 2) {
        if (parts[i] + 0 > found) { found = parts[i] + 0; used = 0 }
        if (parts[i] + 0 == found && parts[i + 1] + 0 > used) used = parts[i + 1] + 0
      }
    }
    END {
      ratio = peak ? used / peak : 0
      good = found == arena && ratio >= 0.95 && ratio <= 1.05
      printf "%-14s %5d %14d %14d %14d %14d %7.3f%s\n", name, ranks, arena, found, peak, used, ratio, good ? "" : "  DIFFERS"
      exit !good
    }' plan.txt "logs/$name/memory.json" || failed=$((failed + 1))
  count=$((count + 1))
}

evaluates=(pretrain.val_period=2 pretrain.val_batches=2 'data.split="90,10,0"')
check llama 1 "$llama"
check gpt2 1 "$gpt2"
check qwen3 1 "$qwen3" policy.train_micro_batch_size=8
check tied 1 "$grouped" policy.max_total_sequence_length=512 policy.train_micro_batch_size=2
check long 1 "$llama" policy.max_total_sequence_length=2048 policy.train_global_batch_size=2 policy.train_micro_batch_size=1
check no_recompute 1 "$llama" policy.recompute.granularity=none
check recompute 1 "$llama" policy.recompute.granularity=selective 'policy.recompute.modules=[norm,activation]'
check offload 1 "$llama" policy.offload_activations=true policy.recompute.granularity=none
check offload_half 1 "$llama" policy.offload_activations=0.5
check threads 1 "$llama" kernels.num_threads=2
check bf16 1 "$llama" policy.precision=bfloat16 policy.train_micro_batch_size=8
check experts 1 "$experts"
check order 1 "$llama" "${evaluates[@]}" pretrain.val_period=1000 pretrain.val_batches=200000
check evaluates 1 "$llama" "${evaluates[@]}"
check checkpoints 1 "$llama" checkpointing.enabled=true "checkpointing.checkpoint_dir=checkpoints"
check optimizer 1 "$llama" policy.offload_optimizer=true
check optimizer_half 1 "$llama" policy.offload_optimizer=0.5 policy.precision=bfloat16
check ddp 2 "$llama" policy.train_micro_batch_size=2
check optim 2 "$llama" distributed.shard_strategy=optim
check gradients 2 "$llama" distributed.shard_strategy=optim_grads
check parameters 2 "$llama" distributed.shard_strategy=optim_grads_params
check parameters_4 4 "$llama" distributed.shard_strategy=optim_grads_params policy.train_micro_batch_size=1
check tensor 2 "$llama" distributed.tensor_parallel_size=2
check vocabulary 2 "${llama/4096/4097}" distributed.tensor_parallel_size=2
check context 2 "$llama" distributed.context_parallel_size=2 policy.max_total_sequence_length=512 policy.train_micro_batch_size=2
check pipeline 2 "$llama" distributed.pipeline_parallel_size=2 policy.train_micro_batch_size=2
check expert_ranks 2 "$experts" distributed.expert_parallel_size=2

printf '%d of %d configurations agree\n' $((count - failed)) "$count"
((failed == 0))
