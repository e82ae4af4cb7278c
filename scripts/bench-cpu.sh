#!/usr/bin/env bash
# Benchmarks training on this machine's CPU in alternation with its peers, up to three builds of PyTorch (CONTRIBUTING.md
# says how to install them). Writes build/bench/cpu.md (tables) and cpu.json (all runs).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-cpu.sh [--rounds N] [--steps N] [--case NAME]... [--precision NAME]... [--peer NAME]...
                            [--torch PYTHON]... [--no-torch] [--binary PATH] [--output DIR]
  --rounds N        rounds of all programs per case (3)
  --steps N         timed steps per round (5), after two warm-up steps
  --case NAME       MODEL-bBATCH-tLENGTH with MODEL gpt2-124m or llama-17m
                    (default: gpt2-124m-b4-t256, gpt2-124m-b1-t1024, llama-17m-b16-t256)
  --precision NAME  float32, bfloat16 (default: both)
  --peer NAME       debian: Debian's python3-torch with OpenBLAS tuned to the processor; wheel: another build of torch;
                    compiled: that with torch.compile (default: all that are installed)
  --torch PYTHON    a Python to look for torch in (default: $NRL_PYTHON, python3, /usr/bin/python3)
  --no-torch        nrl-train alone
  --binary PATH     nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  --output DIR      directory for cpu.md and cpu.json (build/bench)
TEXT
}

rounds=3
steps=5
warmup=2
cases=()
precisions=()
peers=()
pythons=()
binary=
output=$root_dir/build/bench
torch=true
while (($#)); do
  taken=2
  case $1 in
    --case)
      [[ ${2:-} =~ ^(gpt2-124m|llama-17m)-b([1-9][0-9]*)-t([1-9][0-9]*)$ ]] ||
        die 64 "--case takes MODEL-bBATCH-tLENGTH; found '${2:-}'"
      cases+=("$2")
      ;;
    --precision)
      [[ ${2:-} =~ ^(float32|bfloat16)$ ]] || die 64 "--precision takes float32 or bfloat16; found '${2:-}'"
      precisions+=("$2")
      ;;
    --peer)
      [[ ${2:-} =~ ^(debian|wheel|compiled)$ ]] || die 64 "--peer takes debian, wheel or compiled; found '${2:-}'"
      peers+=("$2")
      ;;
    --torch) take_python "$@" ;;
    --no-torch) torch=false taken=1 ;;
    *) take_option "rounds steps" "output" "$@" ;;
  esac
  shift "$taken"
