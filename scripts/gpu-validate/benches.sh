# shellcheck shell=bash
# shellcheck disable=SC2154  # device, bin, out, work, small: of gpu-validate.sh
# The stages that measure; sourced. A stage NAME leaves $work/bench-NAME.json and $work/bench-NAME.txt, which become part
# of the results even if it is stopped later.

# Runs a command while clocks and power are recorded; appends their summary to FILE.
with_clocks() { # FILE COMMAND...
  local file=$1 monitors=() code=0
  shift
  if on_gpu && command -v nvidia-smi >/dev/null; then
    nvidia-smi dmon -s pc -d 1 >"$work/dmon" 2>/dev/null &
    monitors=($!)
    # 0x1 is an idle GPU, 0x4 the power limit, 0x8 and above heat and hardware.
    nvidia-smi --query-gpu=clocks_event_reasons.active --format=csv,noheader -l 1 >"$work/reasons" 2>/dev/null &
    monitors+=($!)
  fi
  run "$@" | tee "$file" || code=$?
  if ((${#monitors[@]})); then
    kill "${monitors[@]}" 2>/dev/null || true
    wait "${monitors[@]}" 2>/dev/null || true
    awk -f scripts/gpu-validate/dmon.awk "$work/dmon" | tee -a "$file"
    awk -F', ' '$1 ~ /^0x/ && $1 !~ /^0x0*1?$/ { n[$1]++ } END { for (r in n) printf "slowed      reasons %s (clocks_event_reasons.active) in %d of %d samples\n", r, n[r], NR }' \
      "$work/reasons" | tee -a "$file"
  fi
  return $code
}
# bench NAME BENCHMARK [ARGUMENT...]
bench() {
  local name=$1 size=()
  on_gpu || size=(--quick)
  with_clocks "$work/bench-$name.txt" "$bin/nrl-train" bench "${@:2}" --device "$device" "${size[@]}" --json "$work/bench-$name.json"
}
step_note() {
  note "$(awk '/^(speed|memory|offload|first step|clocks|slowed) / { gsub(/ +/, " "); printf "%s%s", separator, $0; separator = "; " }' "$work/bench-$1.txt")"
}

# model_of NAME: the configuration of a stage's model.
model_of() {
  case $1 in
    *-1.5b*) echo configs/bench-gpt2-1.5b.yaml ;;
    *-1b*) echo configs/bench-llama-1b.yaml ;;
    *) echo configs/bench-8b-layers.yaml ;;
  esac
}
# The name that --predict has for this GPU; nothing for others.
gpu_model() {
  case $(cat "$work/smi.txt" 2>/dev/null) in
    *GH200* | *GB200* | *PCIe* | *NVL*) ;;
    *H200*) echo h200 ;;
    *H100*) echo h100 ;;
    *B200*) echo b200 ;;
    *A100*) echo a100 ;;
  esac
}
# variant_of STAGE: sets the array overrides to the keys of step-MODEL-VARIANT.
variant_of() {
  overrides=()
  case $1 in
    *-autotune) overrides=(kernels.autotune=true "kernels.gemm_tuning=$out/gemm-tuning") ;;
    *-fp8 | *-fp8-delayed | *-fp8-blockwise)
      local fp8 recipe=${1##*-}
      fp8_recipe "${recipe/#fp8/tensorwise}"
      overrides=("${fp8[@]}")
      ;;
    # About 29 kB per token and layer: at 50 GB/s 0.6 us, and a layer's forward pass takes 0.8 us per token at 650 TFLOP/s.
    *-offload)
      overrides=(policy.recompute.granularity=selective "policy.recompute.modules=[norm,activation]"
        policy.offload_activations=true "policy.offload_modules=[input,qkv,core_attn]")
      ;;
    *-recompute) overrides=(policy.recompute.granularity=selective) ;;
    *-graph) overrides=(policy.cuda_graph=true) ;;
    *-8b-micro4) overrides=(policy.train_global_batch_size=16) ;;
    *-1b-micro4) overrides=(policy.train_global_batch_size=32) ;;
  esac
}
# step STAGE: `bench step` of step-MODEL or step-MODEL-VARIANT.
step() {
  local config gpu='' overrides model=()
  config=$(model_of "$1")
  variant_of "$1"
  if ! on_gpu; then
    [[ $1 == *-recompute || $1 == *-micro4 || $1 == *-fp8* || $1 == *-offload ]] || overrides=() # the others are of GPUs only
    [[ $1 != *-fp8* ]] || low_precision_model
    config=configs/bench-tiny.yaml overrides=("${small[@]}" "${model[@]}" "${overrides[@]}")
  fi
  on_gpu && gpu=$(gpu_model)
  bench "$1" step "$config" "${overrides[@]}" --steps 8 ${gpu:+--predict "$gpu"}
  step_note "$1"
}
ops_note() {
  note "$(awk '/"gated":true/ { ++all; share = $0; sub(/.*"fraction_of_copy":/, "", share); if (share + 0 >= 0.85) ++met }
    END { printf "%d of %d kernels at 85 %% of the copy bandwidth or more", met, all }' "$work/bench-$1.json")"
}
stage_ops() { bench ops ops && ops_note ops; }
stage_ops-32k() { bench ops-32k ops --tokens 32768 && ops_note ops-32k; }
stage_gemm() { bench gemm gemm; }
stage_attention() { bench attention attention; }

