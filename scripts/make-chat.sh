#!/usr/bin/env bash
# Writes a small, deterministic file of conversations to fine-tune on, without a download: a user gives digits, and the
# assistant answers with the same digits in order. Every record has the keys of both formats, messages and instruction
# (prompt, completion).
# usage: scripts/make-chat.sh DIRECTORY [TRAINING-RECORDS]
#   writes DIRECTORY/train.jsonl (8,000 records unless given) and DIRECTORY/validation.jsonl (200 others)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

(($# == 1 || $# == 2)) || die 64 "usage: scripts/make-chat.sh DIRECTORY [TRAINING-RECORDS]"
directory=$1 count=${2:-8000}
[[ $count =~ ^[1-9][0-9]*$ ]] || die 64 "the number of records is $count; expected 1 or more"
mkdir -p "$directory"
# Numbers of a generator that every awk computes alike (x' = 16807 x mod 2^31 - 1).
awk -v count="$count" -v directory="$directory" 'BEGIN {
  x = 42
  for (i = 0; i < count + 200; ++i) {
    split("", of)
    digits = ""
    for (d = 0; d < 4; ++d) {
      x = x * 16807 % 2147483647
      digit = int(x / 65536) % 10
      ++of[digit]
      digits = digits digit
    }
    sorted = ""
    for (d = 0; d < 10; ++d)
      for (n = 0; n < of[d]; ++n) sorted = sorted d
    file = directory (i < count ? "/train.jsonl" : "/validation.jsonl")
    printf "{\"prompt\":\"Sort %s: \",\"completion\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"Sort %s\"},{\"role\":\"assistant\",\"content\":\"%s\"}]}\n",
      digits, sorted, digits, sorted >file
  }
}'
echo "wrote $directory/train.jsonl ($count records) and $directory/validation.jsonl (200 records)"
