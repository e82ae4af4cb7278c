#!/usr/bin/env bash
# One case of the tests of scripts/gpu-validate.sh: validate.sh CASE NRL_TRAIN SOURCE_DIR
set -euo pipefail
case_name=$1
nrl_train=$2
source_dir=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export TMPDIR=$work OMP_NUM_THREADS=1

fail() {
  echo "FAIL: $*" >&2
  exit 1
}
# expect CODE COMMAND...: the command must leave with this code.
expect() {
  local want=$1 got=0
  shift
  "$@" >out.txt 2>err.txt || got=$?
  ((got == want)) || {
    cat out.txt err.txt >&2
    fail "exit code $got instead of $want: $*"
  }
}
cores() { env -u OMP_NUM_THREADS nproc; }
command -v python3 >/dev/null || {
  echo "skipped: there is no python3, which writes the results"
  exit 77
}
script=$source_dir/scripts/gpu-validate.sh
validate() { bash "$script" --device cpu --out results --commit test "$@"; }
# field STAGE KEY: of the results, in one line; nothing without the stage. Also checks that the file is JSON, which is
# read once: Python takes long to start.
field() {
  local results=results/gpu-validate.json
  [[ -f $results && fields.txt -nt $results ]] || python3 -c 'import json, sys
for s in json.load(open(sys.argv[1]))["stages"]:
    for key, value in s.items(): print(s["stage"], key, " ".join(str(value).splitlines()))' "$results" >fields.txt || {
    rm fields.txt
    fail "the results are not JSON"
  }
  sed -n "s/^$1 $2 //p" fields.txt
}
status() { field "$1" status; }

# program FILE: an nrl-train that does what files in this directory say. A command that contains the text in the file
# `hangs` does not end; one with that in `fails` fails.
program() {
  mkdir -p "$(dirname "$1")"
  cat >"$1" <<SCRIPT
#!/bin/bash
if [[ \$1 == doctor && -n \${NRL_VALIDATE_WORK:-} && -e "$work/slow-doctor" ]]; then exec sleep 100; fi
case " \$* " in
  *" \$(cat "$work/hangs" 2>/dev/null || echo none) "*) echo hanging; echo \$\$ >"$work/pid"; exec sleep 1000 ;;
  *" \$(cat "$work/fails" 2>/dev/null || echo none) "*) echo seeded failure >&2; exit 3 ;;
