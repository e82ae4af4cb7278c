// Losses of policies, written out from their papers.

#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

/// A function of log_prob and its derivative.
struct Graph {
  double value, slope;
};
Graph exponential(double x, double low, double high) {
  return {std::exp(std::clamp(x, low, high)), x < low || x > high ? 0.0 : std::exp(x)};
}

Graph surrogate(const PolicyLoss::Options& o, double advantage, Graph ratio, double log_prob, bool& clipped) {
  const double bounded = std::clamp(ratio.value, 1 - o.lower, 1 + o.upper);
  const bool outside = ratio.value < 1 - o.lower || ratio.value > 1 + o.upper;
  switch (o.type) {
    case PolicyObjective::reinforce:
      return {-advantage * log_prob, -advantage};
    case PolicyObjective::cispo:
      clipped = outside && advantage != 0;
      return {-advantage * bounded * log_prob, -advantage * bounded};
    default:
      break;
  }
  // PPO: positive advantages gain nothing above the range, negative ones nothing below it.
  if ((advantage > 0 && ratio.value > 1 + o.upper) || (advantage < 0 && ratio.value < 1 - o.lower))
    clipped = true;
  if (advantage < 0 && o.dual_clip > 0 && ratio.value > o.dual_clip) {
    clipped = true;
    return {-advantage * o.dual_clip, 0};
  }
  if (clipped) return {-advantage * bounded, 0};
  return {-advantage * ratio.value, -advantage * ratio.slope};
}

Graph kl_estimate(KlEstimator type, double difference) {
  const double k = std::clamp(difference, -20.0, 20.0);
  const Graph raw = type == KlEstimator::k1   ? Graph{-k, 1}
                    : type == KlEstimator::k2 ? Graph{k * k / 2, -k}
                                              : Graph{std::exp(k) - k - 1, 1 - std::exp(k)};
  const bool flat = std::fabs(difference) > 20 || std::fabs(raw.value) > 10;
  return {std::clamp(raw.value, -10.0, 10.0), flat ? 0 : raw.slope};
}

void losses_of_policy(Exec&, const PolicyLoss& a) {
  const PolicyLoss::Options& o = a.options;
  const auto add = [&](PolicyMetric::Index at, double x) {
    if (a.metrics) store(a.metrics, at, load(a.metrics, at) + x);
  };
  const bool sequences = o.type == PolicyObjective::gspo || o.type == PolicyObjective::rloo;
  for (int64_t n = 0; n < a.log_prob.dim(0); ++n) {
    if (a.weight) store(a.weight, n, 0);
    if (a.entropy_weight) store(a.entropy_weight, n, 0);
    double c = load(a.normalizer, n);
    if (index(a.target, n) < 0 || c == 0) continue;
    const double log_prob = load(a.log_prob, n), advantage = load(a.advantage, n);
    const Graph token = a.old ? exponential(log_prob - load(a.old, n), -20, 20) : Graph{1, 1};
    Graph ratio = token;
    if (sequences) {
      const int64_t s = index(a.segment, n);
      if (s < 0) continue;
      const double tokens = load(a.tokens, s), sum = a.log_ratios ? load(a.log_ratios, s) : 0.0;
      c /= tokens;  // a row's share of the sequence's loss
      if (o.type == PolicyObjective::gspo) {
        ratio = exponential(sum / tokens, -1e300, 10);
      } else {
        ratio = exponential(sum, -20, 20);
        ratio.slope *= tokens;
      }
    }
    bool clipped = false;
    Graph loss = surrogate(o, advantage, ratio, log_prob, clipped);
    if (a.importance) {
      loss.value *= load(a.importance, n);
      loss.slope *= load(a.importance, n);
    }
    if (a.reference) {
      const Graph kl = kl_estimate(o.kl_type, load(a.reference, n) - log_prob);
      add(PolicyMetric::kl, c * kl.value);
      loss.value += o.kl_penalty * kl.value;
      loss.slope += o.kl_penalty * kl.slope;
    }
    if (a.entropy) {
      add(PolicyMetric::entropy, load(a.entropy, n));
      loss.value -= o.entropy_coef * load(a.entropy, n);
    }
    add(PolicyMetric::loss, c * loss.value);
    add(PolicyMetric::ratio, ratio.value);
    add(PolicyMetric::ratio_clamped, std::clamp(ratio.value, 1 - o.lower, 1 + o.upper));
    add(PolicyMetric::clipped, clipped ? 1 : 0);
    add(PolicyMetric::approx_entropy, -token.value * log_prob);
    if (a.weight) store(a.weight, n, c * loss.slope);
    if (a.entropy_weight) store(a.entropy_weight, n, -o.entropy_coef * c);
  }
}

}  // namespace

void fill_policy_loss(KernelTable& table) {
  table.policy_loss = losses_of_policy;
}

}  // namespace nrl::ops::reference
