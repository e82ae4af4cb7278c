#!/usr/bin/env bash
# Benchmarks generation on this machine's CPU in alternation with transformers: the model of a configuration with random
# weights, sampling at temperature 1. Writes build/bench/generate.md (the table) and generate.jsonl (all runs). Exits with
# 77 without transformers and torch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/bench-generate.sh [--rounds N] [--prompt N] [--new N] [--torch PYTHON] [--binary PATH] [--output DIR]
  --rounds N      rounds of both programs, of which the fastest counts (3)
  --prompt N      tokens of each prompt (128)
  --new N         tokens generated after each (64)
  --torch PYTHON  a Python with transformers and torch (default: $NRL_PYTHON, else python3)
  --binary PATH   nrl-train to measure (default: builds build/cpu/bin/nrl-train)
  --output DIR    directory for generate.md and generate.jsonl (build/bench)
TEXT
}

rounds=3
prompt=128
new=64
torch=${NRL_PYTHON:-python3}
binary=
output=$root_dir/build/bench
while (($# > 0)); do
  case $1 in
    --rounds | --prompt | --new) take_number "$1" "${2:-}" ;;
    --torch | --output) take_path "$1" "${2:-}" ;;
    --binary) take_program "$1" "${2:-}" ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && die 64 "unknown option $1" ;;
  esac
  shift 2
done
"$torch" -c 'import torch, transformers' 2>/dev/null || die 77 "$torch has no transformers and torch. Fix: --torch PYTHON"
[[ -n $binary ]] || build_binary
mkdir -p "$output"
: >"$output/generate.jsonl"
# The shape of configs/smollm-135m.yaml.
model='{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
  "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048, "tie_word_embeddings": true}'
for ((round = 1; round <= rounds; ++round)); do
  for precision in float32 bfloat16; do
    say "round $round, $precision"
    "$binary" bench generate "$root_dir/configs/smollm-135m.yaml" --device cpu --precision "$precision" \
      --prompt-tokens "$prompt" --new-tokens "$new" --json "$output/own.json"
    sed -n 's/^\({"precision".*}\),*$/\1/p' "$output/own.json" | sed 's/^{/{"program": "nrl-train", /' >>"$output/generate.jsonl"
    "$torch" "$root_dir/scripts/bench/torch_generate.py" --precision "$precision" --batch 1 16 --prompt-tokens "$prompt" \
      --new-tokens "$new" --threads "$(cores)" --rounds 1 --model "$model" | tee -a "$output/generate.jsonl"
  done
done
"$torch" - "$output/generate.jsonl" >"$output/generate.md" <<'PYTHON'
import json, sys

best = {}
for line in open(sys.argv[1]):
    row = json.loads(line)
    own = row["program"] == "nrl-train"
    for part in ("prefill", "decode"):
        key = (row["precision"], row["batch"], part)
        rates = best.setdefault(key, {True: 0.0, False: 0.0})
        rates[own] = max(rates[own], row[f"{part}_tokens_per_s"])
print("| tokens/s, the best round | nrl-train | transformers | ratio |\n|---|---|---|---|")
for (precision, batch, part), rates in best.items():
    print(f"| {precision}, batch {batch}, {part} | {rates[True]:.0f} | {rates[False]:.0f} | {rates[True] / rates[False]:.2f} |")
PYTHON
rm -f "$output/own.json"
cat "$output/generate.md"
