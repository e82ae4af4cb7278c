#!/usr/bin/env bash
# Text from trained models: generate.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"
reference=$(dirname "$nrl_train")/reference_trainer
prompt="int main("

# text FILE MODEL OPTIONS...: what generate prints for the prompt.
text() {
  local file=$1
  shift
  expect 0 run 1 generate "$@" --prompt "$prompt"
  cp out.txt "$file"
}

# sampled FILE STEP: the text of that step in metrics.jsonl, without JSON's escapes and those of single bytes (\xNN).
sampled() {
  local line
  line=$(sed -n "s/.*\"step\":$2,\"text\":\"\(.*\)\"}\$/\1/p" "$1" | sed 's/\\"/"/g; s/\\\\/\\/g')
  printf '%b\n' "$line"
}

case $case_name in
  generate)
    # With this text and seed no token is nearly as likely as the likeliest, so that rounding changes no choice (the
    # reference says by how much).
    awk 'BEGIN { for (i = 0; i < 3000; ++i) print "int main(" i * i % 997 ") { return " i "; }" }' >text.txt
    expect 0 run 1 prepare --input text.txt --tokenizer bytes --output corpus
    # A window shorter than the generated text; more text than max_position_embeddings.
    varied="policy.model.initializer_range=0.3 pretrain.seed=9"
    config g
    # shellcheck disable=SC2086
    expect 0 run 1 g.yaml $varied policy.model.model_type=mistral policy.model.sliding_window=6 pretrain.max_num_steps=12 \
      checkpointing.save_period=6 logger.sample_period=6 "logger.sample_prompt=$prompt" logger.sample_tokens=30 \
      logger.sample_temperature=0.7
    model=g/checkpoints/step-12
    "$reference" greedy $model "$prompt" 60 >want.txt
    text greedy.txt $model --max-tokens 60 --temperature 0
    cmp greedy.txt want.txt || fail "another text than the reference decoder's"
    # The newest checkpoint is taken.
    text newest.txt g/checkpoints --max-tokens 60 --temperature 0
    cmp -s newest.txt want.txt || fail "$(cat newest.txt)"
    text old.txt g/checkpoints/step-6 --max-tokens 60 --temperature 0
    ! cmp -s old.txt want.txt || fail "the checkpoint makes no difference"
    # One token, or so little probability that it is one, is the likeliest.
    text one.txt $model --max-tokens 60 --temperature 9 --top-k 1 --seed 9
    cmp one.txt want.txt || fail "top-k"
    text one.txt $model --max-tokens 60 --temperature 9 --top-p 0 --seed 9
    cmp one.txt want.txt || fail "top-p"
    text one.txt $model --max-tokens 60 --temperature 0.00001 --threads 1
    cmp one.txt want.txt || fail "temperature"
    # What is left out has the value that the help names.
    text defaults.txt $model
    text named.txt $model --max-tokens 100 --temperature 0.8 --top-k 0 --top-p 1 --seed 0 --tokenizer bytes
    cmp defaults.txt named.txt || fail "other defaults"
    text other.txt $model --seed 1
    ! cmp -s other.txt defaults.txt || fail "the seed makes no difference"
    # Samples of the training are what generate prints, with the run's seed.
    for step in 6 12; do
      sampled g/logs/metrics.jsonl $step >sample.txt
      text generated.txt g/checkpoints/step-$step --max-tokens 30 --temperature 0.7 --seed 9
      cmp sample.txt generated.txt || fail "the sample of step $step: $(cat sample.txt generated.txt)"
    done
    # GPT-2, to the end of its positions.
    config h
    sed -i 's/model: {.*/model: {model_type: gpt2, vocab_size: 272, n_embd: 48, n_layer: 2, n_head: 4, n_positions: 48,/
      /num_attention_heads/s/.*/          attn_pdrop: 0}/' h.yaml
    # shellcheck disable=SC2086
    expect 0 run 1 h.yaml $varied
    "$reference" greedy h/checkpoints/step-10 "$prompt" 40 >want.txt
    text greedy.txt h/checkpoints/step-10 --max-tokens 1000 --temperature 0
    cmp greedy.txt want.txt || fail "another text than the reference decoder's"
    # Weights stored in bf16 stay so in memory.
    config half
    expect 0 run 1 half.yaml policy.precision=bfloat16
    text half.txt half/checkpoints/step-10 --max-tokens 4 --temperature 0
    ;;
  *) fail "no such case: $case_name" ;;
esac
