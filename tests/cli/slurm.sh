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
printf '#!/bin/sh\necho "scontrol $*" >>calls.txt\n' >bin/scontrol
cat >bin/leave <<'SH'
#!/bin/sh
exit "$1"
SH
chmod +x bin/*
export PATH=$work/bin:$PATH SLURM_JOB_ID=42 NRL_TRAIN=leave
requeued() { grep -qx 'scontrol requeue 42' calls.txt; }
# batch ARGS...: the job with these arguments; which commands it used is in calls.txt.
batch() {
  : >calls.txt
  bash "$job" "$@" >out.txt 2>err.txt
}

case $case_name in
  slurm)
    expect 0 batch 0
    grep -q -- '--mpi=pmix' calls.txt || fail "srun without PMIx: $(cat calls.txt)"
    ! requeued || fail "a finished run is requeued"
    for code in 1 70 80 143; do
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
    printf '#!/bin/sh\necho "scontrol $*" >>calls.txt\n' >bin/scontrol
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
    saved=$(printf '%s\n' run/checkpoints/step-* | sort -V | tail -n 1)
    saved=${saved##*/}
    expect 0 batch run.yaml pretrain.max_num_steps=$((${saved#step-} + 5)) policy.scheduler.lr_decay_iters=100000
    grep -q "resume *.*$saved" out.txt err.txt || fail "it does not resume at $saved: $(cat out.txt err.txt)"
    ;;
  *) fail "no case $case_name" ;;
esac
