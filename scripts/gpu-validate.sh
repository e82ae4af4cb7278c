#!/usr/bin/env bash
# Runs every check that needs a GPU: tests, sanitizers, losses against the CPU, benchmarks.
# Writes gpu-validate.json, gpu-validate.md and gpu-validate.log. A stage that fails does not stop the others.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/gpu-validate.sh [--bin DIR] [--device cuda|cpu] [--out DIR] [--budget SECONDS] [--stages LIST] [--commit TEXT]
  --bin DIR          programs built before (nrl-train, gpu_tests, ...); default: builds them, which needs the CUDA
                     toolkit
  --device cpu       the same stages on the CPU at small sizes: tests this script without a GPU
  --out DIR          directory of the results (default: $OUT, else build/gpu-validate)
  --budget SECONDS   total time of all stages (570); later stages are skipped
  --stages LIST      only these, e.g. doctor,kernels,losses-fp32; --stages list prints their names
  --commit TEXT      the commit that was built, outside of a git checkout
Exit code 0: no stage failed; 1: a stage failed; 69: there is no GPU. Missed targets are reported but are not failures.
TEXT
}

# Name, time limit in seconds, description. New checks come before slow ones.
stage_table() {
  cat <<'TEXT'
doctor|30|capabilities of this build and machine
kernels|120|every kernel against the fp64 reference
gradients|45|backward kernels against finite differences
libraries|120|the other GPU tests of the build (gpu_*): communication, cuDNN, ...
losses-fp32|60|20 steps of configs/quickstart.yaml in fp32 against the CPU
losses-bf16|60|the same in bf16
graph|45|20 steps with a CUDA graph: bitwise identical
resume|45|10 steps, a checkpoint, 10 steps: bitwise identical to 20 steps
ranks|60|2 ranks that share the GPU, host-staged
ranks-nccl|60|the same through NCCL (2.30 and later support two ranks on one GPU)
memcheck|60|compute-sanitizer memcheck on small cases
step-1b|75|steps of configs/bench-llama-1b.yaml
step-8b|75|steps of configs/bench-8b-layers.yaml
step-1.5b|60|steps of configs/bench-gpt2-1.5b.yaml, and the time to the first
ops|60|memory-bound kernels against the copy bandwidth
gemm|45|GEMMs
attention|45|attention
torch|150|configs/bench-8b-layers.yaml in PyTorch, in alternation
racecheck|60|compute-sanitizer racecheck on small cases
synccheck|45|compute-sanitizer synccheck on small cases
TEXT
}

device=cuda bin='' out=${OUT:-} budget=570 stages='' commit='' inner=''
while (($#)); do
  case $1 in
    --bin) bin=$(realpath -e "${2:-}") || die 66 "--bin: no such directory"; shift ;;
    --device)
      device=${2:-}
      [[ $device =~ ^(cuda|cpu)$ ]] || die 64 "--device takes cuda or cpu"
      shift
      ;;
    --out) out=$(realpath -m "${2:?}"); shift ;;
    --budget)
      budget=${2:-}
      [[ $budget =~ ^[1-9][0-9]*$ ]] || die 64 "--budget takes seconds"
      shift
      ;;
    --stages) stages=${2:?}; shift ;;
    --commit) commit=${2:?}; shift ;;
    --inner) inner=${2:?}; shift ;; # one stage, started by this script
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 64 ;;
  esac
  shift
done
if [[ $stages == list ]]; then
  stage_table | awk -F'|' '{ printf "%-12s %s\n", $1, $3 }'
  exit 0
