#!/usr/bin/env bash
# Dropout in training and its absence in evaluation: dropout.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# gpt2_directory: gpt2/ as Hugging Face serves GPT-2, but narrow and shallow, with random weights. The names of the
# tensors have no prefix there; blanks take its place, so that the header keeps its length.
gpt2_directory() {
  mkdir gpt2
  cat >gpt2/config.json <<'JSON'
{
  "activation_function": "gelu_new",
  "architectures": [
    "GPT2LMHeadModel"
  ],
  "attn_pdrop": 0.1,
  "bos_token_id": 50256,
  "embd_pdrop": 0.1,
  "eos_token_id": 50256,
  "initializer_range": 0.02,
  "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2",
  "n_ctx": 1024,
  "n_embd": 48,
  "n_head": 4,
  "n_layer": 2,
  "n_positions": 1024,
  "resid_pdrop": 0.1,
  "summary_activation": null,
  "summary_first_dropout": 0.1,
  "summary_proj_to_labels": true,
  "summary_type": "cls_index",
  "summary_use_proj": true,
  "task_specific_params": {
    "text-generation": {
      "do_sample": true,
      "max_length": 50
    }
  },
  "vocab_size": 50257
}
JSON
  config seed
  sed -i 's|model: {.*|model: {model_type: gpt2, vocab_size: 50257, n_embd: 48, n_layer: 2, n_head: 4, n_positions: 1024}|
    /num_attention_heads/d' seed.yaml
  expect 0 run 1 seed.yaml pretrain.max_num_steps=0
  LC_ALL=C sed 's/"transformer\.\([^"]*\)":/"\1"            :/g' seed/checkpoints/step-0/model.safetensors >gpt2/model.safetensors
}

# gpt2_config NAME: training that starts from this directory.
gpt2_config() {
  config "$1"
  sed -i '/model: {/,/max_position/d; s/max_num_steps: 10/max_num_steps: 4/; s|^policy:|policy:\n  model_name: gpt2|' "$1.yaml"
}

no_dropout=(policy.model.attn_pdrop=0 policy.model.resid_pdrop=0 policy.model.embd_pdrop=0)

