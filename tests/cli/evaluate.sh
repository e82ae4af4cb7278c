#!/usr/bin/env bash
# What is done with a finished run: evaluation, reports. evaluate.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# number FILE KEY: a field of a JSON line.
number() {
  sed -E "s/.*\"$2\":([^,}]*).*/\1/" "$1"
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
