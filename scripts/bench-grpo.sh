#!/usr/bin/env bash
# Benchmarks steps of GRPO on this machine's CPU in alternation with TRL: a random Llama of 0.5 million parameters generates
# 512 completions of 5 tokens (in TRL by `generate` of transformers), a verifier judges them, one step trains on them, fp32.
# --model smollm-135m has the shape of SmolLM-135M and completions of 32 tokens; fewer of them take a while, too:
#   scripts/bench-grpo.sh --model smollm-135m --examples 32 --micro 16 --rounds 1 --steps 1
# Writes build/bench/grpo.md (the table) and grpo.jsonl (all runs). Exits with 77 without trl, transformers and torch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-grpo.sh [--model NAME] [--rounds N] [--steps N] [--examples N] [--micro N] [--threads N] [--variant NAME]...
                             [--torch PYTHON] [--binary PATH] [--output DIR]
  --model NAME    sort: 0.5 million parameters, completions of 5 tokens; smollm-135m: 135 million, of 32 (sort)
  --rounds N      rounds of all programs (3)
  --steps N       timed steps per round (3), after a warm-up step
  --examples N    completions of a step, a multiple of --micro and of 16, the completions of a prompt (512)
  --micro N       completions of a microbatch (512); nrl-train, packed: of as many tokens as their longest ones
  --threads N     threads of each program (2)
  --variant NAME  packed, plain: nrl-train with and without packing; padded: TRL (default: packed and padded)
  --torch PYTHON  a Python with trl, transformers and torch (default: $NRL_PYTHON, python3, /usr/bin/python3)
  --binary PATH   nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  --output DIR    directory for grpo.md and grpo.jsonl (build/bench)
TEXT
}

# shellcheck disable=SC2034  # these are used by tuning.sh
{
  objective=grpo
  title="Group relative policy optimization on the CPU"
  known=(packed plain padded)
  variants_default=(packed padded)
}
source "$(dirname "${BASH_SOURCE[0]}")/bench/tuning.sh"
