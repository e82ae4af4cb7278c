#include "core/device/kernel/kernel.h"
#include "core/ops/cpu_families.h"
#include "core/ops/kernel_table.h"
#include "core/ops/step/decide.h"

namespace nrl::ops::NRL_GPU {
namespace {

__global__ void decide_kernel(double* scalars, double max_norm, double beta1, double beta2,
                              int64_t max_skipped) {
  step::decide(scalars, max_norm, beta1, beta2, max_skipped);
}

}  // namespace

void fill_step(KernelTable& table) {
  table.decide_step = [](Exec& exec, const DecideStep& a) {
    NRL_LAUNCH(decide_kernel, 1, 1, 0, exec.stream, static_cast<double*>(a.scalars.data), a.max_norm, a.beta1,
               a.beta2, a.max_skipped);
  };
}

}  // namespace nrl::ops::NRL_GPU