done
output=$(realpath -m "$output")
((${#cases[@]})) || cases=(gpt2-124m-b4-t256 gpt2-124m-b1-t1024 llama-17m-b16-t256)
((${#precisions[@]})) || precisions=(float32 bfloat16)
((${#peers[@]})) || peers=(debian wheel compiled)
((${#pythons[@]})) || mapfile -t pythons < <(torch_pythons)
$torch || peers=()

cd "$root_dir"
[[ -n $binary ]] || build_binary
mkdir -p "$output"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
threads=$(cores)
unset OMP_NUM_THREADS

# torch of each kind (debian: Debian's package, wheel: any other build): its Python, version and whether it has torch.compile.
declare -A python_of version_of compiles
probe='import torch
print("debian" if torch.__file__.startswith("/usr/lib/python3/") else "wheel", torch.__version__.split("+")[0], hasattr(torch, "compile"))'
if ((${#peers[@]})); then
  for python in "${pythons[@]}"; do
    read -r kind version compile < <(outside "$python" -c "$probe" 2>/dev/null) || continue
    [[ -z ${python_of[$kind]:-} ]] || continue
    python_of[$kind]=$python version_of[$kind]=$version compiles[$kind]=$compile
  done
fi

# OpenBLAS for Debian's torch. Its pthread build conflicts with the threads of torch, and it does not recognize every
# virtual processor: either makes it several times slower.
openblas=$(compgen -G '/usr/lib/*/openblas-openmp/libblas.so.3' | head -n 1 || true)
tuning=("LD_PRELOAD=$openblas")
for flag in avx512f:SKYLAKEX avx2:HASWELL; do
  if grep -qm 1 -w "${flag%%:*}" /proc/cpuinfo; then
    tuning+=("OPENBLAS_CORETYPE=${flag#*:}")
    break
  fi
done

# blocker PEER: prints why it cannot run, or nothing.
blocker() {
  case $1 in
    debian)
      if [[ -z ${python_of[debian]:-} ]]; then
        echo "python3-torch is not installed"
      elif [[ -z $openblas ]]; then
        echo "libopenblas-openmp-dev is not installed"
      fi
      ;;
    wheel) [[ -n ${python_of[wheel]:-} ]] || echo "no Python has a torch that is not Debian's (pip install torch; --torch PYTHON)" ;;
    compiled)
      if [[ -z ${python_of[wheel]:-} ]]; then
        blocker wheel
      elif [[ ${compiles[wheel]} != True ]]; then
        echo "torch ${version_of[wheel]} has no torch.compile"
      elif ! command -v g++ >/dev/null; then
        echo "g++ is not installed"
      fi
      ;;
  esac
}
programs=(nrl-train)
declare -A title=([nrl-train]=nrl-train)
missing=()
for peer in "${peers[@]}"; do
  reason=$(blocker "$peer")
  if [[ -n $reason ]]; then
    missing+=("$peer: $reason")
    continue
  fi
  programs+=("$peer")
  case $peer in
    debian) title[debian]="PyTorch ${version_of[debian]}, OpenBLAS" ;;
    wheel) title[wheel]="PyTorch ${version_of[wheel]}" ;;
    compiled) title[compiled]="PyTorch ${version_of[wheel]}, compiled" ;;
  esac
done

# Text for the token files: this tree. A byte vocabulary fits every model.
"$binary" prepare --input apps core parallel --tokenizer bytes --output "$work/corpus" >"$work/prepare.txt"

# Clock ticks of the machine: total and busy.
machine_ticks() { awk '/^cpu / { print $2 + $3 + $4 + $5 + $6 + $7 + $8 + $9, $2 + $3 + $4 + $7 + $8 + $9 }' /proc/stat; }
# Sets own_seconds: processor time of this shell's children so far. (A subshell would report its own.)
child_seconds() {
  times >"$work/times"
  own_seconds=$(awk 'NR == 2 { for (i = 1; i <= 2; ++i) { split($i, t, /[ms]/); s += t[1] * 60 + t[2] } print s }' "$work/times")
}

# values KEY FILE: the field KEY of every line.
values() { awk -v key="$1" -f scripts/metrics.awk "$2" | tr -d ' '; }

# run_ours MODEL BATCH LENGTH PRECISION: sets best_ms, median_ms, peak_kib, mfu and gemm_share.
run_ours() {
  local log=$work/ours timed=$work/timed.jsonl
  rm -rf "$log"
  "$binary" "configs/$1.yaml" "data.train.data_path=$work/corpus" data.split=null "policy.train_global_batch_size=$2" \
    "policy.train_micro_batch_size=$2" "policy.max_total_sequence_length=$3" "policy.precision=$4" \
    "pretrain.max_num_steps=$((warmup + steps))" policy.scheduler.lr_warmup_iters=0 pretrain.val_period=0 \
    pretrain.val_at_end=false checkpointing.enabled=false "kernels.num_threads=$threads" "logger.log_dir=$log" \
    >"$work/ours.log" 2>&1 || { cat "$work/ours.log" >&2; die 70 "nrl-train failed on $1 (see above)"; }
  tail -n "+$((warmup + 1))" "$log/metrics.jsonl" >"$timed"
  best_ms=$(values step_ms "$timed" | LC_ALL=C sort -g | head -n 1)
  median_ms=$(values step_ms "$timed" | median)
  # The run's own figure: a program that watches it would take part of a processor.
  peak_kib=$(($(values peak_resident_bytes "$log/memory.json") / 1024))
  mfu=$(values mfu "$timed" | median)
  gemm_share=$(awk -v ms="$(values gemm_ms "$timed" | median)" -v step="$median_ms" 'BEGIN { printf "%.4f", ms / step }')
}

# run_torch PEER MODEL BATCH LENGTH PRECISION: sets best_ms, median_ms and peak_kib.
run_torch() {
  local kind=wheel environment=("OMP_NUM_THREADS=$threads" PYTHONDONTWRITEBYTECODE=1) options=()
  case $1 in
    debian)
      kind=debian
      environment+=("${tuning[@]}")
      ;;
    compiled) options=(--compile) ;;
  esac
  outside "${environment[@]}" "${python_of[$kind]}" scripts/bench/torch_train.py --model "$2" --batch "$3" --seq "$4" --precision "$5" \
    --steps "$steps" --warmup "$warmup" --threads "$threads" "${options[@]}" >"$work/torch.json" 2>"$work/torch.log" ||
    { cat "$work/torch.log" >&2; die 70 "${title[$1]} failed on $2 (see above). Fix: name the other peers with --peer"; }
  best_ms=$(values step_ms_best "$work/torch.json")
  median_ms=$(values step_ms "$work/torch.json")
  peak_kib=$(values peak_rss_kib "$work/torch.json")
}

# measure CASE PRECISION PROGRAM ROUND: runs a program and adds a line to the results.
measure() {
  local total_before busy_before own_before total busy others model batch length
  [[ $1 =~ ^(.*)-b([0-9]+)-t([0-9]+)$ ]]
  model=${BASH_REMATCH[1]} batch=${BASH_REMATCH[2]} length=${BASH_REMATCH[3]}
  read -r total_before busy_before < <(machine_ticks)
  child_seconds
  own_before=$own_seconds mfu='' gemm_share=''
  case $3 in
    nrl-train) run_ours "$model" "$batch" "$length" "$2" ;;
    *) run_torch "$3" "$model" "$batch" "$length" "$2" ;;
  esac
  read -r total busy < <(machine_ticks)
  child_seconds
  others=$(awk -v total=$((total - total_before)) -v busy=$((busy - busy_before)) -v own="$own_seconds" -v before="$own_before" \
    -v hz="$(getconf CLK_TCK)" 'BEGIN { x = total > 0 ? (busy - (own - before) * hz) / total : 0; printf "%.3f", x < 0 ? 0 : x }')
  printf 'run\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$@" "$best_ms" "$median_ms" "$peak_kib" "$others" "$mfu" "$gemm_share" >>"$work/results"
  awk -v name="$1 $2 round $4 $3" -v tokens="$((batch * length))" -v best="$best_ms" -v median="$median_ms" -v kib="$peak_kib" \
    'BEGIN { printf "%s: %.0f tokens/s best, %.0f median, %.0f MiB\n", name, tokens / best * 1e3, tokens / median * 1e3, kib / 1024 }'
}

doctor=$("$binary" doctor)
machine=$(awk '$1 == "processor" { sub(/^processor +/, ""); print }' <<<"$doctor")
peak=$(awk '/^fp32 peak/ { sub(/^fp32 peak +/, ""); print }' <<<"$doctor")
for name in "${programs[@]}"; do printf 'program\t%s\t%s\n' "$name" "${title[$name]}"; done >"$work/results"

quoted() { sed 's/\\/\\\\/g; s/"/\\"/g; s/.*/"&"/' <<<"$1"; }
# Writes cpu.md and cpu.json from the cases measured so far.
write_results() {
  local reason
  {
    echo "# nrl-train on the CPU"
    echo
    echo "$machine, $threads threads, $(date +%F). fp32 peak: $peak."
    echo "The programs in alternation; rounds: $rounds, of $steps steps. Best: the fastest step of all rounds; median: over the rounds, of"
    echo "their median steps. Speed is relative to the fastest peer, memory to the smallest."
    for reason in "${missing[@]}"; do echo "Not measured: $reason."; done
    echo
    awk -f scripts/bench/cpu_table.awk "$work/results"
  } >"$output/cpu.md"
  {
    printf '{"processor":%s,"threads":%d,"fp32_peak":%s,"rounds":%d,"steps":%d,"runs":[\n' "$(quoted "$machine")" "$threads" \
      "$(quoted "$peak")" "$rounds" "$steps"
    awk -F '\t' '
      $1 == "program" { title[$2] = $3; next }
      { printf "%s{\"case\":\"%s\",\"precision\":\"%s\",\"program\":\"%s\",\"round\":%d,\"step_ms_best\":%s,\"step_ms\":%s,", \
          separator, $2, $3, title[$4], $5, $6, $7
        printf "\"peak_rss_kib\":%s,\"other_cpu_share\":%s", $8, $9
        if ($10 != "") printf ",\"mfu\":%s,\"gemm_share\":%s", $10, $11
        printf "}"
        separator = ",\n" }' "$work/results"
    printf '\n]}\n'
  } >"$output/cpu.json"
}

echo "$machine, $threads threads; fp32 peak $peak"
for reason in "${missing[@]}"; do echo "not measured: $reason"; done
for entry in "${cases[@]}"; do
  for ((round = 1; round <= rounds; ++round)); do
    for precision in "${precisions[@]}"; do
      for program in "${programs[@]}"; do measure "$entry" "$precision" "$program" "$round"; done
    done
  done
  write_results
done
echo
cat "$output/cpu.md"
echo
echo "written: $output/cpu.md $output/cpu.json"
