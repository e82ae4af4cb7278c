#!/usr/bin/env bash
# One case of the command-line tests: run.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# Kernels on fibers are slow.
short=(pretrain.max_num_steps=6 policy.train_global_batch_size=4 checkpointing.save_period=3)

# gathers_change_nothing RANKS NAME EXTRA...: weights that are gathered during the next forward pass give the same losses,
# evaluations, texts and checkpoints, bit for bit.
gathers_change_nothing() {
  local ranks=$1 name=$2 overlap file
  shift 2
  for overlap in false true; do
    config "$name-$overlap"
    expect 0 run "$ranks" "$name-$overlap.yaml" distributed.shard_strategy=optim distributed.bucket_size_mb=0.03 \
      distributed.overlap_param_gather=$overlap 'data.split=[9,1,0]' pretrain.val_period=2 pretrain.val_batches=2 \
      logger.sample_period=3 "logger.sample_prompt=int main(" logger.sample_tokens=12 checkpointing.save_period=5 "$@"
    grep -oE '"(loss|grad_norm|val_loss)":[^,}]*|"text":.*' "$name-$overlap/logs/metrics.jsonl" >"$name-$overlap.txt"
  done
  for field in loss val_loss text; do
    grep -q "\"$field\"" "$name-true.txt" || fail "no $field in $(cat "$name-true.txt")"
  done
  cmp "$name-false.txt" "$name-true.txt" || fail "the numbers differ: $(diff "$name-false.txt" "$name-true.txt")"
  for file in "$name-false"/checkpoints/step-*/*.safetensors; do
    cmp "$file" "${file/$name-false/$name-true}" || fail "$file differs"
  done
}

# as_planned RANKS NAME OVERRIDE...: runs NAME.yaml; the largest arena is what the plan says.
as_planned() {
  local ranks=$1 name=$2 planned largest
  shift 2
  expect 0 run "$ranks" "$name.yaml" "$@"
  planned=$("$nrl_train" plan "$name.yaml" --world "$ranks" "$@" | awk '$1 == "arena" { gsub(/,/, "", $2); print $2; exit }')
  largest=$(grep -o '"arena_bytes":[0-9]*' "$name/logs/memory.json" | cut -d: -f2 | sort -n | tail -n 1)
  [[ $planned == "$largest" ]] || fail "$* on $ranks ranks: $planned bytes are planned, $largest used"
}

case $case_name in
  strategies) # a run that resumes under other strategies and numbers of ranks
    corpus
    config whole
    config parts
    expect 0 run 1 whole.yaml
    as_planned 4 parts distributed.shard_strategy=hsdp distributed.dp_replicate_size=2 pretrain.max_num_steps=3
    as_planned 2 parts distributed.shard_strategy=fsdp distributed.overlap_param_gather=true pretrain.max_num_steps=6
    as_planned 2 parts distributed.shard_strategy=optim_grads pretrain.max_num_steps=8
    # Rank 0 does not have the largest shards.
    config uneven
    as_planned 8 uneven distributed.shard_strategy=optim_grads policy.train_micro_batch_size=1 pretrain.max_num_steps=1
    expect 0 run 1 parts.yaml
    same whole/logs/metrics.jsonl parts/logs/metrics.jsonl 1e-5
    # Evaluations gather weights as well.
    config evaluated
    expect 0 run 2 evaluated.yaml distributed.shard_strategy=fsdp 'data.split=[9,1,0]' pretrain.val_period=2 pretrain.val_batches=2
    config evaluated_ddp
    expect 0 run 2 evaluated_ddp.yaml 'data.split=[9,1,0]' pretrain.val_period=2 pretrain.val_batches=2
    grep -oE '"val_loss":[^,}]*' evaluated/logs/metrics.jsonl | cut -c1-16 >a.val
    grep -oE '"val_loss":[^,}]*' evaluated_ddp/logs/metrics.jsonl | cut -c1-16 >b.val
    { [[ -s a.val ]] && cmp a.val b.val; } || fail "the validation losses differ: $(paste a.val b.val)"
    expect 78 run 1 parts.yaml distributed.shard_strategy=hsdp
    grep -q 'needs distributed.dp_replicate_size above 1' err.txt || fail "no reason in $(cat err.txt)"
    expect 78 run 2 parts.yaml distributed.shard_strategy=hsdp distributed.dp_replicate_size=2
    grep -q 'into slices of 2 or more' err.txt || fail "no reason in $(cat err.txt)"
    ;;
  # What the plan of another process knows of the ranks of a run.
  planned)
    corpus
    config threads
    as_planned 1 threads kernels.num_threads=auto
    as_planned 2 threads kernels.num_threads=auto checkpointing.resume=never
    grep -q '^device .* [0-9]* threads\? per rank' out.txt || fail "no threads: $(cat out.txt)"
    ranks=$(sed -nE 's/^device .* ([0-9]+) threads? per rank.*/\1/p' out.txt)
    expect 0 run 1 plan threads.yaml --world 2 kernels.num_threads=auto
    grep -q "^device   cpu, $ranks threads\? per rank" out.txt || fail "not the $ranks threads of a rank: $(cat out.txt)"
    # Ranks have slices of 257 and 256 rows of the vocabulary.
    config vocabulary
    for strategy in ddp optim; do
      as_planned 4 vocabulary policy.model.vocab_size=513 distributed.tensor_parallel_size=2 \
        distributed.sequence_parallel=false distributed.shard_strategy=$strategy checkpointing.resume=never
    done
    # A list of 8 microbatches, with the others in other stashes.
    long=(policy.model.num_hidden_layers=8 policy.train_global_batch_size=96 policy.train_micro_batch_size=1 pretrain.max_num_steps=2)
    config one
    config chunks
    expect 0 run 1 one.yaml "${long[@]}"
    as_planned 2 chunks "${long[@]}" distributed.pipeline_parallel_size=2 distributed.virtual_pipeline_size=4
    same one/logs/metrics.jsonl chunks/logs/metrics.jsonl 1e-5
    # The microbatch that auto takes for less and less memory, until nothing fits.
    config memory
    reduced=0
    for ((part = 64; ; part *= 2)); do
      fitted=(policy.train_micro_batch_size=auto policy.train_global_batch_size=64 policy.recompute=none pretrain.max_num_steps=1
        checkpointing.enabled=false memory.max_memory="$(awk "BEGIN { printf \"%.12f\", 1 / $part }")" device=cpu)
      code=0
      run 1 plan memory.yaml --world 2 "${fitted[@]}" || code=$?
      grep '^batch' out.txt | grep -oE '[0-9]+ micro x [0-9]+ accumulate x 2 dp' >planned.txt || fail "no batch: $(cat err.txt)"
      ((code == 0)) || break
      grep -q 'policy.train_micro_batch_size: auto takes' err.txt || continue
      reduced=$((reduced + 1))
      as_planned 2 memory "${fitted[@]}"
      grep -qf planned.txt out.txt || fail "not $(cat planned.txt): $(cat out.txt)"
    done
    ((code == 71 && reduced > 0)) || fail "exit code $code after $reduced smaller microbatches: $(cat err.txt)"
    expect 71 run 2 memory.yaml "${fitted[@]}"
    # Where nothing says that the run is on this machine, that it does not fit here is only a warning.
    expect 0 run 1 plan memory.yaml --world 2 "${fitted[@]}" device=auto
    grep -q '^warning: memory.max_memory: .* leaves a rank' err.txt || fail "no warning: $(cat err.txt)"
    grep -q 'that is for all 2 ranks on this machine, .*--device h100' err.txt || fail "no machine: $(cat err.txt)"
    grep -q '^         all 2 ranks on this machine (others: ' out.txt || fail "no machine: $(cat out.txt)"
    # The memory of other nodes is not known.
    expect 0 run 1 plan memory.yaml --world 2 "${fitted[@]}" cluster.gpus_per_node=1
    grep -q 'a run takes a smaller microbatch if this does not fit into its memory, unknown here' out.txt || fail "no word: $(cat out.txt)"
    # On nodes of their own ranks have all threads.
    expect 0 run 1 plan threads.yaml kernels.num_threads=auto
    grep '^device' out.txt >one.txt
    expect 0 run 1 plan threads.yaml --world 2 kernels.num_threads=auto cluster.gpus_per_node=1
    grep -qxf one.txt out.txt || fail "not $(cat one.txt): $(cat out.txt)"
    ;;
  gathers)
    corpus
    for ranks in 2 4; do
      gathers_change_nothing $ranks r$ranks
    done
    # Nothing is left in flight at the end of a run that saves nothing.
    config unsaved
    expect 0 run 2 unsaved.yaml distributed.shard_strategy=optim distributed.overlap_param_gather=true checkpointing.enabled=false
    ;;
  sim_gathers)
    corpus
    for seed in 1 3; do
      export NRL_SIM_SEED=$seed
      gathers_change_nothing 2 seed$seed device=cuda policy.train_micro_batch_size=1 policy.train_global_batch_size=2 \
        pretrain.max_num_steps=5 policy.max_total_sequence_length=16
    done
    ;;
  fp8)
    # Gradients in fp8 train as those in fp32 do, with error feedback. Without momentum and with a large eps an update is a
    # multiple of the gradient, and the losses show what was lost of its sum over the steps: with AdamW's usual settings
    # they differ by noise, with either.
    corpus
    smooth=(pretrain.max_num_steps=300 policy.scheduler.lr_decay_iters=300 'policy.optimizer.betas=[0.0,0.0]'
      policy.optimizer.eps=1 policy.optimizer.lr=3e-2 policy.scheduler.min_lr=3e-2 policy.optimizer.weight_decay=0
      policy.max_grad_norm=null checkpointing.enabled=false)
    # distance NAME: of the losses from those in fp32, the mean of the absolute differences.
    distance() {
      field "$1/logs/metrics.jsonl" loss >a.txt
      field fp32/logs/metrics.jsonl loss | paste - a.txt | awk '{ d = $1 - $2; sum += d < 0 ? -d : d } END { print sum / NR }'
    }
    config fp32
    expect 0 run 2 fp32.yaml "${smooth[@]}"
    for strategy in ddp optim; do
      for feedback in true false; do
        config $strategy-$feedback
        expect 0 run 2 $strategy-$feedback.yaml "${smooth[@]}" distributed.shard_strategy=$strategy \
          distributed.grad_reduce_dtype=fp8 distributed.grad_reduce_error_feedback=$feedback
      done
      with=$(distance $strategy-true) without=$(distance $strategy-false)
      echo "$strategy: $with from fp32 with error feedback, $without without"
      awk -v a="$with" -v b="$without" 'BEGIN { exit !(a < 5e-4 && b > 2 * a) }' ||
        fail "$strategy: with error feedback $with from fp32 (expected at most 5e-4), without $without (twice that at least)"
    done
    # With the usual settings too.
    for type in fp32 fp8; do
      config adamw-$type
      expect 0 run 2 adamw-$type.yaml pretrain.max_num_steps=60 policy.scheduler.lr_decay_iters=60 checkpointing.enabled=false \
        distributed.grad_reduce_dtype=$type
    done
    paste <(field adamw-fp32/logs/metrics.jsonl loss) <(field adamw-fp8/logs/metrics.jsonl loss) |
      awk '{ d = $1 / $2 - 1; if (d * d > 4e-6) { print; exit 1 } }' || fail "AdamW: the losses are more than 0.2 % apart"
    ;;
  traffic)
    # What a run communicates is what `plan` says: calls and bytes of every group and operation.
    corpus
    # traffic_of NAME RANKS KEYS...: the bytes sent per step, in the file NAME.sent.
    traffic_of() {
      local name=$1 ranks=$2 keys
      config "$name"
      keys=("$name.yaml" distributed.bucket_size_mb=0.05 policy.train_global_batch_size=12 policy.train_micro_batch_size=1
        checkpointing.enabled=false "${@:3}")
      expect 0 run "$ranks" "${keys[@]}" pretrain.max_num_steps=10
      grep -qE '^comm  *[a-z0-9 -]* (all_reduce|reduce_scatter|all_gather|all_to_all|exchange|send|recv)  .*\((shared memory|messages)\)' out.txt ||
        fail "no comm in: $(cat out.txt)"
      "$nrl_train" plan "${keys[@]}" --world "$ranks" >plan.txt
      grep -q '^traffic  of rank 0 ' plan.txt || fail "another rank than 0 is shown: $(cat plan.txt)"
      sed -nE 's/^  (.*[^ ])  ([a-z_]+)  ([0-9]+) calls?, ([0-9,]+) bytes, ([0-9,]+) sent$/\1|\2|\3|\4|\5/p' plan.txt | tr -d , |
        sort >planned.txt
      sed 's/{/\n{/g' "$name/logs/communication.json" |
        sed -nE 's/.*"group":"([^"]*)","operation":"([^"]*)".*"count":([0-9]+)0,"bytes":([0-9]+)0,"wire_bytes":([0-9.]+),.*/\1|\2|\3|\4|\5/p' |
        awk -F'|' -v OFS='|' '$1 != "world" { print $1, $2, $3, $4, int($5 / 10) }' | sort >sent.txt
      # Of what the router decides only the calls are planned.
      sed -nE 's/^  (.*[^ ])  ([a-z_]+)  ([0-9]+) calls?, .* if experts are equally busy$/\1|\2|\3/p' plan.txt |
        while IFS= read -r routed; do
          grep -qF "$routed|" sent.txt || fail "$name: planned $routed; sent $(cat sent.txt)"
          grep -vF "$routed|" sent.txt >others.txt
          mv others.txt sent.txt
        done
      [[ $(wc -l <planned.txt) -ge 1 ]] || fail "no traffic in $(cat plan.txt)"
      cmp planned.txt sent.txt || fail "$name: planned $(cat planned.txt); sent $(cat sent.txt)"
      awk -F'|' '$2 != "all_reduce" || $3 > 1 { sum += $5 } END { print sum }' planned.txt >"$name.sent"
    }
    # sends A B FACTOR: A sends FACTOR times the bytes of B, up to the scalars of a step.
    sends() {
      paste "$1.sent" "$2.sent" | awk -v f="$3" '{ d = $1 - f * $2; exit !(d * d < 40000) }' ||
        fail "$1 sends $(cat "$1.sent") bytes, $2 $(cat "$2.sent"), expected $3 times as many"
    }
    # One layout of each kind; tests/layouts compares every layout that it trains.
    traffic_of ddp2 2 distributed.shard_strategy=ddp
    traffic_of optim2 2 distributed.shard_strategy=optim
    sends optim2 ddp2 1 # ZeRO-1 sends what DDP does
    traffic_of optim_bf16 2 distributed.shard_strategy=optim policy.precision=bfloat16
    sends optim_bf16 ddp2 0.75 # gradients in fp32, weights in bf16
    traffic_of sharded 2 distributed.shard_strategy=optim_grads_params distributed.overlap_param_gather=true
    traffic_of hsdp 4 distributed.shard_strategy=hsdp distributed.dp_replicate_size=2
    traffic_of wire-fp8 2 distributed.shard_strategy=ddp distributed.grad_reduce_dtype=fp8
    tensor=(distributed.tensor_parallel_size=2 policy.precision=bfloat16)
    traffic_of tensor2 2 "${tensor[@]}"
    traffic_of tensor2-again 2 "${tensor[@]}" 'policy.recompute.modules=[norm,gather]'
    for overlap in bulk pipelined ring; do
      traffic_of tensor2-$overlap 2 "${tensor[@]}" distributed.tp_comm_overlap=$overlap
      sends tensor2-$overlap tensor2 1
    done
    traffic_of context4 4 distributed.context_parallel_size=4 'distributed.cp_comm_type=[a2a+p2p,p2p]' \
      'distributed.hierarchical_context_parallel_sizes=[2,2]'
    # One byte less than bf16 for each number of the gathered inputs and gradients: four of 32 tokens in 2 layers and 12
    # microbatches.
    fp8=(policy.model.hidden_size=64 policy.model.intermediate_size=64 policy.fp8_cfg.enabled=true)
    for enabled in false true; do
      traffic_of fp8-gather-$enabled 2 "${fp8[@]}" distributed.tensor_parallel_size=2 policy.precision=bfloat16 \
        policy.fp8_cfg.enabled=$enabled
      awk -F'|' '$2 == "all_gather" { sum += $4 } END { print sum }' planned.txt >gathered-$enabled.txt
    done
    (($(cat gathered-false.txt) - $(cat gathered-true.txt) == 12 * 2 * 4 * 32 * 64)) ||
      fail "gathered $(cat gathered-false.txt) bytes in bf16, $(cat gathered-true.txt) in FP8"
    traffic_of fp8-delayed 2 "${fp8[@]}" policy.fp8_cfg.fp8_recipe=delayed distributed.tensor_parallel_size=2 \
      policy.fp8_cfg.fp8_dot_product_attention=true
    # Rank 0, whose communication is logged, must be the one that plan shows: it gets most layers.
    traffic_of pipeline4-sharded 4 distributed.pipeline_parallel_size=2 distributed.overlap_param_gather=true \
      distributed.shard_strategy=optim_grads_params policy.model.num_hidden_layers=4 \
      distributed.num_layers_in_first_pipeline_stage=3
    grep -q '|send|' planned.txt || fail "plan has no messages: $(cat planned.txt)"
    # Tokens that go to experts: exactly, and if the router decides, the number of calls.
    experts='policy.model={model_type: qwen3_moe, vocab_size: 272, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2'
    experts+=', num_attention_heads: 4, num_key_value_heads: 2, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16}'
    traffic_of experts-gathered 2 "$experts" distributed.expert_parallel_size=2 'policy.recompute.modules=[moe]' \
      policy.model.moe_token_dispatcher_type=allgather
    traffic_of experts-routed 2 "$experts" distributed.expert_tensor_parallel_size=2 policy.model.moe_row_slack=0
    traffic_of experts-padded4 4 "$experts" distributed.expert_parallel_size=2 distributed.expert_tensor_parallel_size=2 \
      policy.checkpoint_every=2 policy.model.moe_expert_capacity_factor=1.5 \
      policy.model.moe_pad_expert_input_to_capacity=true
    grep -q '^etp lane 3|reduce_scatter|' planned.txt || fail "no sums among parts of experts: $(cat planned.txt)"
    # Routers count the tokens of each expert over the ranks of a microbatch, and of the global batch; without a loss that
    # needs them once per step.
    experts="policy.model={model_type: qwen2_moe, vocab_size: 272, hidden_size: 32, intermediate_size: 48,"
    experts+=" num_hidden_layers: 3, num_attention_heads: 4, num_experts: 4, num_experts_per_tok: 2, mlp_only_layers: [1],"
    experts+=" moe_intermediate_size: 16, shared_expert_intermediate_size: 16, moe_router_score_function: sigmoid}"
    traffic_of experts-tensor4 4 "$experts" distributed.tensor_parallel_size=2 policy.model.moe_aux_loss_coeff=0.01 \
      policy.model.moe_router_load_balancing_type=global_aux_loss policy.model.moe_router_enable_expert_bias=true
    traffic_of experts-load4 4 "$experts" distributed.tensor_parallel_size=2 distributed.context_parallel_size=2
    grep -q '^tp-cp lane 2|all_reduce|1|' planned.txt || fail "counts are not summed once: $(cat planned.txt)"
    expect 0 run 1 report optim2/logs
    grep -qE 'reduce_scatter +2 +[0-9.]+ .* shared memory$' out.txt || fail "report does not show it: $(cat out.txt)"
    ;;
  resume)
    corpus
    config whole
    config parts
    expect 0 run 1 whole.yaml
    expect 0 run 1 parts.yaml pretrain.max_num_steps=5
    expect 0 run 1 parts.yaml
    grep -q 'resume' out.txt || fail "the second run did not say that it resumes"
    same whole/logs/metrics.jsonl parts/logs/metrics.jsonl 0
    cmp -s whole/checkpoints/step-10/model.safetensors parts/checkpoints/step-10/model.safetensors || fail "the weights differ"
    config sharded
    config sharded_parts
    expect 0 run 2 sharded.yaml distributed.shard_strategy=optim
    expect 0 run 2 sharded_parts.yaml distributed.shard_strategy=optim pretrain.max_num_steps=5
    expect 0 run 2 sharded_parts.yaml distributed.shard_strategy=optim
    same sharded/logs/metrics.jsonl sharded_parts/logs/metrics.jsonl 0
    # Scales that the checkpoint lacks are told of once.
    config scales
    fp8=(policy.model.hidden_size=64 policy.model.intermediate_size=64 policy.fp8_cfg.enabled=true)
    expect 0 run 2 scales.yaml "${fp8[@]}" pretrain.max_num_steps=5
    expect 0 run 2 scales.yaml "${fp8[@]}" policy.fp8_cfg.fp8_recipe=delayed
    [[ $(grep -c 'has no FP8 scales of this recipe' out.txt err.txt | awk -F: '{ n += $2 } END { print n }') -eq 1 ]] ||
      fail "not told of once: $(cat out.txt err.txt)"
    ;;
  ranks)
    corpus
    config one
    expect 0 run 1 one.yaml
    # tests/layouts compares all strategies with one rank.
    name=r4
    config "$name"
    expect 0 run 4 "$name.yaml" distributed.shard_strategy=optim_grads_params distributed.overlap_grad_reduce=false \
      distributed.bucket_size_mb=0.13
    same one/logs/metrics.jsonl "$name/logs/metrics.jsonl" 1e-5
    # The summary has the time that ranks waited for each other as the steps have it, and not as computation.
    waited=$(field "$name/logs/metrics.jsonl" comm_ms | awk '{ sum += $1 } END { print int(sum) }')
    ((waited >= 5)) || fail "four ranks on a machine waited for each other $waited ms only"
    grep -q 'exposed comm' out.txt || fail "no time in the summary: $(cat out.txt)"
    ! grep -q 'exposed comm 0.0%' out.txt || fail "$waited ms of communication are missing in: $(cat out.txt)"
    ;;
  tensor)
    corpus
    validation=('data.split=[9,1,0]' pretrain.val_period=5 pretrain.val_batches=2)
    config one
    expect 0 run 1 one.yaml "${validation[@]}"
    for layout in "2 2 false" "4 2 true"; do
      read -r ranks tensor sequence <<<"$layout"
      name=t$ranks-$tensor-$sequence
      config "$name"
      expect 0 run "$ranks" "$name.yaml" "${validation[@]}" distributed.tensor_parallel_size="$tensor" \
        distributed.sequence_parallel="$sequence" distributed.shard_strategy=optim
      grep -Eq "^grid .*$ranks ranks = tp 2" out.txt || fail "the grid is not shown: $(cat out.txt)"
      same one/logs/metrics.jsonl "$name/logs/metrics.jsonl" 1e-5
      paste <(grep -o '"val_loss":[^,}]*' one/logs/metrics.jsonl) <(grep -o '"val_loss":[^,}]*' "$name/logs/metrics.jsonl") |
        awk -F'[:\t]' '{ n++; d = $2 - $4; if (d < 0) d = -d; if (d > 1e-5 * $2) exit 1 } END { exit n < 1 }' ||
        fail "the validation losses differ"
      # The checkpoint is a model directory like any other.
      expect 0 run 1 checkpoint verify "$name/checkpoints"
      expect 0 run 1 generate "$name/checkpoints" --prompt "int main(" --max-tokens 8
      for run in one "$name"; do
        expect 0 run 1 eval "$run/checkpoints" --data corpus --max-tokens 2001 --json
        sed -E 's/.*"loss": *([^,}]*).*/\1/' out.txt >"$run.loss"
      done
      paste one.loss "$name.loss" | awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > 1e-5) exit 1; n++ } END { exit n != 1 }' ||
        fail "the checkpoint has another loss: $(cat one.loss "$name.loss")"
    done
    # It resumes on any layout of ranks.
    config moved
    expect 0 run 4 moved.yaml "${validation[@]}" distributed.tensor_parallel_size=2 distributed.shard_strategy=optim pretrain.max_num_steps=5
    expect 0 run 1 moved.yaml "${validation[@]}" pretrain.max_num_steps=7
    expect 0 run 2 moved.yaml "${validation[@]}" distributed.tensor_parallel_size=2
    same one/logs/metrics.jsonl moved/logs/metrics.jsonl 1e-5
    expect 78 run 4 moved.yaml distributed.tensor_parallel_size=4
    grep -q '2 key/value heads' err.txt || fail "the reason is missing: $(cat err.txt)"
    grep -q 'fits: 1, 2$' err.txt || fail "the fix is missing: $(cat err.txt)"
    ;;
  stop)
    corpus
    config whole
    expect 0 run 1 whole.yaml pretrain.max_num_steps=800 policy.scheduler.lr_decay_iters=800
    for ranks in 1 2; do
      config stopped$ranks
      run $ranks stopped$ranks.yaml pretrain.max_num_steps=800 policy.scheduler.lr_decay_iters=800 &
      pid=$!
      for _ in $(seq 200); do
        [[ $(grep -c loss stopped$ranks/logs/metrics.jsonl 2>/dev/null || true) -gt 3 ]] && break
        sleep 0.05
      done
      # The process itself on one rank; mpirun forwards the signal to its ranks.
      pkill -USR1 -P $pid || fail "nothing to stop"
      code=0
      wait $pid || code=$?
      ((code == 75)) || fail "stopped with exit code $code instead of 75"
      # The step that was last reported is the one that was saved, and the next run begins after it.
      last=$(field stopped$ranks/logs/metrics.jsonl step | tail -1)
      ((last < 800)) || fail "the run was at its end before it could be stopped"
      [[ $(<stopped$ranks/checkpoints/LATEST) == "step-$last" && -d stopped$ranks/checkpoints/step-$last ]] || fail "step $last was not saved: $(ls stopped$ranks/checkpoints)"
      grep -q "stop requested; finished step $last, saving" out.txt || fail "the step is not named: $(tail -3 out.txt)"
      grep -q "stopped after $last/800 steps, checkpoint saved; exit 75" out.txt || fail "another step: $(tail -20 out.txt)"
      expect 0 run $ranks stopped$ranks.yaml pretrain.max_num_steps=800 policy.scheduler.lr_decay_iters=800
      [[ $(sed -n 's|.* step *\([0-9]*\)/800 .*|\1|p' out.txt | head -1) == $((last + 1)) ]] || fail "did not resume at step $((last + 1)): $(head -30 out.txt)"
      [[ $(field stopped$ranks/logs/metrics.jsonl step) == "$(seq 800)" ]] || fail "the steps are not 1 to 800, each once"
      if ((ranks == 1)); then same whole/logs/metrics.jsonl stopped1/logs/metrics.jsonl 0; fi
    done
    ;;
  bad_config)
    corpus
    config bad
    for ranks in 1 2; do
      expect 78 run $ranks bad.yaml policy.optimiser.lr=1
      grep -q "did you mean" err.txt || fail "no suggestion: $(cat err.txt)"
      sed 's/train_micro_batch_size: 2/train_micro_batch_size: 3/' bad.yaml >micro.yaml
      expect 78 run $ranks micro.yaml
      grep -q 'micro.yaml:5:' err.txt || fail "no place: $(cat err.txt)"
      sed 's/num_attention_heads: 4/num_attention_heads: 5/' bad.yaml >heads.yaml
      expect 78 run $ranks heads.yaml
      grep -q 'heads.yaml:4:' err.txt || fail "no place: $(cat err.txt)"
      [[ $(grep -c '^error\|error:' err.txt) -eq 1 ]] || fail "the message was not printed once: $(cat err.txt)"
      expect 66 run $ranks bad.yaml data.train.data_path=missing
      expect 66 run $ranks missing.yaml
      expect 78 run $ranks bad.yaml policy.model.vocab_size=64
    done
    [[ ! -e bad && ! -e micro && ! -e heads ]] || fail "a refused run left something behind"
    ;;
  elastic)
    corpus
    config one
    expect 0 run 1 one.yaml
    config moved
    expect 0 run 4 moved.yaml distributed.shard_strategy=optim pretrain.max_num_steps=5
    expect 0 run 2 moved.yaml distributed.shard_strategy=optim pretrain.max_num_steps=8
    expect 0 run 1 moved.yaml
    same one/logs/metrics.jsonl moved/logs/metrics.jsonl 1e-5
    # Another batch: the run resumes and lists the change.
    config batch
    expect 0 run 1 batch.yaml pretrain.max_num_steps=5
    expect 0 run 1 batch.yaml policy.train_global_batch_size=16
    grep -q 'policy.train_global_batch_size: 8 -> 16' out.txt || fail "the change was not listed: $(cat out.txt)"
    ;;
  damaged)
    corpus
    config d
    expect 0 run 1 d.yaml
    damage d/checkpoints/step-10/model.safetensors
    expect 65 run 1 checkpoint verify d/checkpoints
    grep -q DAMAGED out.txt || fail "verify did not find the damage"
    expect 0 run 1 d.yaml pretrain.max_num_steps=12
    grep -q 'step-10' err.txt || fail "the damaged checkpoint was not named: $(cat err.txt)"
    grep -q 'step-5' out.txt || fail "the run did not go on from step 5"
    expect 66 run 1 d.yaml checkpointing.resume=nowhere/step-3
    # The part of another rank than the first: all ranks fall back, and nothing of the damaged one is left.
    for name in two whole; do
      config $name
      expect 0 run 2 $name.yaml distributed.shard_strategy=optim
    done
    part=two/checkpoints/step-10/optimizer-00002-of-00002.safetensors
    damage $part
    for name in two whole; do
      expect 0 run 2 $name.yaml distributed.shard_strategy=optim pretrain.max_num_steps=12
      [[ $name == whole ]] || grep -q "checkpoint not used: $part: damaged: tensor .*(found by rank 1)" err.txt ||
        fail "the damage was not named: $(cat err.txt)"
    done
    grep -q 'step-10' out.txt || fail "the sound run did not resume from step 10"
    for file in model.safetensors optimizer-0000{1,2}-of-00002.safetensors; do
      cmp "two/checkpoints/step-12/$file" "whole/checkpoints/step-12/$file" || fail "$file differs after the fallback"
    done
    expect 65 run 2 two.yaml checkpointing.resume=two/checkpoints/previous-1/step-10
    grep -q "two/checkpoints/previous-1/step-10/optimizer-00002-of-00002.safetensors: damaged" err.txt || fail "$(cat err.txt)"
    ;;
  initial)
    corpus
    config i
    expect 0 run 1 i.yaml pretrain.max_num_steps=0
    [[ -s i/checkpoints/step-0/model.safetensors && -s i/checkpoints/step-0/config.json ]] || fail "no initial checkpoint"
    expect 0 run 1 checkpoint verify i/checkpoints/step-0
    # The same weights as those that training starts from, on any number of ranks.
    config j
    expect 0 run 2 j.yaml pretrain.max_num_steps=0
    cmp -s i/checkpoints/step-0/model.safetensors j/checkpoints/step-0/model.safetensors || fail "initial weights depend on the ranks"
    # A Hugging Face directory as the start: the same run.
    config k
    expect 0 run 1 k.yaml
    config l
    sed -i '/model: {/,/max_position/d; s|^policy:|policy:\n  model_name: i/checkpoints/step-0|' l.yaml
    expect 0 run 1 l.yaml
    same k/logs/metrics.jsonl l/logs/metrics.jsonl 0
    ;;
  options)
    corpus
    config base
    expect 0 run 1 base.yaml
    config kept
    expect 0 run 1 kept.yaml policy.recompute.granularity=none
    same base/logs/metrics.jsonl kept/logs/metrics.jsonl 0
    config micro
    expect 0 run 1 micro.yaml policy.train_micro_batch_size=8
    same base/logs/metrics.jsonl micro/logs/metrics.jsonl 1e-5
    config isa
    expect 0 run 1 isa.yaml kernels.isa=baseline kernels.num_threads=1
    same base/logs/metrics.jsonl isa/logs/metrics.jsonl 1e-4
    config eval
    expect 0 run 1 eval.yaml 'data.split=[9,1,0]' pretrain.val_period=5 pretrain.val_batches=2 pretrain.val_at_start=true
    [[ $(grep -c val_loss eval/logs/metrics.jsonl) -eq 3 ]] || fail "three evaluations were asked for"
    expect 0 run 1 plan base.yaml --world 2
    grep -q activations out.txt || fail "plan prints no memory"
    # Ranks that need different memory: every one is named, the largest first.
    expect 0 run 1 plan base.yaml --world 2 distributed.shard_strategy=optim
    grep -q '^grid     2 ranks = dp 2  optim$' out.txt || fail "the grid is not shown"
    expect 0 run 1 plan base.yaml --world 2 distributed.pipeline_parallel_size=2
    grep -q '^memory .*, rank [01] (largest)$' out.txt || fail "the largest rank is not named: $(cat out.txt)"
    grep -Eq '^  rank [01]: [0-9.]+ [KMGi]*B less$' out.txt || fail "the other rank is missing: $(cat out.txt)"
    expect 0 run 1 data show base.yaml --steps 1:3 --json
    [[ $(wc -l <out.txt) -eq 16 ]] || fail "two steps of eight samples were asked for"
    ;;
  bf16)
    corpus
    config full
    expect 0 run 1 full.yaml
    config half
    expect 0 run 1 half.yaml policy.precision=bfloat16
    same full/logs/metrics.jsonl half/logs/metrics.jsonl 0.05
    config half_parts
    expect 0 run 2 half_parts.yaml policy.precision=bfloat16 distributed.shard_strategy=optim pretrain.max_num_steps=5
    expect 0 run 1 half_parts.yaml policy.precision=bfloat16
    same half/logs/metrics.jsonl half_parts/logs/metrics.jsonl 0.01
    ;;
  diverge)
    corpus
    config d
    expect 79 run 2 d.yaml policy.model.initializer_range=1.0e+25 pretrain.max_num_steps=50
    grep -q 'non-finite' err.txt || fail "no reason given: $(cat err.txt)"
    ;;
  # The cases of nrl-train-sim: the GPU's code on the simulated device.
  sim_losses)
    corpus
    for precision in float32 bfloat16; do
      # fp32: sums in another order. bf16: the same roundings of the same values but for those sums; 3 significant
      # digits are what 8 bits of mantissa leave after 6 steps.
      tolerance=2e-4
      [[ $precision == float32 ]] || tolerance=2e-2
      config cpu-$precision
      expect 0 run 1 cpu-$precision.yaml device=cpu policy.precision=$precision "${short[@]}"
      for seed in 1 2; do
        config sim-$precision-$seed
        NRL_SIM_SEED=$seed expect 0 run 1 sim-$precision-$seed.yaml device=cuda policy.precision=$precision "${short[@]}"
        same cpu-$precision/logs/metrics.jsonl sim-$precision-$seed/logs/metrics.jsonl $tolerance
      done
      same sim-$precision-1/logs/metrics.jsonl sim-$precision-2/logs/metrics.jsonl 0
    done
    grep -q 'device *cuda' out.txt || fail "the banner does not name the device"
    # In bf16 a GPU's logits are bf16 too, unless the configuration says otherwise.
    config logits
    expect 0 run 1 logits.yaml device=cuda policy.precision=bfloat16 policy.logits_dtype=float32 "${short[@]}"
    same sim-bfloat16-1/logs/metrics.jsonl logits/logs/metrics.jsonl 5e-3
    (same sim-bfloat16-1/logs/metrics.jsonl logits/logs/metrics.jsonl 1e-6) 2>err.txt && fail "policy.logits_dtype changes nothing"
    ;;
  sim_xid)
    # The driver tells that the GPU of rank 1 has left the bus: all ranks leave, and the record names it.
    corpus
    config xid
    export NRL_FAULTS="gpu:rank=1@step=3:xid=79"
    expect 80 run 2 xid.yaml device=cuda kernels.share_device=true pretrain.max_num_steps=100000 checkpointing.enabled=false
    grep -q 'error: rank 1 (node 0) failed at step [0-9]* in [a-z]*: GPU simulated: Xid 79 (it has fallen off the bus): restart the node' err.txt ||
      fail "the GPU is not named: $(cat err.txt)"
    for field in '"kind": "gpu"' '"rank": 1' '"exit_code": 80'; do
      grep -q "$field" xid/logs/failure.json || fail "no $field in $(cat xid/logs/failure.json)"
    done
    rm -r xid
    # Errors that need no reset, and those of a run of one rank, are warnings.
    NRL_FAULTS="gpu:rank=0@step=1:xid=63" expect 0 run 1 xid.yaml device=cuda "${short[@]}"
    # The warning comes from another thread.
    grep -q 'warn: GPU simulated: Xid 63 (a row of memory is remapped at the next reset)' err.txt || fail "no warning: $(cat err.txt)"
    # A CPU has no GPU's errors.
    rm -r xid
    NRL_FAULTS="gpu:rank=0@step=1:xid=79" expect 64 run 1 xid.yaml device=cpu "${short[@]}"
    grep -q 'NRL_FAULTS: a fault of kind gpu, but this rank has no GPU' err.txt || fail "$(cat err.txt)"
    ;;
  sim_graph)
    corpus
    for model in llama gpt2; do
      extra=()
      [[ $model == llama ]] || extra=(policy.model.model_type=gpt2 policy.model.attn_pdrop=0.1 policy.model.resid_pdrop=0.1 policy.model.embd_pdrop=0.1)
      config eager-$model
      config graph-$model
      [[ $model == llama ]] || sed -i 's/intermediate_size: 80, //; s/num_key_value_heads: 2, //' eager-$model.yaml graph-$model.yaml
      expect 0 run 1 eager-$model.yaml device=cuda "${short[@]}" "${extra[@]}"
      expect 0 run 1 graph-$model.yaml device=cuda policy.cuda_graph=true "${short[@]}" "${extra[@]}"
      same eager-$model/logs/metrics.jsonl graph-$model/logs/metrics.jsonl 0
    done
    ;;
  # auto keeps all activations in a GPU with memory for them. The bits are the same.
  sim_recompute)
    corpus
    for mebibytes in 4096 36; do
      config m$mebibytes
      NRL_SIM_MEMORY=$mebibytes expect 0 run 1 m$mebibytes.yaml device=cuda "${short[@]}"
      tr -s ' \n' ' ' <out.txt >m$mebibytes.txt
      NRL_SIM_MEMORY=$mebibytes expect 0 run 1 plan m$mebibytes.yaml device=cuda "${short[@]}"
      grep '^layers' out.txt >>m$mebibytes.txt
    done
    same m4096/logs/metrics.jsonl m36/logs/metrics.jsonl 0
    grep -q "(recomputed: nothing: within 90 % of the GPU's 4.00 GiB)" m4096.txt || fail "banner: $(cat m4096.txt)"
    grep -q "layers   recomputed: nothing: within 90 % of the GPU's 4.00 GiB" m4096.txt || fail "plan: $(cat m4096.txt)"
    for line in '(recomputed: ' 'layers   recomputed: '; do
      grep -q "${line}.*: keeping everything takes .*, more than 90 % of the GPU's 36.0 MiB.*; chosen by bytes saved" m36.txt ||
        fail "recomputation is not explained: $(cat m36.txt)"
    done
    NRL_SIM_DEVICES=0 expect 0 run 1 plan m36.yaml device=cuda
    grep -q 'norm, activation: keeping everything takes .*, which a run does on a GPU of at least ' out.txt || fail "no GPU: $(cat out.txt)"
    ;;
  # The CPU updates offloaded state for a graph that is in flight when the run fails.
  sim_graph_error)
    { for i in {1..140}; do printf 'all is well'; done; printf 'z'; for i in {1..40}; do printf 'all is well'; done; } >text.txt
    expect 0 run 1 prepare --input text.txt --tokenizer bytes --output corpus
    rm corpus.dataset.json
    config run
    expect 65 run 1 run.yaml device=cuda policy.offload_optimizer=true policy.cuda_graph=true policy.precision=bfloat16 \
      policy.model.vocab_size=122 policy.train_global_batch_size=2 pretrain.max_num_steps=40 checkpointing.enabled=false
    grep -q 'step  3/40' out.txt || fail "the graph did not run: $(cat out.txt)"
    grep -q 'error: corpus.bin: token 122 at position [0-9]* (document 0) is not below vocab_size 122' err.txt || fail "message: $(cat err.txt)"
    ;;
  # Documents kept apart: as on the CPU, on any number of ranks, and as a graph where the launches do not change.
  sim_documents)
    for i in {1..300}; do echo "{\"text\": \"$((i * i)) is the square of $i$(printf '%*s' $((i % 13)) '')\"}"; done >lines.jsonl
    expect 0 run 1 prepare --input lines.jsonl --tokenizer bytes --output corpus
    apart=(data.reset_position_ids=true data.reset_attention_mask=true data.eod_mask_loss=true)
    for precision in float32 bfloat16; do
      tolerance=2e-4
      [[ $precision == float32 ]] || tolerance=2e-2
      config cpu-$precision
      config sim-$precision
      expect 0 run 1 cpu-$precision.yaml device=cpu policy.precision=$precision "${short[@]}" "${apart[@]}"
      expect 0 run 1 sim-$precision.yaml device=cuda policy.precision=$precision "${short[@]}" "${apart[@]}"
      same cpu-$precision/logs/metrics.jsonl sim-$precision/logs/metrics.jsonl $tolerance
    done
    config two
    expect 0 run 2 two.yaml device=cuda policy.precision=float32 "${short[@]}" "${apart[@]}" policy.train_micro_batch_size=1
    same sim-float32/logs/metrics.jsonl two/logs/metrics.jsonl 1e-4
    config together
    expect 0 run 1 together.yaml device=cuda policy.precision=float32 "${short[@]}"
    (same sim-float32/logs/metrics.jsonl together/logs/metrics.jsonl 1e-3) 2>err.txt && fail "the keys change nothing"
    config eager
    config graph
    expect 0 run 1 eager.yaml device=cuda "${short[@]}" "${apart[@]::1}" "${apart[@]:2}"
    expect 0 run 1 graph.yaml device=cuda policy.cuda_graph=true "${short[@]}" "${apart[@]::1}" "${apart[@]:2}"
    same eager/logs/metrics.jsonl graph/logs/metrics.jsonl 0
    expect 78 run 1 graph.yaml device=cuda policy.cuda_graph=true "${apart[@]}"
    grep -q 'data.reset_attention_mask: true varies the number of sequences' err.txt || fail "no reason: $(cat err.txt)"
    ;;
  sim_resume)
    corpus
    config whole
    config parts
    expect 0 run 1 whole.yaml device=cuda "${short[@]}"
    expect 0 run 1 parts.yaml device=cuda "${short[@]}" pretrain.max_num_steps=3
    expect 0 run 1 parts.yaml device=cuda "${short[@]}"
    same whole/logs/metrics.jsonl parts/logs/metrics.jsonl 0
    cmp -s whole/checkpoints/step-6/model.safetensors parts/checkpoints/step-6/model.safetensors || fail "the weights differ"
    # A checkpoint of the GPU goes on on the CPU.
    expect 0 run 1 parts.yaml device=cpu policy.precision=bfloat16 "${short[@]}" pretrain.max_num_steps=7
    grep -q 'step-6' out.txt || fail "the CPU did not resume from the GPU's checkpoint"
    ;;
  sim_ranks)
    corpus
    config one
    expect 0 run 1 one.yaml device=cuda policy.precision=float32 "${short[@]}"
    for strategy in ddp optim; do
      config two-$strategy
      expect 0 run 2 two-$strategy.yaml device=cuda policy.precision=float32 "${short[@]}" distributed.shard_strategy=$strategy \
        distributed.bucket_size_mb=0.13 policy.train_micro_batch_size=1
      same one/logs/metrics.jsonl two-$strategy/logs/metrics.jsonl 1e-4
    done
    # Host memory of the GPU run is planned as well, and not counted with the GPU's.
    expect 0 run 1 plan one.yaml device=cuda --buffers
    grep -Eq '^  pinned host +[0-9,]+ ' out.txt || fail "pinned memory has no sum: $(cat out.txt)"
    [[ $(grep -c '(pinned host memory)$' out.txt) -eq 3 ]] || fail "three pinned buffers are planned: $(cat out.txt)"
    ;;
  sim_share)
    corpus
    config two
    NRL_SIM_DEVICES=1 expect 69 run 2 two.yaml device=cuda "${short[@]}"
    grep -q 'kernels.share_device' err.txt || fail "the refusal does not say how to allow it"
    NRL_SIM_DEVICES=1 expect 0 run 2 two.yaml device=cuda kernels.share_device=true "${short[@]}" pretrain.max_num_steps=1
    tr -s ' \n' ' ' <out.txt | grep -q 'recomputed: norm, activation: .* ranks may share the GPU' || fail "recomputation: $(cat out.txt)"
    ;;
  sim_bad)
    corpus
    config bad
    NRL_SIM_DEVICES=0 expect 69 run 1 bad.yaml device=cuda
    grep -q 'device: cuda' err.txt || fail "the refusal does not name the key"
    NRL_SIM_DEVICES=0 expect 78 run 1 bad.yaml device=auto policy.cuda_graph=true
    expect 78 run 2 bad.yaml device=cuda policy.cuda_graph=true distributed.backend=staged
    expect 71 run 1 bad.yaml device=cuda policy.model.vocab_size=4000000
    grep -q 'policy.model.vocab_size: 4000000 is too large: .* but the GPU has 4.00 GiB' err.txt || fail "no key: $(cat err.txt)"
    [[ ! -e bad ]] || fail "a refused run left files"
    config diverges
    expect 79 run 1 diverges.yaml device=cuda policy.model.initializer_range=1.0e+25 pretrain.max_num_steps=30
    ;;
  # The choices of GEMM algorithms: written by an autotuned run, read by others, refused on another GPU.
  sim_tuning)
    corpus
    for name in plain first second again; do config $name; done
    run_short() { run 1 "$1.yaml" device=cuda "${short[@]}" pretrain.max_num_steps=2 "${@:2}"; }
    expect 66 run_short plain kernels.gemm_tuning=tuning
    grep -q 'no GEMM choices for simulated with sim 1: tuning/simulated_sim-1.txt' err.txt || fail "no file name: $(cat err.txt)"
    expect 0 run_short plain
    expect 0 run 1 bench step plain.yaml device=cuda kernels.autotune=true kernels.gemm_tuning=tuning --quick
    file=tuning/simulated_sim-1.txt
    [[ $(wc -l <$file) -gt 10 ]] || fail "few choices in $file: $(cat $file)"
    # The first algorithm of all GEMMs is the library's own choice; the second one adds up in another order.
    cp $file made.txt
    sed -E '4,$s/^([^ ]+) .*/\1 0 0 0 0 0 0 0 0/' made.txt >$file
    expect 0 run_short first kernels.gemm_tuning=tuning
    same plain/logs/metrics.jsonl first/logs/metrics.jsonl 0
    sed -E '4,$s/^([^ ]+) .*/\1 1 0 0 0 0 0 0 0/' made.txt >$file
    cp $file before.txt
    expect 0 run_short second kernels.gemm_tuning=$file
    cmp -s $file before.txt || fail "a run without autotuning wrote $file"
    ! cmp -s <(field plain/logs/metrics.jsonl grad_norm) <(field second/logs/metrics.jsonl grad_norm) ||
      fail "the choices are not used"
    same plain/logs/metrics.jsonl second/logs/metrics.jsonl 1e-2
    expect 0 run_short again kernels.autotune=true
    [[ -s again/logs/simulated_sim-1.txt ]] || fail "no choices in the log directory: $(ls again/logs)"
    sed -i 's/^gpu .*/gpu NVIDIA H200/' $file
    expect 65 run_short plain kernels.gemm_tuning=$file
    grep -q "$file:2: these GEMM choices were timed with NVIDIA H200, but this run has simulated" err.txt || fail "$(cat err.txt)"
    sed 's/^gpu .*/gpu simulated/; 5s/ 1 / one /' $file >damaged.txt
    expect 65 run_short plain kernels.gemm_tuning=damaged.txt
    grep -q 'damaged.txt:5: .* expected a GEMM and eight hexadecimal words' err.txt || fail "$(cat err.txt)"
    sed 's/^gpu .*/gpu simulated/; 4,$s/ 1 / 7 /' $file >unknown.txt
    config unknown
    expect 65 run_short unknown kernels.gemm_tuning=unknown.txt
    grep -q 'unknown.txt: the library refuses the algorithm of' err.txt || fail "$(cat err.txt)"
    expect 0 run 1 bench gemm --device cuda --quick
    grep -q '^  tuned .* 48 ' out.txt || fail "no tuned rate: $(cat out.txt)"
    ;;
  *) fail "unknown case $case_name" ;;
esac
echo "$case_name: ok"
