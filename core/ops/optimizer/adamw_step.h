#pragma once
// The constants of an AdamW update, for every backend.

#include <cmath>

#include "core/ops/optimizer.h"
#include "core/ops/shared/element.h"
#include "core/ops/shared/moments.h"
#include "core/ops/step.h"

namespace nrl::ops {

/// Values that change from step to step.
struct AdamWScalars {
  double learning_rate, grad_scale;
  double correction1, correction2;  ///< 1 - beta1^step, 1 - beta2^step
  double step;
  bool skip;
};

/// Takes them from the members of a call without AdamW::scalars.
inline AdamWScalars adamw_scalars(const AdamW& a) {
  const auto steps = static_cast<double>(a.step);
  return {static_cast<double>(a.lr),
          static_cast<double>(a.grad_scale),
          1.0 - std::pow(static_cast<double>(a.beta1), steps),
          1.0 - std::pow(static_cast<double>(a.beta2), steps),
          steps,
          false};
}

/// Reads them from AdamW::scalars, in device memory (StepScalar).
NRL_HOST_DEVICE inline AdamWScalars adamw_scalars(const double* s) {
  return {s[StepScalar::learning_rate], s[StepScalar::grad_scale], s[StepScalar::correction1],
          s[StepScalar::correction2],   s[StepScalar::updates],    s[StepScalar::skip] != 0.0};
}

/// Values of all steps and all elements.
struct AdamWConstants {
  float beta1, beta2, eps;
};

NRL_HOST_DEVICE inline element::AdamWStep adamw_step(const AdamWScalars& s, const AdamWConstants& r,
                                                     const AdamWRates& rates) {
  const double lr = s.learning_rate * static_cast<double>(rates.lr_scale);
  element::AdamWStep k;
  k.beta1 = r.beta1;
  k.beta2 = r.beta2;
  k.one_minus_beta1 = static_cast<float>(1.0 - static_cast<double>(r.beta1));
  k.one_minus_beta2 = static_cast<float>(1.0 - static_cast<double>(r.beta2));
  k.decay = static_cast<float>(1.0 - lr * static_cast<double>(rates.weight_decay));
  k.step_size = static_cast<float>(lr / s.correction1);
  k.inv_sqrt_correction2 = static_cast<float>(1.0 / sqrt(s.correction2));
  k.eps = r.eps;
  k.grad_scale = static_cast<float>(s.grad_scale);
  k.seed = moments::mix(static_cast<uint32_t>(static_cast<int64_t>(s.step)));
  return k;
}

}  // namespace nrl::ops
