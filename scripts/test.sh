#!/usr/bin/env bash
# Installs missing packages, builds and runs all tests; with the CUDA toolkit also the GPU build and its tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [--preset cpu|cuda|asan|tsan] [--gpus LIST] [--fast] [--no-install] [-R REGEX]
  --preset NAME   cpu: all tests of the build without CUDA; cuda: the tests that the GPU build adds (needs nvcc);
                  asan: address and undefined-behavior sanitizers; tsan: data races.
                  Default: cpu, and if nvcc is on PATH cuda for the GPUs configured before (sm_90a).
  --gpus LIST     with --preset cuda: compile the kernels for these GPUs and print a table of their resources; default:
                  80;90a;100a;120
  --fast          build and run only the fast half of the tests
  --no-install    do not install missing packages
  -R REGEX        only the tests whose name matches
TEXT
}

presets=(cpu)
gpus=
if command -v nvcc >/dev/null; then presets+=(cuda); fi
install=true
select=()
fast=false
while (($#)); do
  case $1 in
    --preset)
      presets=("${2:-}")
      [[ ${presets[0]} =~ ^(cpu|cuda|asan|tsan)$ ]] || die 64 "--preset takes cpu, cuda, asan or tsan; found '${presets[0]}'"
      shift
      ;;
    --gpus)
      [[ ${2:-} =~ ^[0-9]+a?(\;[0-9]+a?)*$ ]] || die 64 "--gpus takes compute capabilities such as 90a or '90a;100a'; found '${2:-}'"
      gpus=$2
      shift
      ;;
    --fast) fast=true ;;
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

if [[ ${presets[*]} == cuda ]]; then gpus=${gpus:-80;90a;100a;120}; fi
if $install; then "$root_dir/scripts/install-deps.sh"; fi
status=0
for preset in "${presets[@]}"; do
  # The GPU build has the same host code: build and run only what it adds.
  only=()
  targets=()
  settings=()
  if [[ $preset == cuda ]]; then
    only=(-L cuda) targets=(nrl-train cuda_tests)
    settings=(${gpus:+"-DCMAKE_CUDA_ARCHITECTURES=$gpus"})
  elif $fast; then
    only=(-L fast) targets=(fast_tests)
  fi
  say "build ($preset)"
  started=$SECONDS
  cmake_settings="${settings[*]}" build "$preset" "${targets[@]}"
  echo "built in $((SECONDS - started)) s"
  # The test kernels.ptxas decides.
  if [[ -n $gpus && $preset == cuda ]]; then "$root_dir/scripts/ptxas-table.sh" --summary || true; fi
  say "tests ($preset)"
  code=0
  (cd "$root_dir/build/$preset" &&
    ctest -j 2 --output-on-failure --no-tests=error "${only[@]}" "${select[@]}") || code=$?
  log=build/$preset/Testing/Temporary/LastTest.log
  if ((code == 0)); then
    echo "all tests passed; full output: $log"
  else
    status=$code
    echo "tests failed (exit $code); full output: $log" >&2
    echo "to repeat one test: (cd build/$preset && ctest -R NAME --output-on-failure)" >&2
  fi
done
exit "$status"
