#!/usr/bin/env bash
# Installs what is missing, builds and runs all tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [--preset cpu|asan|tsan] [--no-install] [-R REGEX]
  --preset NAME   cpu (default), asan: address and undefined-behaviour checks, tsan: data races
  --no-install    do not install missing packages
  -R REGEX        only the tests whose name matches
TEXT
}

preset=cpu
install=true
select=()
while (($#)); do
  case $1 in
    --preset)
      preset=${2:-}
      [[ $preset =~ ^(cpu|asan|tsan)$ ]] || die 64 "--preset takes cpu, asan or tsan; found '$preset'"
      shift
      ;;
    --no-install) install=false ;;
    -R)
      [[ -n ${2:-} ]] || die 64 "-R takes a regular expression"
      select=(-R "$2")
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      exit 64
      ;;
  esac
  shift
done

if $install; then "$root_dir/scripts/install-deps.sh"; fi
say "build ($preset)"
build "$preset"
say "tests ($preset)"
status=0
(cd "$root_dir/build/$preset" && ctest -j 2 --output-on-failure --no-tests=error "${select[@]}") || status=$?
log=build/$preset/Testing/Temporary/LastTest.log
if ((status == 0)); then
  echo "all tests passed; full output: $log"
else
  echo "tests failed (exit $status); full output: $log" >&2
  echo "one test again: (cd build/$preset && ctest -R NAME --output-on-failure)" >&2
fi
exit "$status"
