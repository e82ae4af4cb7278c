#!/usr/bin/env bash
# What the program says about wrong input: messages.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# said FILE TEXT: the file holds that text.
said() {
  grep -qF -- "$2" "$1" || fail "'$2' is not in $1: $(cat "$1")"
}

# clean FILE: nothing in it steers a terminal, and no line is a flood.
clean() {
  ! LC_ALL=C grep -q $'[\x01-\x08\x0b-\x1f\x7f]\|\xe2\x80\xae' "$1" || fail "control characters in $1: $(cat -v "$1")"
  awk 'length > 1200 { exit 1 }' "$1" || fail "long lines in $1"
}

case $case_name in
  all_at_once)
    corpus
    config bad
    sed -i 's/num_attention_heads: 4/num_attention_heads: 5/; s/lr: 3.0e-3/lr: 3.0e-5/; s/train_micro_batch_size: 2/train_micro_batch_size: 8/; s/data_path: corpus/data_path: nowhere/; s/seed: 7/seed: 7, sed: 1/' bad.yaml
    # The shape, the ranks, two keys against each other, a spelling, a missing file: one run tells all.
    expect 78 run 2 bad.yaml
    for place in 4:32 5:28 9:87 10:40 11:27; do said err.txt "bad.yaml:$place"; done
    said err.txt '5 errors, nothing was started. (exit 78)'
    [[ $(grep -c '^error' err.txt) -eq 5 ]] || fail "not five errors, or not once: $(cat err.txt)"
    # Files that are missing.
    config gone
    expect 66 run 1 gone.yaml data.train.data_path=nowhere
    said err.txt 'nowhere.idx and nowhere.bin are missing'
    sed -i 's/data_path: corpus/data_path: [corpus, corpus.bin]/; s/save_period: 5/save_period: 5, resume: nowhere/' gone.yaml
    expect 66 run 2 gone.yaml
    said err.txt 'gone.yaml:11:27'
    said err.txt 'give the prefix without the suffix: corpus'
    said err.txt 'gone.yaml:12:75'
    sed -i '/data:/d' gone.yaml
    expect 78 run 1 gone.yaml
    said err.txt 'data.train.data_path must be given'
    said err.txt 'gone.yaml:1:1'
    config scratch
    printf 'memory: {offload_dir: nowhere}\n' >>scratch.yaml
    expect 73 run 2 scratch.yaml policy.offload_optimizer=true
    said err.txt 'scratch.yaml:15:23'
    said err.txt 'nowhere: a file for offloaded memory cannot be created: No such file or directory'
    [[ ! -e bad && ! -e gone && ! -e scratch ]] || fail "a refused run left something behind"
    ;;
  too_large)
    corpus
    config big
    for refused in policy.train_global_batch_size=1073741824 policy.max_total_sequence_length=16777216 \
      'policy.model.intermediate_size=16777216 policy.model.num_hidden_layers=64' \
      'policy.model.num_hidden_layers=4096 policy.model.hidden_size=16384'; do
      # shellcheck disable=SC2086  # several overrides
      expect 71 run 1 big.yaml $refused
      key=${refused%%=*}
      said err.txt "error: $key"
      said err.txt "command line: $key"
      said err.txt "needed per rank: "
      ! grep -q 'out of memory' err.txt || fail "that is all it says: $(cat err.txt)"
    done
    # Products that no integer holds.
    expect 78 run 1 big.yaml policy.model.num_attention_heads=16777216 policy.model.head_dim=16777216 \
      policy.model.num_key_value_heads=16777216 policy.model.hidden_size=1048576 policy.model.num_hidden_layers=4096
    said err.txt 'command line: policy.model.num_attention_heads'
    expect 78 run 1 big.yaml pretrain.max_num_steps=1000000000000 policy.train_global_batch_size=1073741824
    said err.txt 'command line: pretrain.max_num_steps'
    # The ranks of a machine share its memory.
    expect 71 run 2 big.yaml policy.train_global_batch_size=1073741824
    said err.txt 'this machine (shared by 2 ranks) has'
    [[ ! -e big ]] || fail "a refused run left something behind"
    ;;
  short_run)
    corpus
    config short
    sed -i 's/lr_warmup_iters: 2, lr_decay_iters: 10/lr_warmup_iters: 50/' short.yaml
    expect 0 run 2 short.yaml
    said err.txt 'warning: the warm-up (50 steps) is longer than the run (10)'
    said err.txt 'short.yaml:9:56'
    # The rate is that of the schedule as it stands: a fifth of the peak at the last step.
    field short/logs/metrics.jsonl lr | tail -1 | awk '{ exit !($1 > 0.000599 && $1 < 0.000601) }' ||
      fail "the schedule was changed: $(field short/logs/metrics.jsonl lr)"
    # The same where the length comes from the data.
    expect 0 run 1 prepare --input "$source_dir/core/base" --tokenizer bytes --output few
    config epoch
    sed -i 's/lr_warmup_iters: 2, lr_decay_iters: 10/lr_warmup_iters: 100000/; s/max_num_steps: 10/max_num_epochs: 1/' epoch.yaml
    expect 0 run 1 epoch.yaml data.train.data_path=few policy.train_global_batch_size=64
    said err.txt 'the warm-up (100000 steps) is longer than the run'
    ;;
  models)
    corpus
    config m
    expect 0 run 1 m.yaml
    # A name on the Hub is no directory.
    config hub
    sed -i '/model: {/,/max_position/d; s|^policy:|policy:\n  model_name: meta-llama/Llama-3.2-1B|' hub.yaml
    expect 66 run 2 hub.yaml
    said err.txt 'hub.yaml:3:15'
    said err.txt 'hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B'
    expect 66 run 1 generate meta-llama/Llama-3.2-1B --prompt x
    said err.txt 'hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B'
    expect 66 run 1 hub.yaml policy.model_name=m/checkpoints
    said err.txt 'the newest is m/checkpoints/step-10'
    expect 66 run 1 hub.yaml policy.model_name=./none/x
    ! grep -q 'hf download' err.txt || fail "that is no name on the Hub: $(cat err.txt)"
    # The problems of a directory's config.json: all at once, at the key that names it or changes it.
    mkdir broken
    sed 's/"rms_norm_eps": [^,]*/"rms_norm_eps": 0/; s/"num_hidden_layers": 2/"num_hidden_layers": 0/' \
      m/checkpoints/step-10/config.json >broken/config.json
    expect 78 run 1 hub.yaml policy.model_name=broken policy.model.rope_parameters.rope_type=llama3
    said err.txt 'broken/config.json: rms_norm_eps must be a finite number above 0, found 0'
    said err.txt 'broken/config.json: num_hidden_layers must be between 1 and 4096, found 0'
    said err.txt 'rope_parameters.factor is missing'
    # The newest checkpoint of a directory.
    expect 0 run 1 generate m/checkpoints --prompt "int " --max-tokens 4 --temperature 0
    said err.txt 'm/checkpoints/step-10'
    cp out.txt newest.txt
    expect 0 run 1 generate m/checkpoints/step-10 --prompt "int " --max-tokens 4 --temperature 0
    cmp -s out.txt newest.txt || fail "another checkpoint was taken"
    # A terminal does not obey what is generated, or echoed; a file gets it as it is.
    expect 0 run 1 generate m/checkpoints --prompt $'\x1b[31mint' --max-tokens 1 --temperature 0
    said out.txt $'\x1b[31mint'
    if command -v script >/dev/null; then
      script -qec "'$nrl_train' generate m/checkpoints --prompt \$'\\x1b[31mint' --max-tokens 1" /dev/null >tty.txt </dev/null
      said tty.txt '\x1b[31mint'
      ! grep -q $'\x1b' tty.txt || fail "a control character reached the terminal: $(cat -v tty.txt)"
    fi
    # Weights in other formats.
    mkdir other
    cp m/checkpoints/step-10/*.json other
    rm -f other/manifest.json
    for weights in 'PK\003\004xxxxxxxxxxxx|zip archive' 'GGUFxxxxxxxxxxxx|GGUF' 'version https://git-lfs.github.com|git lfs pull'; do
      printf '%b' "${weights%|*}" >other/model.safetensors
      expect 65 run 1 generate other --prompt x --tokenizer bytes
      said err.txt "${weights##*|}"
    done
    ;;
  control)
    corpus
    config c
    esc=$'\x1b[31m'
    bidi=$'\xe2\x80\xae'
    long=$(printf 'x%.0s' $(seq 5000))
    for arguments in "c.yaml $esc=1" "c.yaml logger.progress=$bidi" "c.yaml data.train.data_path=$esc" "$esc.yaml" \
      "c.yaml policy.model.model_type=$bidi$long" "c.yaml $long" "c.yaml policy.model_name=/$bidi$long" \
      "explain $esc" "explain $long" "generate $esc --prompt x" "generate /$long --prompt x" \
      "prepare --input $esc --output o" "prepare --input $long --output o" "plan --no$esc" "checkpoint verify $esc" \
      "data show c.yaml --steps $esc" "bench $esc"; do
      code=0
      # shellcheck disable=SC2086  # several arguments
      run 1 $arguments || code=$?
      ((code >= 64 && code <= 78 && code != 70)) || fail "exit code $code: $arguments"
      [[ -s err.txt ]] || fail "nothing was said: $arguments"
      clean err.txt
      clean out.txt
    done
    # A newline in a name cannot pose as a message of its own.
    expect 66 run 1 checkpoint verify $'x\nerror: all is lost'
    [[ $(grep -c '^error' err.txt) -eq 1 ]] || fail "two messages: $(cat err.txt)"
    # The names of a good run.
    mkdir "d$bidi"
    cp corpus.* "d$bidi"
    expect 0 run 1 c.yaml "data.train.data_path=d$bidi/corpus" pretrain.max_num_steps=1
    clean out.txt
    clean err.txt
    # A file's own strings.
    mkdir j
    printf '{"model_type": "\\u001b[2Jllama"}' >j/config.json
    expect 65 run 1 generate j --prompt x
    clean err.txt
    said err.txt '\x1b[2Jllama'
    ;;
  usage)
    for value in nan inf -1 NaN 1e400 x; do
      for option in temperature top-p; do
        expect 64 run 1 generate . --prompt x --$option=$value
        said err.txt "--$option"
        said err.txt "found '$value'"
      done
    done
    expect 0 run 1 --help
    said out.txt 'Usage: nrl-train '
    commands=$(sed -n '/^Subcommands:/,$s/^  \([a-z]\+\) .*/\1/p' out.txt)
    [[ $(wc -w <<<"$commands") -ge 9 ]] || fail "no list of subcommands: $(cat out.txt)"
    while read -r command; do
      # shellcheck disable=SC2086  # two words
      expect 0 run 1 $command --help
      said out.txt "Usage: nrl-train $command"
      grep -A1 '^Examples:' out.txt | grep -q "^  .*nrl-train" || fail "no examples: $(cat out.txt)"
    done <<<"$commands
