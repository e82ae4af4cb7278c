#include "core/ops/cpu_families.h"
#include "core/ops/kernel_table.h"

namespace nrl::ops {

const KernelTable& reference_kernels() {
  static const KernelTable table = [] {
    using namespace reference;
    KernelTable t;
#define NRL_FILL(family) fill_##family(t);
    NRL_OPS_FAMILIES(NRL_FILL)
#undef NRL_FILL
    return t;
  }();
  return table;
}

}  // namespace nrl::ops
