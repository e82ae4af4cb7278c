#!/usr/bin/env bash
# What is done with a finished run: evaluation, reports. evaluate.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# number FILE KEY: a field of a JSON line.
number() {
  sed -E "s/.*\"$2\":([^,}]*).*/\1/" "$1"
}

# evaluated RANKS ARGS...: the loss of an evaluation.
evaluated() {
  expect 0 run "$1" eval "${@:2}" --json --threads 1
  number out.txt loss
}

# near A B: the losses agree, relative to 1e-6.
near() {
  awk -v a="$1" -v b="$2" 'BEGIN { d = (a - b) / b; exit !(d < 1e-6 && d > -1e-6) }'
}

# Ranks and layouts, one a line.
layouts='2
2 distributed.shard_strategy=optim_grads_params
2 distributed.tensor_parallel_size=2
2 distributed.tensor_parallel_size=2 distributed.sequence_parallel=false
2 distributed.pipeline_parallel_size=2
2 distributed.context_parallel_size=2
4 distributed.tensor_parallel_size=2 distributed.pipeline_parallel_size=2
4 distributed.tensor_parallel_size=2 distributed.shard_strategy=optim_grads_params
4 distributed.pipeline_parallel_size=2 distributed.shard_strategy=optim_grads_params
4 distributed.context_parallel_size=2 distributed.pipeline_parallel_size=2'

# same_on_layouts LOSS ARGS...: every layout has the loss of one rank.
same_on_layouts() {
  local loss=$1 ranks layout got
  while read -r ranks layout; do
    # shellcheck disable=SC2086  # one argument a key
    got=$(evaluated "$ranks" "${@:2}" $layout)
    near "$got" "$loss" || fail "the loss is $loss on one rank and $got on $ranks with $layout"
  done <<<"$layouts"
}

# refused CODE RANKS TEXT ARGS...: one message, which names TEXT, and this exit code of mpirun.
refused() {
  expect "$1" run "$2" eval "${@:4}"
  grep -q "$3" err.txt || fail "'$3' is not named: $(cat err.txt)"
  [[ $(grep -c 'error:' err.txt) -eq 1 ]] || fail "the message was not printed once: $(cat err.txt)"
}

