#!/usr/bin/env bash
# check.sh tree ROOT       checks the sources of the tree
# check.sh self-test ROOT  creates a tree with violations and expects exactly these to be reported
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

check_tree() {
  cd "$1"
  local directories=() directory
  for directory in core apps parallel memory precision tests/ops/reference tests/reference tests/sim; do
    if [[ -d $directory ]]; then directories+=("$directory"); fi
  done
  # Generated tables (.inc) are checked for includes like everything else.
  local sources
  mapfile -d '' -t sources < <(find "${directories[@]}" -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.inc' \) -print0 | LC_ALL=C sort -z)
  find . \( -name build -o -name .git \) -prune -o -type f -printf '%P\n' | awk -f "$here/floors.awk" - "${sources[@]}"
}

# seed FILE LINES...: a file of the seeded tree.
seed() {
  mkdir -p "$(dirname "$1")"
  printf '%s\n' "${@:2}" >"$1"
}

self_test() {
  local work
  work=$(mktemp -d)
  # shellcheck disable=SC2064  # the value of now
  trap "rm -rf '$work'" EXIT
  cd "$work"
  # Allowed: down, in the same directory, in the same row, system headers, heavy ones in .cpp.
  seed core/tensor/tensor.h '#include <vector>' '#include "core/base/dtype.h"' '#include "core/device/memory.h"'
  seed core/io/json.cpp '#include <nlohmann/json.hpp>' '#include "core/io/json.h"' '// #include "apps/model/block.h"'
  seed parallel/data/buckets.cpp '#include "parallel/grid/grid.h"' '#include "parallel/comm/communicator.h"' '#include "memory/plan.h"'
  seed apps/train/trainer.cpp '#include "apps/plan/run_plan.h"' '#include "apps/data/loader.h"' '#include "apps/model/decoder.h"'
  seed tests/reference/files.cpp '#include "core/io/json.h"' '#include "tests/reference/decoder.h"' '#include <cmath>'
  seed tests/ops/reference/norm.cpp '#include "core/ops/norm.h"' '#include "tests/ops/reference/reference.h"'
  seed tests/ops/reference/reference.h
  seed tests/ops/reference/linear.cpp '#include "core/ops/linear/gpu.h"'
  seed tests/sim/gemm.cpp '#include "core/ops/gemm/plan.h"' '#include "tests/ops/reference/reference.h"'
  seed tests/sim/accelerator_sim.cpp '#include "apps/train/trainer.h"'
  seed core/device/kernel.h '#include NRL_SIMULATED_CUDA'
  seed parallel/comm/mpi/mpi_internal.h '#include <mpi.h>'
  seed apps/model/block.h '#include "apps/model/spec/spec.h"  // and apps/data/loader.h, block.h, <sysexits.h>, gone.hpp, block_*.cpp'
  seed apps/model/block.cpp '#include "apps/model/block.h"' '#include "core/io/json.h"'
  seed apps/model/spec/spec.h '// see apps/train/trainer.cpp, not /cuda.cu'
  seed parallel/grid/grid.h
  seed apps/data/loader.h
  seed core/ops/linear/linear.cpp '#include "core/ops/linear.h"' '#include "core/ops/shared/check.h"' \
    '#include "core/ops/gemm/plan.h"' '#include "core/ops/linear/gpu.h"'
  seq -f '// line %g' 600 >core/base_600 && mkdir -p core/base && mv core/base_600 core/base/long_enough.cpp
  check_tree . >clean.txt || {
    cat clean.txt >&2
    echo "FAIL: a permitted include was reported" >&2
    exit 1
  }

  seed core/base/up.h '' '#include "core/tensor/tensor.h"'
  seed core/config/sideways.cpp '#include "core/device/memory.h"'
  seed core/ops/norm/sideways.cpp '  #  include "core/io/json.h"'
  seed core/ops/norm/inside.cpp '#include "core/ops/linear/gpu.h"'
  seed core/ops/shared/inside.h '#include "core/ops/gemm/plan.h"'
  seed core/ops/inside.h '#include "core/ops/shared/check.h"'
  seed apps/bench/inside.cpp '#include "core/ops/linear.h"' '#include "core/ops/gemm/plan.h"'
  seed parallel/comm/only_core.cpp '#include "precision/recipe.h"'
  seed memory/up.cpp '#include <core/base/error.h>' '#include <parallel/grid/grid.h>'
  seed apps/plan/up.cpp '#include "apps/nrl-train/commands.h"'
  seed apps/engine/up.cpp '#include "apps/train/start/run.h"'
  seed core/trace/heavy.h '#include <mpi.h>'
  seed core/tensor/local.cpp '#include "tensor.h"'
  seed core/misc/new.cpp 'int x;'
  seq -f '// line %g' 601 >core/io/too_long.cpp
  seed precision/last.cpp 'int x;'
  seed tests/reference/shared.cpp '#include "core/ops/exec.h"'
  seed core/device/upward.h '#include "tests/sim/engine/fiber.h"'
  seed tests/sim/engine/fiber.h
  seed tests/sim/above_core.cpp '#include "core/base/names.h"' '#include "apps/engine/up.h"'
  seed tests/ops/reference/upward.cpp '#include "tests/sim/engine/fiber.h"' '#include "core/ops/linear/gpu.h"'
  seq -f '// line %g' 401 >tests/reference/long.cpp
  # Circles: of two files, of three with one that the circle leads past, of a header through another one's source, and
  # of two directories whose files have none.
  seed core/config/a.h '' '#include "core/config/b.h"'
  seed core/config/b.h '#include "core/config/a.h"' '#include "core/config/other.h"'
  seed core/config/other.h
  seed core/config/way_in.h '#include "core/config/x.h"'
  seed core/config/x.h '#include "core/config/y.h"'
  seed core/config/y.h
  seed core/config/y.cpp '#include "core/config/y.h"' '#include "core/config/z.h"'
  seed core/config/z.h '#include "core/config/x.h"'
  seed parallel/grid/members.h '#include "parallel/context/ring.h"'
  seed parallel/context/ring.h
  seed parallel/context/zigzag.h '' '' '#include "parallel/grid/grid.h"'
  seed core/base/names.h '#include <vector>  // see core/base/gone.h' 'int x;  // of up.h, gone.cpp and core/tensor/up.h'
  local found=0
  check_tree . >found.txt || found=$?
  cut -d ' ' -f 1 found.txt | LC_ALL=C sort >places.txt
  LC_ALL=C sort >expected.txt <<'TEXT'
core/base/up.h:2:
core/config/sideways.cpp:1:
core/ops/norm/sideways.cpp:1:
core/ops/norm/inside.cpp:1:
core/ops/shared/inside.h:1:
core/ops/inside.h:1:
apps/bench/inside.cpp:2:
parallel/comm/only_core.cpp:1:
memory/up.cpp:2:
apps/plan/up.cpp:1:
apps/engine/up.cpp:1:
core/trace/heavy.h:1:
core/tensor/local.cpp:1:
core/misc/new.cpp:1:
core/config/a.h:2:
core/config/x.h:1:
parallel/context/zigzag.h:3:
core/base/names.h:1:
core/base/names.h:2:
core/base/names.h:2:
core/io/too_long.cpp:601:
tests/reference/shared.cpp:1:
core/device/upward.h:1:
tests/sim/above_core.cpp:2:
tests/ops/reference/upward.cpp:1:
tests/ops/reference/upward.cpp:2:
tests/reference/long.cpp:401:
TEXT
  if ((found == 0)) || ! diff expected.txt places.txt; then
    cat found.txt >&2
    echo "FAIL: the reported violations differ from the expected ones (exit $found)" >&2
    exit 1
  fi
}

case ${1:-} in
  tree) check_tree "$2" ;;
  self-test) self_test ;;
  *)
    echo "usage: check.sh tree|self-test ROOT" >&2
    exit 64
    ;;
esac
