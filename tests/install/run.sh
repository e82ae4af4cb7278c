#!/usr/bin/env bash
# run.sh CMAKE BUILD SOURCE: installs a build into an empty directory and uses it from there.
set -euo pipefail
cmake=$1 build=$2 source_dir=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix

fail() {
  echo "FAIL: $*" >&2
  exit 1
}

"$cmake" --install "$build" --prefix "$prefix" >"$work/log" || fail "$(cat "$work/log")"

# Nothing but the program, its scripts, configurations and documents.
(cd "$prefix" && find . -mindepth 1 -maxdepth 3 ! -path '*/configs/*' | LC_ALL=C sort) >"$work/found"
diff - "$work/found" <<'TEXT' || fail "other files than these are installed"
./bin
./bin/nrl-train
./bin/nrl_http.so
./share
./share/doc
./share/doc/nrl-train
./share/nrl-train
./share/nrl-train/configs
./share/nrl-train/scripts
TEXT
share=$prefix/share/nrl-train
diff -r "$source_dir/configs" "$share/configs" || fail "the installed configurations differ"
for script in rank-stacks.sh train.sbatch; do
  [[ -x $share/scripts/$script ]] || fail "$script is not installed, or not executable"
done
# Links of README and documents to files beside them.
for page in "$prefix"/share/doc/nrl-train/README.md "$prefix"/share/doc/nrl-train/docs/README.md; do
  grep -oE '\]\((docs/)?[a-zA-Z-]+\.md' "$page" | sed 's/^](//' | LC_ALL=C sort -u | while read -r link; do
    [[ $link == CONTRIBUTING.md || -f ${page%/*}/$link ]] || fail "$page: $link is not installed"
  done
done

cd "$work"
PATH=$prefix/bin:$PATH
version=$(nrl-train --version)
[[ $version == "nrl-train $(sed -n 's/^project(nrl_train VERSION \([0-9.]*\).*/\1/p' "$source_dir/CMakeLists.txt")" ]] ||
  fail "the installed program says '$version'"
nrl-train plan "$share/configs/bench-tiny.yaml" >"$work/plan" || fail "a plan of an installed configuration failed"
grep -q '^memory ' "$work/plan" || fail "the plan has no memory: $(cat "$work/plan")"