esac
exec "$nrl_train" "\$@"
SCRIPT
  chmod +x "$1"
}
# start_until TEXT [ARGUMENT...]: starts the script and waits until the command with this text hangs.
start_until() {
  echo "$1" >hangs
  shift
  rm -f pid
  bash "$script" --device cpu --out results --commit test --bin bin "$@" >out.txt 2>err.txt &
  child=$!
  until [[ -s pid ]]; do
    kill -0 "$child" 2>/dev/null || fail "it ended early: $(cat out.txt err.txt)"
    sleep 0.05
  done
}
# killed_in TEXT AT STAGE...: kills it where TEXT hangs, in the stage with index AT.
killed_in() {
  local text=$1 at=$2 i want
  shift 2
  local stages=("$@")
  start_until "$text" --stages "$(IFS=, && echo "$*")"
  kill -KILL "$child"
  wait "$child" 2>/dev/null || true
  kill "$(cat pid)"
  for ((i = 0; i < ${#stages[@]}; ++i)); do
    want=pass
    if ((i == at)); then want=running; elif ((i > at)); then want=''; fi
    [[ $(status "${stages[i]}") == "$want" ]] || fail "killed in ${stages[at]}: ${stages[i]}: $(status "${stages[i]}")"
  done
  grep -q '^hanging' results/running.log || fail "the output of the stage is lost"
  grep -q 'not finished' results/gpu-validate.md || fail "the stage that was killed is not named"
}

case $case_name in
  calls)
    bin=$(dirname "$nrl_train")
    # The stages of op cases together have all of them, each once.
    cases() { for part in "$@"; do "$bin/op_tests" list "$part" | grep '^test '; done | LC_ALL=C sort; }
    cmp <(cases '') <(cases attention -attention) || fail "attention-ops and kernels are not all cases"
    cmp <(cases '') <(cases attention norm,qk,rope -attention,norm,qk,rope) || fail "the sanitizers do not get all cases"
    # The processes of a stage have all cases, too.
    cmp <(cases -attention) <(for i in 0 1 2; do NRL_TEST_SHARD=$i/3 cases -attention; done | LC_ALL=C sort) || fail "the shards are not all cases"
    # Named stages run in the order given.
    expect 0 validate --bin "$bin" --stages gemm,doctor
    [[ $(awk '$2 == "pass" { print $1 }' out.txt | paste -sd ,) == gemm,doctor ]] || fail "the order: $(cat out.txt)"
    rm -r results
    # Every call runs within its limit; the table grows from call to call.
    merge=()
    for call in 1 2 3 4 5; do
      began=$SECONDS
      expect 0 validate --bin "$bin" --call $call "${merge[@]}"
      ((SECONDS - began < 480)) || fail "call $call took $((SECONDS - began)) s"
      cp results/gpu-validate.json "call-$call.json"
      merge=(--merge "call-$call.json")
    done
    while read -r number stage _; do
      [[ $(field "$stage" call) == "$number" && $(status "$stage") =~ ^(pass|skip)$ ]] || fail "$stage: $(status "$stage")"
    done < <("$script" --stages list)
    for stage in doctor smoke attention-ops kernels-small kernels cpu-kernels gradients losses-fp32 losses-bf16 losses-float16 losses-fp8-tensorwise \
      losses-fp8-delayed losses-fp8-blockwise offload resume step-8b step-8b-fp8 step-8b-fp8-delayed step-8b-fp8-blockwise step-8b-offload step-1b-micro4 \
      gemm attention ops profile-8b big; do
      [[ $(status $stage) == pass ]] || fail "$stage: $(status $stage)"
    done
    for stage in graph ranks-nccl ncu-norm racecheck-rest; do
      [[ $(status $stage) == skip ]] || fail "$stage is not skipped"
    done
    (($(find results -type f | wc -l) <= 8)) || fail "there are more than 8 files: $(ls results)"
    [[ -z $(find results -type f -size +1M) ]] || fail "a file is large: $(ls -l results)"
    for text in '^## gemm' '^## step-8b' '^attention_backward ' ' 16 x 32 tokens per step'; do
      grep -q "$text" results/gpu-validate.md || fail "the summary lacks $text"
    done
    # What passed is not repeated, unless it is named; references are kept for later calls.
    expect 0 validate --bin "$bin" --call 1 --merge call-5.json
    grep -q '^smoke *passed in an earlier call' out.txt || fail "smoke is repeated: $(cat out.txt)"
    [[ $(field gradients call) == 2 ]] || fail "the results of call 2 are lost"
    expect 0 validate --bin "$bin" --stages losses-fp32
    grep -q 'the run cpu-fp32 is that of an earlier call' results/gpu-validate.log || fail "the reference is not reused"
    [[ -z $(field doctor status) ]] || fail "results of an earlier call appear without --merge"
    # A stage that is skipped does not hide an earlier result.
    expect 0 validate --bin "$bin" --stages doctor --budget 9 --merge call-5.json
    grep -q '^doctor *skip' out.txt || fail "the budget does not hold"
    [[ $(status doctor) == pass ]] || fail "a skipped stage replaced a result"
    expect 64 validate --bin "$bin" --stages nothing
    expect 64 validate --bin "$bin" --call 6
    expect 66 validate --bin nowhere
    expect 66 validate --bin "$bin" --merge nowhere.json
    echo '{"stages":[' >broken.json
    expect 1 validate --bin "$bin" --merge broken.json --stages doctor
    ;;
  stopped)
    # Failing stages are reported and do not stop the run; hanging ones are stopped.
    program bin/nrl-train
    echo bench attention >fails
    expect 1 validate --bin bin --stages doctor,gemm,attention
    [[ $(status attention) == fail && $(status gemm) == pass ]] || fail "the failure is not what it should be"
    grep -q 'seeded failure' results/gpu-validate.md || fail "the end of the log is not shown"
    rm fails
    touch slow-doctor
    expect 1 validate --bin bin --budget 24 --stages doctor,gemm
    [[ $(status doctor) == fail && $(field doctor note) == 'timed out after '* ]] || fail "the time limit does not hold: $(field doctor note)"
    [[ $(status gemm) == skip ]] || fail "a stage began without time"
    rm slow-doctor
    # Killed at any stage, the results of the finished ones are there.
    stages=(doctor gemm attention ops)
    for at in 1 2 3; do killed_in "bench ${stages[at]}" "$at" "${stages[@]}"; done
    killed_in policy.fp8_cfg.fp8_recipe=delayed 1 losses-fp8-tensorwise losses-fp8-delayed offload
    killed_in policy.offload_optimizer=true 0 offload step-8b-fp8
    killed_in 'policy.offload_modules=[input,qkv,core_attn]' 1 step-8b-fp8-delayed step-8b-offload
    start_until 'bench attention' --stages doctor,gemm,attention
    kill -TERM "$child"
    code=0
    wait "$child" || code=$?
    ((code == 143)) || fail "exit code $code after SIGTERM"
    [[ $(status attention) == fail && $(field attention note) == 'interrupted by SIGTERM' ]] || fail "$(field attention note)"
    [[ $(status doctor) == pass && $(status gemm) == pass ]] || fail "results are lost"
    # The rest, in a later call.
    rm hangs
    cp results/gpu-validate.json old.json
    expect 0 validate --bin bin --stages attention,ops --merge old.json
    for stage in "${stages[@]}"; do
      [[ $(status "$stage") == pass ]] || fail "$stage: $(status "$stage")"
    done
    # Time before the start counts if the caller's process becomes the script.
    expect 0 bash -c "sleep 7; exec bash $script --device cpu --out results --commit test --bin bin --budget 18 --stages doctor"
    grep -q '^doctor *skip' out.txt || fail "the time of the caller is not counted: $(cat out.txt)"
    ;;
  nccl)
    # shellcheck source=scripts/gpu-validate/checks.sh
    source "$source_dir/scripts/gpu-validate/checks.sh"
    # A transcript of doctor, which cli.transcript_doctor compares with the program.
    found=$(sed -n 's/^    \(nccl  *[0-9].*\)/\1/p' "$source_dir/docs/gpu.md" | nccl_version)
    [[ $found =~ ^2\.[0-9]+$ ]] || fail "the version in docs/gpu.md is read as '$found'"
    [[ $(printf '%s\n' 'library      cuDNN 9.19.0' 'nccl         2.32.3, several ranks may share a GPU' | nccl_version) == 2.32 ]] || fail "2.32"
    # This build's own output: a version if it names one.
    "$nrl_train" doctor >doctor.txt
    if grep -q '^nccl  *not in this build' doctor.txt; then
      [[ -z $(nccl_version <doctor.txt) ]] || fail "a version without NCCL"
    else
      [[ $(nccl_version <doctor.txt) =~ ^[0-9]+\.[0-9]+$ ]] || fail "no version in: $(grep '^nccl' doctor.txt)"
    fi
    ;;
  plans)
    # The configurations that the stages run on a GPU only are valid there and fit into its memory.
    for part in table common checks benches; do
      # shellcheck source=/dev/null
      source "$source_dir/scripts/gpu-validate/$part.sh"
    done
    # shellcheck disable=SC2034  # used by the stages
    device=cuda out=results overrides=()
    cd "$source_dir"
    while IFS='|' read -r stage _; do
      [[ $stage == step-* ]] || continue
      variant_of "$stage"
      "$nrl_train" bench step "$(model_of "$stage")" "${overrides[@]}" --predict h100 --device cpu >"$work/out.txt" 2>&1 ||
        fail "$stage: $(cat "$work/out.txt")"
      awk '$1 == "memory" { found = 1; bad = $3 != "GiB" || $2 >= $6 } END { exit !found || bad }' "$work/out.txt" ||
        fail "$stage: $(grep '^memory' "$work/out.txt")"
    done < <(stage_table)
    low_precision_model
    for recipe in none tensorwise delayed blockwise; do
      fp8=()
      [[ $recipe == none ]] || fp8_recipe "$recipe"
      "$nrl_train" plan configs/quickstart.yaml device=cuda "${model[@]}" "${fp8[@]}" >"$work/out.txt" 2>&1 || fail "$recipe: $(cat "$work/out.txt")"
    done
    ;;
  torch)
    # Runs the comparison with a stand-in for PyTorch that has memory for one sequence.
    cat >python <<'SCRIPT'