case $case_name in
  dropout_gpt2)
    corpus
    gpt2_directory
    gpt2_config one
    expect 0 run 1 one.yaml
    gpt2_config two
    expect 0 run 2 two.yaml
    same one/logs/metrics.jsonl two/logs/metrics.jsonl 1e-5
    gpt2_config micro
    expect 0 run 1 micro.yaml policy.train_micro_batch_size=8
    same one/logs/metrics.jsonl micro/logs/metrics.jsonl 1e-5
    gpt2_config kept
    expect 0 run 1 kept.yaml policy.recompute.granularity=none
    same one/logs/metrics.jsonl kept/logs/metrics.jsonl 0
    gpt2_config parts
    expect 0 run 1 parts.yaml pretrain.max_num_steps=2
    expect 0 run 1 parts.yaml
    same one/logs/metrics.jsonl parts/logs/metrics.jsonl 0
    # The attention's dropout alone makes other losses, already in the first step.
    gpt2_config off
    expect 0 run 1 off.yaml policy.model.attn_pdrop=0 pretrain.max_num_steps=1
    [[ $(field one/logs/metrics.jsonl loss | head -1) != $(field off/logs/metrics.jsonl loss | head -1) ]] ||
      fail "attn_pdrop does nothing"
    ;;
  dropout_eval)
    corpus
    evaluation=('data.split=[9,1,0]' pretrain.max_num_steps=2 pretrain.val_period=2 pretrain.val_batches=2 pretrain.val_at_start=true)
    gpt2=(policy.model.model_type=gpt2 policy.model.attn_pdrop=0.3 policy.model.resid_pdrop=0.3 policy.model.embd_pdrop=0.3)
    for name in dropped plain; do
      config $name
      sed -i 's/intermediate_size: 80, //; s/num_key_value_heads: 2, //' $name.yaml
    done
    expect 0 run 1 dropped.yaml "${evaluation[@]}" "${gpt2[@]}"
    expect 0 run 1 plain.yaml "${evaluation[@]}" "${gpt2[@]}" "${no_dropout[@]}"
    grep -ho '"val_loss":[^,}]*' dropped/logs/metrics.jsonl | head -1 >a.txt
    grep -ho '"val_loss":[^,}]*' plain/logs/metrics.jsonl | head -1 >b.txt
    [[ -s a.txt ]] || fail "there was no evaluation"
    cmp -s a.txt b.txt || fail "dropout changes the first evaluation: $(cat a.txt b.txt)"
    [[ $(field dropped/logs/metrics.jsonl loss | head -1) != $(field plain/logs/metrics.jsonl loss | head -1) ]] ||
      fail "dropout does not change the first step"
    ;;
  dropout_ranks)
    # The masks belong to the rows of the global batch: ranks and microbatches only change the order of sums.
    corpus
    for kind in resid_pdrop embd_pdrop attn_pdrop all; do
      gpt2=(policy.model.model_type=gpt2 pretrain.max_num_steps=4)
      for key in resid_pdrop embd_pdrop attn_pdrop; do
        if [[ $kind == "$key" || $kind == all ]]; then gpt2+=("policy.model.$key=0.3"); else gpt2+=("policy.model.$key=0"); fi
      done
      config $kind-1
      config $kind-4
      sed -i 's/intermediate_size: 80, //; s/num_key_value_heads: 2, //' $kind-1.yaml $kind-4.yaml
      expect 0 run 1 $kind-1.yaml "${gpt2[@]}"
      expect 0 run 4 $kind-4.yaml "${gpt2[@]}" policy.train_micro_batch_size=1
      same $kind-1/logs/metrics.jsonl $kind-4/logs/metrics.jsonl 5e-6
    done
    sed 's|all-4/|all-2/|g' all-4.yaml >all-2.yaml
    expect 0 run 2 all-2.yaml "${gpt2[@]}" policy.train_micro_batch_size=4 distributed.shard_strategy=optim
    same all-1/logs/metrics.jsonl all-2/logs/metrics.jsonl 5e-6
    ;;
  dropout_context)
    # Context-parallel ranks have the masks of their tokens: verify compares losses, gradients and weights with one rank.
    tiny=$source_dir/tests/verify/tiny_gpt2.yaml
    cp=distributed.context_parallel_size
    for type in p2p all_gather a2a; do
      for micro in 1 2; do
        expect 0 run 2 verify "$tiny" $cp=2 distributed.cp_comm_type=$type policy.train_micro_batch_size=$micro
        grep -q '^verified: 2 ranks' out.txt || fail "$(cat out.txt)"
      done
      expect 0 run 4 verify "$tiny" $cp=4 distributed.cp_comm_type=$type
      expect 0 run 4 verify "$tiny" $cp=2 distributed.cp_comm_type=$type distributed.tensor_parallel_size=2
      expect 0 run 4 verify "$tiny" $cp=2 distributed.cp_comm_type=$type distributed.shard_strategy=optim
      for kind in attn resid embd; do
        expect 0 run 2 verify "$tiny" policy.model.attn_pdrop=0 policy.model.resid_pdrop=0 policy.model.embd_pdrop=0 \
          policy.model.${kind}_pdrop=0.3 $cp=2 distributed.cp_comm_type=$type
      done
    done
    expect 0 run 4 verify "$tiny" $cp=4 distributed.cp_comm_type=a2a+p2p \
      'distributed.hierarchical_context_parallel_sizes=[2,2]'
    # Documents, in the runs' own data, and dropout that does something.
    corpus
    expect 0 run 2 verify "$tiny" $cp=2 data.train.data_path=corpus policy.model.vocab_size=272 \
      data.reset_attention_mask=true data.reset_position_ids=true
    ;;
  # Of nrl-train-sim: the masks of a GPU are those of a CPU.
  sim_dropout)
    corpus
    gpt2=(policy.model.model_type=gpt2 policy.model.attn_pdrop=0.2 pretrain.max_num_steps=4 policy.train_global_batch_size=4
      policy.precision=float32)
    for device in cpu cuda; do
      config $device
      sed -i 's/intermediate_size: 80, //; s/num_key_value_heads: 2, //' $device.yaml
      expect 0 run 1 $device.yaml device=$device "${gpt2[@]}"
    done
    same cpu/logs/metrics.jsonl cuda/logs/metrics.jsonl 2e-4
    ;;
  *) fail "unknown case $case_name" ;;
esac
echo "$case_name: ok"
