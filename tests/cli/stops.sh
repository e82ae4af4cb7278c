#!/usr/bin/env bash
# Stop signals, limits and readers that do not read: stops.sh CASE NRL_TRAIN SOURCE_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh" "$@"

# A failed case leaves no run behind.
trap 'kill -KILL "${pid:-}" 2>/dev/null || true; rm -rf "$work" "$work.mpi"' EXIT

endless=(pretrain.max_num_steps=1000000 policy.scheduler.lr_decay_iters=1000000)

# started NAME [ROWS]: waits until the run has made some steps.
started() {
  for _ in $(seq 1200); do
    [[ $(grep -c loss "$1/logs/metrics.jsonl" 2>/dev/null || true) -gt ${2:-3} ]] && return
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.05
  done
  fail "$1 made no steps: $(cat out.txt err.txt 2>/dev/null)"
}

# stopped PID CODE NAME: the process ends with this code (or any) and a checkpoint; it is killed when it hangs.
stopped() {
  local code=0
  for _ in $(seq 600); do
    kill -0 "$1" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL "$1" 2>/dev/null || true
  wait "$1" || code=$?
  [[ $2 == any && $code != 137 || $2 == "$code" ]] || fail "$3: exit code $code instead of $2: $(cat out.txt err.txt 2>/dev/null)"
  compgen -G "$3/checkpoints/step-*" >/dev/null || fail "$3: no checkpoint was saved"
}

# two_ranks: a run that is making steps; pid is mpirun.
two_ranks() {
  corpus
  config ranks
  mpirun --oversubscribe --bind-to none -n 2 "$nrl_train" ranks.yaml "${endless[@]}" >out.txt 2>err.txt &
  pid=$!
  started ranks
}

# A pipe that is open on descriptor 9, full, and without a reader.
full_pipe() {
  mkfifo full
  exec 9<>full
  dd if=/dev/zero of=full bs=4096 oflag=nonblock 2>/dev/null || true
}

