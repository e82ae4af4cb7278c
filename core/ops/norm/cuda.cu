#include "core/device/kernel/kernel.h"
#include "core/ops/cpu_families.h"
#include "core/ops/kernel_table.h"

namespace nrl::ops::NRL_GPU {

void fill_norm(KernelTable&) {}

}  // namespace nrl::ops::NRL_GPU
