#include "core/ops/cpu_families.h"
#include "core/ops/qk/composed.h"

namespace nrl::ops::reference {

void fill_qk(KernelTable& table) {
  table.qk_norm_rope_forward = qk::forward;
  table.qk_norm_rope_backward = qk::backward;
}

}  // namespace nrl::ops::reference
