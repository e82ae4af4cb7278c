#!/usr/bin/env bash
# Compares the speed of this tree with that of another commit, on this machine. Both are built (the other one in
# build/gate-base, which is kept), and bench step runs with both in turns, old new, new old. Exits with 3 for a regression.
# Absolute times never count, and runs that a busy machine has slowed are left out; it is not a part of .ci/run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/perf-gate.sh [--budget SECONDS] [--allow PERCENT] [--rounds N] [--keep DIRECTORY] [BASE]
  BASE              a commit (default: where this branch left main)
  --budget SECONDS  of the measurements, without builds (180); at least five rounds are made
  --allow PERCENT   by which a step may take longer (5)
  --rounds N        at most so many rounds (60)
  --keep DIRECTORY  add the figures to old.jsonl and new.jsonl there, for `nrl-train report --history`
TEXT
}

budget=180 allow=5 rounds=60 keep=
while [[ ${1:-} == -* ]]; do
  take_option "budget allow rounds" "keep" "$@"
  shift "$taken"
done
[[ -z $keep ]] || keep=$(realpath -m "$keep")
cd "$root_dir"
start=${1:-$(git merge-base HEAD main 2>/dev/null)} || die 64 "there is no branch main to compare with. Fix: give a commit"
base=$(git rev-parse --quiet --verify "$start^{commit}") || die 64 "$start is no commit"
here=$(git rev-parse --short=9 HEAD)
git diff --quiet HEAD || here+="+changes"
old_tree=$root_dir/build/gate-base
mkdir -p "$root_dir/build"
if [[ -e $old_tree/.git ]]; then
  git -C "$old_tree" checkout --quiet --detach "$base"
else
  git worktree prune
  git worktree add --quiet --detach "$old_tree" "$base"
fi
for tree in "$old_tree" "$root_dir"; do
  (root_dir=$tree build cpu nrl-train >"$root_dir/build/gate.log" 2>&1) ||
    die 69 "$tree does not build: $(tail -n 5 "$root_dir/build/gate.log")"
done
"$old_tree"/build/cpu/bin/nrl-train bench --help | grep -q -- --history ||
  die 64 "$base has no bench --history. Fix: give a later BASE"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mpi_setup 2
# block NAME TREE COMMIT RANKS CONFIG...: one process of a block of steps.
block() {
  local name=$1 tree=$2 commit=$3 ranks=$4 launch=()
  shift 4
  ((ranks == 1)) || launch=("${mpi_run[@]}")
  "${launch[@]}" "$tree"/build/cpu/bin/nrl-train bench step "$@" --steps 10 --history "$work/$name.jsonl" --commit "$commit" \
    >"$work/log" 2>&1 || { cat "$work/log" >&2 && die 70 "bench step of $commit fails: $*"; }
}
cases=("1 configs/bench-tiny.yaml" "2 configs/bench-tiny.yaml policy.train_micro_batch_size=4"
  "1 configs/bench-tiny.yaml policy.precision=bfloat16" "1 configs/experts-tiny.yaml")
end=$((SECONDS + budget))
for ((round = 1; round <= rounds && (SECONDS < end || round <= 5); ++round)); do
  order=(old new)
  ((round % 2)) || order=(new old)
  for entry in "${cases[@]}"; do
    read -ra words <<<"$entry"
    for name in "${order[@]}"; do
      if [[ $name == old ]]; then
        block old "$old_tree" "${base:0:9}" "${words[@]}"
      else
        block new "$root_dir" "$here" "${words[@]}"
      fi
    done
  done
done
if [[ -n $keep ]]; then
  mkdir -p "$keep"
  for name in old new; do cat "$work/$name.jsonl" >>"$keep/$name.jsonl"; done
fi
echo "${base:0:9} and $here, $((round - 1)) rounds in turns"
build/cpu/bin/nrl-train report --history "$work/new.jsonl" --against "$work/old.jsonl" --fail-on-regression "$allow"