#!/usr/bin/env python3
import json, sys
job = json.load(sys.stdin)
if job["micro_batch"] > 1:
    print(json.dumps({"out_of_memory": True}))
else:
    print(json.dumps({"program": "torch 2.0", "libraries": {"cuBLASLt": "13.1.0 in /torch/lib/libcublasLt.so.13"}, "compile": job["compile"], "micro_batch": 1,
        "sequences": job["sequences"], "step_ms": 1.0, "tokens_per_s": 1000.0, "first_step_s": 1.0, "peak_resident_bytes": 1 << 30}))
SCRIPT
    chmod +x python
    compare=(python3 "$source_dir/scripts/bench-gpu-vs-torch.py" "$source_dir/configs/bench-tiny.yaml" policy.model.hidden_size=32
      policy.model.intermediate_size=48 policy.model.num_hidden_layers=1 policy.model.num_attention_heads=2 policy.model.num_key_value_heads=1
      policy.train_global_batch_size=4 policy.train_micro_batch_size=4 policy.max_total_sequence_length=16
      --nrl-train "$nrl_train" --device cpu --steps 2 --json torch.json)
    expect 0 "${compare[@]}" --python ./python --rounds 2
    [[ $(grep -c '^round 1  nrl-train ' out.txt) == 2 && $(grep -c '^round 2  nrl-train ' out.txt) == 1 ]] || fail "the runs: $(cat out.txt)"
    grep -q '^round 2  nrl-train .*micro 1 x 4$' out.txt || fail "the microbatches differ: $(cat out.txt)"
    grep -q '^libraries of PyTorch: torch 2.0, cuBLASLt 13.1.0 in /torch/lib/libcublasLt.so.13$' out.txt || fail "no versions: $(cat out.txt)"
    tail -n 1 out.txt | grep -qE '^relative to PyTorch compiled, microbatch 1: speed x .*; relative to PyTorch eager' || fail "$(cat out.txt)"
    python3 - <<'CHECK' || fail "the ratios are not of equal microbatches"
