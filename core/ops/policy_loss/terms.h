#pragma once
// The body of policy_loss, shared by all backends; formulas in core/ops/policy_loss.h.

#include <cmath>

#include "core/base/host_device.h"
#include "core/ops/policy_loss.h"

namespace nrl::ops::policy {

/// The tensors of a PolicyLoss that are read; null where absent.
struct Inputs {
  const float *log_prob, *normalizer, *advantage, *old, *reference, *importance, *entropy;
  const int *target, *segment;
  const double *log_ratios, *tokens;
  int64_t segments;
  PolicyLoss::Options options;

  explicit Inputs(const PolicyLoss& a)
      : log_prob(data<float>(a.log_prob)),
        normalizer(data<float>(a.normalizer)),
        advantage(data<float>(a.advantage)),
        old(data<float>(a.old)),
        reference(data<float>(a.reference)),
        importance(data<float>(a.importance)),
        entropy(data<float>(a.entropy)),
        target(data<int>(a.target)),
        segment(data<int>(a.segment)),
        log_ratios(data<double>(a.log_ratios)),
        tokens(data<double>(a.tokens)),
        segments(a.tokens.data ? a.tokens.shape[0] : 0),
        options(a.options) {}

 private:
  template <class T>
  static const T* data(const Tensor& t) {
    return static_cast<const T*>(t.data);
  }
};

/// A NaN stays, unlike with fmin and fmax.
NRL_HOST_DEVICE inline double clamp(double x, double low, double high) {
  return x < low ? low : x > high ? high : x;
}

/// The largest magnitude of logarithms of ratios and of kappa, of gspo's logarithm, and of estimates of the
/// divergence.
inline constexpr double largest_log = 20, largest_mean_log = 10, largest_kl = 10;

/// A number and its derivative by log_prob.
struct Term {
  double value, slope;
};

NRL_HOST_DEVICE inline Term divergence(KlEstimator type, double difference) {
  const double kappa = clamp(difference, -largest_log, largest_log);
  double value = -kappa, slope = 1.0;
  if (type == KlEstimator::k2) {
    value = 0.5 * kappa * kappa;
    slope = -kappa;
  } else if (type == KlEstimator::k3) {
    value = expm1(kappa) - kappa;
    slope = -expm1(kappa);
  }
  const double clamped = clamp(value, -largest_kl, largest_kl);
  return {clamped, kappa != difference || clamped != value ? 0.0 : slope};
}

/// A row's part of the metrics, and its weights.
struct Row {
  double metrics[PolicyMetric::count] = {};
  double weight = 0, entropy_weight = 0;
};
NRL_HOST_DEVICE inline Row evaluate(const Inputs& a, int64_t n) {
  const PolicyLoss::Options& o = a.options;
  Row out;
  double c = static_cast<double>(a.normalizer[n]);
  if (a.target[n] < 0 || !(c > 0.0)) return out;
  const double log_prob = static_cast<double>(a.log_prob[n]);
  const double advantage = static_cast<double>(a.advantage[n]);
  const double importance = a.importance ? static_cast<double>(a.importance[n]) : 1.0;

  const double difference = a.old ? log_prob - static_cast<double>(a.old[n]) : 0.0;
  const double log_ratio = clamp(difference, -largest_log, largest_log), token_ratio = exp(log_ratio);
  Term rho{token_ratio, log_ratio != difference ? 0.0 : token_ratio};
  if (is_of_sequences(o.type)) {
    const int64_t s = a.segment[n];
    if (s < 0 || s >= a.segments) return out;
    const double tokens = fmax(a.tokens[s], 1.0), sum = a.log_ratios ? a.log_ratios[s] : 0.0;
    c /= tokens;
    const bool mean = o.type == PolicyObjective::gspo;
    const double log = mean ? sum / tokens : sum;
    const double clamped =
        mean ? (log > largest_mean_log ? largest_mean_log : log) : clamp(log, -largest_log, largest_log);
    rho.value = exp(clamped);
    // A row has 1/n of the loss. The derivative of a mean over n tokens is 1/n, which c has, of a sum 1.
    rho.slope = clamped != log ? 0.0 : mean ? rho.value : tokens * rho.value;
  }

  const double bounded = clamp(rho.value, 1.0 - o.lower, 1.0 + o.upper);
  bool clipped = false;
  Term loss{};
  if (o.type == PolicyObjective::reinforce) {
    loss = {-advantage * log_prob, -advantage};
  } else if (o.type == PolicyObjective::cispo) {
    loss = {-advantage * bounded * log_prob, -advantage * bounded};
    clipped = advantage != 0.0 && bounded != rho.value;
  } else {
    loss = {-advantage * rho.value, -advantage * rho.slope};
    if (-advantage * bounded > loss.value) {
      loss = {-advantage * bounded, 0.0};
      clipped = true;
    }
    if (o.dual_clip > 0.0 && advantage < 0.0 && loss.value > -advantage * o.dual_clip) {
      loss = {-advantage * o.dual_clip, 0.0};
      clipped = true;
    }
  }
  double value = importance * loss.value, slope = importance * loss.slope;

  if (a.reference) {
    const Term kl = divergence(o.kl_type, static_cast<double>(a.reference[n]) - log_prob);
    out.metrics[PolicyMetric::kl] = c * kl.value;
    if (o.kl_penalty != 0.0) {
      value += o.kl_penalty * kl.value;
      slope += o.kl_penalty * kl.slope;
    }
  }
  if (a.entropy) {
    const double entropy = static_cast<double>(a.entropy[n]);
    out.metrics[PolicyMetric::entropy] = entropy;
    if (o.entropy_coef != 0.0) value -= o.entropy_coef * entropy;
  }
  out.metrics[PolicyMetric::loss] = c * value;
  out.metrics[PolicyMetric::ratio] = rho.value;
  out.metrics[PolicyMetric::ratio_clamped] = bounded;
  out.metrics[PolicyMetric::clipped] = clipped ? 1.0 : 0.0;
  out.metrics[PolicyMetric::approx_entropy] = -token_ratio * log_prob;
  out.weight = c * slope;
  out.entropy_weight = -o.entropy_coef * c;
  return out;
}

}  // namespace nrl::ops::policy
