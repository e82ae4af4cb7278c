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
    # Several continuations of several prompts: each is that of its own seed.
    printf 'int x\n\nreturn 7\r\n' >prompts.txt
    printf '%s\n' '{"prompt": "int x", "answer": 1}' '{"prompt": "return 7"}' >prompts.jsonl
    for file in prompts.txt prompts.jsonl; do
      expect 0 run 1 generate $model --prompt "$prompt" --prompts $file --n 2 --max-tokens 12 --top-k 9 --seed 4
      cp out.txt many.txt
      grep -qE '^generation  prefill [0-9.]+( k| M)? tok/s, decode [0-9.]+( k| M)? tok/s, first token after [0-9]+\.[0-9]{3} s$' err.txt ||
        fail "no speed: $(cat err.txt)"
      number=4
      for text in "$prompt" "int x" "return 7"; do
        for sample in 1 2; do
          expect 0 run 1 generate $model --prompt "$text" --max-tokens 12 --top-k 9 --seed $number
          printf -- '--- prompt %s, sample %s\n' $(((number - 4) / 2 + 1)) $sample
          cat out.txt
          number=$((number + 1))
        done
      done >want.txt
      cmp many.txt want.txt || fail "$file: other texts: $(diff many.txt want.txt)"
    done
    printf '{"prompt": "a"}\n{"promt": "b"}\n' >wrong.jsonl
    expect 65 run 1 generate $model --prompts wrong.jsonl
    grep -q 'wrong.jsonl:2: expected an object {"prompt": TEXT}' err.txt || fail "$(cat err.txt)"
    printf '{"prompt": \n' >wrong.jsonl
    expect 65 run 1 generate $model --prompts wrong.jsonl
    printf '\n\n' >empty.txt
    expect 65 run 1 generate $model --prompts empty.txt
    expect 66 run 1 generate $model --prompts nowhere.txt
    expect 64 run 1 generate $model --prompt x --n 2 --profile logs
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
  chat)
    # Two conversations, learned by heart. The last answer depends on the first message.
    for pair in "color blue" "fruit plum"; do
      printf '{"messages":[{"role":"user","content":"%s"},{"role":"assistant","content":"%s"},%s,{"role":"assistant","content":"%s"}]}\n' \
        "${pair% *}" "${pair#* }" '{"role":"user","content":"again"}' "${pair#* }"
    done >talk.jsonl
    # The template ends turns with the tokenizer's end token (zephyr), or with a text that is no token.
    printf '%s' "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system messages') }}{% endif %}" \
      "{{ m.role[0] + ':' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '</turn>' }}{% endgeneration %}" \
      "{% else %}{{ m.content + '</turn>' }}{% endif %}{% endfor %}" \
      "{% if add_generation_prompt %}a:{% endif %}" >own.jinja
    for template in zephyr own.jinja; do
      name=${template%.jinja}
      cat >"$name.yaml" <<YAML
algorithm: sft
policy:
  model: {model_type: llama, vocab_size: 257, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
          num_attention_heads: 2, max_position_embeddings: 128}
  tokenizer: {name: bytes, chat_template: $template}
  train_global_batch_size: 2
  train_micro_batch_size: 2
  max_total_sequence_length: 128
  optimizer: {lr: 1.0e-2}