import json
r = json.load(open("torch.json"))
speeds = [run["tokens_per_s"] / 1000 for turn in r["rounds"] for run in turn if "variant" not in run and run["micro_batch"] == 1]
assert len(speeds) == 2 and abs(r["speed_ratio_compiled"] - sum(speeds) / 2) < 1e-9, (speeds, r["speed_ratio_compiled"])
CHECK
    expect 0 "${compare[@]}" --python ./python --no-eager --micro-batch 1
    [[ $(grep -c '^round 1  nrl-train ' out.txt) == 1 ]] || fail "the given microbatch is not used: $(cat out.txt)"
    ! grep -q eager out.txt || fail "--no-eager runs it"
    expect 0 "${compare[@]}" --python false
    grep -q 'PyTorch did not run: no comparison' out.txt || fail "PyTorch failed silently: $(cat out.txt)"
    # Killed in the middle, what was measured is in the file.
    rm torch.json
    # PyTorch has its own libraries: the paths of ours do not reach it.
    printf '#!/bin/sh\nenv >%s/environment\nexit 1\n' "$work" >show
    chmod +x show
    LD_LIBRARY_PATH=$work/ours OPAL_PREFIX=$work/ours expect 0 "${compare[@]}" --python ./show
    ! grep -E '^(LD_LIBRARY_PATH|OPAL_)' environment || fail "PyTorch gets our library paths"
    grep -q '^PYTORCH_CUDA_ALLOC_CONF=' environment || fail "PyTorch was not started"
    printf '#!/bin/sh\necho $$ >%s/pid\nexec sleep 1000\n' "$work" >slow
    chmod +x slow
    "${compare[@]}" --python ./slow >out.txt 2>err.txt &
    child=$!
    until [[ -s pid ]]; do
      kill -0 "$child" 2>/dev/null || fail "it ended early: $(cat out.txt err.txt)"
      sleep 0.05
    done
    kill -KILL "$child"
    kill "$(cat pid)"
    python3 -c 'import json; assert json.load(open("torch.json"))["rounds"][0][0]["tokens_per_s"] > 0' || fail "the first run was not written"
    ;;
  tools)
    # The stages of a GPU with stand-ins for its tools: nrl-train-sim on a tiny model, benchmarks that take 2 s, and
    # programs that print their arguments.
    mkdir bin tools
    cat >bin/nrl-train <<SCRIPT
