#!/usr/bin/env bash
# Windows of steps: profile.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# A failed case leaves no run behind.
trap 'kill -KILL "${pid:-}" 2>/dev/null || true; rm -rf "$work" "$work.mpi"' EXIT

# A window with so many steps, other than those in the list.
window() {
  local directory
  for _ in $(seq 200); do
    for directory in job/logs/profile/step-*; do
      [[ -e $directory/profile.json && " $1 " != *" $directory "* ]] || continue
      echo "$directory"
      return
    done
    sleep 0.1
  done
  fail "no window: $(cat out.txt err.txt)"
}

case $case_name in
  attach)
    corpus
    config job
    mpirun --oversubscribe --bind-to none -n 2 "$nrl_train" job.yaml pretrain.max_num_steps=1000000 \
      policy.scheduler.lr_decay_iters=1000000 checkpointing.enabled=false >out.txt 2>err.txt &
    pid=$!
    for _ in $(seq 600); do
      [[ $(grep -c loss job/logs/metrics.jsonl 2>/dev/null || true) -gt 3 ]] && break
      sleep 0.05
    done
    [[ ! -e job/logs/profile ]] || fail "a window that was not asked for"
    "$nrl_train" profile attach job/logs --steps 4 --timeout 60 >shown.txt 2>&1 || fail "attach: $(cat shown.txt out.txt err.txt)"
    grep -q ' of 4 steps)' shown.txt || fail "not 4 steps: $(cat shown.txt)"
    grep -q '^rank  own work ms' shown.txt || fail "not all ranks: $(cat shown.txt)"
    [[ ! -e job/logs/profile-request.json ]] || fail "the request is left"
    first=$(window "")
    [[ -s $first/profile.html && -s $first/rank-1.pftrace ]] || fail "no page or trace: $(ls "$first")"
    # A signal to one rank makes all of them record.
    kill -USR2 "$(pgrep -P "$pid" -f 'nrl-train job.yaml' | tail -1)"
    second=$(window "$first")
    "$nrl_train" profile show "$second" >shown.txt || fail "no second window"
    grep -q ' of 3 steps)' shown.txt || fail "not 3 steps: $(cat shown.txt)"
    echo '{"steps": -1}' >job/logs/profile-request.json
    for _ in $(seq 50); do
      [[ -e job/logs/profile-request.json ]] || break
      sleep 0.1
    done
    grep -q 'steps is -1; expected 1 to' err.txt || fail "no word about a bad request: $(cat err.txt)"
    kill -TERM "$pid"
    wait "$pid" || true
    # The run is over.
    expect 69 run 1 profile attach job/logs --timeout 0.5
    grep -q 'no answer from job/logs in 0.5 s; the last row of' err.txt || fail "no reason: $(cat err.txt)"
    [[ ! -e job/logs/profile-request.json ]] || fail "the request is left"
    expect 66 run 1 profile attach nowhere
    ;;
  profile_bench)
    corpus
    config c
    expect 0 run 1 profile run c.yaml --steps 2 --output run/logs
    grep -q '^step .* of 2 steps)' out.txt || fail "no window: $(cat out.txt)"
    ! grep -q 'is read as' out.txt || fail "the banner shows keys that the user did not write: $(cat out.txt)"
    # The parts of the step add up to its time.
    expect 0 run 1 profile show run/logs --json
    awk '/^  "split": {/ { inside = 1; next } inside && /}/ { exit }
      inside { gsub(/[",:]/, ""); if ($1 == "wall") wall = $2; else sum += $2; ++count }
      END { if (count != 14 || !(wall > 0) || sum < 0.999 * wall || sum > 1.001 * wall) {
        print count, wall, sum
        exit 1 } }' out.txt || fail "the parts do not add up: $(sed -n '/"split"/,/}/p' out.txt | head -n 20)"
    expect 0 run 2 bench step c.yaml --steps 3 --profile bench/logs
    grep -q '^step .* of 3 steps)' out.txt || fail "no window: $(cat out.txt)"
    grep -q '^rank  own work ms' out.txt || fail "not all ranks: $(cat out.txt)"
    [[ -s bench/logs/profile/step-1/profile.html && -s bench/logs/profile/step-1/all.pftrace ]] || fail "no page or trace"
    expect 0 run 1 profile compare bench/logs bench/logs --html compare.html
    grep -q '<td>step_ms</td>' compare.html || fail "no page of the comparison"
    expect 0 run 1 bench step c.yaml --steps 3 --json bench.json
    expect 0 run 1 profile compare bench.json bench.json --fail-on-regression 5
    grep -q 'results of bench hold no configuration' out.txt || fail "no word about keys: $(cat out.txt)"
    expect 64 run 1 bench gemm --profile bench/logs
    ;;
  profile_generate)
    corpus
    config c
    expect 0 run 1 c.yaml pretrain.max_num_steps=2 policy.scheduler.lr_decay_iters=2
    expect 0 run 1 generate c/checkpoints --prompt the --temperature 0 --max-tokens 20
    cp out.txt plain.txt
    expect 0 run 1 generate c/checkpoints --prompt the --temperature 0 --max-tokens 20 --profile g
    head -c "$(stat -c %s plain.txt)" out.txt | cmp -s - plain.txt || fail "the text differs: $(cat out.txt)"
    grep -q '^linear_forward\|^gemv' out.txt || fail "no operations: $(cat out.txt)"
    [[ -s g/profile/step-1/profile.html && -s g/profile/step-1/rank-0.pftrace ]] || fail "no page or trace"
    expect 0 run 1 profile compare g g
    expect 64 run 1 generate c/checkpoints --prompt the --temperature 0 --max-tokens 3 --profile g
    grep -q 'pieces of text were generated; expected 4 or more' err.txt || fail "no reason: $(cat err.txt)"
    ;;
  *) fail "no such case: $case_name" ;;
esac
