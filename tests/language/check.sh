#!/usr/bin/env bash
# check.sh tree ROOT       compares the phrases of phrases.awk in comments with the numbers of exceptions.txt
# check.sh lower ROOT      lowers the numbers that are higher than what is found
# check.sh self-test ROOT  seeds a tree with phrases and expects exactly these to be found
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# phrases ROOT: one line each, FOLDER FILE:LINE: PHRASE.
phrases() {
  cd "$1"
  local directories=() directory sources
  for directory in core precision memory parallel apps tests; do
    if [[ -d $directory ]]; then directories+=("$directory"); fi
  done
  mapfile -d '' -t sources < <(find "${directories[@]}" -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 | LC_ALL=C sort -z)
  awk -f "$here/phrases.awk" "${sources[@]}"
}

# compare EXCEPTIONS PHRASES: prints what differs, and exits with 1 when anything does.
compare() {
  awk '
    FILENAME == ARGV[1] {
      sub(/#.*/, "")
      if (NF == 2) allowed[$1] = $2 + 0
      next
    }
    { folders[$1]; ++count[$1]; place[$1, count[$1]] = substr($0, length($1) + 2) }
    END {
      for (folder in allowed) folders[folder]
      for (folder in folders) {
        n = count[folder] + 0
        most = allowed[folder] + 0
        if (n == most) continue
        bad = 1
        if (n > most) {
          printf "%s: %d phrases, at most %d are allowed. Write comments as \"X does Y\" (CONTRIBUTING.md)\n", folder, n, most
          for (i = 1; i <= n; ++i) print "  " place[folder, i]
        } else
          printf "%s: %d phrases, the list says %d. Lower the number: tests/language/check.sh lower .\n", folder, n, most
      }
      exit bad
    }' "$1" "$2"
}

# lower EXCEPTIONS PHRASES: prints the list with numbers that are not higher than what is found.
lower() {
  awk '
    FILENAME == ARGV[1] { ++count[$1]; next }
    /^#/ { print; next }
    NF == 2 { n = count[$1] + 0; if (n > $2) n = $2; if (n > 0) print $1, n }' "$2" "$1"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

self_test() {
  mkdir -p "$work/tree/core/base" "$work/tree/apps/model"
  cat >"$work/tree/core/base/a.h" <<'TEXT'
// Of the layers.
// That line goes on; whose it is does not matter, and what it says neither.
int x;  ///< What comes first
const char* s = "// Of a string, nobody's";
// The address of the first of those
// of the second, and that of
// the third; no one reads it, and nobody writes it.
char quote = '"';  // who
//
// Who reads this who?
// (Those of a bracket)
int whole, those_offsets;  // the whole of them; that offset
TEXT
  printf '// Adds one.\n' >"$work/tree/apps/model/b.cpp"
  phrases "$work/tree" >"$work/found"
  diff - "$work/found" <<'TEXT'
core/base core/base/a.h:1: begins with Of
core/base core/base/a.h:3: begins with What
core/base core/base/a.h:6: those of
core/base core/base/a.h:6: that of
core/base core/base/a.h:7: no one
core/base core/base/a.h:7: nobody
core/base core/base/a.h:8: who
core/base core/base/a.h:10: begins with Who
core/base core/base/a.h:10: who
core/base core/base/a.h:11: those of
TEXT
  printf '# numbers\ncore/base 10\n' >"$work/exact"
  printf 'core/base 9\n' >"$work/fewer"
  printf '# numbers\ncore/base 11\napps/model 2\n' >"$work/more"
  compare "$work/exact" "$work/found"
  if compare "$work/fewer" "$work/found" >"$work/out"; then return 1; fi
  grep -q '^core/base: 10 phrases, at most 9' "$work/out"
  grep -q '^  core/base/a.h:6: that of$' "$work/out"
  if compare "$work/more" "$work/found" >"$work/out"; then return 1; fi
  grep -q '^core/base: 10 phrases, the list says 11. Lower' "$work/out"
  grep -q '^apps/model: 0 phrases, the list says 2. Lower' "$work/out"
  : >"$work/empty"
  if compare "$work/empty" "$work/found" >"$work/out"; then return 1; fi
  lower "$work/more" "$work/found" | diff - "$work/exact"
  lower "$work/fewer" "$work/found" | diff - "$work/fewer"
  lower "$work/fewer" "$work/empty" | diff - "$work/empty"
}

case ${1:-} in
  tree)
    phrases "$2" >"$work/found"
    compare "$here/exceptions.txt" "$work/found"
    ;;
  lower)
    phrases "$2" >"$work/found"
    lower "$here/exceptions.txt" "$work/found" >"$work/list"
    cp "$work/list" "$here/exceptions.txt"
    ;;
  self-test) self_test ;;
  *)
    echo "usage: check.sh tree|lower|self-test ROOT" >&2
    exit 64
    ;;
esac
