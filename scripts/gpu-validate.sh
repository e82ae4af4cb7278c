#!/usr/bin/env bash
# Runs the checks and benchmarks that need a GPU, in calls that fit a limit of ten minutes. Results are written after
# every stage; a stage that fails does not stop the others.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/gpu-validate/table.sh"
source "$(dirname "${BASH_SOURCE[0]}")/gpu-validate/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/gpu-validate/checks.sh"
source "$(dirname "${BASH_SOURCE[0]}")/gpu-validate/benches.sh"

usage() {
  cat <<'TEXT'
usage: scripts/gpu-validate.sh [--call 1..5] [--bin DIR] [--device cuda|cpu] [--out DIR] [--budget SECONDS]
                               [--merge OLD.json]... [--stages LIST] [--commit TEXT]
  --call N           only the stages of call N: 1 speed and losses, 2 PyTorch and kernels, 3 sanitizers of attention,
                     profiles and variants, 4 other variants, 5 big sizes and the other sanitizers; default: all stages
  --bin DIR          programs built before (nrl-train, gpu_tests, ...); default: builds them, which needs the CUDA
                     toolkit and is not counted
  --device cpu       the same stages on the CPU at small sizes: tests this script without a GPU
  --out DIR          directory of the results (default: $OUT, else build/gpu-validate)
  --budget SECONDS   total time (480), counted from the start of this process, which may have been another program
                     before; later stages are skipped
  --merge OLD.json   keep the results of an earlier call. Stages that passed with the same programs are not repeated
                     unless --stages names them
  --stages LIST      only these, in this order, e.g. doctor,kernels,losses-fp32; --stages list prints call, name and
                     description
  --commit TEXT      the commit that was built, outside of a git checkout
Exit code 0: no stage of this call failed; 1: a stage failed; 69: there is no GPU, or no python3. Missed targets are
reported but are not failures.
TEXT
}

device=cuda bin='' out=${OUT:-} budget=480 stages='' call='' commit='' inner='' merge=()
while (($#)); do
  case $1 in
    --bin) bin=$(realpath -e "${2:-}") || die 66 "--bin: no such directory"; shift ;;
    --device)
      device=${2:-}
      [[ $device =~ ^(cuda|cpu)$ ]] || die 64 "--device takes cuda or cpu"
      shift
      ;;
    --call)
      call=${2:-}
      [[ $call =~ ^[1-5]$ ]] || die 64 "--call takes 1, 2, 3, 4 or 5"
      shift
      ;;
    --out) out=$(realpath -m "${2:?}"); shift ;;
    --budget)
      budget=${2:-}
      [[ $budget =~ ^[1-9][0-9]*$ ]] || die 64 "--budget takes seconds"
      shift
      ;;
    --merge) merge+=("$(realpath -e "${2:-}")") || die 66 "--merge: no such file"; shift ;;
    --stages) stages=${2:?}; shift ;;
    --commit) commit=${2:?}; shift ;;
    --inner) inner=${2:?}; shift ;; # one stage, started by this script
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 64 ;;
  esac
  shift
done
if [[ $stages == list ]]; then
  list_stages
  exit 0
fi
for name in ${stages//,/ }; do
  stage_table | grep -q "^$name|" || die 64 "there is no stage $name; --stages list prints them"
done
cd "$root_dir"

if [[ -n $inner ]]; then
  # shellcheck disable=SC2154  # of the environment
  read -ra small <<<"$NRL_VALIDATE_SMALL"
  # shellcheck disable=SC2034  # used by the stages
  work=$NRL_VALIDATE_WORK bin=$NRL_VALIDATE_BIN tests=$NRL_VALIDATE_TESTS programs=$NRL_VALIDATE_PROGRAMS
  case $inner in
    step-*) step "$inner" ;;
    profile-*) profile "$inner" ;;
    ncu-*) counters "$inner" ;;
    memcheck-* | racecheck-* | synccheck-*) sanitize "$inner" ;;
    *) "stage_$inner" ;;
  esac
  exit
fi

# Seconds since this process began, which was a caller that unpacked programs if it then used `exec`; at most 5 minutes,
# so that the age of an interactive shell does not count.
process_age() {
  awk -v ticks="$(getconf CLK_TCK)" 'NR == FNR { sub(/.*\) /, ""); start = $20; next }
    { age = start > 0 ? int($1 - start / ticks) : 0; print (age > 0 && age < 300 ? age : 0) }' "/proc/$$/stat" /proc/uptime 2>/dev/null || echo 0
}
SECONDS=$(process_age)

command -v python3 >/dev/null || die 69 "python3 was not found, which writes the results"
if [[ -z $bin ]]; then
  if [[ $device == cuda ]]; then
    command -v nvcc >/dev/null || die 69 "nvcc was not found. Fix: put the CUDA toolkit's bin on PATH, or give --bin"
    build cuda nrl-train cuda_tests
    bin=$root_dir/build/cuda/bin
  else
    build cpu nrl-train op_tests
    bin=$root_dir/build/cpu/bin
  fi
  SECONDS=0
fi
[[ -x $bin/nrl-train ]] || die 66 "there is no nrl-train in $bin"
tests=gpu_tests
[[ $device == cuda ]] || tests=op_tests

