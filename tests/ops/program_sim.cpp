// op_tests_address and op_tests_thread: the GPU's kernels, compiled with a sanitizer, on the CPU. Nothing
// else is instrumented.

#include "tests/ops/backend.h"
#include "tests/ops/cases.h"
#include "tests/sim/engine/sanitizers.h"

namespace nrl::ops_test {

Program program() {
  buffer_memory().fence = [](void* p, size_t bytes) { sim::sanitizer::poison(p, bytes); };
  buffer_memory().unfence = [](void* p, size_t bytes) { sim::sanitizer::unpoison(p, bytes); };
  Program program;
  program.backends.push_back(sim_backend());
  return program;
}

}  // namespace nrl::ops_test
