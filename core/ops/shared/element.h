#pragma once
// Bodies of element-wise ops, shared by all backends: plain inline functions of values V, which are floats or
// the CPU's vectors of them. `Math` supplies exp, erf, sqrt and reciprocal of the backend (SimdMath on the
// CPU), and may supply normal(), the normal distribution.

#include <cstdint>

#include "core/base/host_device.h"
#include "core/ops/activation.h"

namespace nrl::ops::element {

template <class V>
struct ValueAndSlope {
  V value, slope;
};

/// f(x) and f'(x).
template <class Math, Activation kind, class V>
NRL_HOST_DEVICE inline __attribute__((always_inline)) ValueAndSlope<V> activation(V x) {
  if constexpr (kind == Activation::silu) {
    const V s = Math::reciprocal(1.0f + Math::exp(-x));
    return {x * s, s + x * s * (1.0f - s)};
  } else if constexpr (kind == Activation::gelu_tanh) {
    // (1 + tanh u) / 2 = sigmoid(2u), which does not cancel for negative x.
    constexpr float c = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    const V x2 = x * x;
    const V s = Math::reciprocal(1.0f + Math::exp(-c * x * (1.0f + 0.044715f * x2)));
    return {x * s, s + x * s * (1.0f - s) * (c * (1.0f + 3.0f * 0.044715f * x2))};
  } else if constexpr (kind == Activation::gelu_erf && requires { Math::normal(x); }) {
    const auto normal = Math::normal(x);
    return {x * normal.cdf, normal.cdf + x * 0.39894228f * normal.exponential};
  } else if constexpr (kind == Activation::gelu_erf) {
    const V cdf = 0.5f * (1.0f + Math::erf(x * 0.70710678f));
    return {x * cdf, cdf + x * 0.39894228f * Math::exp(-0.5f * x * x)};
  } else {
    return {x, V{} + 1.0f};
  }
}

/// Gradients of f(gate) * up by gate and up.
template <class V>
NRL_HOST_DEVICE inline __attribute__((always_inline)) V gate_gradient(V slope, V up, V dout) {
  return dout * up * slope;
}
template <class V>
NRL_HOST_DEVICE inline __attribute__((always_inline)) V up_gradient(V value, V dout) {
  return dout * value;
}

/// An element of a normed row, before the bias.
template <class V>
NRL_HOST_DEVICE inline __attribute__((always_inline)) V normalized(V x, float mean, float rstd, V weight) {
  return (x - mean) * rstd * weight;
}

template <class V>
struct Pair {
  V first, second;
};

/// Rotates (x1, x2) by the angle with this cosine and sine; for the transpose pass -sin.
template <class V>
NRL_HOST_DEVICE inline __attribute__((always_inline)) Pair<V> rope_pair(V x1, V x2, V cos, V sin) {
  return {x1 * cos - x2 * sin, x2 * cos + x1 * sin};
}

/// The constants of one AdamW step, derived once per call.
struct AdamWStep {
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float decay;                 ///< 1 - lr * weight_decay
  float step_size;             ///< lr / (1 - beta1^step)
  float inv_sqrt_correction2;  ///< 1 / sqrt(1 - beta2^step)
  float eps, grad_scale;
  uint32_t seed;  ///< of the random bits that round reduced state
};

struct AdamWState {
  float param, exp_avg, exp_avg_sq;
};

template <class Math>
NRL_HOST_DEVICE inline __attribute__((always_inline)) AdamWState adamw(const AdamWStep& s, AdamWState x,
                                                                       float grad) {
  const float g = grad * s.grad_scale;
  const float m = s.beta1 * x.exp_avg + s.one_minus_beta1 * g;
  const float v = s.beta2 * x.exp_avg_sq + s.one_minus_beta2 * (g * g);
  const float denominator = Math::sqrt(v) * s.inv_sqrt_correction2 + s.eps;
  return {x.param * s.decay - s.step_size * m / denominator, m, v};
}

}  // namespace nrl::ops::element
