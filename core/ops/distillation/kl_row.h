#pragma once
// The arithmetic of a row of topk_kl, shared by all backends; formulas in core/ops/distillation.h.

#include "core/base/host_device.h"
#include "core/ops/distillation.h"

namespace nrl::ops::distillation {

/// The constants of a call.
struct KlFactors {
  float inverse_temperature;
  float forward, reverse;  ///< parts of the divergence
  float score, gradient;   ///< -T^2, and -T: dscore/dlogit has a factor 1/T
  bool zero_outside;
};

inline KlFactors factors_of(const TopkKl& a) {
  const double t = a.options.temperature, reverse = a.reverse();
  return {.inverse_temperature = static_cast<float>(1.0 / t),
          .forward = static_cast<float>(1.0 - reverse),
          .reverse = static_cast<float>(reverse),
          .score = static_cast<float>(-t * t),
          .gradient = static_cast<float>(-t),
          .zero_outside = a.options.zero_outside};
}

/// log p of a number x of a row, with a shift that is subtracted first for accuracy.
struct LogSoftmax {
  float scale, shift, log_sum;
  NRL_HOST_DEVICE float scaled(float x) const { return x * scale - shift; }
  NRL_HOST_DEVICE float operator()(float x) const { return scaled(x) - log_sum; }
};

/// Sums over the k ids.
struct KlSums {
  double forward = 0;  ///< q (log q - log p)
  double reverse = 0;  ///< p (log p - log q); with zero_outside -p log q
  double inside = 0;   ///< p, with zero_outside
};

/// R of the gradient, the score, and the gradient outside the k ids.
struct KlRow {
  float reverse, score, rest_constant, rest_slope;
};

/// `weight`: times the loss scale. `entropy`: of p, with zero_outside and a reverse part.
NRL_HOST_DEVICE inline KlRow finish(const KlFactors& f, const KlSums& sums, float entropy, float weight) {
  double reverse = 0, divergence = 0;
  if (f.reverse > 0.0f) {
    reverse = sums.reverse;
    if (f.zero_outside) {
      // Rounding of lse may make the k probabilities add up to more than 1.
      const double outside = sums.inside > 1.0 ? 0.0 : 1.0 - sums.inside;
      reverse -= static_cast<double>(entropy) + static_cast<double>(log_prob_outside) * outside;
    }
    divergence = static_cast<double>(f.reverse) * reverse;
  }
  if (f.forward > 0.0f) divergence += static_cast<double>(f.forward) * sums.forward;
  const auto r = static_cast<float>(reverse);
  const float scale = weight * f.gradient;
  return {r, static_cast<float>(divergence) * f.score,
          scale * (f.forward + f.reverse * (-log_prob_outside - r)), scale * f.reverse};
}

/// dLoss/dlogit of one of the k ids.
NRL_HOST_DEVICE inline float gradient(const KlFactors& f, const KlRow& row, float weight, float p, float q,
                                      float log_ratio) {
  return weight * f.gradient * (f.forward * (p - q) + f.reverse * (p * (log_ratio - row.reverse)));
}

/// p (constant + slope log p), the gradient of the other logits. A log p of -infinity must not make it NaN.
template <class Math, class V>
NRL_HOST_DEVICE inline __attribute__((always_inline)) V rest(V log_p, float constant, float slope) {
  const V bounded = log_p < -200.0f ? V{} - 200.0f : log_p;
  return Math::exp(log_p) * (constant + slope * bounded);
}

}  // namespace nrl::ops::distillation