fi
for name in ${stages//,/ }; do
  stage_table | grep -q "^$name|" || die 64 "there is no stage $name; --stages list prints them"
done
cd "$root_dir"

# --- the stages: one function each, run in its own process. Exit code 77: skipped. The last line that begins with
# "note: " is the result in the summary.

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

# train NAME RANKS key=value...: 20 steps of the quickstart into $work/NAME.
train() {
  local name=$1 ranks=$2 launch=()
  shift 2
  if ((ranks > 1)); then
    local mpirun
    mpirun=$(find_mpirun) || skip "there is no mpirun"
    mpi_setup "$ranks"
    launch=("$mpirun" "${mpi_run[@]:1}")
  fi
  run "${launch[@]}" "$bin/nrl-train" configs/quickstart.yaml "data.train.data_path=$work/corpus" data.split=null \
    pretrain.val_period=0 pretrain.max_num_steps=20 policy.optimizer.lr=5e-4 policy.scheduler.lr_decay_iters=20 policy.scheduler.lr_warmup_iters=5 \
    checkpointing.enabled=false logger.log_interval=1 logger.progress=plain "logger.log_dir=$work/$name" "${small[@]}" "$@"
}
# same A B TOLERANCE [NORM_TOLERANCE]: compares the losses of two runs.
same() {
  local result code=0
  result=$(awk -v "tolerance=$3" -v "norm_tolerance=${4:-}" -f scripts/compare-losses.awk "$work/$1/metrics.jsonl" \
    "$work/$2/metrics.jsonl") || code=$?
  note "$1 and $2: $result"
  return $code
}
# A run that several stages compare with.
reference() { [[ -s $work/$1/metrics.jsonl ]] || train "$@"; }
other_device() { if on_gpu; then echo device=cpu; else echo device=cpu kernels.isa=baseline; fi; }

# Relative tolerances of losses and gradient norms. Another summation order changes the last bits, and AdamW amplifies
# that. Over six corpora, 20 steps on two instruction sets of one CPU differed by at most 1e-8 and 5e-8 in fp32, and by
# 2e-5 and 1.5e-3 in bf16, where the last bit of fp32 occasionally changes the rounding to bf16. (With the quickstart's
# learning rate, spikes of the gradient norm raised that to 2e-2.) A GPU sums in a third order and has its own exp and
# rsqrt. The fp32 tolerance is far below the effect of any wrong formula; that of bf16 is about the difference between
# bf16 and fp32 on the CPU (9e-4 and 7e-3).
loss32=1e-5 norm32=1e-4 loss16=1e-3 norm16=1e-2

stage_doctor() {
  run "$bin/nrl-train" doctor
  if on_gpu; then run nvidia-smi || true; fi
}
stage_kernels() {
  on_gpu || export NRL_TEST_BACKEND=baseline NRL_TEST_SMALL=4000
  [[ -x $bin/$tests ]] || skip "$tests is not in $bin"
  run "$bin/$tests" test | tee "$work/kernels"
  note "$(grep '^test:' "$work/kernels")"
}
stage_gradients() {
  on_gpu || export NRL_TEST_BACKEND=baseline
  [[ -x $bin/$tests ]] || skip "$tests is not in $bin"
  run "$bin/$tests" grad | tee "$work/gradients"
  note "$(grep '^grad:' "$work/gradients")"
}
stage_libraries() {
  local program mpirun code bad=() good=() skipped=() launch
  on_gpu || skip "needs a GPU"
  for program in "$bin"/gpu_* "$bin"/*_gpu_tests; do
    [[ -x $program && ! $program -ef $bin/gpu_tests ]] || continue
    launch=()
    if [[ $program == *comm* ]] && mpirun=$(find_mpirun); then
      mpi_setup 2
      launch=("$mpirun" "${mpi_run[@]:1}")
    fi
    code=0
    run "${launch[@]}" "$program" || code=$?
    case $code in
      0) good+=("${program##*/}") ;;
      77) skipped+=("${program##*/}") ;;
      *) bad+=("${program##*/} ($code)") ;;
    esac
  done
  ((${#good[@]} + ${#bad[@]} + ${#skipped[@]})) || skip "there are no other GPU tests in $bin"
  note "passed: ${good[*]:-none}; skipped: ${skipped[*]:-none}; failed: ${bad[*]:-none}"
  ((${#bad[@]} == 0))
}
stage_losses-fp32() {
  reference "$device-fp32" 1 "device=$device" policy.precision=float32
  # shellcheck disable=SC2046
  train other-fp32 1 $(other_device) policy.precision=float32
  same "$device-fp32" other-fp32 $loss32 $norm32
}
stage_losses-bf16() {
  reference "$device-bf16" 1 "device=$device" policy.precision=bfloat16 kernels.deterministic=true
  # shellcheck disable=SC2046
  train other-bf16 1 $(other_device) policy.precision=bfloat16
  same "$device-bf16" other-bf16 $loss16 $norm16
}
stage_graph() {
  on_gpu || skip "needs a GPU"
  reference "$device-bf16" 1 "device=$device" policy.precision=bfloat16 kernels.deterministic=true
  train graph 1 device=cuda policy.precision=bfloat16 kernels.deterministic=true policy.cuda_graph=true
  same "$device-bf16" graph 0
}
stage_resume() {
  local half=(checkpointing.enabled=true "checkpointing.checkpoint_dir=$work/resume-checkpoints")
  reference "$device-bf16" 1 "device=$device" policy.precision=bfloat16 kernels.deterministic=true
  train resume 1 "device=$device" policy.precision=bfloat16 kernels.deterministic=true "${half[@]}" pretrain.max_num_steps=10
  train resume 1 "device=$device" policy.precision=bfloat16 kernels.deterministic=true "${half[@]}"
  same "$device-bf16" resume 0
}
two_ranks() {
  reference "$device-fp32" 1 "device=$device" policy.precision=float32
  train "$1" 2 "device=$device" policy.precision=float32 policy.train_micro_batch_size=1 "${@:2}"
  same "$device-fp32" "$1" $loss32 $norm32
}
stage_ranks() {
  if on_gpu; then
    two_ranks staged kernels.share_device=true distributed.backend=staged
  else
    two_ranks mpi distributed.backend=mpi
  fi
}
stage_ranks-nccl() {
  on_gpu || skip "needs a GPU"
  local version
  version=$("$bin/nrl-train" doctor | sed -nE 's/.*NCCL ([0-9]+\.[0-9]+).*/\1/ip' | head -n 1)
  [[ -n $version ]] || skip "doctor names no NCCL"
  awk -v v="$version" 'BEGIN { split(v, p, "."); exit !(p[1] > 2 || p[2] >= 30) }' ||
    skip "NCCL $version does not support two ranks on one GPU (2.30 does)"
  export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=2 NCCL_NVLS_ENABLE=0
  two_ranks nccl kernels.share_device=true distributed.backend=nccl
}
sanitize() {
  on_gpu || skip "needs a GPU"
  local sanitizer code=0
  sanitizer=$(command -v compute-sanitizer || compgen -G '/usr/local/cuda*/bin/compute-sanitizer' | head -n 1) ||
    skip "there is no compute-sanitizer"
  [[ -x $bin/$tests ]] || skip "$tests is not in $bin"
  export NRL_TEST_SMALL=4000
  run "$sanitizer" --tool "$1" --error-exitcode 99 --launch-timeout 30 "$bin/$tests" test >"$work/$1" 2>&1 || code=$?
  tail -n 200 "$work/$1"
  note "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$work/$1" | tail -n 1 | sed 's/^=* *//')"
  return $code
}
stage_memcheck() { sanitize memcheck; }
stage_racecheck() { sanitize racecheck; }
stage_synccheck() { sanitize synccheck; }

# bench NAME BENCHMARK [CONFIG]: writes $work/bench-NAME.json.
bench() {
  local name=$1 size=() model=("${@:3}")
  if ! on_gpu; then
    size=(--quick)
    ((${#model[@]} == 0)) || model=(configs/bench-tiny.yaml "${small[@]}")
  fi
  run "$bin/nrl-train" bench "$2" "${model[@]}" --device "$device" "${size[@]}" --json "$work/bench-$name.json" |
    tee "$work/bench-$name.txt"
}
step_note() {
  note "$(awk '/^step  / { ours = 1 } ours && /^(speed|first step) / { gsub(/ +/, " "); printf "%s%s", separator, $0; separator = "; " }' "$work/bench-$1.txt")"
}
stage_step-1b() { bench step-1b step configs/bench-llama-1b.yaml && step_note step-1b; }
stage_step-8b() { bench step-8b step configs/bench-8b-layers.yaml && step_note step-8b; }
stage_step-1.5b() { bench step-1.5b step configs/bench-gpt2-1.5b.yaml && step_note step-1.5b; }
stage_ops() {
  bench ops ops
  note "$(awk '/"gated":true/ { ++all; share = $0; sub(/.*"fraction_of_copy":/, "", share); if (share + 0 >= 0.85) ++met }
    END { printf "%d of %d kernels at 85 %% of the copy bandwidth or more", met, all }' "$work/bench-ops.json")"
}
stage_gemm() { bench gemm gemm; }
stage_attention() { bench attention attention; }
stage_torch() {
  local python config=configs/bench-8b-layers.yaml extra=(--steps 6 --warmup 3)
  for python in python3 /usr/bin/python3 ''; do
    [[ -n $python ]] || skip "PyTorch is not installed"
    if "$python" -c 'import torch' 2>/dev/null; then break; fi
  done
  on_gpu || { config=configs/bench-tiny.yaml extra=(--steps 3 --warmup 1 "${small[@]}"); }
  run "$python" scripts/bench-gpu-vs-torch.py "$config" --nrl-train "$bin/nrl-train" --device "$device" "${extra[@]}" \
    --json "$work/bench-torch.json" | tee "$work/bench-torch.txt"
  note "$(tail -n 1 "$work/bench-torch.txt")"
}

if [[ -n $inner ]]; then
  # shellcheck disable=SC2154  # of the environment
  read -ra small <<<"$NRL_VALIDATE_SMALL"
  work=$NRL_VALIDATE_WORK bin=$NRL_VALIDATE_BIN tests=$NRL_VALIDATE_TESTS
  "stage_$inner"
  exit
fi

# --- the run

if [[ -z $bin ]]; then
  if [[ $device == cuda ]]; then
    command -v nvcc >/dev/null || die 69 "nvcc was not found. Fix: put the CUDA toolkit's bin on PATH, or give --bin"
    build cuda nrl-train cuda_tests
    bin=$root_dir/build/cuda/bin
  else
    build cpu nrl-train op_tests
    bin=$root_dir/build/cpu/bin
  fi
fi
[[ -x $bin/nrl-train ]] || die 66 "there is no nrl-train in $bin"
tests=gpu_tests
[[ $device == cuda ]] || tests=op_tests
if [[ $device == cuda ]]; then
  why=$(timeout 60 "$bin/nrl-train" bench ops --device cuda --quick --only nothing 2>&1 >/dev/null) ||
    die 69 "there is no GPU to validate: ${why#error: }
--device cpu tests the stages on the CPU"
fi
out=${out:-build/gpu-validate}
mkdir -p "$out"
out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/stages"
"$bin/nrl-train" prepare --input apps core parallel --tokenizer bytes --output "$work/corpus" >"$work/prepare.txt"
small=()
if [[ $device == cpu ]]; then
  small=(policy.model.hidden_size=64 policy.model.intermediate_size=128 policy.model.num_hidden_layers=2
    policy.model.num_attention_heads=4 policy.model.num_key_value_heads=2 policy.train_global_batch_size=4
    policy.train_micro_batch_size=2 policy.max_total_sequence_length=32)
fi
export NRL_VALIDATE_WORK=$work NRL_VALIDATE_BIN=$bin NRL_VALIDATE_TESTS=$tests NRL_VALIDATE_SMALL="${small[*]}"
date=$(date -u +%Y-%m-%dT%H:%M:%SZ)
if [[ -z $commit ]]; then
  commit=$(git rev-parse HEAD 2>/dev/null || echo unknown)
  [[ $commit == unknown || -z $(git status --porcelain --untracked-files=no 2>/dev/null) ]] || commit+=' and changes'
fi
json_text() { awk 'BEGIN { printf "\"" } { gsub(/\\/, "\\\\"); gsub(/"/, "\\\""); gsub(/\t/, "\\t"); gsub(/[\001-\037]/, ""); printf "%s%s", (NR > 1 ? "\\n" : ""), $0 } END { printf "\"" }' <<<"$1"; }

SECONDS=0
failed=0
: >"$work/rows.md"
: >"$work/rows.json"
: >"$work/tails.md"
: >"$out/gpu-validate.log"
while IFS='|' read -r name limit what <&3; do
  [[ -z $stages || ,$stages, == *,$name,* ]] || continue
  log=$work/stages/$name
  began=$SECONDS code=0
  left=$((budget - SECONDS))
  if ((left < 5)); then
    echo "note: the time budget of $budget s is used up" >"$log"
    code=77
  else
    limit=$((limit < left ? limit : left))
    timeout -k 5 "$limit" bash "$here/gpu-validate.sh" --inner "$name" --device "$device" >"$log" 2>&1 </dev/null || code=$?
  fi
  text=$(sed -n 's/^note: //p' "$log" | tail -n 1)
  case $code in
    0) status=pass ;;
    77) status=skip ;;
    124 | 137) status=fail text="timed out after $limit s${text:+; $text}" ;;
    *) status=fail text="exit code $code${text:+; $text}" ;;
  esac
  took=$((SECONDS - began))
  printf '%-12s %-4s %4d s  %s\n' "$name" "$status" "$took" "$text"
  { echo "== $name: $status, $took s"; cat "$log"; echo; } >>"$out/gpu-validate.log"
  echo "| $name | $status | $took | ${what//|/\\|} | ${text//|/\\|} |" >>"$work/rows.md"
  printf '%s{"stage":"%s","status":"%s","seconds":%d,"limit":%d,"note":%s,"commands":%s}' \
    "$([[ ! -s $work/rows.json ]] || printf ',\n')" "$name" "$status" "$took" "$limit" "$(json_text "$text")" \
    "$(json_text "$(sed -n 's/^+ //p' "$log" | sed "s#$work#WORK#g")")" >>"$work/rows.json"
  if [[ $status == fail ]]; then
    failed=$((failed + 1))
    { printf '\n### %s\n\n```\n' "$name"; tail -n 40 "$log"; echo '```'; } >>"$work/tails.md"
  fi
done 3< <(stage_table)

# --- results and targets, for a GPU at full size only. Missing results must not stop the report.
set +e
# first FILE KEY: the first value of a key in a JSON file.
first() { [[ ! -s $1 ]] || awk -v key="$2" -f scripts/metrics.awk "$1" | head -n 1; }
: >"$work/targets"
target() { # NAME RELATION(>= or <=) MINIMUM STRETCH VALUE
  echo "$1|$2|$3|$4|$(! on_gpu || echo "$5")" >>"$work/targets"
}
target "MFU, Llama 1B at 4096 tokens" '>=' 0.48 0.53 "$(first "$work/bench-step-1b.json" mfu)"
target "MFU, layers of Llama 8B at 8192 tokens" '>=' 0.55 0.61 "$(first "$work/bench-step-8b.json" mfu)"
target "first step of 1.5 B parameters after exec, s" '<=' 6 '' "$(first "$work/bench-step-1.5b.json" first_step_s)"
if [[ -s $work/bench-ops.json ]]; then
  while read -r name share; do target "$name, fraction of the copy bandwidth" '>=' 0.85 '' "$share"; done < <(
    awk '/"gated":true/ { name = $0; sub(/.*"name":"/, "", name); sub(/".*/, "", name)
      share = $0; sub(/.*"fraction_of_copy":/, "", share); sub(/[,}].*/, "", share); print name, share }' "$work/bench-ops.json")
fi
target "speed relative to torch.compile, 1.9 B parameters" '>=' 1.10 '' "$(first "$work/bench-torch.json" speed_ratio_compiled)"
target "memory relative to torch.compile, 1.9 B parameters" '<=' 0.7 '' "$(first "$work/bench-torch.json" memory_ratio_compiled)"
awk -F'|' '{
  value = $5 == "" || $5 == "null" ? "null" : $5 + 0
  met = value == "null" ? "null" : (($2 == ">=" ? value >= $3 + 0 : value <= $3 + 0) ? "true" : "false")
  printf "%s{\"target\":\"%s\",\"relation\":\"%s\",\"minimum\":%s,\"stretch\":%s,\"value\":%s,\"met\":%s}", (NR > 1 ? ",\n" : ""), $1, $2, $3, \
    ($4 == "" ? "null" : $4), value, met
}' "$work/targets" >"$work/targets.json"
awk -F'|' '{
  value = $5 == "" || $5 == "null" ? "not measured" : sprintf("%.3f", $5)
  met = value == "not measured" ? "" : (($2 == ">=" ? $5 + 0 >= $3 + 0 : $5 + 0 <= $3 + 0) ? "yes" : "NO")
  printf "| %s | %s %s%s | %s | %s |\n", $1, $2, $3, ($4 == "" ? "" : " (stretch " $4 ")"), value, met
}' "$work/targets" >"$work/targets.md"

