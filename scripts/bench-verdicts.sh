#!/usr/bin/env bash
# Makes runs slow on purpose, asks `nrl-train profile run` for the cause, applies the first verdict, and compares what it
# predicts with the time of the mended run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-verdicts.sh [--rounds N] [--steps N] [--attempts N] [--names-only] [--binary PATH] [CASE...]
  workers      one thread reads from storage that takes 15 ms for every sample
  buckets      gradients of 24 small layers in a bucket for each tensor, 2 ranks
  straggler    rank 1 shares its core with two other programs, 2 ranks
  recompute    all layers are computed again although memory is free
  microbatch   microbatches of one sequence of 16 tokens
  imbalance    two pipeline stages with 6 and 2 layers, 2 ranks
  --rounds N    slow and mended runs in turn (5); predicted and measured gains are medians over the rounds
  --steps N     recorded steps of a run (10)
  --attempts N  so many profiles may name another cause first (3): other programs disturb small runs
  --names-only  the exit code does not depend on the measured gain, which other programs change
  --binary PATH nrl-train to measure (default: builds build/cpu/bin/nrl-train)
Without CASE all of them. Prints a table: `named` is in how many rounds the cause came first, `close` says if the medians of
the gains differ by at most 3 points or a quarter of the measured one. Exits with 1 if a cause is not named first in most
rounds with its key, or does not help.
TEXT
}

rounds=5 steps=10 attempts=3 names_only=false
binary=
while [[ ${1:-} == -* ]]; do
  if [[ $1 == --names-only ]]; then
    names_only=true taken=1
  else
    take_option "rounds steps attempts" "" "$@"
  fi
  shift "$taken"
