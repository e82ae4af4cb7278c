#!/usr/bin/env bash
# ptx_check.sh EXPECTATIONS PTX...: every kernel that an expectation names has the instructions it is written for, and
# as many of one kind for each of another as it says.
set -euo pipefail
expectations=$1
shift

# Op, kernel, instruction, how often it is written: one line each. "(anonymous namespace)" is @, enumerators are their numbers.
instructions() {
  awk '
    FNR == 1 { op = FILENAME; sub(/.*\//, "", op); sub(/\..*/, "", op); kernel = "" }
    /\.entry/ { match($0, /_Z[A-Za-z0-9_]*/); kernel = substr($0, RSTART, RLENGTH); ++count[op "\t" kernel "\t.entry"]; next }
    /^(\.weak |\.visible )*\.func/ { kernel = "" }
    kernel == "" { next }
    { sub(/^[ \t]+/, ""); sub(/^@!?%p[0-9]+[ \t]+/, ""); sub(/;.*/, "") }
    /^[a-z]/ { ++count[op "\t" kernel "\t" $1] }
    END { for (line in count) print line "\t" count[line] }
  ' "$@" | LC_ALL=C sort | c++filt | sed -E 's/\(anonymous namespace\)/@/g; s/\([A-Za-z_:@]+\)([0-9]+)/\1/g; s/, /,/g; s/nrl:://g'
}

# The table of instructions comes first, then the expectations.
awk '
  NR == FNR {
    split($0, field, "\t")
    kernel = field[1] "\t" field[2]
    if (field[3] == ".entry") {
      plain = field[2]
      sub(/^void /, "", plain)
      sub(/\(.*/, "", plain)
      sub(/^[^<]*::/, "", plain)
      kernels[++n] = kernel
      op[n] = field[1]
      name[n] = plain
    } else {
      i = ++lines[kernel]
      instruction[kernel, i] = field[3]
      count[kernel, i] = field[4]
    }
    next
  }
  /^#/ || NF == 0 { next }
  {
    matching = 0
    for (k = 1; k <= n; ++k) {
      if (op[k] != $1 || name[k] !~ "^(" $2 ")$") continue
      ++matching
      for (p = 3; p <= NF; ++p) {
        ++checks
        parts = split($p, part, /:|>=/)
        found = others = 0
        for (i = 1; i <= lines[kernels[k]]; ++i) {
          if (instruction[kernels[k], i] ~ "^(" part[1] ")") found += count[kernels[k], i]
          if (parts == 3 && instruction[kernels[k], i] ~ "^(" part[2] ")") others += count[kernels[k], i]
        }
        if (parts == 3 ? found >= part[3] * others : found) continue
        split(kernels[k], field, "\t")
        print "FAILED: " field[2] " of " $1 " has no " $p
        ++failures
      }
    }
    if (!matching) {
      print "FAILED: " $1 " has no kernel " $2
      ++failures
    }
  }
  END {
    print checks + 0 " instructions looked for, " failures + 0 " failures"
    exit failures > 0 || checks == 0
  }
' <(instructions "$@") "$expectations"
