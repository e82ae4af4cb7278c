# shellcheck shell=bash
# What the command-line tests share: sourced as common.sh CASE NRL_TRAIN SOURCE_DIR; works in a new directory.
set -euo pipefail
# shellcheck disable=SC2034  # read by the scripts that source this
case_name=$1
nrl_train=$2
# shellcheck disable=SC2034
source_dir=$3
work=$(mktemp -d)
trap 'rm -rf "$work" "$work.mpi"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1
# mpirun fails if another one of the same user removes their common directory while it starts (Open MPI 4).
export OMPI_MCA_orte_tmpdir_base=$work.mpi

fail() {
  echo "FAIL: $*" >&2
  exit 1
}

# run RANKS ARGS...: trains on that many ranks; the output goes to out.txt and err.txt.
run() {
  local ranks=$1
  shift
  if ((ranks == 1)); then
    "$nrl_train" "$@" >out.txt 2>err.txt
  else
    mpirun --oversubscribe --bind-to none -n "$ranks" "$nrl_train" "$@" >out.txt 2>err.txt
  fi
}

# expect CODE COMMAND...: the command must leave with this code.
expect() {
  local want=$1 got=0
  shift
  "$@" || got=$?
  ((got == want)) || {
    cat out.txt err.txt >&2 || true
    fail "exit code $got instead of $want: $*"
  }
}

# field FILE NAME: the values of one field of metrics.jsonl, one line a step.
field() {
  grep -v val_loss "$1" | sed -E "s/.*\"$2\":([^,}]*).*/\1/"
}

# same A B TOLERANCE: the losses and gradient norms of two runs agree at every step (relative; 0: to the last digit).
same() {
  local name
  for name in loss grad_norm; do
    field "$1" "$name" >a.txt
    field "$2" "$name" >b.txt
    [[ $(wc -l <a.txt) -gt 0 && $(wc -l <a.txt) -eq $(wc -l <b.txt) ]] || fail "$1 and $2 have different numbers of steps"
    if [[ $3 == 0 ]]; then
      cmp -s a.txt b.txt || fail "$name of $1 and $2 differ: $(paste a.txt b.txt | awk '$1 != $2' | head -1)"
    else
      paste a.txt b.txt | awk -v tolerance="$3" -v name="$name" '{ d = $1 - $2; if (d < 0) d = -d; m = $2 < 0 ? -$2 : $2
        if (d > tolerance * m) { print name " differs at line " NR ": " $1 " " $2; exit 1 } }' || fail "$1 and $2 differ"
    fi
  done
}

# processes PATTERN: those of this test, which work below $work, whose command line matches. Fails if there are none.
processes() {
  local pid found=1
  for pid in $(pgrep -f -- "$1"); do
    [[ $(readlink "/proc/$pid/cwd") == "$work"* && $pid != "$$" ]] && echo "$pid" && found=0
  done
  return "$found"
}

# corpus: documents of English words in an order that never changes, as token files with the prefix corpus.
corpus() {
  mkdir -p text/even text/odd
  awk 'function draw(n) { state = (state * 69069 + 1) % 2147483648; return int(state / 2147483648 * n) }
    BEGIN {
      n = split("the of and to in is that it was for on are as with his they at be this from have or by one had not " \
        "but what all were when we there can an your which their said if do will each about how up out them then " \
        "she many some so these would other into has more her two like him see time could no make than first been", w, " ")
      for (d = 0; d < 240; ++d) {
        file = "text/" (d % 2 ? "odd" : "even") "/" d ".txt"
        # Frequent words come first: the smaller of two draws.
        for (words = 40 + draw(600); words > 0; --words) {
          a = draw(n); b = draw(n)
          printf "%s%s", w[(a < b ? a : b) + 1], draw(9) ? " " : draw(4) ? ", " : ".\n" > file
        }
        close(file)
      }
    }'
  expect 0 run 1 prepare --input text/even text/odd --tokenizer bytes --output corpus
}

# damage FILE [OFFSET]: flips a bit of one byte, without an offset in the middle.
damage() {
  local at=${2-$(($(stat -c %s "$1") / 2))} byte
  byte=$(od -An -tu1 -j "$at" -N 1 "$1")
  printf '%b' "\\x$(printf %02x $((byte ^ 1)))" | dd of="$1" bs=1 seek="$at" conv=notrunc status=none
}

# config NAME EXTRA...: a tiny Llama with grouped heads on the corpus; logs and checkpoints in NAME.
config() {
  cat >"$1.yaml" <<YAML
algorithm: pretrain
policy:
  model: {model_type: llama, vocab_size: 272, hidden_size: 48, intermediate_size: 80, num_hidden_layers: 2,
          num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
  train_global_batch_size: 8
  train_micro_batch_size: 2
  max_total_sequence_length: 32
  optimizer: {lr: 3.0e-3}
  scheduler: {lr_decay_style: cosine, lr_warmup_iters: 2, lr_decay_iters: 10, min_lr: 1.0e-4}
pretrain: {max_num_steps: 10, seed: 7}
data: {train: {data_path: corpus}}
checkpointing: {checkpoint_dir: $1/checkpoints, save_period: 5}
logger: {log_dir: $1/logs, log_interval: 1}
kernels: {num_threads: 1}
YAML
}
