#!/usr/bin/env bash
# A failed check on one rank ends the others, and is named: abort.sh MPIRUN... (with ranks and program). A rank that went
# on waiting would run into the timeout of this test.
set -euo pipefail
code=0
output=$("$@" '[.one_rank_fails]' 2>&1) || code=$?
if ((code == 0)) || ! grep -q 'rank 2 of 3 failed in "the last rank fails"' <<<"$output" ||
  ! grep -q 'one_rank_fails_test.cpp:9: .*rank != last' <<<"$output"; then
  echo "FAIL: exit code $code, with:" >&2
  echo "$output" >&2
  exit 1
fi
