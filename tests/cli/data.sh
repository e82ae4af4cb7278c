#!/usr/bin/env bash
# Text to tokens to training: input files of all kinds, datasets of one document, the memory of the sample order.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

case $case_name in
  one_document)
    cat "$source_dir"/core/io/*.h >all.txt
    head -c 20000 all.txt >text.txt
    expect 0 run 1 prepare --input text.txt --tokenizer train-sentencepiece:4096 --output corpus
    grep -q '^1 document from 1 file: 19.5 KiB' out.txt || fail "not one document: $(cat out.txt)"
    grep -q 'of 4,096 tokens: the text is too small for more' out.txt || fail "no word about the vocabulary: $(cat out.txt)"
    run_one() {
      expect 0 run "$1" "$source_dir/configs/quickstart.yaml" data.train.data_path=corpus pretrain.max_num_steps=4 \
        pretrain.val_period=2 policy.scheduler.lr_warmup_iters=1 policy.train_global_batch_size=4 \
        policy.model.num_hidden_layers=1 policy.max_total_sequence_length=64 \
        checkpointing.checkpoint_dir="$2/checkpoints" logger.log_dir="$2/logs" "${@:3}"
      [[ $(grep -c val_loss "$2/logs/metrics.jsonl") -eq 2 ]] || fail "two evaluations were asked for"
    }
    run_one 1 one
    run_one 2 two
    same one/logs/metrics.jsonl two/logs/metrics.jsonl 1e-4
    tr -s ' \n' ' ' <out.txt | grep -q 'split by tokens' || fail "no word about the split: $(cat out.txt)"
    # Less validation data than a global batch: all of it, in one batch.
    run_one 1 few pretrain.val_batches=null policy.train_global_batch_size=16
    grep -q 'less than one global batch of 16' out.txt err.txt || fail "no word about repeated samples"
    ;;
  blend)
    # Without weights; tests/data compares the order with that of Megatron-LM.
    expect 0 run 1 prepare --input "$source_dir/core" --output a
    expect 0 run 1 prepare --input "$source_dir/apps" --output b
    config blend
    expect 0 run 1 blend.yaml 'data.train.data_path=[a, b]' pretrain.max_num_steps=2 checkpointing.save_period=2
    grep -q '2 sources: ' out.txt || fail "the sources are not named: $(cat out.txt)"
    printf 'x' >tiny.txt
    expect 0 run 1 prepare --input tiny.txt --output tiny
    expect 78 run 1 blend.yaml 'data.train.data_path=[a, tiny]'
    grep -q 'tiny is too small: no complete sample of 33 tokens' err.txt || fail "the empty source is not named: $(cat err.txt)"
    ;;
  prepare_input)
    mkdir out
    empty() { [[ -z $(ls -A out) ]] || fail "files are left: $(ls out)"; }
    printf 'one\ntwo \xe9\n' >bad.txt
    expect 65 run 1 prepare --input bad.txt --output out/x
    grep -q 'bad.txt:2: not UTF-8 text: byte 0xe9 at byte 8 of the file' err.txt || fail "no place: $(cat err.txt)"
    empty
    expect 64 run 1 prepare --input bad.txt --output out/x --invalid-utf8 maybe
    expect 65 run 1 prepare --input bad.txt --output out/x --invalid-utf8 skip
    empty
    expect 0 run 1 prepare --input bad.txt --output out/x --invalid-utf8 replace
    grep -q '1 documents had invalid UTF-8, which was replaced by U+FFFD:' err.txt || fail "not counted: $(cat err.txt)"
    [[ $(stat -c %s out/x.bin) -eq $((2 * (8 + 3 + 1 + 1))) ]] || fail "not one U+FFFD"
    rm out/*

    mkdir in
    printf '{"text": "one"}\n{"text": 2}\n' | gzip >in/a.jsonl.gz
    printf '{"text": "three"}\n' | gzip >>in/a.jsonl.gz
    printf 'four' >in/b.txt
    expect 65 run 1 prepare --input in --output out/x
    grep -q 'in/a.jsonl.gz:2:' err.txt || fail "no line: $(cat err.txt)"
    grep -q -- '--on-bad-line skip' err.txt || fail "no way out: $(cat err.txt)"
    empty
    expect 0 run 1 prepare --input in --output out/x --on-bad-line skip
    grep -q '^3 documents from 2 files' out.txt || fail "not three documents: $(cat out.txt)"
    grep -q '^tokenizing ...' out.txt || fail "no progress without a terminal: $(cat out.txt)"
    grep -A1 '1 invalid lines were skipped:' err.txt | grep -q 'in/a.jsonl.gz:2:' || fail "not counted: $(cat err.txt)"
    rm out/*
    head -c 30 in/a.jsonl.gz >in/c.txt.gz
    expect 65 run 1 prepare --input in/c.txt.gz --output out/x
    grep -q 'in/c.txt.gz: truncated: its gzip data is incomplete at the end of the file, byte 30' err.txt || fail "cut file not named: $(cat err.txt)"
    empty
    printf 'PAR1' >in/d.parquet
    expect 65 run 1 prepare --input in --output out/x
    grep -q 'in/d.parquet: Parquet files are not supported' err.txt || fail "not named: $(cat err.txt)"
    empty
    ;;
  prepare_stop)
    mkdir out
    awk 'BEGIN { for (i = 0; i < 2000000; ++i) print "{\"text\": \"some words to encode, and 123 numbers\"}" }' >big.jsonl
    "$nrl_train" prepare --input big.jsonl --tokenizer "hf:$source_dir/tests/data/fixtures/gpt2.json" --workers 1 \
      --output out/x >out.txt 2>err.txt &
    until grep -q tokenizing out.txt; do
      kill -0 $! || fail "it ended: $(cat err.txt)"
      sleep 0.02
    done
    kill -TERM $!
    expect 143 wait $!
    grep -q 'stopped by SIGTERM: no files were written' out.txt || fail "no word: $(cat out.txt)"
    [[ -z $(ls -A out) ]] || fail "files are left: $(ls out)"
    ;;
  plan_data)
    corpus
    config plan
    expect 0 run 1 plan plan.yaml data.train.data_path=missing
    grep -q 'memory of the sample order unknown: missing.bin' out.txt || fail "no reason: $(cat out.txt)"
    data_bytes() { awk '$1 == "data" { gsub(",", "", $2); print $2; exit }' out.txt; }
    without=$(data_bytes)
    expect 0 run 1 plan plan.yaml pretrain.max_num_steps=1
    few=$(data_bytes)
    expect 0 run 1 plan plan.yaml pretrain.max_num_steps=100001 policy.scheduler.lr_decay_iters=100
    many=$(data_bytes)
    ((without < few)) || fail "the order takes no memory: $without, $few"
    # Four bytes a sample, and the documents of more epochs.
    ((many - few >= 4 * 8 * 100000)) || fail "$few bytes for 8 samples, $many for 800,008"
    grep -q 'data  *sample order .* (included in data)' out.txt || fail "no line about the order: $(cat out.txt)"
    ;;
  show_examples)
    cat >chat.jsonl <<'END'
{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4\u001b[2J"}]}
{"messages": [{"role": "user", "content": "and 3+3?"}, {"role": "assistant", "content": "6"}]}
END
    template="{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ eos_token ~ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    show() { run 1 data show chat.jsonl --tokenizer bytes --chat-template "$template" "$@"; }
    expect 0 show --n 1
    grep -qF 'assistant: [4\x1b[2J<|endoftext|>]' out.txt || fail "no loss tokens in brackets: $(cat out.txt)"
    grep -qF 'format: messages (chat.jsonl:1 has "messages")' out.txt || fail "the format is not named: $(cat out.txt)"
    grep -q '^2 records -> 2 examples, ' out.txt || fail "no counts: $(cat out.txt)"
    [[ $(grep -c '^example ' out.txt) -eq 1 ]] || fail "one example was asked for: $(cat out.txt)"
    [[ ! -s err.txt ]] || fail "a warning: $(cat err.txt)"
    [[ $(ls) == "$(printf '%s\n' chat.jsonl err.txt out.txt)" ]] || fail "files are left: $(ls)"
    expect 0 show --json --cache-dir cache
    [[ $(wc -l <out.txt) -eq 3 ]] || fail "not one line of the set and two of examples: $(cat out.txt)"
    grep -q '"loss_tokens":8,' out.txt || fail "not 8 loss tokens: $(cat out.txt)"
    [[ $(ls cache) == chat.jsonl.examples-*.cache ]] || fail "no cache: $(ls cache)"
    # A text at the end of a turn that is no token.
    template=${template/eos_token/"'</turn>'"}
    expect 0 show
    grep -q 'no end token is trained in 2 of 2 examples' err.txt || fail "no warning: $(cat err.txt)"
    expect 78 show --train-on completion
    expect 64 run 1 data show chat.jsonl
    grep -q 'records need a tokenizer' err.txt || fail "no reason: $(cat err.txt)"
    expect 64 show --steps 1:2
    expect 64 show --format tokens
    expect 78 run 1 data show chat.jsonl --tokenizer bytes
    grep -q 'needs a chat template' err.txt || fail "no reason: $(cat err.txt)"
    echo '{"messages": [{"role": "user", "content": "x"}]}' >>chat.jsonl
    expect 65 show
    grep -q 'chat.jsonl:3:14: no message of the role assistant' err.txt || fail "no place: $(cat err.txt)"
    expect 0 show --on-bad-record skip
    grep -q '^1 left out: bad records' out.txt || fail "not counted: $(cat out.txt)"
    expect 66 run 1 data show missing.jsonl --tokenizer bytes
    printf '{"prompt_ids": [49], "completion_ids": [50, 256], "reward": %s, "group": 7, "logprobs": [-1, -2]}\n' 1 0 >rollouts.jsonl
    expect 0 run 1 data show rollouts.jsonl --tokenizer bytes
    grep -q '^example 1 .*, reward 0, group 0, mean logprob -1.5$' out.txt || fail "no numbers: $(cat out.txt)"
    grep -qF '1[2<|endoftext|>]' out.txt || fail "not the ids: $(cat out.txt)"
    grep -q '^1 group of 2, mean reward 0.5$' out.txt || fail "no group: $(cat out.txt)"
    config c
    printf '%02000d' 7 >digits.txt
    expect 0 run 1 prepare --input digits.txt --output corpus
    expect 64 run 1 data show c.yaml
    grep -q -- '--steps is missing' err.txt || fail "no reason: $(cat err.txt)"
    expect 64 run 1 data show c.yaml --steps 1:2 --train-on all
    grep -q -- '--train-on has no effect with a configuration' err.txt || fail "no reason: $(cat err.txt)"
    # The data of a run.
    sed -e 's/^algorithm: pretrain/algorithm: sft/; s/^pretrain:/sft:/; s/data_path: corpus/data_path: ask.jsonl/' \
      -e '/^  train_global/i\  tokenizer: {name: bytes}' c.yaml >sft.yaml
    printf '{"prompt": "%s=", "completion": "%s"}\n' 12 twelve 13 thirteen >ask.jsonl
    expect 0 run 1 data show sft.yaml --n 1
    grep -qF '12=[twelve<|endoftext|>]' out.txt || fail "not the example: $(cat out.txt)"
    expect 0 run 1 data show sft.yaml data.train_on=all --n 1
    grep -qF '1[2=twelve<|endoftext|>]' out.txt || fail "not the example: $(cat out.txt)"
    expect 64 run 1 data show sft.yaml --steps 1:2
    expect 64 run 1 data show sft.yaml --split validation
    ;;
  *) fail "unknown case $case_name" ;;
esac
echo "$case_name: ok"
