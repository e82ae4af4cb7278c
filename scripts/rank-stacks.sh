#!/usr/bin/env bash
# Prints for every rank of nrl-train on this host in which of its functions the main thread is, innermost first.
# usage: rank-stacks.sh [PROGRAM]
# PROGRAM: the name of the program, nrl-train by default. In a hang, all ranks but the late one wait for it. Needs gdb,
# and the permission to trace the processes: their user, or root where the kernel restricts that (ptrace_scope).
set -euo pipefail

case ${1:-} in
  -h | --help)
    sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
command -v gdb >/dev/null || {
  echo "error: gdb is not installed. Fix: install the package gdb" >&2
  exit 69
}
program=${1:-nrl-train}
mapfile -t processes < <(pgrep -x "${program:0:15}" || true)
((${#processes[@]})) || {
  echo "error: no process has the name $program on this host. Fix: run this on a host of the run" >&2
  exit 66
}
for process in "${processes[@]}"; do
  # Open MPI's mpirun, or srun.
  rank=$(tr '\0' '\n' <"/proc/$process/environ" | sed -nE 's/^(OMPI_COMM_WORLD_RANK|PMIX_RANK|SLURM_PROCID)=//p' | head -n 1) || continue
  echo "rank ${rank:-alone}, process $process, $(sed -n 's/^State:\s*//p' "/proc/$process/status")"
  stack=$(gdb -p "$process" -batch -nx -ex 'thread 1' -ex bt 2>&1) || true
  functions=$(sed -nE 's/^#[0-9]+ +(0x[0-9a-f]+ in )?[^(<]*(nrl::[A-Za-z_0-9:]+).*/  \2/p' <<<"${stack//\(anonymous namespace\)::/}")
  head -n 8 <<<"${functions:-  no stack: $(tail -n 1 <<<"$stack")}"
done
