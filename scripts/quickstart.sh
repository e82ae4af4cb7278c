#!/usr/bin/env bash
# From a bare machine to a trained model that generates text, in a few minutes on two cores.
# usage: scripts/quickstart.sh [FILE-or-DIR] [KEY=VALUE...]
# FILE-or-DIR: training text; default: this machine's C and C++ headers. KEY=VALUE: a key of configs/quickstart.yaml
# to override, for example pretrain.max_num_steps=200. Without that key, the first steps are timed, and the training
# has as many (100 to 2,000) as take QUICKSTART_SECONDS here, 120 by default.
# A second start reuses the prepared text and trains a new model; an interrupted training resumes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus_limit=$((30 << 20)) # bytes of headers to train on
ranks=$(($(cores) < 2 ? 1 : 2))
train_seconds=${QUICKSTART_SECONDS:-120}

case ${1:-} in
  -h | --help)
    sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
input=
if (($#)) && [[ -e $1 || $1 != *=* ]]; then
  [[ -r $1 ]] || die 66 "$1: no such file or directory, or not readable"
  input=$(realpath "$1")
  shift
fi
steps=
[[ $train_seconds =~ ^[1-9][0-9]*$ ]] || die 64 "QUICKSTART_SECONDS: expected a number of seconds; found '$train_seconds'"
for override in "$@"; do
  [[ $override == *=* ]] || die 64 "$override: not KEY=VALUE; expected at most one file or directory. Fix: see --help"
  if [[ $override == pretrain.max_num_steps=* ]]; then steps=${override#*=}; fi
done

"$root_dir/scripts/install-deps.sh"
say "build"
build cpu nrl-train
nrl_train=$root_dir/build/cpu/bin/nrl-train
cd "$root_dir" # paths below are relative to it, so that printed commands can be copied

# Links up to corpus_limit bytes of headers into the directory $1, spread over all of them.
collect_headers() {
  local list=$1.list
  find /usr/include -type f \( -name '*.h' -o -name '*.hh' -o -name '*.hpp' -o -path '*/c++/*' \) -size -400k -size +0 \
    -printf '%s %p\n' 2>/dev/null | LC_ALL=C sort -k 2 >"$list" || true
  [[ -s $list ]] || die 66 "there are no headers in /usr/include. Fix: pass a text file or directory: scripts/quickstart.sh DIR"
  # Every k-th file, so that all libraries are represented.
  awk -v limit="$corpus_limit" '{ size[NR] = $1; total += $1; sub(/^[0-9]+ /, ""); path[NR] = $0 }
    END {
      k = total > limit ? total / limit : 1
      for (i = 1; int(i) <= NR; i += k) print path[int(i)]
    }' "$list" >"$list.chosen"
  mkdir -p "$1"
  tr '\n' '\0' <"$list.chosen" | xargs -0 cp -s --parents -f -t "$1"
}

if [[ -n $input ]]; then
  name=$(basename "$input" | tr -cs 'A-Za-z0-9._\n-' _)-$(cksum <<<"$input" | cut -d ' ' -f 1)
else
  name=headers
fi
work=quickstart/$name
mkdir -p "$work"

if [[ -s $work/corpus.idx && -s $work/corpus.dataset.json ]]; then
  say "text: reusing $work/corpus.bin (delete $work to prepare it again)"
else
  say "text to tokens"
  invalid=replace # a few bytes of another encoding must not fail a first try; they are counted
  if [[ -z $input ]]; then
    rm -rf "$work/text"
    collect_headers "$work/text"
    input=$work/text
    invalid=skip
  fi
  # In random order: the validation set is the last documents, and those of a directory are alike.
  "$nrl_train" prepare --input "$input" --tokenizer train-sentencepiece:4096 --invalid-utf8 "$invalid" \
    --shuffle-documents 1 --output "$work/corpus" || die $? "preparing the text failed (see above)"
fi

train=("$nrl_train" configs/quickstart.yaml "data.train.data_path=$work/corpus" "$@")
mpi_setup "$ranks"

# Sets `steps` to as many as take about train_seconds, by the median of a few trial steps.
choose_steps() {
  local trial=12 status=0 step_ms
  say "how long a step takes here"
  rm -rf "$work/trial"
  "${mpi_run[@]}" "${train[@]}" pretrain.max_num_steps="$trial" pretrain.val_period=0 checkpointing.enabled=false \
    policy.scheduler.lr_warmup_iters=0 logger.log_dir="$work/trial" >"$work/trial.txt" 2>&1 || status=$?
  if ((status != 0)); then
    cat "$work/trial.txt" >&2
    die "$status" "the trial steps failed (see above)"
  fi
  step_ms=$(awk -v key=step_ms -f scripts/metrics.awk "$work/trial/metrics.jsonl" | tail -n $((trial - 4)) | median)
  steps=$(awk -v ms="$step_ms" -v seconds="$train_seconds" 'BEGIN {
    n = int(1000 * seconds / ms / 100) * 100
    print (n < 100 ? 100 : n > 2000 ? 2000 : n)
  }')
  LC_ALL=C printf '%.1f ms: %d steps in about %d s\n' "$step_ms" "$steps" "$train_seconds"
  rm -rf "$work/trial" "$work/trial.txt"
}

# A run is finished when it has the checkpoint of its last step, which is noted in the file `steps`.
run=1
while [[ -s $work/run-$run/steps && -d $work/run-$run/checkpoints/step-$(<"$work/run-$run/steps") ]]; do run=$((run + 1)); done
out=$work/run-$run
if [[ -z $steps && -s $out/steps ]]; then
  steps=$(<"$out/steps")
elif [[ -z $steps ]]; then
  choose_steps
fi
mkdir -p "$out"
echo "$steps" >"$out/steps"
train+=("pretrain.max_num_steps=$steps" "checkpointing.checkpoint_dir=$out/checkpoints" "logger.log_dir=$out/logs")
say "training on $ranks MPI ranks: $steps steps into $out"
if compgen -G "$out/checkpoints/step-*" >/dev/null; then
  echo "resuming an unfinished training in $out from its last checkpoint"
fi
status=0
"${mpi_run[@]}" "${train[@]}" || status=$?
if ((status == 75)); then
  echo "stopped with a checkpoint; start this script again to resume"
  exit 75
fi
((status == 0)) ||
  die "$status" "the training failed (exit $status, see above). Fix: start this script again to resume from the last checkpoint"

say "the loss"
"$nrl_train" report "$out/logs" --html "$out/report.html"
awk -v key=loss -f scripts/metrics.awk "$out/logs/metrics.jsonl" | awk '
  { loss[NR] = $1 }
  END {
    n = NR < 10 ? NR : 10
    for (i = NR - n + 1; i <= NR; ++i) last += loss[i] / n
    if (last >= loss[1]) { print "the loss did not decrease" > "/dev/stderr"; exit 1 }
  }'

say "text from the model"
prompt='#include <'
if [[ $name != headers ]]; then prompt='The '; fi
model=$out/checkpoints/step-$steps
"$nrl_train" generate "$model" --prompt "$prompt" --max-tokens 120 --temperature 0.7 --seed 1

say "next steps"
cat <<TEXT
more text        build/cpu/bin/nrl-train generate $model --prompt "static inline int"
another run      build/cpu/bin/nrl-train configs/quickstart.yaml data.train.data_path=$work/corpus \\
                   policy.optimizer.lr=1e-3 checkpointing.checkpoint_dir=$work/mine/checkpoints logger.log_dir=$work/mine/logs
your own text    scripts/quickstart.sh FILE-or-DIR
a larger model   configs/llama-17m.yaml; its memory: build/cpu/bin/nrl-train plan configs/llama-17m.yaml
any key          build/cpu/bin/nrl-train explain policy.optimizer.lr   (all: docs/configuration.md)
all tests        scripts/test.sh
TEXT
