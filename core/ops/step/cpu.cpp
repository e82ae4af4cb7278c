#include "core/ops/cpu_families.h"
#include "core/ops/kernel_table.h"
#include "core/ops/step/decide.h"

namespace nrl::ops::NRL_ISA {

void fill_step(KernelTable& table) {
  table.decide_step = [](Exec&, const DecideStep& a) {
    step::decide(static_cast<double*>(a.scalars.data), a.max_norm, a.beta1, a.beta2, a.max_skipped);
  };
}

}  // namespace nrl::ops::NRL_ISA
