#!/usr/bin/env bash
# Runs against the trainer of tests/reference, which does the same in double precision and shares no code:
# oracle.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"
reference=$(dirname "$nrl_train")/reference_trainer

# settings MODEL OPTIMIZER SCHEDULER DATA [PRETRAIN] [POLICY]: c.yaml, a run of 20 steps.
settings() {
  cat >c.yaml <<YAML
algorithm: pretrain
policy:
  model: {$1}
  train_global_batch_size: 8
  max_total_sequence_length: 12
  optimizer: {$2}
  scheduler: {$3}
  ${6:-}
pretrain: {max_num_steps: 20, ${5:-val_period: 10}}
data: {$4}
checkpointing: {save_period: 0}
logger: {log_interval: 20}
kernels: {num_threads: 1}
YAML
}

# in_directory NAME: overrides that put logs and checkpoints there.
in_directory() {
  echo "checkpointing.checkpoint_dir=$1 logger.log_dir=$1/logs"
}

# prepare_reference EVALUATION_BATCHES [END]: what the reference starts from: token files, whose documents END ends,
# initial weights, samples.
prepare_reference() {
  "$reference" data a 61 60 1 "${@:2}"
  "$reference" data b 61 45 5 "${@:2}"
  # shellcheck disable=SC2046
  expect 0 run 1 c.yaml $(in_directory start) pretrain.max_num_steps=0
  expect 0 run 1 data show c.yaml --steps 1:21 --json
  cp out.txt samples.jsonl
  (($1 > 0)) || return 0
  expect 0 run 1 data show c.yaml --split validation --steps "1:$(($1 + 1))" --json
  cp out.txt validation.jsonl
}

# train RANKS NAME ARGS...: a run in NAME.
train() {
  local ranks=$1 name=$2
  shift 2
  # shellcheck disable=SC2046
  expect 0 run "$ranks" c.yaml $(in_directory "$name") "$@"
}

# compare NAME [ARGS...]: the run in NAME against the reference.
compare() {
  local name=$1
  shift
  "$reference" train c.yaml start/step-0 samples.jsonl validation.jsonl "$name/logs/metrics.jsonl" "$name/step-20" "$@" \
    >table.txt || {
    cat table.txt >&2
    fail "$name differs from the reference"
  }
  cat table.txt
}

gpt2="model_type: gpt2, vocab_size: 61, n_embd: 18, n_layer: 2, n_head: 3, n_positions: 16, resid_pdrop: 0, embd_pdrop: 0,
    attn_pdrop: 0, initializer_range: 0.1"
llama="model_type: llama, vocab_size: 61, hidden_size: 20, intermediate_size: 28, num_hidden_layers: 2, num_attention_heads: 4,
    num_key_value_heads: 2, head_dim: 6, max_position_embeddings: 64"

