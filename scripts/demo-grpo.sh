#!/usr/bin/env bash
# A tiny model learns from rewards to put four digits in order, in about two minutes on two cores: it first imitates
# answers of which a third are right, then answers 32 prompts 16 times in each of 120 steps. Prints the reward by step.
# usage: scripts/demo-grpo.sh [KEY=VALUE...]     keys of configs/grpo-sort.yaml
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  -h | --help)
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
for override in "$@"; do
  [[ $override == *=* ]] || die 64 "$override: not KEY=VALUE. Fix: see --help"
done
nrl_train=${NRL_TRAIN:-} # a program that is built already works in the current directory
if [[ -z $nrl_train ]]; then
  say "build"
  build cpu nrl-train
  nrl_train=$root_dir/build/cpu/bin/nrl-train
  cd "$root_dir"
fi

say "data: data/sort"
mkdir -p data/sort
awk 'function draw(n) {  # of a generator that every awk computes alike
    x = x * 16807 % 2147483647
    return int(x / 2147483647 * n)
  }
  function sorted(s,   d, i, j, v) {
    for (i = 1; i <= 4; ++i) d[i] = substr(s, i, 1)
    for (i = 2; i <= 4; ++i) {
      v = d[i]
      for (j = i - 1; j >= 1 && d[j] > v; --j) d[j + 1] = d[j]
      d[j + 1] = v
    }
    return d[1] d[2] d[3] d[4]
  }
  function shuffled(s,   d, i, j, v) {
    for (i = 1; i <= 4; ++i) d[i] = substr(s, i, 1)
    for (i = 4; i > 1; --i) {
      j = draw(i) + 1
      v = d[i]
      d[i] = d[j]
      d[j] = v
    }
    return d[1] d[2] d[3] d[4]
  }
  BEGIN {
    x = 7
    for (i = 0; i < 10000; ++i) digits[i] = sprintf("%04d", i)
    for (i = 9999; i > 0; --i) {
      j = draw(i + 1)
      v = digits[i]
      digits[i] = digits[j]
      digits[j] = v
    }
    for (i = 0; i < 10000; ++i) {
      s = digits[i]
      printf "{\"prompt\": \"%s=\", \"answer\": \"%s\"}\n", s, sorted(s) > (i < 9000 ? "data/sort/prompts.jsonl" : "data/sort/validation.jsonl")
      answer = draw(10) < 3 ? sorted(s) : shuffled(s)
      if (i < 9000) printf "{\"prompt\": \"%s=\", \"completion\": \"%s\"}\n", s, answer > "data/sort/sft.jsonl"
    }
  }'

say "imitation: configs/grpo-sort-sft.yaml"
"$nrl_train" "$root_dir/configs/grpo-sort-sft.yaml"
say "rewards: configs/grpo-sort.yaml"
"$nrl_train" "$root_dir/configs/grpo-sort.yaml" "$@"

say "reward by step"
awk -v key=reward -f "$root_dir/scripts/metrics.awk" results/grpo-sort/logs/metrics.jsonl | awk '
  { sum += $1; if (NR == 1 || NR % 10 == 0) { n = NR == 1 ? 1 : NR - last; bar = sprintf("%" int(sum / n * 50 + 0.5) "s", ""); gsub(/ /, "#", bar)
      printf "%4d  %.3f  %s\n", NR, sum / n, bar; sum = 0; last = NR } }'
