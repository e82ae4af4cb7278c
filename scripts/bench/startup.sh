#!/usr/bin/env bash
# Time from exec to the end of the first step of a tiny model: one process, and two under mpirun.
# usage: scripts/bench/startup.sh [BINARY [ROUNDS]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

binary=$(realpath -e "${1:-$root_dir/build/cpu/bin/nrl-train}") || die 66 "build nrl-train first: scripts/quickstart.sh or scripts/test.sh"
rounds=${2:-5}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"$binary" prepare --input "$root_dir/apps" --tokenizer bytes --output corpus >prepare.txt
cat >tiny.yaml <<'YAML'
policy:
  model: {model_type: llama, vocab_size: 272, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
          num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
  train_global_batch_size: 4
  max_total_sequence_length: 32
  optimizer: {lr: 1.0e-3}
pretrain: {max_num_steps: 1}
data: {train: {data_path: corpus}}
checkpointing: {enabled: false}
logger: {log_dir: logs, log_interval: 1}
YAML

mpi_setup 2
# Wall time from before the start to the time in the row of step 1, and to the program's end.
measure() {
  local name=$1 begin end row i
  shift
  for ((i = 0; i < rounds; ++i)); do
    rm -rf logs
    begin=$(date +%s.%N)
    "$@" tiny.yaml >out.txt 2>&1 || { cat out.txt >&2; die 70 "nrl-train failed"; }
    end=$(date +%s.%N)
    row=$(awk -v key=time -f "$root_dir/scripts/metrics.awk" logs/metrics.jsonl)
    awk -v a="$begin" -v b="$row" -v c="$end" 'BEGIN { printf "%.3f %.3f\n", b - a, c - a }'
  done | LC_ALL=C sort -g | awk -v name="$name" '{ v[NR] = $1; e[NR] = $2 }
    END { printf "%-14s first step done after %.2f s (best %.2f), program ended after %.2f s\n", name, v[int((NR + 1) / 2)], v[1], e[int((NR + 1) / 2)] }'
}
measure "1 process" "$binary"
measure "mpirun -n 2" "${mpi_run[@]}" "$binary"
