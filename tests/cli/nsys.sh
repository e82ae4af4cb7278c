#!/usr/bin/env bash
# Steps for Nsight Systems, with a program in its place: nsys.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# Writes its arguments to a file each and runs the program, as nsys does.
mkdir bin
cat >bin/nsys <<'SH'
#!/usr/bin/env bash
printf '%s\n' "$@" >>nsys.args
while [[ $1 != /* ]]; do shift; done
exec "$@"
SH
chmod +x bin/nsys
nsys() { PATH=$work/bin:$PATH NRL_NSYS_PROFILE_STEP_RANGE=$1 NRL_NSYS_WORKER_PATTERNS=$2 "${@:3}"; }
said() { grep -qF -- "$1" err.txt out.txt || fail "no word of '$1': $(cat err.txt)"; }

corpus
config c
case $case_name in
  nsys_refused) # on a CPU
    expect 78 nsys 2:4 '*policy*' run 1 c.yaml
    said 'NRL_NSYS_PROFILE_STEP_RANGE=2:4: Nsight Systems captures GPUs, and this run is on a CPU'
    said 'profiling.steps=2:4 records these steps without a tool'
    expect 78 run 1 c.yaml profiling.nsys.steps=2:4
    said 'profiling.nsys.steps: 2:4: Nsight Systems captures GPUs'
    expect 64 nsys 2:4 '' run 1 c.yaml
    said 'NRL_NSYS_PROFILE_STEP_RANGE is set without NRL_NSYS_WORKER_PATTERNS'
    expect 64 nsys 4 '*' run 2 c.yaml
    said 'NRL_NSYS_PROFILE_STEP_RANGE=4: expected FIRST:END'
    expect 78 nsys 2:4 '*vllm*' run 1 c.yaml
    said 'no pattern matches the ranks, which are named policy_worker'
    [[ ! -e nsys.args ]] || fail "nsys was started for a CPU"
    ;;
  sim_nsys) # of nrl-train-sim: on the simulated device
    keys=(device=cuda pretrain.max_num_steps=5 checkpointing.enabled=false)
    NRL_NSYS_EXTRA_OPTIONS='{"sample": "none", "f": "true"}' expect 0 nsys 2:4 '*vllm*, *policy*' run 1 c.yaml "${keys[@]}"
    cat >want <<ARGS
profile
--trace=cuda,nvtx,osrt,cublas,cudnn
--capture-range=cudaProfilerApi
--capture-range-end=stop
--kill=none
--stop-on-exit=true
--output=c/logs/profile/policy_worker_2:4_%p
--sample=none
-f
true
$(readlink -f "$nrl_train")
c.yaml
$(printf '%s\n' "${keys[@]}")
ARGS
    cmp -s want nsys.args || fail "other arguments: $(diff want nsys.args)"
    said 'nsys captures steps 2 to 3'
    [[ $(grep -c 'profiler starts' err.txt) -eq 1 && $(grep -c 'profiler stops' err.txt) -eq 1 ]] || fail "no capture: $(cat err.txt)"
    # Beyond the end of the run, and under a profiler already: no second nsys.
    rm nsys.args
    NVTX_INJECTION64_PATH=none expect 0 nsys 4:9 '*' run 1 c.yaml "${keys[@]}"
    [[ ! -e nsys.args ]] || fail "nsys was started twice"
    [[ $(grep -c 'profiler stops' err.txt) -eq 1 ]] || fail "the capture does not end with the run"
    expect 0 run 1 c.yaml "${keys[@]}"
    ! grep -q 'profiler starts' err.txt || fail "a capture that was not asked for"
    NRL_NSYS_EXTRA_OPTIONS='[1' expect 64 nsys 2:4 '*' run 1 c.yaml "${keys[@]}"
    said 'NRL_NSYS_EXTRA_OPTIONS is a JSON object of options'
    [[ ! -e nsys.args ]] || fail "nsys was started with bad options"
    rm bin/nsys
    expect 69 nsys 2:4 '*' run 1 c.yaml "${keys[@]}"
    said 'NRL_NSYS_PROFILE_STEP_RANGE=2:4: nsys is not on PATH'
    ;;
  *) fail "no such case: $case_name" ;;
esac
