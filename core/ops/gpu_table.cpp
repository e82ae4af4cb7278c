// The GPU's table, compiled once for CUDA and once for the simulated device (NRL_GPU).

#include "core/ops/cpu_families.h"
#include "core/ops/kernel_table.h"

#define NRL_JOIN(a, b) a##b
#define NRL_TABLE(gpu) NRL_JOIN(gpu, _kernels)

namespace nrl::ops {

const KernelTable& NRL_TABLE(NRL_GPU)() {
  static const KernelTable table = [] {
    using namespace NRL_GPU;
    KernelTable t;
#define NRL_FILL(family) fill_##family(t);
    NRL_OPS_FAMILIES(NRL_FILL)
#undef NRL_FILL
    return t;
  }();
  return table;
}

}  // namespace nrl::ops
