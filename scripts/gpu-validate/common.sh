# shellcheck shell=bash
# shellcheck disable=SC2154  # device, bin, out, work, programs, small: of gpu-validate.sh
# Functions of the stages; sourced. Every stage runs in a process of its own. Exit code 77: skipped. The last line that
# begins with "note: " is its result in the summary.

note() { echo "note: $*"; }
skip() {
  note "$*"
  exit 77
}
# Prints and runs a command.
run() {
  printf '+'
  printf ' %q' "$@"
  printf '\n'
  "$@"
}
on_gpu() { [[ $device == cuda ]]; }

find_mpirun() { command -v mpirun || command -v mpirun.openmpi || command -v orterun; }
# find_tool NAME: a tool of the CUDA toolkit.
find_tool() { command -v "$1" || compgen -G "/usr/local/cuda*/bin/$1" | head -n 1 | grep .; }

# banner_line LABEL: one entry of a banner, without line breaks.
banner_line() { awk -v label="$1" '/^[^ ]/ { on = $1 == label && !found } on { if (!found) $1 = ""; found = 1; $1 = $1; printf " %s", $0 }' | sed 's/^ *//'; }
# train NAME RANKS CONFIG key=value...: trains into $work/NAME on the corpus of this project's sources.
train() {
  local name=$1 ranks=$2 config=$3 launch=()
  shift 3
  if ((ranks > 1)); then
    local mpirun
    mpirun=$(find_mpirun) || skip "there is no mpirun"
    mpi_setup "$ranks"
    launch=("$mpirun" "${mpi_run[@]:1}")
  fi
  run "${launch[@]}" "$bin/nrl-train" "$config" "data.train.data_path=$work/corpus" data.split=null pretrain.val_period=0 \
    checkpointing.enabled=false logger.log_interval=1 logger.progress=plain "logger.log_dir=$work/$name" "${small[@]}" "$@"
}
# quickstart NAME RANKS key=value...: 20 steps of the quickstart; the caller's $steps, if set.
quickstart() {
  local count=${steps:-20}
  train "$1" "$2" configs/quickstart.yaml "pretrain.max_num_steps=$count" policy.optimizer.lr=5e-4 \
    "policy.scheduler.lr_decay_iters=$count" policy.scheduler.lr_warmup_iters=5 "${@:3}"
}
# reference NAME key=value...: a run of quickstart() that several stages compare with. Its metrics are kept in $out, for
# later calls with the same programs.
reference() {
  local kept=$out/reference-$1.jsonl key
  key="{\"reference\":\"$programs ${steps:-20} ${*:2}\"}"
  if [[ $(head -n 1 "$kept" 2>/dev/null) != "$key" ]]; then
    rm -rf "${work:?}/$1"
    quickstart "$1" 1 "${@:2}"
    { echo "$key"; cat "$work/$1/metrics.jsonl"; } >"$kept.part"
    mv "$kept.part" "$kept"
  elif [[ ! -s $work/$1/metrics.jsonl ]]; then
    echo "the run $1 is that of an earlier call"
    mkdir -p "$work/$1"
    cp "$kept" "$work/$1/metrics.jsonl"
  fi
}
# compare A B TOLERANCE [NORM_TOLERANCE]: compares two files of metrics step by step and prints the result.
compare() { awk -v "tolerance=$3" -v "norm_tolerance=${4:-}" -f scripts/compare-losses.awk "$1" "$2"; }
# same A B TOLERANCE [NORM_TOLERANCE]: compares the losses of two runs.
same() {
  local result code=0
  result=$(compare "$work/$1/metrics.jsonl" "$work/$2/metrics.jsonl" "${@:3}") || code=$?
  note "$1 and $2: $result"
  return $code
}
# near A B PERCENT: compares the means of the last 10 losses of two runs and prints the result.
near() {
  local run means=()
  for run in "$1" "$2"; do
    means+=("$(awk -v key=loss -f scripts/metrics.awk "$work/$run/metrics.jsonl" | tail -n 10 | awk '{ sum += $1 } END { print sum / NR }')")
  done
  awk -v a="${means[0]}" -v b="${means[1]}" -v allowed="$3" 'BEGIN {
    d = 100 * (b / a - 1)
    printf "last 10 losses %.4f and %.4f: %+.2f %%, allowed %s %%", a, b, d, allowed
    exit !(d <= allowed && d >= -allowed)
  }'
}
