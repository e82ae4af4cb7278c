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
  verify_undisturbed)
    # Steps as in training, an evaluation, and checkpoints between the layout and one rank, in a directory that is removed.
    tiny=$source_dir/tests/verify/tiny.yaml
    mkdir temporary
    export TMPDIR=$PWD/temporary
    expect 0 run 2 verify "$tiny" --undisturbed 2 distributed.shard_strategy=optim distributed.overlap_param_gather=true
    grep -qE '^verified: 2 ranks = .* trains as one rank does \(4 undisturbed steps, evaluation, checkpoints, 39 tensors' out.txt ||
      fail "$(cat out.txt)"
    (($(grep -cE '^step [1-4] .* gradient norm' out.txt) == 6)) || fail "not 2, 2 resumed and 2 on one rank: $(cat out.txt)"
    (($(grep -cE '^step [34] .*  resumed$' out.txt) == 2)) || fail "not resumed: $(cat out.txt)"
    (($(grep -cE '^step [34] .*  resumed on one rank$' out.txt) == 2)) || fail "not resumed: $(cat out.txt)"
    (($(grep -c '^evaluation  loss' out.txt) == 3)) || fail "no evaluation: $(cat out.txt)"
    grep -q '^checkpoint  saved after step 2; the layout resumed from that of one rank, one rank from the layout' out.txt ||
      fail "no checkpoint: $(cat out.txt)"
    for kind in loss "gradient norm" evaluation weight; do
      grep -qE "^$kind .*[0-9]e[-+][0-9]+ +[12]e-0[56]  step [1-4]" out.txt || fail "no $kind in: $(cat out.txt)"
    done
    grep -qE '^skipped steps +0 of 6 compared steps +equal +equal$' out.txt || fail "no skipped steps: $(cat out.txt)"
    ! grep -q '^gradient  ' out.txt || fail "looked at gradients: $(cat out.txt)"
    # The loss scale of float16 is too large at first: skipped steps and scales are those of one rank.
    expect 0 run 2 verify "$tiny" --undisturbed 3 policy.precision=float16 policy.model.initializer_range=0.5 \
      distributed.shard_strategy=optim
    grep -qE '^step 2 .*, skipped by the layout, skipped by the reference$' out.txt || fail "nothing skipped: $(cat out.txt)"
    grep -qE '^loss scale +after each of 9 compared steps +equal +equal$' out.txt || fail "no loss scale: $(cat out.txt)"
    # bf16 weights without master weights are rounded at random, with other random bits in another order of sums.
    alone=(policy.precision=bfloat16 policy.optimizer.use_precision_aware_optimizer=true policy.optimizer.main_params_dtype=bf16)
    for keys in tensor_parallel_size=2 shard_strategy=optim_grads_params; do
      expect 0 run 2 verify "$tiny" --undisturbed 3 "${alone[@]}" distributed.$keys
      expect 0 run 2 verify "$tiny" --steps 8 "${alone[@]}" distributed.$keys
    done
    # A chain of checkpoints: each layout resumes from the one before.
    expect 0 run 2 verify "$tiny" --layouts auto --sample 7 --undisturbed 1
    grep -qE '^7 of 7 valid layouts verified \(2 steps undisturbed, evaluation, checkpoints\), [0-9]+ refused' out.txt ||
      fail "$(cat out.txt)"
    expect 64 run 1 verify "$tiny" --undisturbed 2 --steps 2
    expect 64 run 1 verify "$tiny" --undisturbed 0
    [[ -z $(ls temporary) ]] || fail "left in TMPDIR: $(ls temporary)"
    TMPDIR=$PWD/none expect 73 run 1 verify "$tiny" --undisturbed 1
    # Nothing is left of a verification that is killed.
    "$nrl_train" verify "$tiny" --undisturbed 1000 >out.txt 2>err.txt &
    for ((tries = 0; tries < 600; ++tries)); do
      [[ -z $(ls temporary) ]] || break
      sleep 0.05
    done
    [[ -n $(ls temporary) ]] || fail "no directory for checkpoints: $(cat err.txt)"
    kill -KILL $!
    for ((tries = 0; tries < 600; ++tries)); do
      [[ -n $(ls temporary) ]] || break
      sleep 0.05
    done
    [[ -z $(ls temporary) ]] || fail "left in TMPDIR after SIGKILL: $(ls temporary)"
    ;;
  sim_verify)
    # Undisturbed steps on the simulated device, whose streams are late and out of order: captured steps, and gathers during
    # the next pass.
    tiny=$source_dir/tests/verify/tiny.yaml
    small=(device=cuda policy.train_global_batch_size=2 policy.max_total_sequence_length=16 policy.model.num_hidden_layers=2)
    expect 0 run 1 verify "$tiny" "${small[@]}" --undisturbed 3 policy.cuda_graph=true
    grep -q '^verified: 1 rank trains as one rank does (6 undisturbed steps, ' out.txt || fail "$(cat out.txt)"
    expect 0 run 2 verify "$tiny" "${small[@]}" --undisturbed 2 distributed.shard_strategy=optim distributed.overlap_param_gather=true
    expect 78 run 1 verify "$tiny" "${small[@]}" --undisturbed 2 policy.cuda_graph=true
    grep -q 'Fix: --undisturbed 4' err.txt || fail "$(cat err.txt)"
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