out=${out:-build/gpu-validate}
mkdir -p "$out"
out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for i in "${!merge[@]}"; do cp "${merge[i]}" "$work/merge-$((100 + i)).json"; done
stage_table >"$work/table"
date=$(date -u +%Y-%m-%dT%H:%M:%SZ)
if [[ -z $commit ]]; then
  commit=$(git rev-parse HEAD 2>/dev/null || echo unknown)
  [[ $commit == unknown || -z $(git status --porcelain --untracked-files=no 2>/dev/null) ]] || commit+=' and changes'
fi
programs=$(cksum <"$bin/nrl-train" | tr ' ' -)-$device
report() { # MODE [STAGE]
  python3 "$here/gpu-validate/report.py" "$1" --work "$work" --out "$out" --device "$device" --commit "$commit" --date "$date" \
    --programs "$programs" --call "${call:-0}" --seconds "$SECONDS" "${@:2}"
}
passed=,$(report passed),

if [[ $device == cuda ]]; then
  code=0
  probe=$((budget / 8))
  why=$(timeout -k 5 "$probe" "$bin/nrl-train" bench ops --device cuda --quick --only nothing 2>&1 >/dev/null) || code=$?
  case $code in
    0) ;;
    124 | 137) echo "note: the probe of the GPU did not end within $probe s; the stages will tell" ;;
    69) die 69 "there is no GPU to validate: ${why#error: }
--device cpu tests the stages on the CPU" ;;
    *) die 1 "the probe of the GPU failed with exit code $code: $why" ;;
  esac
fi
"$bin/nrl-train" prepare --input apps core parallel --tokenizer bytes --output "$work/corpus" >"$work/prepare.txt"
timeout 30 "$bin/nrl-train" doctor >"$work/doctor.txt" 2>&1 || true
timeout 30 nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader >"$work/smi.txt" 2>/dev/null || true
small=()
if [[ $device == cpu ]]; then
  small=(policy.model.hidden_size=64 policy.model.intermediate_size=128 policy.model.num_hidden_layers=2
    policy.model.num_attention_heads=4 policy.model.num_key_value_heads=2 policy.train_global_batch_size=4
    policy.train_micro_batch_size=2 policy.max_total_sequence_length=32)
fi
export NRL_VALIDATE_WORK=$work NRL_VALIDATE_BIN=$bin NRL_VALIDATE_TESTS=$tests NRL_VALIDATE_SMALL="${small[*]}" NRL_VALIDATE_PROGRAMS=$programs

# finish NAME LIMIT STATUS TEXT BEGAN: records a stage and rewrites the results.
mkdir "$work/stages"
failed=0
finish() {
  local took=$((SECONDS - $5))
  mv "$out/running.log" "$work/stages/$1.log"
  printf '%s\t%s\t%d\t%d\t%s\t%s\n' "$1" "$3" "$took" "$2" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "${4//$'\t'/ }" >>"$work/done"
  printf '%-21s %-4s %4d s  %s\n' "$1" "$3" "$took" "$4"
  [[ $3 != fail ]] || failed=$((failed + 1))
  report write
}
child=''
interrupted() {
  trap '' TERM INT HUP
  if [[ -n $child ]]; then
    kill "$child" 2>/dev/null || true
    finish "$name" "$limit" fail "interrupted by SIG$1" "$began"
  fi
  exit "$2"
}
trap 'interrupted TERM 143' TERM
trap 'interrupted INT 130' INT
trap 'interrupted HUP 129' HUP

# Left for the end of a stage that does not stop by itself, and for the results.
reserve=8
while IFS='|' read -r name number limit _ <&3; do
  least=${limit#*/} limit=${limit%/*}
  [[ $least != "$limit" ]] || least=$((limit / 4))
  if [[ -n $stages ]]; then
    : # named: repeated, even if it has passed
  elif [[ -n $call && $number != "$call" ]]; then
    continue
  elif [[ $passed == *,$name,* ]]; then
    printf '%-21s passed in an earlier call\n' "$name"
    continue
  fi
  began=$SECONDS code=0
  left=$((budget - reserve - SECONDS))
  # The results of a stage that gets too little time are worth less than those of a shorter one behind it.
  if ((left < 5 || left < least)); then
    echo "note: $((left > 0 ? left : 0)) s of the budget of $budget s are left" >"$out/running.log"
    finish "$name" "$limit" skip "$((left > 0 ? left : 0)) s of the budget of $budget s are left" "$began"
    continue
  fi
  limit=$((limit < left ? limit : left))
  : >"$out/running.log"
  report write --running "$name"
  timeout -k 5 "$limit" bash "$here/gpu-validate.sh" --inner "$name" --device "$device" --out "$out" >"$out/running.log" 2>&1 </dev/null &
  child=$!
  wait "$child" || code=$?
  child=''
  text=$(sed -n 's/^note: //p' "$out/running.log" | tail -n 1)
  case $code in
    0) status=pass ;;
    77) status=skip ;;
    124 | 137) status=fail text="timed out after $limit s${text:+; $text}" ;;
    *) status=fail text="exit code $code${text:+; $text}" ;;
  esac
  finish "$name" "$limit" "$status" "$text" "$began"
done 3< <(if [[ -n $stages ]]; then rows_of "${stages//,/ }"; else stage_table; fi)
report write
report targets
echo "written: $out/gpu-validate.json $out/gpu-validate.md $out/gpu-validate.log"
((failed == 0)) || die 1 "$failed of the stages failed"
