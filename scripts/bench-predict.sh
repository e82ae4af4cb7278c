#!/usr/bin/env bash
# Predicts the steps of layouts that were not measured, from a calibration of this machine just before, and then measures
# them: `nrl-train plan --profile` against the median step of a run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-predict.sh [--rounds N] [--every N] [--steps N] [--only TEXT] [--binary PATH] [--out FILE]
  Calibrates configs/llama-17m.yaml with one thread a rank, on 1 rank and on all that this machine has a core for, at most
  4. Every layout of the list below is planned with the calibration for its number of ranks, and run. A line has the
  predicted and the measured step in ms and their difference. With several rounds every layout then has its medians over
  them. The last line has the median and the ninth decile of the differences of these.
  --rounds N     times that all layouts are predicted and run (1)
  --every N      layouts of a calibration (5): the rates of a machine that others use change
  --steps N      timed steps of a run (6), after 2 warm-up steps; the median counts
  --only TEXT    only layouts whose line contains the text
  --binary PATH  nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  --out FILE     append the lines to this file
TEXT
}

# Each line: ranks (n: of all cores), keys. No layout is the calibrated one, whose microbatches have 4 sequences of 256 tokens.
layouts() {
  cat <<'TEXT'
1 policy.train_micro_batch_size=1
1 policy.train_micro_batch_size=2
1 policy.train_micro_batch_size=8
1 policy.max_total_sequence_length=128
1 policy.max_total_sequence_length=512 policy.train_micro_batch_size=2
1 policy.model.num_hidden_layers=3
1 policy.model.hidden_size=256 policy.model.num_attention_heads=4 policy.model.num_key_value_heads=4
1 policy.model.hidden_size=512 policy.model.num_attention_heads=8 policy.model.num_key_value_heads=4
1 policy.model.intermediate_size=2048
1 policy.model.vocab_size=2048
1 policy.recompute.granularity=full
1 policy.recompute.granularity=full policy.max_total_sequence_length=512 policy.train_micro_batch_size=2
1 policy.train_global_batch_size=4
1 policy.train_global_batch_size=4 policy.train_micro_batch_size=1
n distributed.shard_strategy=optim
n distributed.shard_strategy=optim_grads
n distributed.shard_strategy=optim_grads_params
n distributed.overlap_grad_reduce=false
n policy.train_micro_batch_size=2
n policy.max_total_sequence_length=512 policy.train_micro_batch_size=2
n policy.train_global_batch_size=16 policy.train_micro_batch_size=2
n policy.model.num_hidden_layers=3
n policy.recompute.granularity=full
n distributed.tensor_parallel_size=n
n distributed.tensor_parallel_size=n distributed.sequence_parallel=true
n distributed.tensor_parallel_size=n policy.train_micro_batch_size=2
n distributed.context_parallel_size=n policy.max_total_sequence_length=512 policy.train_micro_batch_size=2
n distributed.pipeline_parallel_size=n policy.train_micro_batch_size=1
n distributed.pipeline_parallel_size=n distributed.pipeline_schedule=zb_h1 policy.train_micro_batch_size=1
n distributed.pipeline_parallel_size=n distributed.virtual_pipeline_size=3 policy.train_micro_batch_size=1
TEXT
}

rounds=1
every=5
steps=6
warmup=2
only=
binary=
out=/dev/null
while (($#)); do
  taken=2
  case $1 in
    --only) only=${2:-} ;;
    *) take_option "rounds every steps" "out" "$@" ;;
  esac
  shift "$taken"
done
ranks=$(cores)
((ranks <= 4)) || ranks=4
((ranks >= 2)) || die 69 "two cores are required; this process may use $(cores)"
[[ -n $binary ]] || build_binary
binary=$(readlink -f "$binary")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$binary" prepare --input "$root_dir/core" "$root_dir/apps" --tokenizer bytes --output "$work/corpus" >"$work/log" 2>&1 ||
  die 70 "cannot prepare the data: $(cat "$work/log")"
# Threads of one rank alone have a core, as ranks side by side do.
base=("$root_dir/configs/llama-17m.yaml" "data.train.data_path=$work/corpus" kernels.num_threads=1 policy.train_global_batch_size=8
  policy.train_micro_batch_size=4 policy.recompute.granularity=none)