case $case_name in
  eval)
    corpus
    config e
    expect 0 run 1 e.yaml
    model=e/checkpoints/step-10
    expect 0 run 1 eval $model --data corpus --max-tokens 3001 --json
    loss=$(number out.txt loss)
    [[ $(number out.txt tokens) == 3000 ]] || fail "3000 tokens were to be predicted: $(cat out.txt)"
    # Ranks and microbatches change nothing beyond rounding; windows of other lengths see other contexts.
    for ranks in 1 2 3; do
      expect 0 run $ranks eval $model --data corpus --max-tokens 3001 --json --micro-batch $((4 - ranks))
      awk -v a="$loss" -v b="$(number out.txt loss)" 'BEGIN { d = a - b; exit !(d < 1e-6 && d > -1e-6) }' ||
        fail "the loss is $loss on one rank and $(number out.txt loss) on $ranks"
    done
    # No more windows are computed than the data have.
    expect 0 run 1 eval $model --data corpus --max-tokens 3001 --json --micro-batch 65536
    # Bits per byte by hand, from the size of the text.
    head -c 5000 "$source_dir/README.md" | iconv -c -t ascii >text.txt
    expect 0 run 1 prepare --input text.txt --tokenizer bytes --output small
    expect 0 run 1 eval $model --data small --json
    bytes=$(wc -c <text.txt)
    awk -v loss="$(number out.txt loss)" -v tokens="$(number out.txt tokens)" -v bytes="$bytes" -v got="$(number out.txt bits_per_byte)" \
      'BEGIN { want = loss * tokens / log(2) / bytes; exit !(got / want < 1.000001 && got / want > 0.999999) }' ||
      fail "bits per byte: $(cat out.txt)"
    # A model that has learned is better than its start.
    config start
    expect 0 run 1 start.yaml pretrain.max_num_steps=0
    expect 0 run 1 eval start/checkpoints/step-0 --data corpus --max-tokens 3001 --json
    awk -v a="$loss" -v b="$(number out.txt loss)" 'BEGIN { exit !(a < b - 0.5 && b > 5.4 && b < 6.0) }' ||
      fail "loss $loss after training, $(number out.txt loss) before; log(272) is 5.61"
    expect 0 run 1 eval $model --data corpus corpus --max-tokens 200
    grep -q 'made with another tokenizer' err.txt && fail "a warning about its own data: $(cat err.txt)"
    [[ $(grep -c '^perplexity' out.txt) -eq 2 ]] || fail "two datasets were named: $(cat out.txt)"
    for ranks in 1 2; do
      expect 66 run $ranks eval $model --data missing
      expect 66 run $ranks eval missing --data corpus
      [[ $(grep -c 'error:' err.txt) -eq 1 ]] || fail "the message was not printed once: $(cat err.txt)"
    done
    ;;
  eval_layouts)
    corpus
    config e
    expect 0 run 1 e.yaml
    model=e/checkpoints/step-10
    data=(--data corpus --max-tokens 3001)
    loss=$(evaluated 1 $model "${data[@]}")
    same_on_layouts "$loss" $model "${data[@]}"
    # More microbatches than the stages take at once, and several chunks of layers a stage.
    near "$(evaluated 2 $model "${data[@]}" --micro-batch 1 distributed.pipeline_parallel_size=2)" "$loss" ||
      fail "$(cat out.txt): the loss is $loss"
    expect 0 run 4 eval $model "${data[@]}" distributed.tensor_parallel_size=2 distributed.pipeline_parallel_size=2
    grep -q '^layout      4 ranks = tp 2 x pp 2; a rank needs .*, of which weights' out.txt || fail "no layout: $(cat out.txt)"
    # Two datasets of different lengths, of which the second one does not fill a microbatch of each rank.
    head -c 60 text/odd/1.txt >short.txt
    expect 0 run 1 prepare --input short.txt --tokenizer bytes --output short
    expect 0 run 1 eval $model --data corpus short --max-tokens 3001 --json
    cp out.txt one.txt
    expect 0 run 4 eval $model --data corpus short distributed.pipeline_parallel_size=2 --max-tokens 3001 --json
    for line in 1 2; do
      sed -n ${line}p one.txt >a.json
      sed -n ${line}p out.txt >b.json
      near "$(number a.json loss)" "$(number b.json loss)" || fail "$(cat a.json b.json)"
    done
    # Experts on several ranks.
    experts='policy.model={model_type: qwen3_moe, vocab_size: 272, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4'
    experts+=', num_attention_heads: 4, num_key_value_heads: 2, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16}'
    config m
    expect 0 run 1 m.yaml "$experts" pretrain.max_num_steps=3
    moe=m/checkpoints/step-3
    loss=$(evaluated 1 $moe "${data[@]}")
    for layout in '2 expert_parallel_size=2' '2 expert_tensor_parallel_size=2' \
      '4 expert_parallel_size=2 tensor_parallel_size=2' '4 pipeline_parallel_size=2 virtual_pipeline_size=2'; do
      read -ra words <<<"$layout"
      keys=("${words[@]:1}")
      got=$(evaluated "${words[0]}" $moe "${data[@]}" "${keys[@]/#/distributed.}")
      near "$got" "$loss" || fail "the loss is $loss on one rank and $got on $layout"
    done
    # Impossible layouts, keys without effect, and data that only some ranks read.
    refused 78 2 'do not fit the grid' $model "${data[@]}" distributed.tensor_parallel_size=3
    refused 78 4 '2 key/value heads' $model "${data[@]}" distributed.tensor_parallel_size=4
    refused 78 4 'does not fit the 2 layers' $model "${data[@]}" distributed.pipeline_parallel_size=4
    refused 78 2 'max_total_sequence_length is --sequence-length' $model "${data[@]}" --sequence-length 30 \
      distributed.context_parallel_size=2
    refused 78 2 'policy.optimizer.lr has no effect on an evaluation' $model "${data[@]}" policy.optimizer.lr=1
    refused 78 2 'data.train_on has no effect on an evaluation of token files' $model "${data[@]}" data.train_on=all
    refused 78 2 'shard_strategy: optim has no effect' $model "${data[@]}" distributed.shard_strategy=optim
    refused 78 1 'tensor_paralel_size' $model "${data[@]}" distributed.tensor_paralel_size=2
    cp corpus.idx spoiled.idx
    cp corpus.bin spoiled.bin
    damage spoiled.bin 1001  # the upper byte of a token
    for layout in expert_parallel_size=1 tensor_parallel_size=2 shard_strategy=optim_grads_params; do
      refused 65 2 'not below vocab_size 272' $model --data spoiled distributed.$layout
    done
    refused 64 1 'no files are named' $model --data distributed.tensor_parallel_size=1
    ;;
  eval_records)
    "$source_dir/scripts/make-chat.sh" data/chat 200 >out.txt
    config e
    sed -i -e 's/^algorithm: pretrain/algorithm: sft/' -e 's/^pretrain:/sft:/' -e '/^data:/d' e.yaml
    cat >>e.yaml <<YAML
