#!/usr/bin/env bash
# nrl-train launch on one host: restarts after failures with the losses of an undisturbed run, stop requests, supervisors
# that are killed, and what it refuses.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# launch ARGS...: the output goes to out.txt and err.txt.
launch() {
  "$nrl_train" launch "$@" >out.txt 2>err.txt
}

# says FILE TEXT...: the file has a line with each text.
says() {
  local text
  for text in "${@:2}"; do grep -qF -- "$text" "$1" || fail "no '$text' in $1: $(cat "$1")"; done
}

# attempts N: the supervisor started that many.
attempts() {
  [[ $(grep -c '^launch: attempt [0-9]* starts' out.txt) == "$1" ]] || fail "not $1 attempts: $(cat out.txt)"
}

# begin ARGS...: starts a run of 20 s in the background, its supervisor's number in $!, and waits for a checkpoint.
long=(pretrain.max_num_steps=400 policy.scheduler.lr_decay_iters=400 checkpointing.save_period=5)
begin() {
  NRL_FAULTS="slow:all@step=1:seconds=0.05,steps=1000000,attempt=any" "$nrl_train" launch "$@" "${long[@]}" >out.txt 2>err.txt &
  for ((i = 0; i < 1200; ++i)); do
    [[ $(newest) -ge 5 ]] && return
    kill -0 $! 2>/dev/null || fail "the run ended early: $(cat out.txt err.txt)"
    sleep 0.05
  done
  fail "no checkpoint: $(cat out.txt err.txt)"
}
newest() { printf '%s\n' run/checkpoints/step-* | sed -nE 's/.*step-([0-9]+)$/\1/p' | sort -n | tail -n 1; }

# nothing_left: neither processes of the run nor its files in shared memory.
nothing_left() {
  ! processes "$nrl_train run.yaml" >left.txt || fail "processes are left: $(cat left.txt)"
  local id
  id=$(sed -nE 's/.*"run_id": "([^"]*)".*/\1/p' run/logs/run.json)
  [[ ! -e /dev/shm/nrl-$UID/$id ]] || fail "shared memory is left: $(ls "/dev/shm/nrl-$UID/$id")"
}

