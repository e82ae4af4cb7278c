#!/usr/bin/env bash
# Benchmarks training on this machine's CPU, in alternation with PyTorch if installed (package python3-torch).
# Writes build/bench/cpu.md and cpu.json.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-cpu.sh [--rounds N] [--steps N] [--case NAME]... [--binary PATH] [--no-torch]
  --rounds N      rounds of nrl-train and PyTorch per case (3); the ratios are medians over the rounds
  --steps N       timed steps per round (5), after two warm-up steps; the median counts
  --case NAME     gpt2-124m-b4-t64, gpt2-124m-b4-t256, gpt2-124m-b1-t1024, llama-17m-b16-t256 (default: all)
  --binary PATH   nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  --no-torch      nrl-train alone
TEXT
}

rounds=3
steps=5
warmup=2
cases=()
binary=
torch=true
while (($#)); do
  case $1 in
    --rounds | --steps)
      take_number "$@"
      shift
      ;;
    --case)
      [[ ${2:-} =~ ^(gpt2-124m|llama-17m)-b([0-9]+)-t([0-9]+)$ ]] || die 64 "--case takes MODEL-bBATCH-tLENGTH; found '${2:-}'"
      cases+=("$2")
      shift
      ;;
    --binary)
      take_program "$@"
      shift
      ;;
    --no-torch) torch=false ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      exit 64
      ;;
  esac
  shift
