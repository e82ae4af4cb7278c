#!/usr/bin/env bash
# ptx_check.sh EXPECTATIONS PTX...: every kernel that an expectation names has the instructions it is written for, and
# as many of one kind for each of another as it says.
set -euo pipefail
expectations=$1
shift

# Op, kernel, instruction, how often it is written: one line each. "(anonymous namespace)" is @, enumerators are their numbers.
instructions=$(
  for ptx in "$@"; do
    op=$(basename "$ptx")
    op=${op%%.*}
    awk -v op="$op" '
      /\.entry/ { match($0, /_Z[A-Za-z0-9_]*/); kernel = substr($0, RSTART, RLENGTH); print op "\t" kernel "\t.entry"; next }
      /^}/ { kernel = "" }
      kernel == "" { next }
      { sub(/^[ \t]+/, ""); sub(/^@!?%p[0-9]+[ \t]+/, ""); sub(/;.*/, "") }
      /^[a-z]/ { print op "\t" kernel "\t" $1 }
    ' "$ptx"
  done | sort | uniq -c | awk '{ count = $1; sub(/^ *[0-9]+ /, ""); print $0 "\t" count }' | c++filt | sed -E 's/\(anonymous namespace\)/@/g; s/\([A-Za-z_:@]+\)([0-9]+)/\1/g; s/, /,/g; s/nrl:://g'
)

failures=0 checks=0
while read -r op name patterns; do
  [[ -z $op || $op == \#* ]] && continue
  kernels=$(awk -F '\t' -v op="$op" -v name="$name" '
    $1 == op && $3 == ".entry" { plain = $2; sub(/^void /, "", plain); sub(/\(.*/, "", plain); sub(/^[^<]*::/, "", plain)
      if (plain ~ "^(" name ")$") print $2 }' <<<"$instructions")
  if [[ -z $kernels ]]; then
    echo "FAILED: $op has no kernel $name"
    failures=$((failures + 1))
    continue
  fi
  while read -r kernel; do
    for pattern in $patterns; do
      checks=$((checks + 1))
      if ! awk -F '\t' -v op="$op" -v kernel="$kernel" -v pattern="$pattern" '
          BEGIN { n = split(pattern, part, /:|>=/) }
          $1 != op || $2 != kernel { next }
          $3 ~ "^(" part[1] ")" { found += $4 }
          n == 3 && $3 ~ "^(" part[2] ")" { others += $4 }
          END { exit !(n == 3 ? found >= part[3] * others : found) }' <<<"$instructions"; then
        echo "FAILED: $kernel of $op has no $pattern"
        failures=$((failures + 1))
      fi
    done
  done <<<"$kernels"
done <"$expectations"
echo "$checks instructions looked for, $failures failures"
((failures == 0 && checks > 0))