case $case_name in
  launch)
    # A killed rank, a hung one, and one whose files fail: the same losses as without.
    corpus
    config plain
    expect 0 run 4 plain.yaml
    config run
    NRL_FAULTS="kill:rank=2@step=4; hang:rank=1@step=6:attempt=2" \
      expect 0 launch --ranks 4 -- run.yaml checkpointing.save_period=1 reliability.step_timeout_seconds=3
    attempts 3
    says out.txt 'launch: attempt 1 starts: 4 ranks' 'launch: attempt 1: rank 2 on ' ' (exit 80, rank_' \
      'Restart 1 of at most 100 from step ' 'launch: attempt 2: rank 1 on ' '(exit 80, rank_hung)' \
      'launch: attempt 3: the run is complete. Exit 0'
    same plain/logs/metrics.jsonl run/logs/metrics.jsonl 0
    [[ $(wc -l <run/logs/failures.jsonl) == 2 && ! -e run/logs/failure.json ]] || fail "$(ls run/logs)"
    grep -q '"attempt":2,' run/logs/failures.jsonl || fail "the second failure names no attempt: $(cat run/logs/failures.jsonl)"
    grep -q '"attempt": 3,' run/logs/run.json || fail "run.json: $(cat run/logs/run.json)"
    grep -q '"done": true' run/logs/launch.json || fail "launch.json: $(cat run/logs/launch.json)"
    [[ ! -e run/logs/run.lock && ! -e run/logs/launch.lock ]] || fail "locks are left: $(ls run/logs)"
    nothing_left
    # One rank needs no launcher. Failures that go on end the run with their code.
    rm -r run
    NRL_FAULTS="kill:all@step=2:attempt=any" expect 137 launch --max-restarts 1 -- run.yaml
    attempts 2
    says out.txt 'launch: attempt 1: it was ended by signal 9 and left no failure.json. Restart 1 of at most 1 from step 0 in 1 s' \
      'after 1 restarts. Exit 137'
    NRL_FAULTS="error:all@step=2:attempt=any" expect 70 launch -- run.yaml
    attempts 1
    ;;
  launch_refused)
    corpus
    config run
    expect 69 launch --launcher "nrl-no-such-launcher -n {ranks}" --ranks 2 -- run.yaml
    says err.txt "cannot start 'nrl-no-such-launcher': No such file or directory" "name another --launcher"
    expect 64 launch --launcher "mpirun -n {rank}" --ranks 2 -- run.yaml
    says err.txt "'{rank}' is not known"
    for option in --elastic --relayout --replace-slow; do
      expect 64 launch "$option" -- run.yaml
      says err.txt "$option is not supported: "
    done
    expect 64 launch --spares 1 --ranks 2 -- run.yaml
    says err.txt '--spares takes hosts of --hosts FILE'
    printf 'a slots=2\nb slots=2\n' >hosts.txt
    expect 64 launch --hosts hosts.txt --spares 2 -- run.yaml
    expect 64 launch --hosts hosts.txt --ranks 3 -- run.yaml
    says err.txt '3 ranks do not divide into 2 hosts'
    expect 64 launch --hosts hosts.txt --hosts none.txt -- run.yaml
    expect 64 launch
    expect 66 launch -- none.yaml
    # Errors of the configuration, which launch itself finds, and which the ranks find: returned at once.
    expect 78 launch --ranks 2 -- run.yaml policy.optimiser.lr=1
    attempts 0
    expect 78 launch --ranks 3 -- run.yaml
    attempts 1
    says out.txt ': it failed (exit 78, config); starting again cannot help. Exit 78'
    NRL_FAULTS="kil:rank=1@step=3" expect 64 launch --ranks 2 -- run.yaml
    attempts 1
    NRL_RUN_ID=../x NRL_ATTEMPT=1 expect 64 run 1 run.yaml
    says err.txt "NRL_RUN_ID and NRL_ATTEMPT are '../x' and '1'"
    printf '{"format": 3}' >run/logs/launch.json
    expect 65 launch -- run.yaml
    says err.txt 'run/logs/launch.json' 'Fix: remove the file'
    ;;
  launch_stops)
    corpus
    config run
    # A request to stop: a checkpoint, 75, and nothing is left; the same command goes on.
    for signal in USR1 TERM; do
      rm -rf run
      begin --ranks 2 -- run.yaml
      supervisor=$!
      # A second supervisor of the directory, and a run without one.
      code=0
      "$nrl_train" launch -- run.yaml >second.txt 2>&1 || code=$?
      [[ $code == 73 ]] || fail "a second supervisor left with $code: $(cat second.txt)"
      says second.txt "run/logs/launch.lock: locked by pid $supervisor on "
      code=0
      "$nrl_train" run.yaml >second.txt 2>&1 || code=$?
      [[ $code == 73 ]] || fail "a second run left with $code: $(cat second.txt)"
      kill "-$signal" "$supervisor"
      code=0
      wait "$supervisor" || code=$?
      [[ $code == 75 ]] || fail "$signal: exit code $code: $(cat out.txt err.txt)"
      says out.txt 'the run is asked to save and to stop' 'launch: attempt 1: the run has stopped with a checkpoint. Exit 75'
      nothing_left
    done
    # No time to save: killed, and said so.
    begin --ranks 2 --grace 0 -- run.yaml
    kill -TERM $!
    code=0
    wait $! || code=$?
    [[ $code == 143 || $code == 75 ]] || fail "exit code $code: $(cat out.txt err.txt)"
    sleep 2
    nothing_left
    ;;
  launch_killed)
    # A killed supervisor takes its run with it, and the next one goes on.
    corpus
    config plain
    config run
    begin --ranks 2 -- run.yaml
    kill -KILL $!
    wait $! || true
    grep -q '"running": true' run/logs/launch.json || fail "launch.json: $(cat run/logs/launch.json)"
    for ((i = 0; i < 100; ++i)); do
      processes "$nrl_train run.yaml" >left.txt || break
      sleep 0.1
    done
    expect 0 launch --ranks 2 -- run.yaml "${long[@]}"
    says out.txt 'launch: attempt 1 was running when its supervisor ended' 'launch: attempt 2 starts: 2 ranks' 'Exit 0'
    nothing_left
    expect 0 run 2 plain.yaml "${long[@]}" checkpointing.save_period=0
    same plain/logs/metrics.jsonl run/logs/metrics.jsonl 0
    # A launcher that stays when its ranks and its supervisor are gone, as Open MPI's may.
    rm -r run
    cat >stays <<'TEXT'
#!/usr/bin/env bash
mpirun --oversubscribe -n 2 "$@" &
trap 'kill $!' TERM
while :; do sleep 0.1; done
TEXT
    chmod +x stays
    begin --launcher ./stays --ranks 2 -- run.yaml
    kill -KILL $!
    wait $! || true
    expect 0 launch --ranks 2 -- run.yaml "${long[@]}"
    says out.txt 'the launcher of attempt 1, had not ended and is killed' 'launch: attempt 2 starts: 2 ranks' 'Exit 0'
    ! processes ./stays >left.txt || fail "the launcher is left: $(cat left.txt)"
    ;;
  *) fail "no case $case_name" ;;
esac
echo "$case_name: ok"
