#!/usr/bin/env bash
# scripts/slurm/train.sbatch with stand-ins for srun and scontrol: what goes back into the queue and what does not.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

job=$source_dir/scripts/slurm/train.sbatch
mkdir bin
cat >bin/srun <<'SH'
#!/bin/sh
echo "srun $*" >>calls.txt
while case $1 in --*) true ;; *) false ;; esac; do shift; done
exec "$@"
SH
cat >bin/scontrol.works <<'SH'
#!/bin/sh
echo "scontrol $*" >>calls.txt
[ "$1" != show ] || printf 'JobId=42 JobName=nrl-train\n   StdErr=%s\n   StdOut=%s\n' "$PWD/err.txt" "$PWD/job.log"
SH
cp bin/scontrol.works bin/scontrol
# leave CODE: exits with it; leave CODE STEP: after a checkpoint of that step.
cat >bin/leave <<'SH'
#!/bin/sh
[ $# -eq 1 ] || printf '12:00:00 ckpt %-8s     checkpoints/step-%s  0.1s\n' "$2" "$2"
exit "$1"
SH
chmod +x bin/*
export PATH=$work/bin:$PATH SLURM_JOB_ID=42 NRL_TRAIN=leave
requeued() { grep -qx 'scontrol requeue 42' calls.txt; }
# batch ARGS...: the job with these arguments; which commands it used is in calls.txt. All starts append to $job_log.
job_log=job.log
batch() {
  local code=0 before
  : >calls.txt
  touch "$job_log"
  before=$(wc -c <"$job_log")
  bash "$job" "$@" >>"$job_log" 2>err.txt || code=$?
  tail -c +$((before + 1)) "$job_log" >out.txt
  return "$code"
}
# lost TIMES ARGS...: a rank is lost that many times, and the job goes back into the queue every time.
lost() {
  local i
  for ((i = 0; i < $1; ++i)); do
    SLURM_RESTART_COUNT=$((10 + i)) expect 0 batch "${@:2}"
    requeued || fail "a run that lost a rank is not requeued after $i others: $(cat err.txt)"
  done
}
# given_up: the job ends at the next lost rank.
given_up() {
  expect 80 batch 80
  ! requeued || fail "NRL_MAX_LOST is not respected"
  grep -q 'a rank was lost again after [0-9]* requeues without a new checkpoint' err.txt || fail "no reason: $(cat err.txt)"
}

case $case_name in
  slurm)
    expect 0 batch 0
    grep -q -- '--mpi=pmix' calls.txt || fail "srun without PMIx: $(cat calls.txt)"
    ! requeued || fail "a finished run is requeued"
    for code in 1 70 79 143; do
      expect "$code" batch "$code"
      ! requeued || fail "a run that failed with $code is requeued"
    done
    expect 0 batch 75
    requeued || fail "a stopped run is not requeued"
    SLURM_RESTART_COUNT=3 NRL_MAX_REQUEUES=3 expect 75 batch 75
    ! requeued || fail "NRL_MAX_REQUEUES is not respected"
    printf '#!/bin/sh\nexit 1\n' >bin/scontrol
    expect 75 batch 75
    grep -q 'did not requeue' err.txt || fail "a refused requeue is not reported: $(cat err.txt)"
    cp bin/scontrol.works bin/scontrol
    # A lost rank: three times in a row, counted from the last checkpoint.
    lost 3 80
    given_up
    expect 0 batch 75
    given_up
    lost 1 80 5
    lost 2 80
    given_up
    NRL_MAX_LOST=5 lost 2 80
    SLURM_RESTART_COUNT=100 expect 80 batch 80 6
    ! requeued || fail "NRL_MAX_REQUEUES is not respected"
    # Where the log is not to be found, all restarts count.
    job_log=elsewhere.log
    mv job.log "$job_log"
    SLURM_RESTART_COUNT=2 expect 0 batch 80
    requeued || fail "a run whose log is elsewhere is not requeued: $(cat err.txt)"
    SLURM_RESTART_COUNT=3 given_up
    job_log=job.log
    expect 64 batch
    # With the program itself: stopped at a limit, started again by the same command, done.
    export NRL_TRAIN=$nrl_train
    corpus
    config run
    expect 78 batch run.yaml policy.optimiser.lr=1
    ! requeued || fail "a wrong configuration is requeued"
    batch run.yaml pretrain.max_num_steps=100000 policy.scheduler.lr_decay_iters=100000 &
    for _ in $(seq 600); do
      [[ $(grep -c loss run/logs/metrics.jsonl 2>/dev/null || true) -gt 3 ]] && break
      sleep 0.05
    done
    # As --signal does: the ranks get it, the batch script does not.
    pkill -USR1 -P "$(pgrep -P $!)" || fail "nothing to stop"
    wait $! || fail "the batch script failed: $(cat err.txt)"
    requeued || fail "the stopped run is not requeued"
    # The line of its checkpoint is the one that the script looks for.
    cp out.txt trained.txt
    export NRL_TRAIN=leave
    lost 3 80
    cat trained.txt >>job.log
    lost 1 80
    export NRL_TRAIN=$nrl_train
    saved=$(printf '%s\n' run/checkpoints/step-* | sort -V | tail -n 1)
    saved=${saved##*/}
    expect 0 batch run.yaml pretrain.max_num_steps=$((${saved#step-} + 5)) policy.scheduler.lr_decay_iters=100000
    grep -q "resume *.*$saved" out.txt err.txt || fail "it does not resume at $saved: $(cat out.txt err.txt)"
    ;;
  *) fail "no case $case_name" ;;
esac
