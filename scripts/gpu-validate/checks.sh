# shellcheck shell=bash
# shellcheck disable=SC2154  # device, bin, tests, work: of gpu-validate.sh
# The stages that compare results; sourced.

# Of a run to compare with. AMX multiplies in an order of its own, and few machines have it: beside a GPU the CPU does not use
# it, so that a difference is the GPU's.
other_device() {
  local isa=''
  if ! on_gpu; then
    isa=baseline
  elif "$bin/nrl-train" doctor | grep -q '^kernels  *avx512_amx'; then
    isa=avx512_bf16
  fi
  echo "device=cpu ${isa:+kernels.isa=$isa}"
}

# Relative tolerances of losses and gradient norms. Another summation order changes the last bits, and AdamW amplifies
# that. Over six corpora, 20 steps on two instruction sets of one CPU differed by at most 1e-8 and 5e-8 in fp32, and by
# 2e-5 and 1.5e-3 in bf16, where the last bit of fp32 occasionally changes the rounding to bf16. (With the quickstart's
# learning rate, spikes of the gradient norm raised that to 2e-2.) A GPU sums in a third order and has its own exp and
# rsqrt. The fp32 tolerance is far below the effect of any wrong formula; that of bf16 is about the difference between
# bf16 and fp32 on the CPU (9e-4 and 7e-3).
loss32=1e-5 norm32=1e-4 loss16=1e-3 norm16=1e-2
# The first 5 steps in other formats, by three seeds on two instruction sets: at most 3e-6 and 5e-5 in fp16, and in FP8,
# where a number at the middle of two moves by up to 2^-3, 1.2e-4 and 3e-3. The formats themselves differ more: the
# losses of two recipes by 6e-4 to 1.6e-3, bf16 and fp16 by 2.4e-3. A GPU also rounds to 16 bits in other places.
loss_fp16=3e-4 norm_fp16=3e-3 loss_fp8=1e-3 norm_fp8=2e-2
# Percent between the last 10 losses of 100 steps in bf16 and in another format. On a CPU, by two seeds: -0.16 and -0.08 in
# fp16, -0.06 (blockwise), +0.19 and +0.35 (tensorwise), +0.24 (delayed).
near_percent=1

