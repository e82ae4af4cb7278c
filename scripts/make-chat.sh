#!/usr/bin/env bash
# Writes small, deterministic files to fine-tune on, without a download: a user gives four digits, and the assistant
# answers with the same digits in order.
# usage: scripts/make-chat.sh DIRECTORY [TRAINING-RECORDS]
#   writes into DIRECTORY, with 8,000 training records unless given, and 200 others for validation:
#   train.jsonl, validation.jsonl               conversations; with the keys of instructions too (prompt, completion)
#   pairs-train.jsonl, pairs-validation.jsonl   preferences: the answer, and the answer with a wrong order
#   rollouts.jsonl                              the first 250 prompts with four completions each and their rewards, the
#                                               share of digits at the right place
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

(($# == 1 || $# == 2)) || die 64 "usage: scripts/make-chat.sh DIRECTORY [TRAINING-RECORDS]"
directory=$1 count=${2:-8000}
[[ $count =~ ^[1-9][0-9]*$ ]] || die 64 "the number of records is $count; expected 1 or more"
mkdir -p "$directory"
awk -v count="$count" -v directory="$directory" '
  # Numbers of a generator that every awk computes alike (x = 16807 x mod 2^31 - 1).
  function draw(n) {
    x = x * 16807 % 2147483647
    return int(x / 65536) % n
  }
  # The digits with two neighbors interchanged, or the last one replaced where all are equal.
  function wrong(digits, at,   i) {
    for (i = 0; i < 3; ++i) {
      p = (at + i) % 3 + 1
      if (substr(digits, p, 1) != substr(digits, p + 1, 1))
        return substr(digits, 1, p - 1) substr(digits, p + 1, 1) substr(digits, p, 1) substr(digits, p + 2)
    }
    return substr(digits, 1, 3) (digits + 1) % 10
  }
  function rollout(group, digits, answer, sorted,   i, right) {
    for (i = 1; i <= 4; ++i) right += substr(answer, i, 1) == substr(sorted, i, 1)
    printf "{\"prompt\":\"Sort %s: \",\"completion\":\"%s\",\"reward\":%.2f,\"group\":%d}\n",
      digits, answer, right / 4, group >(directory "/rollouts.jsonl")
  }
  BEGIN {
    x = 42
    for (i = 0; i < count + 200; ++i) {
      split("", of)
      digits = sorted = reversed = ""
      for (d = 0; d < 4; ++d) {
        digit = draw(10)
        ++of[digit]
        digits = digits digit
      }
      for (d = 0; d < 10; ++d)
        for (n = 0; n < of[d]; ++n) {
          sorted = sorted d
          reversed = d reversed
        }
      file = (i < count ? "train.jsonl" : "validation.jsonl")
      printf "{\"prompt\":\"Sort %s: \",\"completion\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"Sort %s\"},{\"role\":\"assistant\",\"content\":\"%s\"}]}\n",
        digits, sorted, digits, sorted >(directory "/" file)
      rejected = wrong(sorted, i)
      printf "{\"prompt\":\"Sort %s: \",\"chosen\":\"%s\",\"rejected\":\"%s\"}\n", digits, sorted, rejected >(directory "/pairs-" file)
      if (i < count && i < 250) {
        rollout(i, digits, sorted, sorted)
        rollout(i, digits, rejected, sorted)
        rollout(i, digits, digits, sorted)
        rollout(i, digits, reversed, sorted)
      }
    }
  }'
echo "wrote $directory/train.jsonl ($count records) and $directory/validation.jsonl (200 records)"
