#pragma once
// The body of decide_step, shared by all backends; formulas in core/ops/step.h.

#include <cmath>

#include "core/base/host_device.h"
#include "core/ops/step.h"

namespace nrl::ops::step {

NRL_HOST_DEVICE inline void decide(double* s, double max_norm, double beta1, double beta2,
                                   int64_t max_skipped, int64_t growth_interval) {
  const double scale = s[StepScalar::loss_scale] > 0.0 ? s[StepScalar::loss_scale] : 1.0;
  const double norm = sqrt(s[StepScalar::squared_norm]) / scale;
  // x - x is 0 only when x is finite.
  const bool halted = max_skipped > 0 && s[StepScalar::skipped_in_a_row] >= static_cast<double>(max_skipped);
  const bool finite_loss = s[StepScalar::metrics] - s[StepScalar::metrics] == 0.0;
  const bool finite = !halted && norm - norm == 0.0 && finite_loss;
  const bool overflow =
      growth_interval > 0 && !halted && finite_loss && !finite && scale > smallest_loss_scale;
  s[StepScalar::grad_norm] = norm;
  s[StepScalar::skip] = finite ? 0.0 : 1.0;
  s[StepScalar::overflow] = overflow ? 1.0 : 0.0;
  const double factor = s[StepScalar::loss_factor], norm_limit = s[StepScalar::norm_limit];
  const bool limited =
      finite && ((factor != 0.0 && factor * s[StepScalar::metrics] > s[StepScalar::loss_limit]) ||
                 (norm_limit > 0.0 && norm > norm_limit));
  s[StepScalar::limited] = limited ? 1.0 : 0.0;
  s[StepScalar::used_loss_scale] = scale;
  if (overflow) {
    s[StepScalar::loss_scale] = scale * 0.5 > smallest_loss_scale ? scale * 0.5 : smallest_loss_scale;
    s[StepScalar::clean_steps] = 0.0;
    return;
  }
  if (!finite) {
    s[StepScalar::skipped_in_a_row] += 1.0;
    return;
  }
  s[StepScalar::skipped_in_a_row] = 0.0;
  if (limited) {
    s[StepScalar::skip] = 1.0;
    return;
  }
  const double updates = s[StepScalar::updates] += 1.0;
  const double clip = max_norm / (norm + 1e-6);
  s[StepScalar::grad_scale] = (max_norm > 0.0 && clip < 1.0 ? clip : 1.0) / scale;
  if (growth_interval > 0) {
    const double clean = s[StepScalar::clean_steps] += 1.0;
    if (clean >= static_cast<double>(growth_interval)) {
      s[StepScalar::clean_steps] = 0.0;
      if (scale < largest_loss_scale) s[StepScalar::loss_scale] = 2.0 * scale;
    }
  }
  s[StepScalar::correction1] = 1.0 - pow(beta1, updates);
  s[StepScalar::correction2] = 1.0 - pow(beta2, updates);
}

}  // namespace nrl::ops::step