case $case_name in
  stop_signals)
    corpus
    for signal in HUP USR1 TERM INT; do
      config "$signal"
      # In a shell script a command in the background ignores SIGINT unless it sets it itself.
      "$nrl_train" "$signal.yaml" "${endless[@]}" >out.txt 2>err.txt &
      pid=$!
      started "$signal"
      kill -"$signal" $pid
      if [[ $signal == USR1 ]]; then
        # Until it is gone: handlers must be there in the summary and at the end too.
        while kill -USR1 $pid 2>/dev/null; do sleep 0.001; done
      fi
      stopped $pid 75 "$signal"
      grep -q 'exit 75' out.txt || fail "$signal: no last line: $(cat out.txt)"
      grep -q '^checkpoint  *'"$signal"/checkpoints out.txt || fail "$signal: no summary: $(cat out.txt)"
    done
    # Also where a library takes SIGHUP before main(), as UCX does.
    printf '#include <csignal>\nextern "C" void on_hup(int) {}\nstatic const auto before = std::signal(SIGHUP, on_hup);\n' >hup.cpp
    c++ -shared -fPIC hup.cpp -o hup.so
    for preload in '' "$work/hup.so"; do
      config nohup
      rm -rf nohup
      LD_PRELOAD=$preload ASAN_OPTIONS=${ASAN_OPTIONS:-}:verify_asan_link_order=0 \
        nohup "$nrl_train" nohup.yaml "${endless[@]}" >out.txt 2>err.txt &
      pid=$!
      started nohup
      kill -HUP $pid
      started nohup $(($(wc -l <nohup/logs/metrics.jsonl) + 20))
      kill -USR1 $pid
      stopped $pid 75 nohup
    done
    ;;
  stop_signals_ranks)
    two_ranks
    # The ranks themselves: mpirun is killed by a signal that comes at its very end.
    for _ in $(seq 300); do
      pkill -USR1 -P $pid 2>/dev/null || break
      sleep 0.01
    done
    stopped $pid 75 ranks
    grep -q 'exit 75' out.txt || fail "no last line: $(cat out.txt)"
    ;;
  stop_one_rank)
    two_ranks
    for rank in $(pgrep -P $pid); do
      if grep -qz '^OMPI_COMM_WORLD_RANK=1$' "/proc/$rank/environ"; then kill -USR1 "$rank"; fi
    done
    stopped $pid 75 ranks
    grep -q 'exit 75' out.txt || fail "no last line: $(cat out.txt)"
    ;;
  unread)
    corpus
    full_pipe
    for streams in out both; do
      config "$streams"
      if [[ $streams == out ]]; then
        "$nrl_train" out.yaml "${endless[@]}" >full 2>err.txt &
      else
        "$nrl_train" both.yaml "${endless[@]}" >full 2>&1 &
      fi
      pid=$!
      started "$streams" 50
      kill -USR1 $pid
      stopped $pid 75 "$streams"
    done
    grep -q 'lines of standard output were not shown' err.txt || fail "nothing tells of the lines that nobody read: $(cat err.txt)"
    # A reader that goes away is no reason to stop.
    config gone
    { "$nrl_train" gone.yaml 2>err.txt || echo "$?" >code.txt; } | true
    [[ ! -e code.txt ]] || fail "a closed reader ended the run: $(cat code.txt err.txt)"
    [[ $(grep -c loss gone/logs/metrics.jsonl) -eq 10 ]] || fail "the run stopped with its reader"
    ;;
  unread_ranks)
    corpus
    config ranks
    full_pipe
    mpirun --oversubscribe --bind-to none -n 2 "$nrl_train" ranks.yaml "${endless[@]}" >full 2>err.txt &
    pid=$!
    started ranks 50
    kill -USR1 $pid
    # The ranks leave, as zombies: mpirun itself waits for its reader.
    for _ in $(seq 600); do
      pgrep -r R,S,D,T -P $pid >/dev/null || break
      sleep 0.1
    done
    ! pgrep -r R,S,D,T -P $pid >/dev/null || fail "the ranks wait for a reader"
    cat <&9 >/dev/null &
    reader=$!
    stopped $pid 75 ranks
    kill $reader
    # Told to stop, mpirun reads its ranks' output no more, and ends with a code of its own.
    config told
    mpirun --oversubscribe --bind-to none -n 2 "$nrl_train" told.yaml "${endless[@]}" checkpointing.save_period=0 >out.txt 2>err.txt &
    pid=$!
    started told 50
    kill -TERM $pid
    stopped $pid any told
    expect 0 run 1 checkpoint verify told/checkpoints
    ;;
  file_limit)
    corpus
    config limit
    # 64 KiB: enough for logs, too little for the weights. Standard output is a file as well.
    expect 74 bash -c 'ulimit -f 64; "$@" >out.txt 2>err.txt' - "$nrl_train" limit.yaml
    grep -q 'error: .*limit/checkpoints.*File too large (the limit of ulimit -f' err.txt || fail "the error does not name file and reason: $(cat err.txt)"
    ! compgen -G "limit/checkpoints/step-*" >/dev/null || fail "half a checkpoint was left"
    ;;
  own_numbers)
    corpus
    config own
    # The parent's 120 MB are not the run's.
    bash -c 'x=$(head -c 120000000 /dev/zero | tr "\0" x); echo "${#x}"; "$@" >out.txt; exit $?' - "$nrl_train" own.yaml
    mem=$(sed -n 's/.*step 10\/10 .* mem \([0-9]*\)\..*M .*/\1/p' out.txt)
    ((mem > 5 && mem < 100)) || fail "mem ${mem:-missing} is not this process's own: $(cat out.txt)"
    awk '{ for (i = 1; i < NF; i++) if ($i == "mfu" && $(i + 1) + 0 > 100) exit 1 }' out.txt || fail "more than 100 % of the peak: $(cat out.txt)"
    # Threads: the environment's number where the configuration says auto; the banner has lines of at most 100 columns,
    # and no dimension of the grid that is not used.
    OMP_NUM_THREADS=3 expect 0 run 1 own.yaml checkpointing.resume=never kernels.num_threads=auto
    grep -q '^device .* 3 threads per rank' out.txt || fail "OMP_NUM_THREADS=3 is not respected: $(cat out.txt)"
    awk '/^[a-z ]* *[^ ]/ && !/^[0-9]/ && length($0) > 100' out.txt >long.txt
    [[ ! -s long.txt ]] || fail "more than 100 columns: $(cat long.txt)"
    ! grep -Eq '^(grid|device).*((tp|pp|cp|ep) 1|auto:)' out.txt || fail "words that say nothing: $(cat out.txt)"
    expect 0 run 2 own.yaml checkpointing.resume=never
    grep -q '^grid  *2 ranks = dp 2 ' out.txt || fail "no grid: $(cat out.txt)"
    mkdir single
    cp "$source_dir/core/base/text.cpp" single
    expect 0 run 1 prepare --input single --tokenizer bytes --output single/corpus
    grep -q 'from 1 file:' out.txt || fail "1 files: $(cat out.txt)"
    ;;
  *) fail "unknown case $case_name" ;;
esac
echo "$case_name: ok"
