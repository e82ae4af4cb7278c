#!/usr/bin/env bash
# Benchmarks preference training (DPO) on this machine's CPU in alternation with TRL: a Llama of 17 million parameters,
# pairs of sequences whose lengths are log-normal, fp32, the same pairs in every step, log-probabilities of the reference
# computed before the first step. Writes build/bench/dpo.md (the table) and dpo.jsonl (all runs). Exits with 77 without
# trl, transformers and torch, with 70 if the losses of the programs differ.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-dpo.sh [--rounds N] [--steps N] [--examples N] [--micro N] [--threads N] [--variant NAME]...
                            [--torch PYTHON] [--binary PATH] [--output DIR]
  --rounds N      rounds of all programs (3)
  --steps N       timed steps per round (3), after a warm-up step
  --examples N    pairs of a step, a multiple of --micro (32)
  --micro N       pairs of a microbatch (8)
  --threads N     threads of each program (2)
  --variant NAME  packed, plain: nrl-train with and without packing; padded: TRL as it comes, but without gradient
                  checkpointing; single: TRL with one pair per microbatch (default: all but single)
  --torch PYTHON  a Python with trl, transformers and torch (default: $NRL_PYTHON, python3, /usr/bin/python3)
  --binary PATH   nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  --output DIR    directory for dpo.md and dpo.jsonl (build/bench)
TEXT
}

# shellcheck disable=SC2034  # these are used by tuning.sh
{
  objective=dpo
  title="Preference training on the CPU"
  known=(packed plain padded single)
  variants_default=(packed plain padded)
}
source "$(dirname "${BASH_SOURCE[0]}")/bench/tuning.sh"