stage_doctor() {
  run "$bin/nrl-train" doctor
  if on_gpu; then run nvidia-smi || true; fi
}
stage_smoke() {
  local attention
  train smoke 1 configs/quickstart.yaml "device=$device" pretrain.max_num_steps=5 policy.scheduler.lr_decay_iters=5 \
    policy.scheduler.lr_warmup_iters=1 | tee "$work/smoke.txt"
  attention=$(banner_line attention <"$work/smoke.txt")
  note "attention: ${attention:-not named}; loss$(awk -v key=loss -f scripts/metrics.awk "$work/smoke/metrics.jsonl" |
    awk '{ printf " %.3f", $1 }')"
  # On a GPU the banner names the kernel: with our own instead of cuDNN's training is far slower.
  ! on_gpu || [[ -n $attention ]]
}
# op_cases_of SHARD MODE [FILTER]: one process that runs some of the cases. A kernel that faults makes the device unusable for
# its process: the other ops run in another one.
op_cases_of() {
  local code=0 lost filter=${3:-} log=$work/cases-${1//\//-} # a process writes its own
  export NRL_TEST_SHARD=$1
  while :; do
    run "$bin/$tests" "$2" ${filter:+"$filter"} >"$log" || code=$?
    cat "$log"
    lost=$(sed -nE 's/^lost: ([a-z_0-9]+).*/\1/p' "$log")
    [[ -n $lost && $filter =~ ^(-|$) && ! ,${filter#-}, == *,$lost,* ]] || return $code
    filter=-${filter#-}${filter:+,}$lost
  done
}
# op_cases PROCESSES MODE [FILTER]
op_cases() {
  on_gpu || export NRL_TEST_BACKEND=baseline NRL_TEST_SMALL=500
  [[ -x $bin/$tests ]] || skip "$tests is not in $bin"
  local code=0 i children=() outputs=()
  for ((i = 0; i < $1; ++i)); do
    outputs+=("$work/all-cases-$i")
    op_cases_of "$i/$1" "${@:2}" >"$work/all-cases-$i" &
    children+=($!)
  done
  for i in "${children[@]}"; do wait "$i" || code=$?; done
  cat "${outputs[@]}"
  note "$({ grep -hE '^(FAILED|left out)' "${outputs[@]}" | head -n 2; grep -hE "^(lost|$2):" "${outputs[@]}"; } | sum_of_cases | paste -sd ';')"
  return $code
}
# Joins the summaries of processes ("test: 17 runs, worst error / tolerance 0.07 (NAME)") into one with all runs and the worst.
sum_of_cases() {
  awk '!/^(test|grad|big): [0-9]+ /{ print; next }
    { runs += $2; value = $0; sub(/^[^,]*,[^0-9]*/, "", value); if (!n++ || value + 0 > worst) { worst = value + 0; line = $0 } }
    END { if (n) { sub(/ [0-9]+ /, " " runs " ", line); print line } }'
}
# Each has a context on the device; references are computed by one thread.
op_processes() {
  local n
  n=$(($(cores) / 2))
  if ! on_gpu; then n=2; fi
  echo $((n < 1 ? 1 : n > 8 ? 8 : n))
}
stage_attention-ops() { op_cases "$(op_processes)" test attention; }
stage_kernels-small() { NRL_TEST_SMALL=100000 op_cases "$(op_processes)" test -attention; }
stage_kernels() { op_cases "$(op_processes)" test -attention; }
stage_gradients() { op_cases 1 grad; }
stage_big() {
  on_gpu || export NRL_TEST_BIG=100000
  op_cases 1 big
}
# The kernels of the CPU: on a machine with instructions that others lack they are proven here only.
stage_cpu-kernels() {
  local isa code=0 results=() wrong=()
  [[ -x $bin/op_tests ]] || skip "op_tests is not in $bin"
  export NRL_TEST_SMALL=100000
  if ! on_gpu; then NRL_TEST_SMALL=500; fi
  for isa in avx512_amx avx512_bf16 avx512 avx2; do
    code=0
    NRL_TEST_BACKEND=$isa NRL_TEST_ONCE=1 run "$bin/op_tests" test >"$work/cpu-$isa" || code=$?
    tail -n 50 "$work/cpu-$isa"
    ((code == 77)) || results+=("$isa: $(grep '^test:' "$work/cpu-$isa" | sed 's/^test: //')")
    ((code == 0 || code == 77)) || wrong+=("$isa")
  done
  note "$(IFS=';' && echo "${results[*]}")${wrong[*]:+; failed: ${wrong[*]}}"
  ((${#wrong[@]} == 0))
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

reference_fp32() { reference "$device-fp32" "device=$device" policy.precision=float32; }
reference_bf16() { reference "$device-bf16" "device=$device" policy.precision=bfloat16 policy.logits_dtype=bfloat16 kernels.deterministic=true; }
stage_losses-fp32() {
  reference_fp32
  # shellcheck disable=SC2046
  quickstart other-fp32 1 $(other_device) policy.precision=float32
  same "$device-fp32" other-fp32 $loss32 $norm32
}
stage_losses-bf16() {
  reference_bf16
  # shellcheck disable=SC2046
  quickstart other-bf16 1 $(other_device) policy.precision=bfloat16 policy.logits_dtype=bfloat16
  same "$device-bf16" other-bf16 $loss16 $norm16
}
# Sets the array model to sizes that all recipes take.
low_precision_model() {
  if on_gpu; then
    model=(policy.model.hidden_size=256 policy.model.num_attention_heads=4)
  else
    model=(policy.model.hidden_size=128 policy.model.intermediate_size=256 policy.model.num_attention_heads=2
      policy.model.num_key_value_heads=1 policy.train_micro_batch_size=4)
  fi
  model+=(policy.precision=bfloat16)
}
# low_precision NAME LOSS NORM key=value...: 100 steps in another format. The last losses are compared with those in bf16; the
# first steps with the CPU, which computes in the same format, within the tolerances LOSS and NORM.
low_precision() {
  local steps=100 name=$1 first=5 model ends begins code=0
  low_precision_model
  reference "$device-bf16-$steps" "device=$device" "${model[@]}"
  quickstart "$name" 1 "device=$device" "${model[@]}" "${@:4}"
  # shellcheck disable=SC2046
  quickstart "other-$name" 1 $(other_device) "${model[@]}" "${@:4}" pretrain.max_num_steps=$first
  ends=$(near "$device-bf16-$steps" "$name" $near_percent) || code=1
  begins=$(compare <(head -n $first "$work/$name/metrics.jsonl") "$work/other-$name/metrics.jsonl" "$2" "$3") || code=1
  note "bf16 and $name, $ends; other-$name: $begins"
  return $code
}
stage_losses-float16() { low_precision float16 $loss_fp16 $norm_fp16 policy.precision=float16; }
# PyTorch is code that we did not write: the only check of a formula that CPU and GPU share.
stage_torch-losses() {
  local python precision code=0 notes=() out
  python=$(find_torch) || skip "PyTorch is not installed"
  for precision in float32 bfloat16; do
    out=$(NRL_PYTHON=$python run scripts/check-parity.sh --device "$device" --precision $precision "$bin/nrl-train" gpt2 llama) || code=1
    echo "$out"
    notes+=("$precision: $(grep ': worst' <<<"$out" | paste -sd ';')")
  done
  note "$(IFS=';' && echo "${notes[*]}")"
  return $code
}

# Sets the array fp8 to the keys of a recipe.
fp8_recipe() {
  fp8=(policy.fp8_cfg.enabled=true "policy.fp8_cfg.fp8_recipe=$1")
  [[ $1 != delayed ]] || fp8+=(policy.fp8_cfg.fp8_amax_history_len=16 policy.fp8_cfg.fp8_amax_compute_algo=max)
}
fp8_losses() {
  local fp8
  fp8_recipe "$1"
  low_precision "fp8-$1" $loss_fp8 $norm_fp8 "${fp8[@]}"
}
stage_losses-fp8-tensorwise() { fp8_losses tensorwise; }
stage_losses-fp8-delayed() { fp8_losses delayed; }
stage_losses-fp8-blockwise() { fp8_losses blockwise; }

stage_offload() {
  local keys=("device=$device" policy.precision=bfloat16 policy.logits_dtype=bfloat16 kernels.deterministic=true
    policy.offload_activations=true policy.offload_optimizer=true)
  reference_bf16
  quickstart offload 1 "${keys[@]}"
  same "$device-bf16" offload 0
  on_gpu || return 0
  quickstart offload-graph 1 "${keys[@]}" policy.cuda_graph=true
  same "$device-bf16" offload-graph 0
}
stage_graph() {
  on_gpu || skip "needs a GPU"
  reference_bf16
  quickstart graph 1 device=cuda policy.precision=bfloat16 policy.logits_dtype=bfloat16 kernels.deterministic=true policy.cuda_graph=true
  same "$device-bf16" graph 0
}
stage_resume() {
  local half=("device=$device" policy.precision=bfloat16 policy.logits_dtype=bfloat16 kernels.deterministic=true checkpointing.enabled=true
    "checkpointing.checkpoint_dir=$work/resume-checkpoints")
  reference_bf16
  quickstart resume 1 "${half[@]}" pretrain.max_num_steps=10
  quickstart resume 1 "${half[@]}"
  same "$device-bf16" resume 0
}
two_ranks() {
  reference_fp32
  quickstart "$1" 2 "device=$device" policy.precision=float32 policy.train_micro_batch_size=1 "${@:2}"
  same "$device-fp32" "$1" $loss32 $norm32
}
stage_ranks() {
  if on_gpu; then
    two_ranks staged kernels.share_device=true distributed.backend=staged
  else
    two_ranks mpi distributed.backend=mpi
  fi
}
stage_ranks-optim() {
  local backend=(distributed.backend=mpi)
  ! on_gpu || backend=(kernels.share_device=true distributed.backend=staged)
  two_ranks optim "${backend[@]}" distributed.shard_strategy=optim distributed.overlap_param_gather=true
}
# NCCL's MAJOR.MINOR from the output of doctor; nothing without NCCL.
nccl_version() { sed -nE 's/^nccl +([0-9]+\.[0-9]+).*/\1/p' | head -n 1; }
stage_ranks-nccl() {
  on_gpu || skip "needs a GPU"
  local version
  version=$("$bin/nrl-train" doctor | nccl_version)
  [[ -n $version ]] || skip "doctor names no NCCL"
  awk -v v="$version" 'BEGIN { split(v, p, "."); exit !(p[1] > 2 || p[2] >= 30) }' ||
    skip "NCCL $version does not support two ranks on one GPU (2.30 does)"
  export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=2 NCCL_NVLS_ENABLE=0
  two_ranks nccl kernels.share_device=true distributed.backend=nccl
}

# sanitize TOOL-GROUP: compute-sanitizer on the small cases of some ops. Library kernels are not instrumented: racecheck
# reports hazards in them that are none, and they take most of the time. The mangled names of ours contain "nrl".
sanitize() {
  on_gpu || skip "needs a GPU"
  local tool=${1%%-*} cases sanitizer filter code=0
  case ${1#*-} in
    attention) cases=attention ;;
    norm) cases=norm,qk,rope ;;
    rest) cases=-attention,norm,qk,rope ;;
  esac
  sanitizer=$(find_tool compute-sanitizer) || skip "there is no compute-sanitizer"
  [[ -x $bin/$tests ]] || skip "$tests is not in $bin"
  # Toolkits before 13 have the option under another name.
  filter=(--kernel-name kernel_substring=nrl)
  "$sanitizer" --help 2>&1 | grep -- --kernel-name >/dev/null || filter=(--kernel-regex kns=nrl)
  export NRL_TEST_SMALL=4000 NRL_TEST_ONCE=1
  run "$sanitizer" --tool "$tool" "${filter[@]}" --print-limit 50 --error-exitcode 99 --launch-timeout 30 \
    "$bin/$tests" test "$cases" >"$work/sanitizer" 2>&1 || code=$?
  head -n 1 "$work/sanitizer"
  tail -n 200 "$work/sanitizer"
  note "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$work/sanitizer" | tail -n 1 | sed 's/^=* *//')"
  return $code
}