case $case_name in
  # One rank, 4 microbatches; tied; a decay that ends before the run does; an eps that matters; the whole validation data.
  oracle_gpt2)
    settings "$gpt2, n_inner: 50" \
      "lr: 1.0e-2, weight_decay: 0.5, betas: [0.8, 0.97], eps: 2.0e-3, lr_scaling: {rule: sqrt, base_batch_size: 32}" \
      "lr_decay_style: cosine, lr_warmup_iters: 3, lr_decay_iters: 15, min_lr: 1.0e-3" \
      "train: {data_path: [a, b], weights: [3, 1]}, split: [7, 2, 1]" "val_period: 10, seed: 5" "max_grad_norm: 1.0"
    prepare_reference 4
    train 1 run policy.train_micro_batch_size=2
    compare run
    ;;
  # Two ranks, 4 microbatches of one sequence; Llama 3's RoPE, whose three frequencies are kept, blended and stretched; a
  # blend without weights; a decay that ends after the run.
  oracle_llama)
    settings "$llama, initializer_range: 0.1, rms_norm_eps: 1.0e-3, rope_theta: 17.0, attention_bias: true, mlp_bias: true,
      rope_scaling: {rope_type: llama3, factor: 4, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 32}" \
      "lr: 8.0e-3, weight_decay: 0.4, betas: [0.7, 0.95], eps: 1.0e-5" \
      "lr_decay_style: linear, warmup_ratio: 0.22, lr_decay_iters: 30, min_lr: 5.0e-4" \
      "train: {data_path: [a, b]}, split: [8, 2, 0]" "val_period: 7, val_batches: 1, seed: 6" "max_grad_norm: 1.2"
    prepare_reference 1
    train 2 run policy.train_micro_batch_size=1 distributed.bucket_size_mb=0.01
    compare run
    ;;
  # Four ranks with sharded optimizer state (a shard has at least 61440 / ranks elements of a bucket, so that these models
  # must have many); a window shorter than the sequence; a run of two epochs, and validation files of its own.
  oracle_mistral)
    settings "model_type: mistral, vocab_size: 61, hidden_size: 48, intermediate_size: 72, num_hidden_layers: 3,
      num_attention_heads: 4, num_key_value_heads: 1, sliding_window: 5, max_position_embeddings: 64, initializer_range: 0.06" \
      "lr: 1.6e-2, weight_decay: 0.3, betas: [0.8, 0.95], eps: 1.0e-4, lr_scaling: {rule: linear, base_batch_size: 16}" \
      "lr_decay_style: WSD, lr_warmup_iters: 4, lr_wsd_decay_iters: 6, min_lr: 1.0e-3" \
      "train: {data_path: b}, validation: {data_path: [a, b], weights: [1, 1]}, seed: 9" \
      "val_at_start: true, val_at_end: true, val_batches: 2, max_num_epochs: 2" "max_grad_norm: 1.4"
    sed -i 's/max_num_steps: 20, //' c.yaml
    prepare_reference 2
    train 4 run policy.train_micro_batch_size=2 distributed.shard_strategy=optim
    compare run
    ;;
  # Two ranks with sharded optimizer state in two buckets; a last epoch of which between 50 and 80 % are needed; biases of
  # q, k and v; tied; stretched RoPE.
  oracle_qwen2)
    settings "model_type: qwen2, vocab_size: 61, hidden_size: 48, intermediate_size: 115, num_hidden_layers: 3,
      num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true,
      initializer_range: 0.06, rope_scaling: {rope_type: linear, factor: 2}" \
      "lr: 8.0e-3, weight_decay: 0.4, betas: [0.85, 0.9], eps: 1.0e-4" \
      "lr_decay_style: inverse-square-root, lr_warmup_iters: 4, lr_decay_iters: 18, min_lr: 2.0e-3" \
      "train: {data_path: a}, split: [9, 1, 0]" "val_period: 10, val_batches: 2, seed: 7" "max_grad_norm: 1.7"
    prepare_reference 2
    train 2 run policy.train_micro_batch_size=4 distributed.shard_strategy=optim distributed.bucket_size_mb=0.13
    compare run
    ;;
  # Four ranks; norms of q and k; then resumed from step 7 on two ranks with sharded optimizer state. The validation data
  # follow another rule, so that the best evaluation lies before the resume.
  oracle_qwen3)
    settings "model_type: qwen3, vocab_size: 61, hidden_size: 44, intermediate_size: 70, num_hidden_layers: 3,
      num_attention_heads: 3, num_key_value_heads: 1, head_dim: 10, max_position_embeddings: 64, initializer_range: 0.06" \
      "lr: 6.0e-3, weight_decay: 0.5, betas: [0.9, 0.8], eps: 1.0e-4" "lr_decay_style: constant, lr_warmup_iters: 5" \
      "train: {data_path: [a, b], weights: [1, 2]}, validation: {data_path: other}" "val_period: 5, val_batches: 2, seed: 8" \
      "max_grad_norm: 2.0"
    "$reference" data other 13 20 6
    prepare_reference 2
    train 4 run policy.train_micro_batch_size=1 checkpointing.save_period=7
    compare run
    rm -r run/step-14 run/step-20
    train 2 run policy.train_micro_batch_size=2 distributed.shard_strategy=optim
    grep -q 'resume .*step-7' out.txt || fail "the run did not resume from step 7: $(cat out.txt)"
    compare run
    ;;
  # Two ranks with sharded optimizer state; layers with a window and without, each kind with its own rotary base; norms that
  # multiply by 1 + weight, of q, k and the outputs as well; scaled embeddings, tied.
  oracle_gemma3)
    settings "model_type: gemma3_text, vocab_size: 61, hidden_size: 44, intermediate_size: 70, num_hidden_layers: 4,
      num_attention_heads: 4, num_key_value_heads: 2, head_dim: 10, sliding_window: 5, sliding_window_pattern: 3,
      query_pre_attn_scalar: 7, rope_theta: 1000.0, rope_local_base_freq: 30.0, rope_scaling: {rope_type: linear, factor: 8},
      max_position_embeddings: 64, initializer_range: 0.06" \
      "lr: 3.0e-3, weight_decay: 0.5, betas: [0.85, 0.9], eps: 1.0e-4" \
      "lr_decay_style: cosine, lr_warmup_iters: 4, lr_decay_iters: 18, min_lr: 1.0e-3" \
      "train: {data_path: [a, b]}, split: [8, 2, 0]" "val_period: 7, val_batches: 2, seed: 8" "max_grad_norm: 2.2"
    prepare_reference 2
    train 2 run policy.train_micro_batch_size=2 distributed.shard_strategy=optim
    compare run
    ;;
  # Experts: Mixtral on two ranks; Qwen2-MoE with a dense layer, a shared expert and the router's losses, whose microbatches
  # are single sequences, then per sequence of larger ones, with the experts' activations recomputed; Qwen3-MoE on four ranks
  # with sharded optimizer state.
  oracle_experts)
    settings "model_type: mixtral, vocab_size: 61, hidden_size: 20, intermediate_size: 14, num_hidden_layers: 2,
      num_attention_heads: 4, num_key_value_heads: 2, head_dim: 6, max_position_embeddings: 64, num_local_experts: 5,
      num_experts_per_tok: 2, rope_theta: 10000.0, rms_norm_eps: 1.0e-6, initializer_range: 0.1" \
      "lr: 8.0e-3, weight_decay: 0.4, betas: [0.8, 0.95], eps: 1.0e-4" "lr_decay_style: linear, lr_warmup_iters: 3" \
      "train: {data_path: [a, b]}, split: [8, 2, 0]" "val_period: 7, val_batches: 2" "max_grad_norm: 1.2"
    prepare_reference 2
    train 2 run policy.train_micro_batch_size=2
    compare run
    rm -r start run
    settings "model_type: qwen2_moe, vocab_size: 61, hidden_size: 20, intermediate_size: 26, num_hidden_layers: 3,
      num_attention_heads: 4, num_key_value_heads: 2, head_dim: 6, max_position_embeddings: 64, num_experts: 6, num_experts_per_tok: 2,
      moe_intermediate_size: 10, shared_expert_intermediate_size: 18, mlp_only_layers: [1], moe_aux_loss_coeff: 0.5,
      moe_z_loss_coeff: 0.05, initializer_range: 0.1" \
      "lr: 8.0e-3, weight_decay: 0.4, betas: [0.8, 0.95], eps: 1.0e-4" "lr_decay_style: linear, lr_warmup_iters: 3" \
      "train: {data_path: [a, b]}, split: [8, 2, 0]" "val_period: 7, val_batches: 2" "max_grad_norm: 1.2"
    prepare_reference 2
    train 2 run policy.train_micro_batch_size=1
    compare run
    train 1 per_sequence policy.train_micro_batch_size=4 policy.model.moe_router_load_balancing_type=seq_aux_loss \
      policy.recompute.granularity=selective 'policy.recompute.modules=[moe]'
    compare per_sequence
    rm -r start run per_sequence
    settings "model_type: qwen3_moe, vocab_size: 61, hidden_size: 48, intermediate_size: 26, num_hidden_layers: 3,
      num_attention_heads: 4, num_key_value_heads: 2, head_dim: 10, max_position_embeddings: 64, num_experts: 8,
      num_experts_per_tok: 3, norm_topk_prob: true, moe_intermediate_size: 20, decoder_sparse_step: 2, initializer_range: 0.06" \
      "lr: 6.0e-3, weight_decay: 0.5, betas: [0.9, 0.8], eps: 1.0e-4" "lr_decay_style: constant, lr_warmup_iters: 5" \
      "train: {data_path: a}, split: [8, 2, 0]" "val_period: 10, val_batches: 2" "max_grad_norm: 2.0"
    prepare_reference 2
    train 4 run policy.train_micro_batch_size=2 distributed.shard_strategy=optim
    compare run
    ;;
  # Documents that do not see each other, with positions of their own and no loss at their ends; the end token is that of
  # the byte tokenizer. A window shorter than some documents; two ranks, whose numbers of tokens with a loss differ.
  oracle_documents)
    settings "model_type: mistral, vocab_size: 257, hidden_size: 20, intermediate_size: 28, num_hidden_layers: 2,
      num_attention_heads: 4, num_key_value_heads: 2, head_dim: 6, sliding_window: 7, max_position_embeddings: 64, initializer_range: 0.1" \
      "lr: 8.0e-3, weight_decay: 0.4, betas: [0.8, 0.95], eps: 1.0e-5" "lr_decay_style: linear, lr_warmup_iters: 3" \
      "train: {data_path: [a, b]}, split: [8, 2, 0], reset_position_ids: true, reset_attention_mask: true,
      eod_mask_loss: true" "val_period: 7, val_batches: 2" $'tokenizer: {name: bytes}\n  max_grad_norm: 1.2'
    prepare_reference 2 256
    train 2 run policy.train_micro_batch_size=2
    compare run
    # Learned positions, and each of the three keys alone.
    settings "${gpt2/: 61/: 257}" "lr: 1.0e-2, weight_decay: 0.5, betas: [0.8, 0.97], eps: 2.0e-3" "lr_decay_style: constant" \
      "train: {data_path: a}, split: [8, 2, 0]" "val_at_end: true, val_batches: 1" $'tokenizer: {name: bytes}\n  max_grad_norm: null'
    for key in reset_position_ids reset_attention_mask eod_mask_loss; do
      sed -i "s/^data: {.*train:/data: {$key: true, train:/" c.yaml
      rm -r start run
      prepare_reference 1 256
      train 1 run policy.train_micro_batch_size=4
      compare run
    done
    ;;
  # bf16 weights and activations with f32 master weights.
  oracle_bf16)
    settings "model_type: llama, vocab_size: 61, hidden_size: 48, intermediate_size: 100, num_hidden_layers: 2,
      num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, initializer_range: 0.06" \
      "lr: 8.0e-3, weight_decay: 0.4, betas: [0.8, 0.95], eps: 1.0e-4" \
      "lr_decay_style: cosine, lr_warmup_iters: 3, min_lr: 5.0e-4" "train: {data_path: a}, split: [8, 2, 0]" \
      "val_period: 10, val_batches: 2" "precision: bfloat16"$'\n  max_grad_norm: 1.75'
    prepare_reference 2
    train 2 run policy.train_micro_batch_size=2 distributed.shard_strategy=optim
    compare run bf16
    train 1 low policy.logits_dtype=bfloat16
    compare low bf16
    (same run/logs/metrics.jsonl low/logs/metrics.jsonl 1e-6) 2>err.txt && fail "policy.logits_dtype changes nothing"
    ;;
  # What config.json may say besides: every activation, YaRN and dynamic RoPE, partly rotated heads, no window.
  oracle_variants)
    llama=${llama//$'\n'/} gpt2=${gpt2//$'\n'/}
    # With theta 20 and 64 positions, every parameter of YaRN moves one of the three frequencies.
    yarn="rope_theta: 20.0, rope_scaling: {rope_type: yarn, factor: 4, original_max_position_embeddings: 64"
    dynamic="rope_scaling: {rope_type: dynamic, factor: 4, original_max_position_embeddings: 8"
    while read -r model; do
      # Two documents, which data.split divides by tokens; an odd batch.
      settings "$model" "lr: 8.0e-3, weight_decay: 0.4, betas: [0.8, 0.95], eps: 1.0e-4" "lr_decay_style: linear" \
        "train: {data_path: few}, split: [8, 2, 0], seed: 3" "val_at_end: true, val_batches: 1" "max_grad_norm: null"
      sed -i 's/batch_size: 8/batch_size: 3/' c.yaml
      "$reference" data few 61 2 3
      prepare_reference 1
      train 1 run policy.train_micro_batch_size=1
      compare run
      rm -r start run
    done <<YAML
$llama, initializer_range: 0.1, hidden_act: gelu, $yarn, beta_fast: 2.0, beta_slow: 0.5, attention_factor: 1.2}
${llama/: 64/: 8}, initializer_range: 0.1, hidden_act: gelu_new, partial_rotary_factor: 0.67, $dynamic}
$llama, initializer_range: 0.1, hidden_act: gelu_pytorch_tanh, tie_word_embeddings: true, $yarn, truncate: false}
${llama/llama/mistral}, initializer_range: 0.1, hidden_act: gelu_fast, sliding_window: null
${llama/llama/qwen2}, initializer_range: 0.1, sliding_window: 3, use_sliding_window: false
${llama/llama/qwen3}, initializer_range: 0.1, attention_bias: true, rms_norm_eps: 1.0e-2, tie_word_embeddings: true
$gpt2, activation_function: gelu, layer_norm_epsilon: 1.0e-2, tie_word_embeddings: false
$gpt2, activation_function: silu
YAML
    ;;
  # Steps with a token whose embedding overflows are skipped, the others are not.
  oracle_skip)
    settings "$gpt2, tie_word_embeddings: false" \
      "lr: 1.0e-2, weight_decay: 0.5, betas: [0.8, 0.97], eps: 2.0e-3" \
      "lr_decay_style: linear, lr_warmup_iters: 3, min_lr: 1.0e-3" "train: {data_path: a}, split: [8, 2, 0]" \
      "val_period: 0, seed: 5, max_nonfinite_steps: 20"
    sed -i 's/train_global_batch_size: 8/train_global_batch_size: 2/' c.yaml
    prepare_reference 0
    "$reference" poison start/step-0 17
    rm start/step-0/manifest.json  # its checksums
    train 2 run policy.model_name=start/step-0 policy.train_micro_batch_size=1 distributed.overlap_grad_reduce=false
    compare run poison 17
    ;;
  # The loss of `eval` on ranks and windows at once that divide the windows evenly and that do not.
  oracle_eval)
    settings "${llama/: 61/: 272}, initializer_range: 0.3" "lr: 1.0e-3" "lr_decay_style: constant" "train: {data_path: a}" \
      "val_period: 0"
    "$reference" data a 61 13 3
    printf 'A text of known length, so that bits per byte can be told from the loss.' >text
    expect 0 run 1 prepare --input text --tokenizer bytes --output t
    # shellcheck disable=SC2046
    expect 0 run 1 c.yaml $(in_directory start) pretrain.max_num_steps=0
    # RANKS DATA MICRO_BATCH LENGTH MAX_TOKENS BYTES; 12 is the length of the training.
    for trial in "1 a 4 - - 0" "1 a 1 7 - 0" "2 a 3 12 - 0" "4 a 2 5 - 0" "4 a 4 12 100 0" "2 t 2 10 - 72" "1 t 2 10 31 31"; do
      read -r ranks data micro length most bytes <<<"$trial"
      limits=()
      [[ $length == - ]] || limits+=(--sequence-length "$length")
      [[ $most == - ]] || limits+=(--max-tokens "$most")
      expect 0 run "$ranks" eval start/step-0 --data "$data" --micro-batch "$micro" --json "${limits[@]}"
      "$reference" eval start/step-0 "$data" "${length/-/12}" "${most/-/0}" "$bytes" out.txt ||
        fail "eval differs ($trial): $(cat out.txt)"
    done
    expect 64 run 1 data show c.yaml --split validation --steps 1:2
    grep -q 'the run has no evaluations' err.txt || fail "no reason: $(cat err.txt)"
    expect 64 run 1 data show c.yaml pretrain.val_at_end=true pretrain.val_batches=2 "data.split=[8,2,0]" --split validation \
      --steps 2:4
    grep -q 'an evaluation has only 2 global batches' err.txt || fail "no reason: $(cat err.txt)"
    ;;
  # Initial weights as random numbers; GPT-2 scales what adds to the residual stream.
  oracle_initial)
    for model in "model_type: gpt2, vocab_size: 300, n_embd: 48, n_layer: 3, n_head: 3, n_positions: 64,
      initializer_range: 0.03, tie_word_embeddings: false" "model_type: qwen3, vocab_size: 300, hidden_size: 48,
      intermediate_size: 60, num_hidden_layers: 2, num_attention_heads: 3, num_key_value_heads: 1, head_dim: 16,
      attention_bias: true"; do
      settings "$model" "lr: 1.0e-3" "lr_decay_style: constant" "train: {data_path: a}" "val_period: 0"
      "$reference" data a 61 60 3
      for seed in 1 2; do
        # shellcheck disable=SC2046
        expect 0 run 1 c.yaml $(in_directory seed$seed) pretrain.max_num_steps=0 pretrain.seed=$seed
      done
      "$reference" initial seed1/step-0 seed2/step-0 || fail "initial weights of $model"
      rm -r seed1 seed2
    done
    ;;
  *) fail "unknown case $case_name" ;;
esac
echo "$case_name: ok"