data:
  train_on: all
  train: {data_path: data/chat/train.jsonl, format: instruction}
  validation: {data_path: data/chat/validation.jsonl, format: instruction}
YAML
    expect 0 run 1 e.yaml sft.val_at_end=true policy.tokenizer.name=bytes policy.sequence_packing.enabled=true
    model=e/checkpoints/step-10 records=data/chat/validation.jsonl
    # The loss of the run's own evaluation, with its options; packing does not matter.
    loss=$(sed -nE 's/.*"val_loss":([^,}]*).*/\1/p' e/logs/metrics.jsonl | tail -1)
    near "$(evaluated 1 $model --data $records)" "$loss" || fail "val_loss is $loss: $(cat out.txt)"
    near "$(evaluated 1 $model --data $records --micro-batch 1)" "$loss" || fail "val_loss is $loss: $(cat out.txt)"
    same_on_layouts "$loss" $model --data $records
    near "$(evaluated 1 $model --data $records data.train_on=completion)" "$loss" && fail "the prompts count"
    # Both answers of preferences: the chosen ones are those of the instructions.
    sed -E 's/"completion":"([0-9]*)",.*/"chosen":"\1","rejected":"0"}/' $records >pairs.jsonl
    chosen=$(evaluated 1 $model --data $records data.train_on=completion)
    expect 0 run 1 eval $model --data pairs.jsonl --json data.validation.format=preference data.train_on=completion
    near "$(number out.txt chosen_loss)" "$chosen" || fail "the loss of the answers is $chosen: $(cat out.txt)"
    rejected=$(number out.txt rejected_loss)
    expect 0 run 2 eval $model --data pairs.jsonl data.validation.format=preference data.train_on=completion \
      distributed.pipeline_parallel_size=2 --json
    near "$(number out.txt rejected_loss)" "$rejected" || fail "$(cat out.txt): $rejected on one rank"
    expect 0 run 1 eval $model --data $records
    grep -q '^data        data/chat/validation.jsonl: 200 examples of instruction' out.txt || fail "$(cat out.txt)"
    # A reward model has no probabilities of tokens.
    config r
    sed -i -e 's/^algorithm: pretrain/algorithm: rm/' -e 's/^pretrain:/rm:/' -e '/^data:/d' r.yaml
    expect 0 run 1 r.yaml policy.tokenizer.name=bytes rm.max_num_steps=2 data.train.data_path=pairs.jsonl
    refused 65 2 'is a reward model' r/checkpoints/step-2 --data $records
    # One message for a damaged record, and for options that do not apply.
    sed '7s/completion/answer/' $records >damaged.jsonl
    refused 65 2 'damaged.jsonl:7:' $model --data damaged.jsonl
    refused 66 2 'missing.jsonl' $model --data missing.jsonl
    corpus
    refused 64 2 'in two commands' $model --data $records corpus
    refused 64 2 'max-tokens' $model --data $records --max-tokens 5
    ;;
  report)
    corpus
    config a
    config b
    expect 0 run 1 a.yaml
    expect 0 run 1 b.yaml policy.optimizer.lr=1.0e-3
    expect 0 run 1 report a/logs b/logs --html report.html
    grep -q 'step 1 to 10' out.txt || fail "no chart: $(cat out.txt)"
    grep -q '^a/logs  *10 ' out.txt || fail "no table: $(cat out.txt)"
    grep -q '<svg' report.html || fail "no curves on the page"
    expect 66 run 1 report nowhere
    expect 73 run 1 report a/logs --html nowhere/report.html
    ;;
  samples)
    corpus
    config plain
    config talking
    expect 0 run 2 plain.yaml
    expect 0 run 2 talking.yaml logger.sample_period=4 "logger.sample_prompt=int main(" logger.sample_tokens=12
    [[ $(grep -c ' text .*int main(' out.txt) -eq 3 ]] || fail "samples of steps 4, 8 and 10: $(cat out.txt)"
    [[ $(grep -c '"text":"int main(' talking/logs/metrics.jsonl) -eq 3 ]] || fail "metrics.jsonl lacks the samples"
    grep -v '"text"' talking/logs/metrics.jsonl >without.jsonl
    same plain/logs/metrics.jsonl without.jsonl 0
    cmp -s plain/checkpoints/step-10/model.safetensors talking/checkpoints/step-10/model.safetensors ||
      fail "samples changed the training"
    expect 0 run 1 report talking/logs
    # Token files of another program do not say what their tokens mean.
    cp corpus.bin other.bin
    cp corpus.idx other.idx
    expect 78 run 2 plain.yaml data.train.data_path=other checkpointing.enabled=false logger.sample_period=4
    grep -q 'logger.sample_period' err.txt || fail "the key is not named: $(cat err.txt)"
    expect 0 run 1 talking.yaml data.train.data_path=other checkpointing.enabled=false logger.log_dir=named \
      logger.sample_period=4 policy.tokenizer.name=bytes pretrain.max_num_steps=4
    ;;
  sim_eval)
    corpus
    config e
    expect 0 run 1 e.yaml device=cpu policy.precision=float32 "pretrain.max_num_steps=3"
    for device in cpu cuda; do
      expect 0 run 1 eval e/checkpoints/step-3 --data corpus --max-tokens 300 --json --device $device
      cp out.txt $device.txt
    done
    awk -v a="$(number cpu.txt loss)" -v b="$(number cuda.txt loss)" 'BEGIN { d = a - b; exit !(d < 1e-4 && d > -1e-4) }' ||
      fail "the loss on the CPU and the GPU differ: $(cat cpu.txt cuda.txt)"
    # Weights of the device are sampled from a copy: the same text as from the checkpoint.
    expect 0 run 1 e.yaml device=cuda policy.precision=float32 pretrain.max_num_steps=4 logger.sample_period=4 \
      logger.sample_prompt=int_x logger.sample_tokens=16 logger.sample_temperature=0
    sed -E -n 's/.*"text":"(.*)"\}$/\1/p' e/logs/metrics.jsonl >sampled.txt
    # Both backends choose the same text.
    expect 0 run 1 generate e/checkpoints/step-4 --prompt int_x --max-tokens 16 --temperature 0 --device cuda
    cp out.txt cuda.txt
    expect 0 run 1 generate e/checkpoints/step-4 --prompt int_x --max-tokens 16 --temperature 0 --device cpu
    cmp -s out.txt cuda.txt || fail "generated on the CPU $(cat out.txt), on the GPU $(cat cuda.txt)"
    [[ -s sampled.txt ]] || fail "no sample of the device's weights"
    head -c 8 sampled.txt >a.txt
    head -c 8 out.txt >b.txt
    cmp -s a.txt b.txt || fail "sampled $(cat sampled.txt), generated $(cat out.txt)"
    ;;
  *) fail "unknown case $case_name" ;;
esac
echo "$case_name: ok"
