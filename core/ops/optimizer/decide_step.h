#pragma once
// The body of decide_step, shared by all backends; formulas in core/ops/step.h.

#include <cmath>

#include "core/base/host_device.h"
#include "core/ops/step.h"

namespace nrl::ops::step {

NRL_HOST_DEVICE inline void decide(double* s, double max_norm, double beta1, double beta2,
                                   int64_t max_skipped) {
  const double norm = sqrt(s[StepScalar::squared_norm]);
  // x - x is 0 only when x is finite.
  const bool halted = max_skipped > 0 && s[StepScalar::skipped_in_a_row] >= static_cast<double>(max_skipped);
  const bool finite = !halted && norm - norm == 0.0 && s[StepScalar::metrics] - s[StepScalar::metrics] == 0.0;
  s[StepScalar::grad_norm] = norm;
  s[StepScalar::skip] = finite ? 0.0 : 1.0;
  if (!finite) {
    s[StepScalar::skipped_in_a_row] += 1.0;
    return;
  }
  s[StepScalar::skipped_in_a_row] = 0.0;
  const double updates = s[StepScalar::updates] += 1.0;
  const double clip = max_norm / (norm + 1e-6);
  s[StepScalar::grad_scale] = max_norm > 0.0 && clip < 1.0 ? clip : 1.0;
  s[StepScalar::correction1] = 1.0 - pow(beta1, updates);
  s[StepScalar::correction2] = 1.0 - pow(beta2, updates);
}

}  // namespace nrl::ops::step