#!/bin/bash
case " \$* " in
  *" --only nothing "*) sleep "\$(cat "$work/probe" 2>/dev/null || echo 0)" ;;
  *" bench "*) sleep 2; exit 0 ;;
  *quickstart*) exec "$nrl_train" "\$@" policy.model.hidden_size=32 policy.model.intermediate_size=48 policy.model.num_hidden_layers=2 \
    policy.model.num_attention_heads=2 policy.model.num_key_value_heads=1 policy.train_global_batch_size=2 policy.max_total_sequence_length=16 ;;
esac
exec "$nrl_train" "\$@"
SCRIPT
    printf '#!/bin/sh\necho "cases: $*"\n' >bin/gpu_tests
    cat >tools/nvidia-smi <<'SCRIPT'
#!/bin/bash
[[ $1 == dmon ]] || { echo "NVIDIA A, 1.2"; exit; }
printf '# gpu    pwr  gtemp  mtemp   mclk   pclk\n# Idx      W      C      C    MHz    MHz\n'
printf '    0    %s     30     40   3201   %s\n' 80 345 650 1500 700 1980
echo $$ >"$TMPDIR/dmon-pid"
exec sleep 1000 # not a child, which would outlive this process
SCRIPT
    cat >tools/compute-sanitizer <<'SCRIPT'