data show
checkpoint verify"
    expect 0 run 1 explain learning_rate
    said out.txt 'policy.optimizer.lr'
    said out.txt 'Peak learning rate'
    expect 0 run 1 explain warmup
    said out.txt 'policy.scheduler.lr_warmup_iters'
    expect 64 run 1 explain leaning_rat
    # A rank that is late still says what is wrong for all of them.
    # shellcheck disable=SC2016  # expanded by the inner shell
    expect 64 mpirun --oversubscribe --bind-to none -n 2 bash -c '((OMPI_COMM_WORLD_RANK)) || sleep 1.2; exec "$0" no-such' \
      "$nrl_train" >out.txt 2>err.txt
    said err.txt "'no-such' is neither a command nor a configuration file"
    # Options of other benchmarks.
    corpus
    config c
    for options in "step c.yaml --precision bfloat16" "step c.yaml --only x" "compare s.yaml --precision float32" "comm --only x" "ops --steps 3" \
      "gemm --tokens 4" "attention --predict h200"; do
      # shellcheck disable=SC2086  # several arguments
      expect 64 run 1 bench $options
      said err.txt "has no effect in bench ${options%% *}; expected"
    done
    # Once, not by every rank.
    for arguments in "plan c.yaml" "verify c.yaml --sample 3"; do
      # shellcheck disable=SC2086  # several arguments
      expect 64 run 2 $arguments || true
      [[ $(grep -c 'error: \|Fix: \|--sample' err.txt) -le 2 ]] || fail "said by every rank: $(cat err.txt)"
    done
    ;;
  *) fail "no such case: $case_name" ;;
esac
