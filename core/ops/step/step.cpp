#include "core/ops/step/step.h"

#include "core/ops/check.h"
#include "core/ops/kernel_table.h"
#include "core/trace/trace.h"

namespace nrl::ops {

void decide_step(Exec& exec, const DecideStep& a) {
  NRL_CHECK(is_vector(a.scalars, StepScalar::count, DType::f64), "decide_step: scalars are {}",
            describe(a.scalars));
  NRL_CHECK(a.max_norm >= 0 && a.beta1 >= 0 && a.beta1 < 1 && a.beta2 >= 0 && a.beta2 < 1,
            "decide_step: norm {}, betas {} {}", a.max_norm, a.beta1, a.beta2);
  const trace::Range range("decide_step");
  exec.kernels->decide_step(exec, a);
}

}  // namespace nrl::ops
