#!/usr/bin/env bash
# Benchmarks fine-tuning on this machine's CPU in alternation with TRL: a Llama of 17 million parameters, a chat file whose
# lengths are log-normal, fp32, the same examples in every step. Writes build/bench/sft.md (the table) and sft.jsonl (all
# runs). Exits with 77 without trl, transformers and torch, with 70 if the losses of the programs differ.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-sft.sh [--rounds N] [--steps N] [--examples N] [--micro N] [--threads N] [--variant NAME]...
                            [--torch PYTHON] [--binary PATH] [--output DIR]
  --rounds N      rounds of all programs (3)
  --steps N       timed steps per round (3), after a warm-up step
  --examples N    examples of a step, a multiple of --micro (32)
  --micro N       examples of a microbatch; packed: N x 512 tokens (8)
  --threads N     threads of each program (2)
  --variant NAME  packed, plain: nrl-train with and without packing; padded: TRL as it comes, but without gradient
                  checkpointing; padding-free: TRL without padding, attention over the whole microbatch; single: TRL with one
                  example per microbatch (default: all but single)
  --torch PYTHON  a Python with trl, transformers and torch (default: $NRL_PYTHON, python3, /usr/bin/python3)
  --binary PATH   nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  --output DIR    directory for sft.md and sft.jsonl (build/bench)
TEXT
}

# shellcheck disable=SC2034  # these are used by tuning.sh
{
  objective=sft
  title="Fine-tuning on the CPU"
  known=(packed plain padded padding-free single)
  variants_default=(packed plain padded padding-free)
}
source "$(dirname "${BASH_SOURCE[0]}")/bench/tuning.sh"