#!/bin/sh
if [ "$1" = --help ]; then cat sanitizer-help; exit; fi
echo "========= COMPUTE-SANITIZER $*"
echo "========= ERROR SUMMARY: 0 errors"
exit "$(cat sanitizer-code)"
SCRIPT
    printf '#!/bin/sh\necho "==PROF== $*"\necho "    Duration   us   12.5"\n' >tools/ncu
    chmod +x bin/* tools/*
    # The stages run in the source directory; the files are here.
    sed -i "s#sanitizer-#$work/sanitizer-#" tools/compute-sanitizer
    export PATH=$work/tools:$PATH
    validate() { bash "$script" --device cuda --bin bin --out results --commit test "$@"; }
    echo '  --kernel-name arg' >sanitizer-help
    echo 0 >sanitizer-code
    while read -r kernel; do
      grep -rqE "\b${kernel}[a-z_]*\(" "$source_dir/core/ops" --include='*.cu' --include='*.cuh' || fail "there is no kernel $kernel"
    done < <(grep -oE 'kernel=[a-z_]+' "$source_dir/scripts/gpu-validate/benches.sh" | cut -d= -f2)
    # Targets that are ratios of results: of two stages, or of parts of a step.
    mkdir results-of-stages
    cd results-of-stages
    "$script" --stages list | awk '{ print $2 "|" $1 "|60|" }' >table
    for stage in step-8b step-8b-fp8 step-8b-offload; do printf '%s\tpass\t1\t60\tdate\t\n' "$stage"; done >./done
    echo '{"tokens_per_s":1000,"mfu":0.6,"planned_bytes":98,"used_bytes":100,"prediction":{"estimated_s":10,"estimated_mfu":0.61,"parts":[
      {"name":"norms, forward","measured_s":0.1,"estimated_s":0.1},{"name":"activation, forward","measured_s":0.2,"estimated_s":0.2},
      {"name":"activation, backward","measured_s":0.3,"estimated_s":0.3}]}}' >bench-step-8b.json
    echo '{"tokens_per_s":1300,"mfu":0.8,"prediction":{"estimated_s":8,"parts":[{"name":"layer GEMMs, forward","measured_s":1,"estimated_s":1},
      {"name":"layer GEMMs, wgrad","measured_s":2,"estimated_s":1},{"name":"head GEMM, wgrad","measured_s":4,"estimated_s":4},
      {"name":"quantization","measured_s":0.9,"estimated_s":0.7}]}}' >bench-step-8b-fp8.json
    echo '{"tokens_per_s":900,"mfu":0.5,"offload":{"hidden":0.9}}' >bench-step-8b-offload.json
    targets() {
      expect 0 python3 "$source_dir/scripts/gpu-validate/report.py" targets --work . --out . --device cuda --commit c --date d \
        --programs p-cuda --call 0 --seconds 1
    }
    targets
    for row in '8B at 8192 tokens, best variant | >= 0.55 (stretch 0.61) |  | 0.600 | yes' 'FP8 (tensorwise) .* | >= 1.25 | 1.250 | 1.300 | yes' \
      'quantization (tensorwise) adds, .* | <= 0.08 | 0.050 | 0.100 | NO' 'FP8 (delayed) .* |  | not measured | ' \
      'hidden, 8192 tokens | >= 0.8 |  | 0.900 | yes' 'gave, layers of Llama 8B .* | >= 0.97 | 1.000 | 0.980 | yes'; do
      grep -q "$row" out.txt || fail "no row $row: $(cat out.txt)"
    done
    # Another GPU has other targets.
    echo 'NVIDIA H100 80GB HBM3, 580' >smi.txt
    targets
    grep -q '8B at 8192 tokens | >= 0.53 (stretch 0.59) | 0.610 | 0.600 | yes' out.txt || fail "the targets of an H100: $(cat out.txt)"
    cd ..
    expect 0 validate --stages smoke,offload,gemm,ncu-norm,memcheck-norm,racecheck-rest
    [[ $(status smoke) == pass && $(field smoke note) == *'attention: forward: our own kernels'* ]] || fail "smoke: $(field smoke note)"
    [[ $(status offload) == pass && $(field offload commands) == *policy.cuda_graph=true* ]] || fail "offload: $(field offload note)"
    [[ $(field memcheck-norm commands) == *'--tool memcheck --kernel-name kernel_substring=nrl '*'/gpu_tests test norm'* ]] ||
      fail "memcheck: $(field memcheck-norm commands)"
    [[ $(field racecheck-rest commands) == *'--tool racecheck '*' test -attention'* ]] || fail "racecheck: $(field racecheck-rest commands)"
    [[ $(field memcheck-norm note) == 'ERROR SUMMARY: 0 errors' ]] || fail "memcheck: $(field memcheck-norm note)"
    [[ $(field ncu-norm commands) == *'--clock-control none --kernel-name regex:norm_rows_backward '* ]] || fail "ncu: $(field ncu-norm commands)"
    [[ $(field gemm text) == *'SM 1500 to 1980 MHz, power 675 W (largest 700 W), 2 samples under load'* ]] || fail "dmon: $(field gemm text)"
    ! kill -0 "$(cat dmon-pid)" 2>/dev/null || fail "nvidia-smi dmon still runs"
    # Kernels of two ops make the device unusable: the others run nevertheless.
    cat >bin/gpu_tests <<'SCRIPT'
#!/bin/bash
for op in norm rope; do
  [[ ,${2#-}, == *,$op,* ]] || { echo "FAILED $op.bf16 (3, 5) [cuda]: fault"; echo "lost: $op.bf16 (3, 5) [cuda]: unusable"; exit 1; }
done
echo "$1: 7 runs without ${2:-}"
SCRIPT
    processes=$(($(cores) / 2 < 1 ? 1 : $(cores) / 2 > 8 ? 8 : $(cores) / 2))
    expect 1 validate --stages kernels,gradients
    [[ $(field kernels note) == *'lost: norm.bf16 '*'lost: rope.bf16 '*"test: $((7 * processes)) runs without -attention,norm,rope" ]] ||
      fail "kernels: $(field kernels note)"
    [[ $(status gradients) == fail && $(field gradients note) == *'grad: 7 runs without -norm,rope' ]] || fail "gradients: $(field gradients note)"
    printf '#!/bin/sh\necho "cases: $*"\n' >bin/gpu_tests
    # An older sanitizer; one that finds an error.
    echo '  --kernel-regex arg' >sanitizer-help
    echo 99 >sanitizer-code
    expect 1 validate --stages memcheck-rest
    [[ $(field memcheck-rest commands) == *' --kernel-regex kns=nrl '* ]] || fail "memcheck: $(field memcheck-rest commands)"
    [[ $(status memcheck-rest) == fail ]] || fail "an error of the sanitizer is ignored"
    # A probe that takes long does not mean that there is no GPU.
    echo 1000 >probe
    expect 0 validate --stages doctor --budget 40
    grep -q 'the probe of the GPU did not end within 5 s' out.txt || fail "$(cat out.txt)"
    rm probe
    NRL_SIM_DEVICES=0 expect 69 validate --stages doctor
    grep -q 'there is no GPU to validate' err.txt || fail "$(cat err.txt)"
    ;;
  *) fail "no case $case_name" ;;
esac
