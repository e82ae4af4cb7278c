#!/usr/bin/env bash
# Runs that hang or fail, and what they leave. reliability.sh CASE NRL_TRAIN SOURCE_DIR
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# shared RUN: the directory of the run's flight files in shared memory.
shared() {
  echo "/dev/shm/nrl-$(id -u)/$(sed -nE 's/.*"run_id": "([^"]*)".*/\1/p' "$1/logs/run.json")"
}

# diagnosed CODE DIRECTORY: nrl-train diagnose leaves with this code; the output goes to diagnosis.txt.
diagnosed() {
  local code=0
  "$nrl_train" diagnose "$2/logs" >diagnosis.txt 2>&1 || code=$?
  ((code == $1)) || fail "diagnose left with $code: $(cat diagnosis.txt)"
}

# rank_pid LAUNCHER RANK: the process of a rank of a running mpirun, once the ranks watch each other; empty after 60 s.
rank_pid() {
  local pid i
  for ((i = 0; i < 600; ++i)); do
    for pid in $(pgrep -P "$1"); do
      if tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qx "OMPI_COMM_WORLD_RANK=$2" &&
        cat /proc/"$pid"/task/*/comm 2>/dev/null | grep -qx nrl-helper; then
        echo "$pid"
        return
      fi
    done
    sleep 0.1
  done
}

# background RANKS ARGS...: starts a command on that many ranks; its launcher is $launcher.
background() {
  local ranks=$1
  shift
  mpirun --oversubscribe --bind-to none -n "$ranks" "$nrl_train" "$@" >out.txt 2>err.txt &
  launcher=$!
}

case $case_name in
  hang)
    # A rank that hangs is named while all processes live, and after they were killed; the next start goes on.
    corpus
    config run
    NRL_FAULTS="hang:rank=1@step=4" run 2 run.yaml checkpointing.save_period=2 &
    for ((i = 0; i < 600; ++i)); do
      [[ $(wc -l 2>/dev/null <run/logs/metrics.jsonl) -ge 3 ]] && break
      sleep 0.1
    done
    sleep 1
    diagnosed 0 run
    grep -q '^cause: rank_hung, rank 1$' diagnosis.txt || fail "no culprit: $(cat diagnosis.txt)"
    grep -q 'waited for by 0 for .* not begun by 1$' diagnosis.txt || fail "no operation: $(cat diagnosis.txt)"
    grep -q '^rank 1 .*: computing of step 4$' diagnosis.txt || fail "no place: $(cat diagnosis.txt)"
    sed -nE 's/.*, pid ([0-9]+).*/\1/p' diagnosis.txt | xargs kill -KILL
    wait $! || true
    diagnosed 0 run
    grep -q '^cause: rank_lost, rank 1$' diagnosis.txt || fail "no culprit afterwards: $(cat diagnosis.txt)"
    [[ -d $(shared run) ]] || fail "no flight files are left"
    # The fault was of the first attempt.
    NRL_FAULTS="hang:rank=1@step=4" expect 0 run 2 run.yaml checkpointing.save_period=2
    [[ -f run/logs/flight/attempt-1/rank-1.attempt-1.flight ]] || fail "the flight files of the first attempt are lost"
    [[ ! -e $(shared run) ]] || fail "flight files of a run that ended: $(ls "$(shared run)")"
    config plain
    expect 0 run 2 plain.yaml
    same plain/logs/metrics.jsonl run/logs/metrics.jsonl 0
    ;;
  failures)
    # The record of a failure: who, where, and whether to try again; gone after a start that succeeds.
    corpus
    config run
    NRL_FAULTS="error:rank=1@step=3:phase=data" expect 70 run 2 run.yaml
    grep -q 'NRL_FAULTS: this run will have error of rank 1 in step 3 (data), attempt 1' err.txt || fail "no warning: $(cat err.txt)"
    for line in '"kind": "internal"' '"exit_code": 70' '"retryable": false' '"rank": 1' '"phase": "data"' '"step": 3' '"last_completed_step": 2'; do
      grep -qF "$line" run/logs/failure.json || fail "failure.json lacks $line: $(cat run/logs/failure.json)"
    done
    diagnosed 0 run
    grep -q '^failure: internal (exit 70), rank 1 on .*, data of step 3: ' diagnosis.txt || fail "diagnosis: $(cat diagnosis.txt)"
    # An error of files on all ranks: three saves in a row fail.
    NRL_FAULTS="io:rank=0@op=rename#1:errno=ENOSPC,times=1000000,attempt=2" expect 74 run 2 run.yaml checkpointing.save_period=1
    [[ $(wc -l <run/logs/failures.jsonl) == 1 ]] || fail "failures.jsonl: $(cat run/logs/failures.jsonl)"
    expect 0 run 2 run.yaml
    [[ ! -e run/logs/failure.json ]] || fail "a failure of a run that succeeded"
    diagnosed 66 run
    grep -q 'no records of the last attempt' diagnosis.txt || fail "diagnosis: $(cat diagnosis.txt)"
    ;;
  lost_rank)
    # Without a launcher that notices: a rank that hangs, stops or dies ends all ranks with one message and exit code 80,
    # and the same command resumes.
    corpus
    config run
    quick=(checkpointing.save_period=2 reliability.step_timeout_seconds=3 reliability.heartbeat_timeout_seconds=2)
    attempt=0
    for kind in hang stop kill segv; do
      attempt=$((attempt + 1))
      NRL_FAULTS="$kind:rank=1@step=$((2 * attempt)):attempt=$attempt" run 3 run.yaml "${quick[@]}" \
        policy.train_global_batch_size=6 policy.train_micro_batch_size=1 && fail "$kind: exit code 0"
      case $kind in
        hang) name=rank_hung words='rank 1 (node 0) hangs for ' ;;
        stop) name=rank_stopped words='rank 1 ' ;;
        *) name="rank_\(killed\|exited\)" words='rank 1 ' ;;
      esac
      grep -q "error: $words" err.txt || fail "$kind: no message: $(cat err.txt)"
      if [[ $kind == segv ]]; then
        grep -q 'error: rank 1 (node 0) was killed at step [0-9]* in computing: by signal 11 (SIGSEGV)' err.txt ||
          fail "$kind: no signal: $(cat err.txt)"
        diagnosed 0 run
        grep -q '^cause: rank_ended, rank 1$' diagnosis.txt || fail "$kind: $(cat diagnosis.txt)"
        grep -q '^rank 1 (.*, ended by signal 11 (SIGSEGV)): computing of step' diagnosis.txt || fail "$kind: $(cat diagnosis.txt)"
      fi
      [[ $(grep -c 'error: ' err.txt) == 1 ]] || fail "$kind: not one message: $(cat err.txt)"
      grep -q "\"kind\": \"$name\"" run/logs/failure.json || fail "$kind: $(cat run/logs/failure.json)"
      grep -q '"rank": 1,' run/logs/failure.json || fail "$kind: $(cat run/logs/failure.json)"
      grep -q '"retryable": true' run/logs/failure.json || fail "$kind: $(cat run/logs/failure.json)"
      grep -q '"exit_code": 80' run/logs/failure.json || fail "$kind: $(cat run/logs/failure.json)"
      diagnosed 0 run
      [[ ! -e $(shared run) ]] || fail "$kind: shared memory is left: $(ls "$(shared run)")"
      grep -q '^cause: mismatch' diagnosis.txt && fail "$kind: $(cat diagnosis.txt)"
      processes "$nrl_train run.yaml checkpointing.save_period=2 reliability" >left.txt && fail "$kind: processes are left: $(cat left.txt)"
    done
    expect 0 run 3 run.yaml "${quick[@]}" policy.train_global_batch_size=6 policy.train_micro_batch_size=1
    config plain
    expect 0 run 3 plain.yaml policy.train_global_batch_size=6 policy.train_micro_batch_size=1 reliability.control=off
    same plain/logs/metrics.jsonl run/logs/metrics.jsonl 0
    [[ ! -e $(shared run) ]] || fail "shared memory is left: $(ls "$(shared run)")"
    ;;
  other_commands)
    # Commands that do not train are watched too, and leave no record.
    corpus
    config run
    for kind in KILL STOP; do
      background 2 verify run.yaml --random-tokens --steps 1000 reliability.heartbeat_timeout_seconds=2
      victim=$(rank_pid "$launcher" 1)
      [[ $victim ]] || fail "$kind: the ranks do not watch each other: $(cat err.txt)"
      kill "-$kind" "$victim"
      wait "$launcher" && fail "$kind: exit code 0"
      # A launcher that notices a kill first names the rank itself, and ends the others before one of them can.
      if [[ $kind == STOP ]] || ! grep -q 'noticed that process rank 1 ' err.txt || grep -q 'error: ' err.txt; then
        [[ $(grep -c 'error: ' err.txt) == 1 ]] || fail "$kind: not one message: $(cat err.txt)"
        grep -q 'error: rank 1 (node 0) \(was killed\|ended\|stopped\)' err.txt || fail "$kind: no message: $(cat err.txt)"
      fi
      [[ -z $(find . -name failure.json) ]] || fail "$kind: a record without a run"
    done
    # One without a configuration.
    background 2 bench comm
    victim=$(rank_pid "$launcher" 1)
    [[ $victim ]] || fail "bench comm: the ranks do not watch each other: $(cat err.txt)"
    kill -KILL "$victim"
    wait "$launcher" && fail "bench comm: exit code 0"
    grep -q 'error: rank 1 (node 0) \|noticed that process rank 1 ' err.txt || fail "bench comm: no message: $(cat err.txt)"
    ;;
  launcher_lost)
    # No rank outlives its launcher.
    corpus
    config run
    background 3 run.yaml pretrain.max_num_steps=1000000 policy.train_global_batch_size=6 policy.train_micro_batch_size=1
    for ((i = 0; i < 600; ++i)); do
      [[ $(wc -l 2>/dev/null <run/logs/metrics.jsonl) -ge 3 ]] && break
      sleep 0.1
    done
    mapfile -t ranks < <(pgrep -P "$launcher")
    ((${#ranks[@]} >= 3)) || fail "${#ranks[@]} ranks"
    kill -KILL "$launcher"
    wait "$launcher" || true
    for ((i = 0; i < 50; ++i)); do
      left=$(for pid in "${ranks[@]}"; do [[ ! -e /proc/$pid ]] || echo "$pid"; done)
      [[ $left ]] || break
      sleep 0.1
    done
    [[ -z $left ]] || fail "ranks outlive their launcher by 5 s: $left"
    grep -q '"kind": "launcher_lost"' run/logs/failure.json || fail "failure.json: $(cat run/logs/failure.json)"
    [[ ! -e $(shared run) ]] || fail "shared memory is left: $(ls "$(shared run)")"
    ;;
  stragglers)
    # A slow rank is found, and the ranks that wait for it are not.
    corpus
    config run
    NRL_FAULTS="slow:rank=1@step=5:seconds=0.1,steps=1000000" expect 0 run 3 run.yaml pretrain.max_num_steps=450 \
      policy.train_global_batch_size=6 policy.train_micro_batch_size=1 checkpointing.save_period=1000
    [[ $(grep -c 'warn: rank 1 (node 0, .*) needs .* x the time of its peers' err.txt out.txt | awk -F: '{ n += $2 } END { print n }') == 1 ]] ||
      fail "not one warning: $(cat err.txt)"
    [[ $(grep -c '"event":"began","rank":1' run/logs/stragglers.jsonl) == 1 ]] || fail "stragglers.jsonl: $(cat run/logs/stragglers.jsonl)"
    grep -v '"rank":1' run/logs/stragglers.jsonl && fail "ranks that wait are blamed"
    tail -1 run/logs/metrics.jsonl | grep -q '"straggler_ratio":' || fail "no metric: $(tail -1 run/logs/metrics.jsonl)"
    config off
    expect 0 run 2 off.yaml reliability.stragglers=false
    ;;
  stacks)
    # A run that hangs keeps the threads of its ranks, and shows where they are.
    corpus
    config run
    NRL_FAULTS="hang:rank=1@step=3" run 2 run.yaml reliability.step_timeout_seconds=3 && fail "exit code 0"
    diagnosed 0 run
    grep -q '^threads of rank 1 when the run was ended:$' diagnosis.txt || fail "no threads: $(cat diagnosis.txt)"
    grep -q '^  thread nrl-train (.*): .*\(nrl::\|addr2line -Cfpe /\)' diagnosis.txt || fail "no stack: $(cat diagnosis.txt)"
    for rank in 0 1; do
      [[ $(stat -c %a "run/logs/flight/attempt-1/rank-$rank.attempt-1.stacks") == 600 ]] || fail "the stacks of rank $rank are open to others"
    done
    grep -q 'PATH=' run/logs/flight/attempt-1/*.stacks && fail "the stacks have the environment"
    NRL_FAULTS="hang:rank=1@step=3:attempt=2" run 2 run.yaml reliability.step_timeout_seconds=3 reliability.stacks=false && fail "exit code 0"
    [[ -z $(find run/logs/flight/attempt-2 -name '*.stacks') ]] || fail "stacks that were not wanted"
    ;;
  one_error)
    # An error that one rank has is the exit code of all, with its message once; one that the launcher cannot see.
    corpus
    config run
    NRL_FAULTS="error:rank=2@step=3" expect 70 run 3 run.yaml policy.train_global_batch_size=6 policy.train_micro_batch_size=1
    [[ $(grep -c 'error: ' err.txt) == 1 ]] || fail "not one message: $(cat err.txt)"
    grep -q '^\[rank 2\] error: step 3: an error that NRL_FAULTS asked for' err.txt || fail "no message: $(cat err.txt)"
    expect 0 run 2 run.yaml reliability.control=off reliability.network_timeout_seconds=5
    grep -q 'reliability.network_timeout_seconds has no effect' err.txt || fail "an unused key is not named: $(cat err.txt)"
    rm -r run/checkpoints/step-10
    expect 0 run 2 run.yaml reliability.network_timeout_seconds=5 reliability.interface=lo
    ;;
  wrong_bits)
    # A flipped bit of a weight or of the optimizer state is found within the period and before a checkpoint, on all
    # ranks with exit code 81, and the rank is named where three have the tensor.
    corpus
    config run
    three=(3 run.yaml policy.train_global_batch_size=6 policy.train_micro_batch_size=1 checkpointing.save_period=4)
    NRL_FAULTS="flip:rank=2@step=5:tensor=model.layers.1.mlp.up_proj.weight,element=17" \
      expect 81 run "${three[@]}" reliability.replica_check_period=3
    grep -q 'error: silent data corruption: after step 6, rank 2 (.*) has other bits than the other replicas in model.layers.1.mlp.up_proj.weight. Fix: ' err.txt || fail "no message: $(cat err.txt)"
    [[ $(grep -c 'error: ' err.txt) == 1 ]] || fail "not one message: $(cat err.txt)"
    for line in '"kind": "silent_corruption"' '"exit_code": 81' '"retryable": true' '"rank": 2' '"last_completed_step": 6'; do
      grep -qF "$line" run/logs/failure.json || fail "failure.json lacks $line: $(cat run/logs/failure.json)"
    done
    grep -q '"replicas_agreed":true' run/checkpoints/step-4/manifest.json || fail "the checkpoint does not say that the replicas agreed"
    # Not in a step of the period: the save finds it, and leaves no checkpoint.
    NRL_FAULTS="flip:rank=0@step=6:tensor=exp_avg_sq/model.norm.weight,bit=3,attempt=2" expect 81 run "${three[@]}"
    grep -q 'after step 8, rank 0 (.*) has other bits .* in .*exp_avg_sq/model.norm.weight' err.txt || fail "no message: $(cat err.txt)"
    [[ ! -e run/checkpoints/step-8 ]] || fail "wrong bits were saved"
    expect 0 run "${three[@]}"
    [[ ! -e run/logs/failure.json ]] || fail "a failure of a run that succeeded"
    # The start after it takes no checkpoint that was saved without a comparison.
    config unproven
    three[1]=unproven.yaml
    expect 0 run "${three[@]}" pretrain.max_num_steps=4
    expect 0 run "${three[@]}" pretrain.max_num_steps=8 reliability.replica_check_period=0
    NRL_FAULTS="flip:rank=1@step=9:attempt=3" expect 81 run "${three[@]}" reliability.replica_check_period=1
    expect 0 run "${three[@]}"
    grep -q 'checkpoint not used: unproven/checkpoints/step-8: the attempt before ended with silent data corruption, and the replicas were not compared' err.txt ||
      fail "the newest checkpoint is not explained: $(cat err.txt)"
    grep -q '^resume *unproven/checkpoints/step-4, step 4' out.txt || fail "not resumed from step 4: $(cat out.txt)"
    three[1]=run.yaml
    # Off: nothing is found, and the checkpoints say nothing.
    config off
    NRL_FAULTS="flip:rank=1@step=5:tensor=model.norm.weight" expect 0 run 2 off.yaml reliability.replica_check_period=0
    if grep -q replicas_agreed off/checkpoints/step-10/manifest.json; then fail "replicas agreed that were not compared"; fi
    # Of two replicas none is right by itself; of copies on tensor- and data-parallel ranks one is in both groups.
    config two
    NRL_FAULTS="flip:rank=1@step=2:tensor=model.norm.weight" expect 81 run 2 two.yaml reliability.replica_check_period=2
    grep -q 'ranks 0 (.*), 1 (.*) have different bits in model.norm.weight; which of them is right cannot be told' err.txt || fail "no message: $(cat err.txt)"
    grep -q '"rank": null' two/logs/failure.json || fail "a rank is named: $(cat two/logs/failure.json)"
    config grid
    NRL_FAULTS="flip:rank=3@step=2:tensor=model.norm.weight" expect 81 run 4 grid.yaml reliability.replica_check_period=2 \
      distributed.tensor_parallel_size=2
    grep -q 'rank 3 (.*) has other bits' err.txt || fail "no message: $(cat err.txt)"
    # A rank with other bits is told from bad data when a step is not finite.
    config nan
    NRL_FAULTS="nan:rank=1@step=3:tensor=model.norm.weight" expect 81 run "${three[@]/run.yaml/nan.yaml}"
    grep -q 'after step 3, rank 1 (.*) has other bits' err.txt || fail "no message: $(cat err.txt)"
    config gradient
    NRL_FAULTS="nan:rank=1@step=3:site=gradient" expect 0 run 2 gradient.yaml
    grep -q 'A rank computed another result\|a rank computed another result' out.txt || fail "no cause of NaN: $(cat out.txt)"
    # Without replicas there is nothing to compare.
    config pipeline
    expect 0 run 2 pipeline.yaml distributed.pipeline_parallel_size=2 reliability.replica_check_period=2
    [[ $(grep -c 'no rank has a replica in this layout' out.txt) == 1 ]] || fail "no word about the key: $(cat out.txt)"
    NRL_FAULTS="flip:rank=1@step=2:tensor=model.nrom.weight" expect 64 run 2 two.yaml checkpointing.resume=never logger.log_dir=typo \
      checkpointing.checkpoint_dir=typo
    grep -q "did you mean 'model.norm.weight'" err.txt || fail "no remedy: $(cat err.txt)"
    ;;
  repeated)
    # A step that is computed twice gives the same bits, in every layout, and the one that does not is named.
    corpus
    config plain
    expect 0 run 2 plain.yaml
    for layout in "2 distributed.shard_strategy=ddp" "2 distributed.shard_strategy=optim_grads_params" \
      "2 distributed.tensor_parallel_size=2" "2 distributed.pipeline_parallel_size=2" "2 distributed.context_parallel_size=2"; do
      read -r ranks key <<<"$layout"
      config run
      expect 0 run "$ranks" run.yaml "$key" reliability.recompute_check_period=3 reliability.replica_check_period=1
      same plain/logs/metrics.jsonl run/logs/metrics.jsonl "$([[ $key == *=ddp ]] && echo 0 || echo 1e-5)"
      rm -r run
    done
    config wrong
    NRL_FAULTS="flip:rank=1@step=6:site=repeat,tensor=model.layers.0.mlp.up_proj.weight,bit=2,element=9" \
      expect 81 run 2 wrong.yaml reliability.recompute_check_period=3
    grep -q 'step 6 was computed twice from the same bits, and rank 1 (.*) has two results for the gradient of model.layers.0.mlp' err.txt || fail "no message: $(cat err.txt)"
    grep -q '"rank": 1' wrong/logs/failure.json || fail "$(cat wrong/logs/failure.json)"
    # One rank alone, too.
    config one
    NRL_FAULTS="flip:rank=0@step=4:site=repeat" expect 81 run 1 one.yaml reliability.recompute_check_period=2
    ;;
  faults_refused)
    corpus
    config run
    NRL_FAULTS="kil:rank=1@step=3" expect 64 run 2 run.yaml
    [[ $(grep -c "NRL_FAULTS:1: 'kil' is not a kind of fault" err.txt) == 1 ]] || fail "not one message: $(cat err.txt)"
    [[ ! -e run ]] || fail "files of a run that did not start"
    ;;
  *) fail "no case $case_name" ;;
esac
