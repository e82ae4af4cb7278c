// Losses of pairs, written out from their papers: the values first, then the derivatives by the two rewards.

#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

double log_sigmoid(double x) {
  return x < 0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x));
}
double sigmoid(double x) {
  return std::exp(log_sigmoid(x));
}

/// log(p / (1 - p)) of p = exp(u).
double log_odds_of(double u) {
  const double p = std::exp(std::min(u, -1e-7));
  return std::min(u, -1e-7) - (p < 0.5 ? std::log1p(-p) : std::log(-std::expm1(std::min(u, -1e-7))));
}

/// A sequence of a pair: its sum, the reference's, its factor a.
struct Member {
  double sum, reference, factor, tokens;
  double reward() const { return factor * (sum - reference); }
};

double preference(const PairLoss::Options& o, const Member& w, const Member& l, double margin) {
  const double e = o.label_smoothing, difference = w.reward() - l.reward();
  const double logit = o.beta * difference - margin - (o.type == PreferenceLoss::simpo ? o.gamma : 0.0);
  switch (o.type) {
    case PreferenceLoss::sigmoid:
    case PreferenceLoss::simpo:
      return -(1 - e) * log_sigmoid(logit) - e * log_sigmoid(-logit);
    case PreferenceLoss::robust:
      return (-(1 - e) * log_sigmoid(logit) + e * log_sigmoid(-logit)) / (1 - 2 * e);
    case PreferenceLoss::hinge:
      return std::max(0.0, 1 - logit);
    case PreferenceLoss::ipo:
      return std::pow(difference - 1 / (2 * o.beta), 2);
    case PreferenceLoss::apo_zero:
      return 1 - sigmoid(o.beta * w.reward()) + sigmoid(o.beta * l.reward());
    case PreferenceLoss::apo_down:
      return sigmoid(o.beta * w.reward()) + 1 - sigmoid(o.beta * difference);
    case PreferenceLoss::orpo:
      return -o.beta * log_sigmoid(log_odds_of(w.reward()) - log_odds_of(l.reward()));
  }
  return 0;
}

struct Slopes {
  double chosen, rejected;  // by the rewards
};
Slopes slopes(const PairLoss::Options& o, const Member& w, const Member& l, double margin) {
  const double e = o.label_smoothing, b = o.beta, difference = w.reward() - l.reward();
  const double logit = b * difference - margin - (o.type == PreferenceLoss::simpo ? o.gamma : 0.0);
  const auto opposed = [](double slope) { return Slopes{slope, -slope}; };
  const auto bell = [](double x) { return sigmoid(x) * sigmoid(-x); };
  switch (o.type) {
    case PreferenceLoss::sigmoid:
    case PreferenceLoss::simpo:
      return opposed(b * (sigmoid(logit) - (1 - e)));
    case PreferenceLoss::robust:
      return opposed(b * (-(1 - e) * sigmoid(-logit) - e * sigmoid(logit)) / (1 - 2 * e));
    case PreferenceLoss::hinge:
      return opposed(logit < 1 ? -b : 0.0);
    case PreferenceLoss::ipo:
      return opposed(2 * (difference - 1 / (2 * b)));
    case PreferenceLoss::apo_zero:
      return {-b * bell(b * w.reward()), b * bell(b * l.reward())};
    case PreferenceLoss::apo_down:
      return {b * bell(b * w.reward()) - b * bell(b * difference), b * bell(b * difference)};
    case PreferenceLoss::orpo: {
      const double odds = log_odds_of(w.reward()) - log_odds_of(l.reward());
      const auto slope = [](double u) { return -1 / std::expm1(std::min(u, -1e-7)); };
      return {-b * sigmoid(-odds) * slope(w.reward()), b * sigmoid(-odds) * slope(l.reward())};
    }
  }
  return {};
}

void losses_of_pairs(Exec&, const PairLoss& a) {
  const PairLoss::Options& o = a.options;
  const auto add = [&](PairMetric::Index at, double x) {
    if (a.metrics) store(a.metrics, at, load(a.metrics, at) + x);
  };
  for (int64_t p = 0; p < a.sums.dim(0) / 2; ++p) {
    const double c = load(a.values, 2 * p, PairValue::normalizer);
    if (c == 0) {
      if (a.gradient) store(a.gradient, 2 * p, 0), store(a.gradient, 2 * p + 1, 0);
      continue;
    }
    const auto member = [&](int64_t s) {
      Member m{};
      m.sum = load(a.sums, s);
      m.tokens = std::max(1.0, load(a.values, s, PairValue::tokens));
      m.factor = o.average ? 1 / m.tokens : 1;
      if (o.type != PreferenceLoss::simpo && o.type != PreferenceLoss::orpo)
        m.reference = load(a.values, s, PairValue::reference);
      return m;
    };
    const Member w = member(2 * p), l = member(2 * p + 1);
    const double margin = load(a.values, 2 * p, PairValue::margin);
    const double sft = o.sft_average ? 1 / w.tokens : 1, center = w.sum + l.sum;
    const double loss = preference(o, w, l, margin);
    add(PairMetric::loss,
        c * (o.preference_weight * loss - o.sft_weight * sft * w.sum + o.center * center * center));
    add(PairMetric::preference_loss, c * loss);
    add(PairMetric::sft_loss, -c * sft * w.sum);
    add(PairMetric::accuracy, w.reward() > l.reward() ? 1 : 0);
    add(PairMetric::rewards_chosen, o.beta * w.reward());
    add(PairMetric::rewards_rejected, o.beta * l.reward());
    add(PairMetric::rewards_margin, o.beta * (w.reward() - l.reward()));
    add(PairMetric::log_probs_chosen, w.sum);
    add(PairMetric::log_probs_rejected, l.sum);
    if (!a.gradient) continue;
    const Slopes s = slopes(o, w, l, margin);
    store(a.gradient, 2 * p,
          c * (o.preference_weight * w.factor * s.chosen - o.sft_weight * sft + 2 * o.center * center));
    store(a.gradient, 2 * p + 1, c * (o.preference_weight * l.factor * s.rejected + 2 * o.center * center));
  }
}

}  // namespace

void fill_pair_loss(KernelTable& table) {
  table.pair_loss = losses_of_pairs;
}

}  // namespace nrl::ops::reference
