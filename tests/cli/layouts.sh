#!/usr/bin/env bash
# Layouts of ranks: verify, and checkpoints from one layout to another: layouts.sh CASE NRL_TRAIN SOURCE_DIR
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# Ranks and overrides of the layouts that checkpoints go between: a line each.
checkpoint_layouts=(
  "1"
  "2 distributed.shard_strategy=ddp"
  "2 distributed.shard_strategy=optim"
  "4 distributed.shard_strategy=optim_grads distributed.overlap_param_gather=true"
  "4 distributed.shard_strategy=hsdp distributed.dp_replicate_size=2"
  "2 distributed.tensor_parallel_size=2 distributed.sequence_parallel=true"
  "4 distributed.tensor_parallel_size=2 distributed.shard_strategy=optim_grads_params"
  "2 distributed.context_parallel_size=2 distributed.shard_strategy=optim"
  "2 distributed.pipeline_parallel_size=2"
)

# train NAME LAYOUT ARGS...: trains on a layout; logs and checkpoints in NAME.
train() {
  local name=$1 ranks keys
  read -r ranks keys <<<"$2"
  shift 2
  config "$name"
  # shellcheck disable=SC2086  # several overrides
  expect 0 run "$ranks" "$name.yaml" $keys distributed.bucket_size_mb=0.05 "$@"
}

case $case_name in
  checkpoint_layouts)
    # Each layout saves, and three read it: the losses that follow are those of the layout that goes on, bit for bit if
    # it is the same one. Every pair of layouts is in train_tests.
    corpus
    count=${#checkpoint_layouts[@]}
    for ((saved = 0; saved < count; ++saved)); do
      save=${checkpoint_layouts[saved]}
      train "whole-$saved" "$save" pretrain.max_num_steps=5 checkpointing.save_period=3
      for distance in 0 1 4; do
        load=${checkpoint_layouts[(saved + distance) % count]}
        tolerance=1e-6
        if ((distance == 0)); then tolerance=0; fi
        train next "$load" pretrain.max_num_steps=5 checkpointing.save_period=100 \
          "checkpointing.resume=whole-$saved/checkpoints/step-3"
        grep '"loss"' "whole-$saved/logs/metrics.jsonl" | tail -2 >want.jsonl
        grep '"loss"' next/logs/metrics.jsonl >got.jsonl
        (($(wc -l <got.jsonl) == 2)) || fail "$load did not continue from step 3 of $save"
        same got.jsonl want.jsonl $tolerance
        rm -rf next next.yaml
      done
      # A Hugging Face directory, whichever ranks wrote it.
      for file in config.json manifest.json; do
        [[ -s whole-$saved/checkpoints/step-3/$file ]] || fail "no $file from $save"
      done
    done
    ;;
  verify)
    tiny=$source_dir/tests/verify/tiny.yaml
    for keys in shard_strategy=ddp "shard_strategy=optim distributed.overlap_param_gather=true" \
      shard_strategy=optim_grads shard_strategy=optim_grads_params tensor_parallel_size=2 context_parallel_size=2 pipeline_parallel_size=2; do
      # shellcheck disable=SC2086
      expect 0 run 2 verify "$tiny" distributed.$keys
      grep -qE '^verified: 2 ranks = .* trains as one rank does \(2 steps, 39 tensors' out.txt || fail "$(cat out.txt)"
      grep -qE '^initial weight all 39 tensors, bitwise +equal' out.txt || fail "initial weights: $(cat out.txt)"
      # Every kind is compared, with its limit.
      for kind in gradient loss "gradient norm" weight; do
        grep -qE "^$kind .*[0-9]e[-+][0-9]+ +1e-0[56] +step [12]" out.txt || fail "no $kind in: $(cat out.txt)"
      done
    done
    # Recomputation alone, documents, several steps, the data of the run.
    expect 0 run 1 verify "$tiny" policy.recompute.granularity=selective --steps 3
    grep -q '^verified: 1 rank trains as one rank does (3 steps' out.txt || fail "$(cat out.txt)"
    corpus
    expect 0 run 2 verify "$tiny" data.train.data_path=corpus policy.model.vocab_size=272 data.reset_attention_mask=true \
      data.reset_position_ids=true data.eod_mask_loss=true
    grep -q '^data .*documents' out.txt || fail "not the data of the run: $(cat out.txt)"
    expect 0 run 2 verify "$tiny" data.train.data_path=corpus --random-tokens data.eod_mask_loss=true
    grep -q '^data .*random tokens' out.txt || fail "not random tokens: $(cat out.txt)"
    expect 64 run 1 verify "$tiny" --steps 0
    expect 66 run 1 verify none.yaml
    ;;
  verify_layouts)
    expect 0 run 2 verify "$source_dir/tests/verify/tiny.yaml" --layouts auto
    verified=$(grep -cE '^(tp|cp|dp|pp) 2 .* [0-9.]+ s  (gradient|weight|loss|initial weight)' out.txt)
    ((verified >= 26)) || fail "$verified layouts: $(cat out.txt)"
    grep -qE "^$verified of $verified valid layouts verified, [0-9]+ refused" out.txt || fail "$(cat out.txt)"
    grep -qE '^refused +[0-9]+ x distributed.shard_strategy: hsdp needs' out.txt || fail "no reason: $(cat out.txt)"
    expect 0 run 2 verify "$source_dir/tests/verify/tiny.yaml" --layouts auto --sample 7
    grep -qE '^7 of 7 valid layouts verified, [0-9]+ refused \(a sample of [0-9]+ layouts\)$' out.txt || fail "$(cat out.txt)"
    expect 0 run 2 verify "$source_dir/tests/verify/tiny.yaml" --layouts list
    grep -qE "^$verified valid layouts, [0-9]+ refused$" out.txt || fail "$(cat out.txt)"
    expect 64 run 1 verify "$source_dir/tests/verify/tiny.yaml" --sample 7
    ;;
  *) fail "no case $case_name" ;;
esac
