#!/usr/bin/env bash
# Measures how training scales from one rank to two on this machine, in alternating (paired) runs: weak scaling, two
# ranks against two threads, and how much of the gradient reduction is hidden on a slow network.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-scaling.sh [--rounds N] [--steps N] [--binary PATH] [--common KEY=VALUE]... [--rate RATE]
                                [--out FILE] CASE [KEY=VALUE...]
  weak       configs/llama-17m.yaml with one thread a rank: the batch grows with the ranks. Efficiency: time of a step on
             1 rank / on 2. "machine": the same for two runs of 1 rank side by side, which share memory and caches but
             do not communicate: what the machine allows
  strong     configs/gpt2-124m.yaml, 8 sequences of 256 tokens: 1 rank with 2 threads / 2 ranks with 1 thread. KEY=VALUE
             go to the 2 ranks: distributed.tensor_parallel_size=2 and so on; data parallelism without any
  pipeline   8 equal layers of configs/llama-17m.yaml in two stages, one thread a rank, 4 and 8 microbatches: the share of
             a step in which the first stage waits, against the bubble that `nrl-train plan` simulates
  overlap    configs/llama-17m.yaml on two hosts in network namespaces (scripts/multihost.sh, needs root): the exposed
             communication with overlap_grad_reduce / without it
  tp-overlap the same hosts as two tensor-parallel ranks, 1 microbatch of 4 sequences: the exposed communication and the
             time of a step with every distributed.tp_comm_overlap / with none, and by operation in the last round
  --rounds N     rounds of paired runs (3); ratios are medians over the rounds
  --steps N      timed steps of a run (3), after 2 warm-up steps; the median counts
  --common K=V   a key of all runs, of 1 rank too: --common policy.train_global_batch_size=8 (repeatable)
  --rate RATE    of the network in `overlap` and `tp-overlap` (1gbit)
  --binary PATH  nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  --out FILE     append the lines of the result to this file
TEXT
}

rounds=3
steps=3
warmup=2
rate=1gbit
binary=
out=/dev/null
common=()
while [[ ${1:-} == -* ]]; do
  taken=2
  case $1 in
    --common)
      [[ ${2:-} == *=* ]] || die 64 "--common takes KEY=VALUE; found '${2:-}'"
      common+=("$2")
      ;;
    --rate)
      [[ -n ${2:-} ]] || die 64 "$1 takes a value"
      rate=$2
      ;;
    *) take_option "rounds steps" "out" "$@" ;;
  esac
  shift "$taken"
done
case=${1:-}
[[ $case =~ ^(weak|strong|pipeline|overlap|tp-overlap)$ ]] || {
  usage >&2
  exit 64
}
shift
(($(cores) >= 2)) || die 69 "two cores are required; this process may use $(cores)"
[[ -n $binary ]] || build_binary
binary=$(readlink -f "$binary")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$binary" prepare --input "$root_dir/core" "$root_dir/apps" --tokenizer bytes --output "$work/corpus" >"$work/prepare.txt" 2>&1 ||
  die 70 "cannot prepare the data: $(cat "$work/prepare.txt")"
mpi_setup 2

# train NAME COMMAND... -- CONFIG KEYS...: the median time of a step in ms, in NAME.ms; logs in $work/NAME.
train() {
  local name=$1 launch=()
  shift
  while [[ $1 != -- ]]; do
    launch+=("$1")
    shift
  done
  shift
  rm -rf "${work:?}/$name"
  "${launch[@]}" "$binary" "$@" data.train.data_path="$work/corpus" pretrain.max_num_steps=$((warmup + steps)) \
    policy.scheduler.lr_warmup_iters=0 pretrain.val_period=0 pretrain.val_at_end=false checkpointing.enabled=false \
    logger.log_dir="$work/$name" logger.log_interval=1 >"$work/$name.txt" 2>&1 ||
    die 70 "$name failed: $(tail -n 20 "$work/$name.txt")"
  column "$name" step_ms >"$work/$name.ms"
}

