#!/usr/bin/env bash
# Checkpoints as model directories of other programs: hf_files.sh CASE NRL_TRAIN SOURCE_DIR
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"

# has FILE TEXT: the file has the text, line ends and indentation aside.
has() {
  tr -d '\n ' <"$1" | grep -qF -- "$2" || fail "$1 has no $2: $(cat "$1")"
}

# train_with TOKENIZER NAME EXTRA...: one checkpoint of a tiny model; NAME/checkpoints/step-1.
train_with() {
  local tokenizer=$1 name=$2
  shift 2
  expect 0 run 1 prepare --input "$source_dir/docs" --tokenizer "$tokenizer" --output corpus
  config "$name"
  expect 0 run 1 "$name.yaml" policy.model.vocab_size=512 pretrain.max_num_steps=1 checkpointing.save_period=1 \
    policy.scheduler.lr_decay_iters=1 policy.scheduler.lr_warmup_iters=0 "$@"
}

case $case_name in
  # What a run from nothing writes.
  hf_scratch)
    train_with train-sentencepiece:400 a
    step=a/checkpoints/step-1
    has $step/config.json '"bos_token_id":1'
    has $step/config.json '"eos_token_id":2'
    has $step/config.json '"rope_theta":10000.0,"rope_scaling":null,"rope_parameters":{"rope_type":"default","rope_theta":10000.0}'
    has $step/generation_config.json '"eos_token_id":2'
    has $step/tokenizer_config.json '"tokenizer_class":"PreTrainedTokenizerFast"'
    has $step/special_tokens_map.json '"eos_token":"</s>"'
    has $step/tokenizer.json '"type":"BPE"'
    train_with bytes b policy.model.eos_token_id=7
    step=b/checkpoints/step-1
    has $step/config.json '"eos_token_id":7'
    has $step/config.json '"bos_token_id":null'
    # The data are bytes now.
    expect 0 run 1 eval a/checkpoints/step-1 --data corpus --max-tokens 200
    grep -q 'corpus was made with another tokenizer than a/checkpoints/step-1 has' err.txt || fail "$(cat err.txt)"
    expect 0 run 1 eval $step --data corpus --max-tokens 200
    [[ ! -s err.txt ]] || fail "a warning about its own tokenizer: $(cat err.txt)"
    expect 0 run 1 b.yaml policy.model.vocab_size=512 pretrain.max_num_steps=0 policy.tokenizer.name=a/checkpoints/step-1 \
      checkpointing.checkpoint_dir=t/checkpoints logger.log_dir=t/logs
    grep -q 'corpus was made with another tokenizer' err.txt || fail "$(cat err.txt)"
    train_with "hf:$source_dir/tests/data/fixtures/llama3.json" c
    has c/checkpoints/step-1/tokenizer_config.json '"tokenizer_class":"PreTrainedTokenizerFast"'
    # Without a tokenizer.
    rm corpus.dataset.json
    config d
    expect 0 run 1 d.yaml policy.model.vocab_size=512 pretrain.max_num_steps=1 checkpointing.save_period=1 \
      policy.scheduler.lr_decay_iters=1 policy.scheduler.lr_warmup_iters=0
    has d/checkpoints/step-1/config.json '"bos_token_id":null,"eos_token_id":null'
    ;;

  # Bytes that a tokenizer has no token for.
  left_out)
    cat >tokenizer.json <<'JSON'
{"normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
 "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<eos>": 2}, "merges": []}}
JSON
    printf 'ab ba\n' >text.txt
    expect 0 run 1 prepare --input text.txt --tokenizer hf:tokenizer.json --output left
    grep -q '^2 bytes of text were skipped: the tokenizer has no token for them' out.txt || fail "$(cat out.txt)"
    ;;

  # What a run from a directory carries over.
  hf_carry)
    train_with train-sentencepiece:400 a
    cp -r a/checkpoints/step-1 start
    rm start/manifest.json  # edited on purpose
    printf '{{ messages }}\n' >start/chat_template.jinja
    printf '{"temperature": 0.6, "eos_token_id": [2, 9]}\n' >start/generation_config.json
    printf '{"eos_token": "</s>", "x": 1}\n' >start/special_tokens_map.json
    sed -i 's/"eos_token_id": 2/"eos_token_id": [2, 9]/' start/config.json
    cat >b.yaml <<'YAML'
algorithm: pretrain
policy: {model_name: start, train_global_batch_size: 2, train_micro_batch_size: 1, max_total_sequence_length: 32}
pretrain: {max_num_steps: 1}
data: {train: {data_path: corpus}}
checkpointing: {checkpoint_dir: b/checkpoints, save_period: 1}
logger: {log_dir: b/logs}
YAML
    expect 0 run 1 b.yaml
    for name in chat_template.jinja generation_config.json special_tokens_map.json tokenizer.model tokenizer.json; do
      cmp start/$name b/checkpoints/step-1/$name || fail "$name was not carried over"
    done
    has b/checkpoints/step-1/config.json '"eos_token_id":[2,9]'
    # With another tokenizer its ids count, and the start directory's files of the old one stay behind.
    expect 0 run 1 b.yaml policy.tokenizer.name=bytes checkpointing.checkpoint_dir=c logger.log_dir=c/logs
    has c/step-1/config.json '"eos_token_id":256'
    has c/step-1/generation_config.json '"eos_token_id":256'
    [[ ! -e c/step-1/chat_template.jinja && ! -e c/step-1/tokenizer.model ]] || fail "files of another tokenizer"
    # One dialect of an override beside the other one of the file.
    expect 78 run 1 b.yaml policy.model.rope_theta=5000.0 checkpointing.checkpoint_dir=d logger.log_dir=d/logs
    grep -q 'rope_theta 5000.* differ' err.txt || fail "the override was not named: $(cat err.txt)"
    # A class that transformers 5 overrides.
    expect 0 run 1 a.yaml policy.model.vocab_size=512 policy.model.model_type=qwen2 pretrain.max_num_steps=1 \
      policy.scheduler.lr_decay_iters=1 policy.scheduler.lr_warmup_iters=0 checkpointing.checkpoint_dir=e \
      logger.log_dir=e/logs
    grep -q PreTrainedTokenizerFast.from_pretrained out.txt err.txt || fail "no warning about qwen2"
    ;;

  # AutoTokenizer, where Python has it: the ids of the prepared data.
  hf_auto_tokenizer)
    python3 -c 'import transformers, sentencepiece' 2>/dev/null || {
      echo "skipped: Python has no transformers and sentencepiece"
      exit 0
    }
    for tokenizer in train-sentencepiece:400 "hf:$source_dir/tests/data/fixtures/llama3.json" bytes; do
      rm -rf a
      train_with "$tokenizer" a
      python3 "$source_dir/scripts/dev/compare-tokenizers.py" --nrl-train "$nrl_train" --checkpoint a/checkpoints/step-1 \
        --documents 300 >auto.txt 2>&1 || fail "AutoTokenizer differs for $tokenizer: $(tail -3 auto.txt)"
    done
    ;;

  *) fail "unknown case $case_name" ;;
esac