done
((${#cases[@]})) || cases=(gpt2-124m-b4-t64 gpt2-124m-b4-t256 gpt2-124m-b1-t1024 llama-17m-b16-t256)

cd "$root_dir"
[[ -n $binary ]] || build_binary
out=build/bench
work=$out/work
rm -rf "$work"
mkdir -p "$work"
threads=$(cores)
unset OMP_NUM_THREADS

# PyTorch, with a tuned BLAS: Debian's OpenBLAS does not recognize every virtual processor, and its pthread build
# conflicts with PyTorch's own threads. Untuned it is several times slower, and no ratio is computed.
torch_run=()
torch_note="PyTorch was not measured"
if $torch; then
  if python=$(find_torch); then
    torch_run=(env "OMP_NUM_THREADS=$threads")
    for flag in avx512f:SKYLAKEX avx2:HASWELL; do
      if grep -qm 1 -w "${flag%%:*}" /proc/cpuinfo; then
        torch_run+=("OPENBLAS_CORETYPE=${flag#*:}")
        torch_note="PyTorch with OPENBLAS_CORETYPE=${flag#*:}"
        break
      fi
    done
    blas=$(compgen -G '/usr/lib/*/openblas-openmp/libblas.so.3' | head -n 1 || true)
    if [[ -n $blas ]]; then
      torch_run+=("LD_PRELOAD=$blas")
      torch_note+=" and OpenBLAS's OpenMP build"
    else
      torch_note+="; NOT TUNED: install libopenblas-openmp-dev for the OpenMP BLAS"
    fi
    torch_run+=("$python" scripts/bench/torch_train.py)
  else
    torch_note="PyTorch is not installed (package python3-torch): no comparison"
  fi
fi

# Text for the token files: this tree. A byte vocabulary fits every model.
"$binary" prepare --input apps core parallel --tokenizer bytes --output "$work/corpus" >"$work/prepare.txt"

# Clock ticks of the machine: total and busy.
machine_ticks() { awk '/^cpu / { print $2 + $3 + $4 + $5 + $6 + $7 + $8 + $9, $2 + $3 + $4 + $7 + $8 + $9 }' /proc/stat; }
# Sets own_seconds: processor time of this shell's children so far. (A subshell would report its own.)
child_seconds() {
  times >"$work/times"
  own_seconds=$(awk 'NR == 2 { for (i = 1; i <= 2; ++i) { split($i, t, /[ms]/); s += t[1] * 60 + t[2] } print s }' "$work/times")
}

# run_ours MODEL BATCH LENGTH: sets step_ms, peak_kib, share (MFU) and gemm (percent of the time).
run_ours() {
  local config=configs/$1.yaml log=$work/ours
  rm -rf "$log"
  "$binary" "$config" "data.train.data_path=$work/corpus" data.split=null "policy.train_global_batch_size=$2" \
    "policy.train_micro_batch_size=$2" "policy.max_total_sequence_length=$3" "pretrain.max_num_steps=$((warmup + steps))" \
    policy.scheduler.lr_warmup_iters=0 pretrain.val_period=0 pretrain.val_at_end=false checkpointing.enabled=false \
    policy.precision=float32 "kernels.num_threads=$threads" "logger.log_dir=$log" >"$work/ours.txt" 2>&1 ||
    { cat "$work/ours.txt" >&2; die 70 "nrl-train failed on $1"; }
  # The run's own figure: programs that look at it while it runs would take part of a processor.
  peak_kib=$(sed -nE 's/.*"peak_resident_bytes": ?([0-9]+).*/\1/p' "$log/memory.json" | awk 'NR == 1 { print int($1 / 1024) }')
  step_ms=$(awk -v key=step_ms -f scripts/metrics.awk "$log/metrics.jsonl" | tail -n "+$((warmup + 1))" | median)
  # From the summary's kernel times: percent of the run in GEMMs.
  gemm=$(awk '$1 == "kernels" { for (i = 2; i < NF; i += 2) if ($i ~ /^linear_/) s += $(i + 1) } END { printf "%.1f", s }' "$work/ours.txt")
  share=$(awk -v key=mfu -f scripts/metrics.awk "$log/metrics.jsonl" | tail -n "+$((warmup + 1))" | median)
}

# run_torch MODEL BATCH LENGTH: sets step_ms and peak_kib.
run_torch() {
  "${torch_run[@]}" --model "$1" --batch "$2" --seq "$3" --steps "$steps" --warmup "$warmup" --threads "$threads" \
    >"$work/torch.json" || die 70 "scripts/bench/torch_train.py failed on $1"
  step_ms=$(awk -v key=step_ms -f scripts/metrics.awk "$work/torch.json")
  peak_kib=$(awk -v key=peak_rss_kib -f scripts/metrics.awk "$work/torch.json")
}

doctor=$("$binary" doctor)
machine=$(awk '$1 == "processor" { sub(/^processor +/, ""); print }' <<<"$doctor")
peak_line=$(awk '/^fp32 peak/ { sub(/^fp32 peak +/, ""); print }' <<<"$doctor")
echo "$machine, $threads threads; fp32 peak $peak_line"
echo "$torch_note"

json=$work/rows.json
markdown=$out/cpu.md
: >"$json"
{
  echo "# nrl-train on the CPU"
  echo
  echo "$machine, $threads threads, fp32. Peak: $peak_line. $torch_note."
  echo "Medians of $rounds rounds of $steps steps each, the programs in alternation. Ratios are medians over the rounds:"
  echo "speed above 1 is faster than PyTorch, memory below 1 is less. Others: processor time of other programs."
  echo
  echo "| model, batch x length | tokens/s | ms/step | MFU | time in GEMMs | peak MiB | PyTorch tokens/s | ms/step | peak MiB | speed ratio | memory ratio | others |"
  echo "|---|---|---|---|---|---|---|---|---|---|---|---|"
} >"$markdown"

for entry in "${cases[@]}"; do
  [[ $entry =~ ^(.*)-b([0-9]+)-t([0-9]+)$ ]]
  model=${BASH_REMATCH[1]} batch=${BASH_REMATCH[2]} length=${BASH_REMATCH[3]}
  rm -f "$work/rounds"
  read -r total_before busy_before < <(machine_ticks)
  child_seconds
  own_before=$own_seconds
  for ((round = 1; round <= rounds; ++round)); do
    run_ours "$model" "$batch" "$length"
    row="$step_ms $peak_kib $share $gemm"
    if ((${#torch_run[@]})); then
      run_torch "$model" "$batch" "$length"
      row+=" $step_ms $peak_kib"
    fi
    echo "$row" >>"$work/rounds"
    awk -v name="$entry" -v round="$round" -v tokens="$((batch * length))" '{
      printf "%-20s round %d: %.0f tokens/s, %.1f ms, %.0f MiB", name, round, tokens / $1 * 1e3, $1, $2 / 1024
      if (NF > 4) printf "; PyTorch %.0f tokens/s, %.1f ms, %.0f MiB; speed x %.2f", tokens / $5 * 1e3, $5, $6 / 1024, $5 / $1
      print "" }' <<<"$row"
  done
  read -r total_after busy_after < <(machine_ticks)
  child_seconds
  others=$(awk -v total=$((total_after - total_before)) -v busy=$((busy_after - busy_before)) -v own="$own_seconds" -v was="$own_before" \
    -v hz="$(getconf CLK_TCK)" 'BEGIN { x = total > 0 ? (busy - (own - was) * hz) / total : 0; if (x < 0) x = 0; printf "%.3f", x }')
  column() { awk -v expression="$1" '{ if (expression == "speed") print $5 / $1; else if (expression == "memory") print $2 / $6
    else print $expression }' "$work/rounds" | median; }
  ours_ms=$(column 1) ours_kib=$(column 2) share=$(column 3) gemm=$(column 4)
  torch_ms=null torch_kib=null speed=null memory=null
  if ((${#torch_run[@]})); then
    torch_ms=$(column 5) torch_kib=$(column 6) speed=$(column speed) memory=$(column memory)
  fi
  awk -v entry="$entry" -v model="$model" -v b="$batch" -v t="$length" -v ms="$ours_ms" -v kib="$ours_kib" -v share="$share" -v gemm="$gemm" \
    -v tms="$torch_ms" -v tkib="$torch_kib" -v speed="$speed" -v memory="$memory" -v others="$others" -v json="$json" \
    -v markdown="$markdown" 'BEGIN {
      tokens = b * t
      printf "{\"case\":\"%s\",\"tokens_per_s\":%.2f,\"step_ms\":%s,\"mfu\":%s,\"gemm_time_percent\":%s,\"peak_rss_kib\":%d,", \
        entry, tokens / ms * 1e3, ms, share, gemm, kib >>json
      printf "\"torch_step_ms\":%s,\"torch_peak_rss_kib\":%s,\"speed_ratio\":%s,\"memory_ratio\":%s,\"other_cpu_share\":%s}\n", \
        tms, tkib, speed, memory, others >>json
      peer = tms == "null" ? "– | – | – | – | –" : \
        sprintf("%.0f | %.0f | %.0f | %.2f | %.2f", tokens / tms * 1e3, tms, tkib / 1024, speed, memory)
      if (others > 0.05) print "  other programs used " int(others * 100 + 0.5) " % of the processor: repeat on an idle machine"
      printf "| %s %dx%d | %.0f | %.0f | %.0f %% | %.0f %% | %.0f | %s | %.0f %% |\n", model, b, t, tokens / ms * 1e3, ms, share * 100, gemm, \
        kib / 1024, peer, others * 100 >>markdown
    }'
done

escape() { sed 's/\\/\\\\/g; s/"/\\"/g' <<<"$1"; }
{
  printf '{"processor":"%s","threads":%d,"peak":"%s","torch":"%s","rounds":%d,"steps":%d,"cases":[\n' "$(escape "$machine")" \
    "$threads" "$(escape "$peak_line")" "$(escape "$torch_note")" "$rounds" "$steps"
  sed '$!s/$/,/' "$json"
  echo ']}'
} >"$out/cpu.json"
rm -rf "$work"
echo
cat "$markdown"
echo
echo "written: $markdown $out/cpu.json"