facts() { "$bin/nrl-train" doctor 2>&1 || true; }
smi() { nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null || true; }
{
  printf '{"date":"%s","commit":%s,"device":"%s","seconds":%d,"failed":%d,\n' "$date" "$(json_text "$commit")" "$device" "$SECONDS" "$failed"
  printf '"nvidia_smi":%s,\n"doctor":%s,\n' "$(json_text "$(smi)")" "$(json_text "$(facts)")"
  printf '"stages":[\n%s\n],\n"targets":[\n%s\n],\n"benchmarks":{' "$(cat "$work/rows.json")" "$(cat "$work/targets.json")"
  separator=''
  for file in "$work"/bench-*.json; do
    [[ -s $file ]] || continue
    name=${file##*/bench-}
    printf '%s\n"%s":%s' "$separator" "${name%.json}" "$(cat "$file")"
    separator=,
  done
  printf '\n}}\n'
} >"$out/gpu-validate.json"
{
  echo "# Validation on $([[ $device == cuda ]] && echo a GPU || echo 'the CPU (a test of the script; not a result for GPUs)')"
  # shellcheck disable=SC2016  # the backquotes are Markdown's
  printf '\n%s, commit %s, %d s.\n\n```\n%s\n%s\n```\n' "$date" "$commit" "$SECONDS" "$(facts)" "$(smi)"
  printf '\n| stage | status | s | check | result |\n|---|---|---|---|---|\n'
  cat "$work/rows.md"
  printf '\n| target | minimum | measured | met |\n|---|---|---|---|\n'
  cat "$work/targets.md"
  for file in "$work"/bench-*.txt; do
    [[ -s $file ]] || continue
    name=${file##*/bench-}
    printf '\n## %s\n\n```\n' "${name%.txt}"
    grep -v '^+ ' "$file" || true
    echo '```'
  done
  if [[ -s $work/tails.md ]]; then
    printf '\n## Logs of failed stages (last lines)\n'
    cat "$work/tails.md"
  fi
  printf '\n## Commands\n\n```\n'
  sed -n 's/^+ //p' "$out/gpu-validate.log" | sed "s#$work#WORK#g"
  echo '```'
} >"$out/gpu-validate.md"
echo
cat "$work/targets.md"
echo "written: $out/gpu-validate.json $out/gpu-validate.md $out/gpu-validate.log"
((failed == 0)) || die 1 "$failed of the stages failed"