# column NAME FIELD: the median of a field of metrics.jsonl over the timed steps.
column() {
  awk -v key="$2" -f "$root_dir/scripts/metrics.awk" "$work/$1/metrics.jsonl" | tail -n "+$((warmup + 1))" | median
}

# ratio FILE: the median of the ratios in a file, as it is shown.
ratio() { printf '%.3f' "$(median <"$work/$1")"; }
quotient() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.4f\n", a / b }'; }
# result TEXT...
result() { printf '%s\n' "$*" | tee -a "$out"; }

one=(env OMP_NUM_THREADS=1 taskset -c)
mapfile -t all < <(taskset -cp $$ | sed 's/.*: //' | tr ',' '\n' | awk -F- '{ for (i = $1; i <= ($2 == "" ? $1 : $2); ++i) print i }')
two=("${mpi_run[@]}")
# Each rank of mpirun has a core of its own, out of the list that is the first argument.
# shellcheck disable=SC2016
pinned='exec taskset -c $(echo $0 | cut -d, -f$((OMPI_COMM_WORLD_LOCAL_RANK + 1))) "$@"'

case $case in
  weak)
    config=$root_dir/configs/llama-17m.yaml
    batch=32
    for key in "${common[@]}"; do [[ $key != policy.train_global_batch_size=* ]] || batch=${key#*=}; done
    keys=("$config" kernels.num_threads=1 "${common[@]}")
    for ((round = 1; round <= rounds; ++round)); do
      train one "${one[@]}" "${all[0]}" -- "${keys[@]}"
      train two "${two[@]}" bash -c "$pinned" "${all[0]},${all[1]}" -- "${keys[@]}" policy.train_global_batch_size=$((2 * batch)) "$@"
      train beside "${one[@]}" "${all[1]}" -- "${keys[@]}" &
      train side "${one[@]}" "${all[0]}" -- "${keys[@]}"
      wait
      quotient "$(cat "$work/one.ms")" "$(cat "$work/two.ms")" >>"$work/efficiency"
      quotient "$(cat "$work/one.ms")" "$(cat "$work/side.ms")" >>"$work/machine"
      echo "round $round: 1 rank $(cat "$work/one.ms") ms, 2 ranks $(cat "$work/two.ms") ms, two runs $(cat "$work/side.ms") ms"
    done
    result "weak scaling of llama-17m, 1 to 2 ranks, $batch sequences each${*:+, $*}: efficiency $(ratio efficiency)," \
      "machine $(ratio machine)"
    ;;
  strong)
    keys=("$root_dir/configs/gpt2-124m.yaml" policy.train_global_batch_size=8 policy.max_total_sequence_length=256
      "${common[@]}")
    for ((round = 1; round <= rounds; ++round)); do
      train threads taskset -c "${all[0]},${all[1]}" -- "${keys[@]}" kernels.num_threads=2
      train ranks "${two[@]}" bash -c "$pinned" "${all[0]},${all[1]}" -- "${keys[@]}" kernels.num_threads=1 "$@"
      quotient "$(cat "$work/threads.ms")" "$(cat "$work/ranks.ms")" >>"$work/ratio"
      echo "round $round: 1 rank x 2 threads $(cat "$work/threads.ms") ms, 2 ranks x 1 thread $(cat "$work/ranks.ms") ms"
    done
    result "gpt2-124m, 1 rank x 2 threads / 2 ranks x 1 thread${*:+, $*}: $(ratio ratio)"
    ;;
  pipeline)
    # A small vocabulary, so that the head hardly lengthens the last stage.
    keys=("$root_dir/configs/llama-17m.yaml" kernels.num_threads=1 policy.model.num_hidden_layers=8
      policy.model.vocab_size=272 policy.train_micro_batch_size=1 policy.max_total_sequence_length=512
      policy.recompute.granularity=none distributed.pipeline_parallel_size=2 "${common[@]}" "$@")
    for microbatches in 4 8; do
      for schedule in 1f1b interleaved zb_h1; do
        chunks=1
        [[ $schedule != interleaved ]] || chunks=2
        these=("${keys[@]}" "policy.train_global_batch_size=$microbatches" "distributed.pipeline_schedule=$schedule"
          "distributed.virtual_pipeline_size=$chunks")
        simulated=$("$binary" plan "${these[@]}" data.train.data_path="$work/corpus" --world 2 |
          sed -nE 's/.*bubble ([0-9.]+) %.*/\1/p')
        : >"$work/idle"
        for ((round = 1; round <= rounds; ++round)); do
          train stages "${two[@]}" bash -c "$pinned" "${all[0]},${all[1]}" -- "${these[@]}"
          quotient "$(column stages comm_ms)" "$(cat "$work/stages.ms")" >>"$work/idle"
        done
        result "pipeline of 2 stages, $schedule, $microbatches microbatches${*:+, $*}: idle" \
          "$(median <"$work/idle" | awk '{ printf "%.1f", 100 * $1 }') %, simulated $simulated %," \
          "$(cat "$work/stages.ms") ms per step"
      done
    done
    ;;
  overlap)
    keys=("$root_dir/configs/llama-17m.yaml" kernels.num_threads=1 "${common[@]}" "$@")
    hosts=("$root_dir/scripts/multihost.sh" --hosts "1,1" --rate "$rate")
    for ((round = 1; round <= rounds; ++round)); do
      for overlap in false true; do
        train $overlap "${hosts[@]}" -- "${keys[@]}" distributed.overlap_grad_reduce=$overlap
        column $overlap comm_ms >"$work/$overlap.exposed"
      done
      quotient "$(cat "$work/true.exposed")" "$(cat "$work/false.exposed")" >>"$work/exposed"
      quotient "$(cat "$work/false.ms")" "$(cat "$work/true.ms")" >>"$work/speedup"
      echo "round $round: without overlap $(cat "$work/false.ms") ms, exposed $(cat "$work/false.exposed") ms;" \
        "with $(cat "$work/true.ms") ms, exposed $(cat "$work/true.exposed") ms"
    done
    result "llama-17m on 2 hosts at $rate${*:+, $*}: overlap hides $(median <"$work/exposed" | awk '{ printf "%.0f", 100 * (1 - $1) }') %" \
      "of the communication and is $(ratio speedup) times as fast"
    ;;
  tp-overlap)
    keys=("$root_dir/configs/llama-17m.yaml" kernels.num_threads=1 distributed.tensor_parallel_size=2
      policy.train_global_batch_size=4 policy.train_micro_batch_size=4 "${common[@]}" "$@")
    hosts=("$root_dir/scripts/multihost.sh" --hosts "1,1" --rate "$rate")
    methods=(none bulk pipelined ring)
    for ((round = 1; round <= rounds; ++round)); do
      for method in "${methods[@]}"; do
        train "$method" "${hosts[@]}" -- "${keys[@]}" "distributed.tp_comm_overlap=$method"
        column "$method" comm_ms >"$work/$method.exposed"
        quotient "$(cat "$work/$method.exposed")" "$(cat "$work/none.exposed")" >>"$work/exposed-$method"
        quotient "$(cat "$work/none.ms")" "$(cat "$work/$method.ms")" >>"$work/speedup-$method"
        echo "round $round: $method $(cat "$work/$method.ms") ms, exposed $(cat "$work/$method.exposed") ms"
      done
    done
    for method in "${methods[@]}"; do
      echo "$method:"
      "$binary" report "$work/$method" | grep -E 'exposed ms| tp |^tp |^ *world ' || true
    done
    for method in "${methods[@]:1}"; do
      result "llama-17m, 2 tensor-parallel ranks on 2 hosts at $rate, tp_comm_overlap $method${*:+, $*}: hides" \
        "$(median <"$work/exposed-$method" | awk '{ printf "%.0f", 100 * (1 - $1) }') % of the exposed communication and is" \
        "$(ratio "speedup-$method") times as fast"
    done
    ;;
esac