sft: {max_num_steps: 120, max_num_epochs: 1000, val_period: 0, seed: 3}
data: {train: {data_path: talk.jsonl}}
checkpointing: {checkpoint_dir: $name/checkpoints}
logger: {log_dir: $name/logs, sample_period: 120, sample_prompt: fruit, sample_tokens: 20, sample_temperature: 0.1}
kernels: {num_threads: 1}
YAML
      expect 0 run 1 "$name.yaml"
      grep -qF "nrl-train generate $name/checkpoints/step-120 --chat --prompt" out.txt || fail "$(cat out.txt)"
      model=$name/checkpoints/step-120
      expect 0 run 1 generate "$model" --chat --prompt fruit --temperature 0.1 --seed 3 --max-tokens 20
      [[ $(<out.txt) == plum && $(grep -vc '^generation  ' err.txt) == 0 ]] || fail "$template: $(cat out.txt err.txt)"
      expect 0 run 1 generate "$model" --chat --prompt fruit --prompt color --n 2 --temperature 0 --max-tokens 20
      printf -- '--- prompt %s, sample %s\n%s\n' 1 1 plum 1 2 plum 2 1 blue 2 2 blue >want.txt
      cmp out.txt want.txt || fail "$template: $(cat out.txt)"
      expect 64 run 1 generate "$model" --chat --n 2 </dev/null
      # Samples of the training are the prompt and the same answer.
      sampled "$name"/logs/metrics.jsonl 120 >sample.txt
      [[ $(<sample.txt) == $'fruit\nplum' ]] || fail "the sample: $(cat sample.txt)"
      # A conversation; empty lines say nothing.
      for pair in "color blue" "fruit plum"; do
        printf '%s\n\nagain\r\n' "${pair% *}" >questions.txt
        expect 0 run 1 generate "$model" --chat --temperature 0 <questions.txt
        [[ $(<out.txt) == "${pair#* }"$'\n'"${pair#* }" ]] || fail "$template: $(cat out.txt)"
      done
      # Generation of plain text does not know the turns.
      expect 0 run 1 generate "$model" --prompt fruit --temperature 0 --max-tokens 9
      grep -q '^fruit' out.txt || fail "$(cat out.txt)"
    done
    cmp own.jinja own/checkpoints/step-120/chat_template.jinja || fail "not the template of the run"
    # Samples of instructions have the system message and the prompt of the run; without a template they continue text.
    for i in 1 2; do printf '{"prompt":"fruit","completion":"plum %s"}\n' $i; done >pairs.jsonl
    printf 'Be kind.' >system.txt
    printf 'a {}, please' >wrap.txt
    short="data.train.data_path=pairs.jsonl sft.max_num_steps=20 logger.sample_period=20 logger.log_dir=i/logs"
    # shellcheck disable=SC2086
    expect 0 run 1 zephyr.yaml $short checkpointing.checkpoint_dir=i/checkpoints data.system_prompt_file=system.txt \
      data.prompt_file=wrap.txt
    sampled i/logs/metrics.jsonl 20 >sample.txt
    expect 0 run 1 generate i/checkpoints/step-20 --chat --system "Be kind." --prompt "a fruit, please" --temperature 0.1 \
      --seed 3 --max-tokens 20
    [[ $(<sample.txt) == $'fruit\n'$(<out.txt) ]] || fail "the sample: $(cat sample.txt out.txt)"
    # shellcheck disable=SC2086
    expect 0 run 1 zephyr.yaml $short checkpointing.checkpoint_dir=p/checkpoints policy.tokenizer.chat_template=none \
      logger.log_dir=p/logs
    grep -q 'nrl-train generate p/checkpoints/step-20 --prompt' out.txt || fail "$(cat out.txt)"
    [[ ! -e p/checkpoints/step-20/chat_template.jinja ]] || fail "a template that the run did not use"
    sampled p/logs/metrics.jsonl 20 >sample.txt
    expect 0 run 1 generate p/checkpoints/step-20 --prompt fruit --temperature 0.1 --seed 3 --max-tokens 20
    cmp sample.txt out.txt || fail "the sample: $(cat sample.txt out.txt)"
    # An answer without an end.
    expect 0 run 1 generate own/checkpoints --chat --prompt fruit --max-tokens 3 --temperature 0
    [[ $(<out.txt) == plu ]] || fail "$(cat out.txt)"
    grep -q 'cut off at --max-tokens (3)' err.txt || fail "$(cat err.txt)"
    # The template's own words; a message that is no text.
    expect 65 run 1 generate own/checkpoints --chat --system x --prompt fruit
    grep -q '^error: chat template: No system messages$' err.txt || fail "$(cat err.txt)"
    printf 'fruit\n\xff\n' >questions.txt
    expect 65 run 1 generate zephyr/checkpoints --chat <questions.txt
    grep -q 'standard input:2: ' err.txt || fail "$(cat err.txt)"
    # A model without a template, and templates that are none.
    cp -r zephyr/checkpoints/step-120 bare
    rm bare/chat_template.jinja bare/manifest.json
    expect 64 run 1 generate bare --chat --prompt x
    grep -q 'the tokenizer of bare has none. Fix: set --chat-template to chatml, llama3 or zephyr' err.txt || fail "$(cat err.txt)"
    expect 64 run 1 generate bare --chat --chat-template none --prompt x
    expect 78 run 1 generate bare --chat --chat-template nowhere --prompt x
    grep -q "chat_template 'nowhere': .* --chat-template to chatml" err.txt || fail "$(cat err.txt)"
    expect 0 run 1 generate bare --chat --chat-template zephyr --prompt fruit --temperature 0
    [[ $(<out.txt) == plum ]] || fail "$(cat out.txt)"
    # Options that need each other.
    expect 64 run 1 generate bare --prompt x --system x
    expect 64 run 1 generate bare --prompt x --chat-template zephyr
    expect 64 run 1 generate bare
    grep -q -- '--prompt is missing' err.txt || fail "$(cat err.txt)"
    ;;
  *) fail "no such case: $case_name" ;;
esac