# profile STAGE: trains 6 steps and traces the fifth; device times of every op, and the trace itself in $out.
profile() {
  local config
  config=$(model_of "$1")
  on_gpu || config=configs/bench-tiny.yaml
  train "$1" 1 "$config" "device=$device" pretrain.max_num_steps=6 profiling.enabled=true profiling.steps=5:6 | tee "$work/$1.txt"
  cp "$work/$1/profile/step-5/rank-0.pftrace" "$work/trace"
  # What comes back from a machine is limited; the table below does not need the trace.
  if (($(stat -c %s "$work/trace") < 4000000)); then mv "$work/trace" "$out/trace-$1.pftrace"; fi
  python3 "$here/gpu-validate/ops_table.py" "$work/$1/profile/step-5/profile.json" >"$work/bench-$1.txt"
  cat "$work/bench-$1.txt"
  local attention
  attention=$(banner_line attention <"$work/$1.txt")
  note "attention: ${attention:-not named}; $(head -n 1 "$work/bench-$1.txt")"
}

# counters STAGE: Nsight Compute on two launches of a named kernel. The clocks stay as they are.
counters() {
  local ncu kernel benchmark
  on_gpu || skip "needs a GPU"
  ncu=$(find_tool ncu || compgen -G '/opt/nvidia/nsight-compute/*/ncu' | head -n 1 | grep .) || skip "there is no ncu"
  case $1 in
    ncu-norm) kernel=norm_rows_backward benchmark=(ops --only rms_norm_backward) ;;
    ncu-loss) kernel=row_kernel benchmark=(ops --only cross_entropy_with_gradient) ;;
    ncu-qk) kernel=qk_backward benchmark=(ops --only qk_norm_rope_backward) ;;
    ncu-attention) kernel=mma_backward benchmark=(attention --only '8b t1024') ;;
  esac
  run "$ncu" --clock-control none --kernel-name "regex:$kernel" --launch-count 2 --kill yes --section SpeedOfLight \
    --section LaunchStats --section Occupancy --section MemoryWorkloadAnalysis --section WarpStateStats \
    "$bin/nrl-train" bench "${benchmark[@]}" --device cuda >"$work/bench-$1.txt" 2>&1 || true
  cat "$work/bench-$1.txt"
  note "$(awk '/(Duration|Memory Throughput|DRAM Throughput|Compute \(SM\) Throughput|Achieved Occupancy) / {
    key = $0; sub(/^ +/, "", key); sub(/  .*/, "", key); if (seen[key]++) next; printf "%s%s %s %s", separator, key, $NF, $(NF - 1); separator = "; " }' \
    "$work/bench-$1.txt")"
  grep -q Duration "$work/bench-$1.txt"
}

# torch_stage STAGE [OPTION...]
torch_stage() {
  local python config extra=(--steps 6 --warmup 3)
  config=$(model_of "$1")
  python=$(find_torch) || skip "PyTorch is not installed"
  on_gpu || { config=configs/bench-tiny.yaml extra=(--steps 3 --warmup 1 "${small[@]}"); }
  run python3 scripts/bench-gpu-vs-torch.py "$config" --python "$python" --nrl-train "$bin/nrl-train" --device "$device" "${extra[@]}" \
    "${@:2}" --json "$work/bench-$1.json" | tee "$work/bench-$1.txt"
  note "$(tail -n 1 "$work/bench-$1.txt")"
  ! tail -n 1 "$work/bench-$1.txt" | grep -q '^PyTorch did not run'
}
stage_torch() { torch_stage torch --no-eager; }
stage_torch-recompute() { torch_stage torch-recompute --no-eager policy.recompute.granularity=selective; }
stage_torch-1b() { torch_stage torch-1b --no-eager; }
stage_torch-eager() { torch_stage torch-eager --no-compile; }
