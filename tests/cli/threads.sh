#!/usr/bin/env bash
# Threads of the program: how they wait, and what happens where the system refuses them.
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# limited COMMAND...: runs with room for no further thread, as a user to whom such limits apply (root is exempt).
limited() {
  local drop=()
  if (($(id -u) == 0)); then
    chmod 777 "$work"
    drop=(setpriv --reuid=54321 --regid=54321 --clear-groups)
  fi
  "${drop[@]}" bash -c 'ulimit -u 1 && exec "$@"' limited "$@" >out.txt 2>err.txt
}

# refused COMMAND...: ends with 71 and says which limit it was.
refused() {
  expect 71 limited "$@"
  grep -q 'the user limit on processes and threads is 1 (ulimit -u' err.txt || fail "the limit is not named: $(cat err.txt)"
  ! grep -q 'bug in nrl-train\|terminate\|libgomp' err.txt || fail "not refused in order: $(cat err.txt)"
}

case $case_name in
  thread_limit)
    corpus
    chmod 644 corpus.*
    config tiny
    # A copy, as the directory of the build need not be open to others.
    cp "$nrl_train" program
    program=$work/program
    refused "$program" tiny.yaml kernels.num_threads=2 data.num_workers=0
    refused "$program" tiny.yaml kernels.num_threads=1 data.num_workers=2
    [[ ! -e tiny/checkpoints/step-5 ]] || fail "something was trained"
    refused "$program" prepare --input corpus.dataset.json --tokenizer bytes --output other --workers 2
    [[ -z $(find . -name 'other*') ]] || fail "prepare left something behind: $(echo other*)"
    expect 0 limited "$program" tiny.yaml kernels.num_threads=1 data.num_workers=0 pretrain.max_num_steps=1
    grep -q 'run.lock: its heartbeat waits for the steps' err.txt || fail "no word of the heartbeat: $(cat err.txt)"
    # A thread whose stack the address space has no room for: whatever is refused first, it is not the number of threads.
    expect 71 bash -c 'ulimit -s 1048576 && ulimit -v 2097152 && exec "$@"' limited "$program" tiny.yaml \
      kernels.num_threads=4 data.num_workers=2 >out.txt 2>err.txt
    grep -q 'ulimit -v' err.txt || fail "the address space is not named: $(cat err.txt)"
    ! grep -q 'ulimit -u' err.txt || fail "the number of threads is blamed: $(cat err.txt)"
    ;;
  openmp_spin)
    # OpenMP prints its settings as it starts: the last ones count, as the program starts itself again.
    spin() { env "$@" OMP_DISPLAY_ENV=verbose "$nrl_train" --version 2>&1 >/dev/null | sed -n "s/.*GOMP_SPINCOUNT = '\(.*\)'/\1/p"; }
    unset OMP_WAIT_POLICY GOMP_SPINCOUNT
    [[ $(spin | tail -n 1) == 3000 ]] || fail "threads wait with $(spin | tail -n 1) rounds"
    [[ $(spin GOMP_SPINCOUNT=77) == 77 ]] || fail "GOMP_SPINCOUNT is not respected: $(spin GOMP_SPINCOUNT=77)"
    [[ $(spin OMP_WAIT_POLICY=passive) == 0 ]] || fail "OMP_WAIT_POLICY is not respected: $(spin OMP_WAIT_POLICY=passive)"
    expect 64 env -u GOMP_SPINCOUNT "$nrl_train" no-such-command
    ;;
  openmp_places)
    # OpenMP binds the first thread to the first place, where all threads of a rank must not end up.
    cores() { env "$@" "$nrl_train" doctor 2>err.txt | sed -n 's/^kernels .*(\(.*\) cores available.*/\1/p'; }
    all=$(cores OMP_PROC_BIND=false)
    ((all >= 1)) || fail "no cores: $all $(cat err.txt)"
    for setting in OMP_PROC_BIND=true OMP_PLACES=cores OMP_PLACES=threads; do
      for more in "-u GOMP_SPINCOUNT" GOMP_SPINCOUNT=77; do
        # shellcheck disable=SC2086  # an option of env and its value
        [[ $(cores $more "$setting") == "$all" ]] || fail "$setting $more: $(cores $more "$setting") of $all cores"
      done
    done
    first=$(taskset -pc $$ | sed 's/.*: *\([0-9]*\).*/\1/')
    [[ $(cores "OMP_PLACES={$first}") == 1 ]] || fail "OMP_PLACES is ignored: $(cores "OMP_PLACES={$first}") cores"
    ;;
  *) fail "no case $case_name" ;;
esac
