#!/usr/bin/env bash
# ptxas statistics of the kernels: registers, stack, spills and shared memory of every entry function, and their largest
# values for every op and architecture.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/ptxas-table.sh [--summary] [--no-spills ARCHITECTURE] [REPORT.ptxas...]
  --summary      only one line per op and architecture
  --no-spills A  the architecture on which a spill is a fault (sm_90a); elsewhere it is only shown
  REPORT.ptxas   outputs of `ptxas -v`, each next to its PTX; default: those of build/cuda
Exits with 1 when a kernel spills registers there, or has too many for a block of 1024 threads without __launch_bounds__; with
65 when there is no kernel.
TEXT
}

reports=()
summary=0 no_spills=sm_90a
while (($#)); do
  case $1 in
    --summary) summary=1 ;;
    --no-spills)
      no_spills=${2:?}
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    -*)
      usage >&2
      exit 64
      ;;
    *) reports+=("$1") ;;
  esac
  shift
done
if ((${#reports[@]} == 0)); then
  mapfile -t reports < <(find "$root_dir/build/cuda/tests/kernels" -name '*.ptxas' 2>/dev/null | LC_ALL=C sort)
  ((${#reports[@]})) || die 66 "there is no report. Fix: build the target nrl-train in build/cuda first, with tests"
fi

# One line per kernel: file, architecture, mangled name, largest block (0: unspecified), registers, stack, spill stores,
# spill loads, shared memory.
rows() {
  awk '
    function put() {
      if (name != "") printf "%s %s %s %d %d %d %d %d %d\n", file, arch, name, bounds[file, name], registers, stack, stores, loads, shared
      name = ""
      registers = stack = stores = loads = shared = 0
    }
    FNR == 1 { put(); file = FILENAME; sub(/.*\//, "", file); sub(/\.ptx(as)?$/, "", file) }
    /\.entry/ { match($0, /_Z[A-Za-z0-9_]*/); entry = substr($0, RSTART, RLENGTH) }
    /^\.maxntid/ { gsub(/,/, " "); bounds[file, entry] = $2 * ($3 ? $3 : 1) * ($4 ? $4 : 1) }
    /Compiling entry function/ { put(); split($0, part, "\047"); name = part[2]; arch = part[4] }
    name == "" { next }  # functions that are not kernels
    match($0, /[0-9]+ bytes stack frame/) { stack = substr($0, RSTART) + 0 }
    match($0, /[0-9]+ bytes spill stores/) { stores = substr($0, RSTART) + 0 }
    match($0, /[0-9]+ bytes spill loads/) { loads = substr($0, RSTART) + 0 }
    match($0, /Used [0-9]+ registers/) { registers = substr($0, RSTART + 5) + 0 }
    match($0, /[0-9]+ bytes smem/) { shared = substr($0, RSTART) + 0 }
    END { put() }
  ' "$@"
}

# "void nrl::ops::cuda::(anonymous namespace)::kernel<nrl::bf16>(...)" becomes "kernel<bf16>".
shorten() {
  sed -E 's/\(anonymous namespace\)/@/g; s/\(\(?nrl::[A-Za-z_:@]*\)\(?([0-9]+)\)?/\1/g; s/\([a-z ]*\)([0-9]+)/\1/g; s/\(.*$//; s/^void //; s/nrl::(ops::)?(cuda::)?(@::)?//g; s/ //g'
}

table=$(rows "${reports[@]/%.ptxas/.ptx}" "${reports[@]}")
[[ -n $table ]] || die 65 "no kernel in: ${reports[*]}"
paste -d ' ' <(awk '{ print $1, $2 }' <<<"$table") <(awk '{ print $3 }' <<<"$table" | c++filt | shorten) \
  <(awk '{ print $4, $5, $6, $7, $8, $9 }' <<<"$table") |
  awk -v summary="$summary" -v no_spills="$no_spills" '
    BEGIN { if (!summary) printf "%-14s %-8s %7s %9s %6s %13s %12s %7s  %s\n", "op", "arch", "threads", "registers", "stack", "spill stores", "spill loads", "shared", "kernel" }
    {
      remark = ""
      fault = 0
      spills = $7 + $8 > 0
      if (spills) {
        fault = $2 == no_spills
        remark = fault ? "  SPILLS" : "  spills"
      }
      if ($4 == 0 && $5 > 64) {
        fault = 1
        remark = remark "  NEEDS __launch_bounds__"
      }
      if (!summary) printf "%-14s %-8s %7s %9d %6d %13d %12d %7d  %s%s\n", $1, $2, ($4 ? $4 : "-"), $5, $6, $7, $8, $9, $3, remark
      bad += fault
      key = $1 " " $2
      if (!(key in kernels)) keys[++n] = key
      ++kernels[key]
      if ($5 > registers[key]) registers[key] = $5
      if ($6 > stack[key]) stack[key] = $6
      if ($9 > shared[key]) shared[key] = $9
      spilling[key] += spills
    }
    END {
      printf "\n%-14s %-8s %7s %9s %6s %8s %7s\n", "op", "arch", "kernels", "registers", "stack", "spilling", "shared"
      for (i = 1; i <= n; ++i) {
        split(keys[i], part)
        printf "%-14s %-8s %7d %9d %6d %8d %7d\n", part[1], part[2], kernels[keys[i]], registers[keys[i]], stack[keys[i]], spilling[keys[i]], shared[keys[i]]
      }
      printf "%d kernels, %d with faults\n", NR, bad
      exit (bad > 0)
    }
  '