done
cases=("$@")
((${#cases[@]})) || cases=(workers buckets straggler recompute microbatch imbalance)
[[ -n $binary ]] || build_binary
mapfile -t all < <(taskset -cp $$ | sed 's/.*: //' | tr ',' '\n' | awk -F- '{ for (i = $1; i <= ($2 == "" ? $1 : $2); ++i) print i }')
((${#all[@]} >= 2)) || die 69 "two cores are required; this process may use ${#all[@]}"
work=$(mktemp -d)
busy=()
stop_busy() {
  ((${#busy[@]} == 0)) || kill "${busy[@]}" 2>/dev/null || true
  busy=()
}
trap 'stop_busy; rm -rf "$work"' EXIT
"$binary" prepare --input "$root_dir/core" "$root_dir/apps" --tokenizer bytes --output "$work/corpus" >"$work/prepare.txt" 2>&1 ||
  die 70 "cannot prepare the data: $(cat "$work/prepare.txt")"
mpi_setup 2

cat >"$work/small.yaml" <<YAML
algorithm: pretrain
policy:
  model: {model_type: llama, vocab_size: 272, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 8,
          num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 256, tie_word_embeddings: false}
  train_global_batch_size: 8
  train_micro_batch_size: 4
  max_total_sequence_length: 128
  recompute: {granularity: none}
data: {train: {data_path: $work/corpus}}
kernels: {num_threads: 1}
YAML

# Reads of files named *.bin take 15 ms longer: storage over a network, whose latency concurrent reads share.
slow_reads() {
  cat >"$work/slow.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
ssize_t pread64(int fd, void* to, size_t bytes, off_t at) {
  static ssize_t (*next)(int, void*, size_t, off_t);
  char link[64], path[4096];
  ssize_t n;
  if (!next) next = (ssize_t (*)(int, void*, size_t, off_t))dlsym(RTLD_NEXT, "pread64");
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  n = readlink(link, path, sizeof path);
  if (n > 4 && !memcmp(path + n - 4, ".bin", 4)) usleep(15000);
  return next(fd, to, bytes, at);
}
ssize_t pread(int fd, void* to, size_t bytes, off_t at) { return pread64(fd, to, bytes, at); }
C
  cc -shared -fPIC -O1 -o "$work/slow.so" "$work/slow.c" -ldl || die 69 "a C compiler is required for 'workers'"
}

# Each rank of mpirun has a core of its own.
# shellcheck disable=SC2016
pinned='exec taskset -c $(echo $0 | cut -d, -f$((OMPI_COMM_WORLD_LOCAL_RANK + 1))) "$@"'
one=(taskset -c "${all[1]}")
two=("${mpi_run[@]}" bash -c "$pinned" "${all[0]},${all[1]}")

# profile NAME KEYS...: the profile of a run of the case is in $work/NAME, its output in $work/NAME.txt.
profile() {
  local name=$1
  shift
  rm -rf "${work:?}/$name"
  "${launch[@]}" "$binary" profile run "$work/small.yaml" "${keys[@]}" "$@" --steps "$steps" --output "$work/$name" \
    >"$work/$name.txt" 2>&1 || die 70 "$name failed: $(tail -n 20 "$work/$name.txt")"
}

# slow NAME, mended NAME OVERRIDES...: the run before and after.
slow() {
  [[ $case != straggler ]] || for _ in 1 2; do
    taskset -c "${all[1]}" bash -c 'while :; do :; done' &
    busy+=($!)
  done
  profile "$1"
  stop_busy
}
mended() { profile "$@"; }

# first NAME: type, overrides, predicted seconds of the first verdict, separated by |.
first() {
  "$binary" profile bottlenecks "$work/$1" --json | awk '
    /"type":/ { type = $2 }
    /"overrides":/ { inside = 1 }
    inside { while (match($0, /"[^"]*=[^"]*"/)) {
        list = list (list == "" ? "" : " ") substr($0, RSTART + 1, RLENGTH - 2)
        $0 = substr($0, RSTART + RLENGTH)
      } }
    inside && /\]/ { inside = 0 }
    /"predicted_step_s":/ { predicted = $2 }
    /^  }/ { exit }
    END { gsub(/[",]/, "", type); gsub(/,/, "", predicted); printf "%s|%s|%s\n", type, list, predicted }'
}

# seconds NAME: the median of the recorded steps.
seconds() {
  "$binary" profile show "$work/$1" --json | awk '/^  "steps_s": \[/ { inside = 1; next } inside && /\]/ { exit }
    inside { gsub(/[ ,]/, ""); print }' | median
}
# wall NAME: the mean of the recorded steps, of which a verdict predicts the change.
wall() { awk '/^    "wall":/ { gsub(/,/, ""); print $2; exit }' "$work/$1"/profile/step-4/profile.json; }
change() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%+.1f\n", 100 * (b / a - 1) }'; }

wrong=0
printf '| made slow by | first verdict | named | mended by | predicted | measured | close |\n|---|---|---|---|---|---|---|\n'
for case in "${cases[@]}"; do
  launch=("${one[@]}") keys=()
  case $case in
    workers)
      slow_reads
      launch+=(env "LD_PRELOAD=$work/slow.so")
      keys=(policy.max_total_sequence_length=64)
      want=data_loading key='^data.num_workers='
      ;;
    buckets)
      launch=("${two[@]}")
      keys=(policy.model.hidden_size=64 policy.model.intermediate_size=160 policy.model.num_hidden_layers=24
        policy.train_micro_batch_size=2 policy.train_global_batch_size=4 distributed.bucket_size_mb=0.02)
      want=exposed_gradients key='^distributed.bucket_size_mb='
      ;;
    straggler)
      launch=("${two[@]}")
      want=straggler key='^$'
      ;;
    recompute)
      keys=(policy.recompute.granularity=full)
      want=recomputation key='^policy.recompute.granularity=none$'
      ;;
    microbatch)
      keys=(policy.train_micro_batch_size=1 policy.max_total_sequence_length=16 policy.train_global_batch_size=64)
      want=inefficient_gemms key='^policy.train_micro_batch_size='
      ;;
    imbalance)
      launch=("${two[@]}")
      keys=(distributed.pipeline_parallel_size=2 'distributed.pipeline_layout=[6,2]' policy.train_micro_batch_size=2)
      want=pipeline_imbalance key='^distributed.pipeline_layout='
      ;;
    *) die 64 "unknown case $case; see --help" ;;
  esac
  for ((attempt = 1; attempt <= attempts; ++attempt)); do
    slow slow
    IFS='|' read -r type overrides predicted < <(first slow)
    [[ $type == "$want" && $overrides =~ $key ]] && break
    echo "$case: attempt $attempt names $type ($overrides) first" >&2
  done
  if ((attempt > attempts)); then
    sed -n '/^step  /,/^$/p' "$work/slow.txt" >&2
    wrong=1
    continue
  fi
  read -ra list <<<"$overrides"
  : >"$work/gains"
  : >"$work/promises"
  named=0
  for ((round = 1; round <= rounds; ++round)); do
    ((round == 1)) || slow slow
    IFS='|' read -r found by predicted < <(first slow)
    if [[ $found == "$want" && $by =~ $key ]]; then
      named=$((named + 1))
      change "$(wall slow)" "$predicted" >>"$work/promises"
    fi
    mended mended "${list[@]}"
    change "$(seconds slow)" "$(seconds mended)" >>"$work/gains"
  done
  promised=$(median <"$work/promises")
  measured=$(median <"$work/gains")
  close=$(awk -v p="$promised" -v m="$measured" 'BEGIN {
    off = p > m ? p - m : m - p
    quarter = (m < 0 ? -m : m) / 4
    print(off <= (quarter > 3 ? quarter : 3) ? "yes" : "no") }')
  printf "| %s | \`%s\` | %d of %d | %s | %+.1f %% | %+.1f %% | %s |\n" "$case" "$want" "$named" "$rounds" \
    "${overrides:+\`$overrides\`}" "$promised" "$measured" "$close"
  if ((2 * named <= rounds)); then
    echo "$case: named first in $named of $rounds rounds" >&2
    wrong=1
  fi
  $names_only || awk -v m="$measured" 'BEGIN { exit !(m < 0) }' || {
    echo "$case: the mended run is not faster" >&2
    wrong=1
  }
done
exit $wrong