# on RANKS PROGRAM ARGS...: as the ranks are started everywhere here.
on() {
  local n=$1
  shift
  mpi_setup "$n"
  if ((n == 1)); then
    OMP_NUM_THREADS=1 taskset -c "$first_core" "$@" </dev/null
  else
    "${mpi_run[@]}" "$@" </dev/null # mpirun reads what is there
  fi
}
first_core=$(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')

# measured RANKS KEYS...: the median step in ms.
measured() {
  rm -rf "$work/logs"
  on "$1" "$binary" "${base[@]}" "${@:2}" pretrain.max_num_steps=$((warmup + steps)) policy.scheduler.lr_warmup_iters=0 \
    pretrain.val_period=0 pretrain.val_at_end=false checkpointing.enabled=false logger.log_dir="$work/logs" \
    logger.log_interval=1 >"$work/log" 2>&1 || die 70 "$* failed: $(tail -n 20 "$work/log")"
  awk -v key=step_ms -f "$root_dir/scripts/metrics.awk" "$work/logs/metrics.jsonl" | tail -n "+$((warmup + 1))" | median
}
# predicted RANKS KEYS...: the estimated step in ms.
predicted() {
  "$binary" plan "${base[@]}" "${@:2}" --world "$1" --device cpu --profile "$work/profile-$1.json" --json "$work/plan.json" \
    >"$work/log" 2>&1 || die 70 "plan $* failed: $(tail -n 20 "$work/log")"
  sed -nE 's/.*"step_s": *([0-9.e+-]+).*/\1/p' "$work/plan.json" | head -n 1 | awk '{ printf "%.6g\n", 1e3 * $1 }'
}
# compared GUESS REAL LAYOUT: a line of the table.
compared() {
  awk -v guess="$1" -v real="$2" -v name="$3" 'BEGIN {
    printf "%9.2f %9.2f %+6.1f %%  %s\n", guess, real, 100 * (guess / real - 1), name }'
}

# calibrate RANKS
calibrate() {
  local links=()
  (($1 == 1)) || links=(--links)
  on "$1" "$binary" bench calibrate "${base[@]}" "${links[@]}" --out "$work/profile-$1.json" >"$work/log" 2>&1 ||
    die 70 "bench calibrate on $1 ranks failed: $(tail -n 20 "$work/log")"
}

for ((round = 1; round <= rounds; ++round)); do
  declare -A planned=() # layouts of the round, by ranks
  while read -r n keys; do
    [[ "$n $keys" == *"$only"* ]] || continue
    keys=${keys//=n/=$ranks}
    n=${n/n/$ranks}
    ((${planned[$n]:=0} % every > 0)) || calibrate "$n"
    ((++planned[$n]))
    read -ra words <<<"$keys"
    guess=$(predicted "$n" "${words[@]}")
    real=$(measured "$n" "${words[@]}")
    printf '%s\t%s\t%s\n' "$guess" "$real" "$n $keys" >>"$work/times"
    compared "$guess" "$real" "$n $keys" | tee -a "$out"
  done < <(layouts)
done
[[ -s $work/times ]] || die 64 "no layout contains '$only'"

# over_rounds: a line for each layout, in the order of the list, with the medians of both times.
over_rounds() {
  local name
  cut -f 3 "$work/times" | awk '!seen[$0]++' | while IFS= read -r name; do
    compared "$(over_rounds_of 1 "$name")" "$(over_rounds_of 2 "$name")" "$name"
  done
}
# over_rounds_of COLUMN LAYOUT
over_rounds_of() { awk -F '\t' -v column="$1" -v name="$2" '$3 == name { print $column }' "$work/times" | median; }
if ((rounds > 1)); then
  echo "medians over $rounds rounds"
  over_rounds
fi | tee -a "$out"
over_rounds | awk '{ e = $3 + 0; print e < 0 ? -e : e }' | LC_ALL=C sort -g | awk -v ranks="$ranks" '
  { v[NR] = $1 }
  END { printf "predicted from a calibration of 1 and %d ranks, %d layouts: median error %.1f %%, ninth decile %.1f %%, largest %.1f %%\n",
          ranks, NR, v[int((NR + 1) / 2)], v[int(0.9 * NR + 0.999)], v[NR] }' | tee -a "$out"
