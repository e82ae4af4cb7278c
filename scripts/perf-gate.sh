#!/usr/bin/env bash
# Compares the speed of this tree with that of another commit: perf-gate.sh [--budget SECONDS] [--allow PERCENT] [BASE]
# BASE: a commit, by default where this branch left main. Both are built (BASE in build/gate-base, which is kept), and
# bench step runs with both in turns, ABBA, until the budget (180 s, without builds) is used. Exits with 3 for a
# regression. Runs that a busy machine has slowed are left out; absolute times never count.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root_dir"

budget=180 allow=5
while [[ ${1:-} == --* ]]; do
  case $1 in
    --budget) budget=$2 ;;
    --allow) allow=$2 ;;
    *) die 64 "unknown option $1; expected --budget or --allow" ;;
  esac
  shift 2
done
base=$(git rev-parse --verify "${1:-$(git merge-base HEAD main)}^{commit}")
here=$(git rev-parse --short HEAD)
old_tree=$root_dir/build/gate-base
if [[ -e $old_tree/.git ]]; then
  git -C "$old_tree" checkout --quiet --detach "$base"
else
  git worktree prune
  git worktree add --quiet --detach "$old_tree" "$base"
fi
for tree in "$root_dir" "$old_tree"; do
  (cd "$tree" && cmake --preset cpu >/dev/null && ninja -C build/cpu nrl-train >/dev/null) ||
    die 69 "$tree does not build"
done
"$old_tree"/build/cpu/bin/nrl-train bench --help | grep -q -- --history ||
  die 64 "$base has no bench --history. Fix: give a later BASE"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# block NAME TREE COMMIT RANKS CONFIG...: one process of a block of steps.
block() {
  local name=$1 tree=$2 commit=$3 ranks=$4 launch=()
  shift 4
  ((ranks == 1)) || launch=(mpirun --oversubscribe --bind-to none -n "$ranks")
  "${launch[@]}" "$tree"/build/cpu/bin/nrl-train bench step "$@" --steps 10 --history "$work/$name.jsonl" --commit "$commit" >/dev/null
}
cases=("1 configs/bench-tiny.yaml" "2 configs/bench-tiny.yaml policy.train_micro_batch_size=4"
  "1 configs/bench-tiny.yaml policy.precision=bfloat16" "1 configs/experts-tiny.yaml")
rounds=0
end=$((SECONDS + budget))
while ((SECONDS < end || rounds < 5)); do
  ((rounds += 1))
  for entry in "${cases[@]}"; do
    read -ra words <<<"$entry"
    order=(old new)
    ((rounds % 2)) || order=(new old)
    for name in "${order[@]}"; do
      if [[ $name == old ]]; then
        block old "$old_tree" "${base:0:9}" "${words[@]}"
      else
        block new "$root_dir" "$here" "${words[@]}"
      fi
    done
  done
  ((rounds < 60)) || break
done
build/cpu/bin/nrl-train report --history "$work/new.jsonl" --against "$work/old.jsonl" --fail-on-regression "$allow"
