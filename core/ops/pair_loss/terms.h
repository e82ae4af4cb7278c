#pragma once
// The body of pair_loss, shared by all backends; formulas in core/ops/pair_loss.h.

#include <cmath>

#include "core/base/host_device.h"
#include "core/ops/pair_loss.h"

namespace nrl::ops::pairs {

/// log(1 + exp(x)) = -log s(-x).
NRL_HOST_DEVICE inline double softplus(double x) {
  return (x > 0.0 ? x : 0.0) + log1p(exp(-fabs(x)));
}
/// s(x), without overflow on either side.
NRL_HOST_DEVICE inline double logistic(double x) {
  const double t = exp(-fabs(x));
  return (x >= 0.0 ? 1.0 : t) / (1.0 + t);
}

/// g(u) and g'(u) of orpo.
struct LogOdds {
  double value, slope;
};
NRL_HOST_DEVICE inline LogOdds log_odds(double u) {
  const double bounded = u > -1e-7 ? -1e-7 : u, rest = -expm1(bounded);  // rest = 1 - exp(u)
  // The two forms cancel on opposite sides of -log(2).
  return {bounded - (bounded < -0.6931471805599453 ? log1p(-exp(bounded)) : log(rest)), 1.0 / rest};
}

/// phi and its derivatives by u+ and u-.
struct Phi {
  double value, chosen, rejected;
};
NRL_HOST_DEVICE inline Phi phi(const PairLoss::Options& o, double chosen, double rejected, double margin) {
  const double beta = o.beta, e = o.label_smoothing, d = chosen - rejected;
  double x = beta * d - margin;
  switch (o.type) {
    case PreferenceLoss::simpo:
      x -= o.gamma;
      [[fallthrough]];
    case PreferenceLoss::sigmoid: {
      const double slope = beta * (e * logistic(x) - (1.0 - e) * logistic(-x));
      return {(1.0 - e) * softplus(-x) + e * softplus(x), slope, -slope};
    }
    case PreferenceLoss::robust: {
      const double scale = 1.0 / (1.0 - 2.0 * e);
      const double slope = -beta * scale * ((1.0 - e) * logistic(-x) + e * logistic(x));
      return {scale * ((1.0 - e) * softplus(-x) - e * softplus(x)), slope, -slope};
    }
    case PreferenceLoss::hinge: {
      // A NaN must reach the loss.
      const double value = x >= 1.0 ? 0.0 : 1.0 - x, slope = x >= 1.0 ? 0.0 : -beta;
      return {value, slope, -slope};
    }
    case PreferenceLoss::ipo: {
      const double distance = d - 0.5 / beta;
      return {distance * distance, 2.0 * distance, -2.0 * distance};
    }
    case PreferenceLoss::apo_zero: {
      const double lost = logistic(-beta * chosen), kept = logistic(beta * rejected);
      return {lost + kept, -beta * lost * logistic(beta * chosen), beta * kept * logistic(-beta * rejected)};
    }
    case PreferenceLoss::apo_down: {
      const double kept = logistic(beta * chosen), lost = logistic(-beta * d);
      const double slope = beta * lost * logistic(beta * d);
      return {kept + lost, beta * kept * logistic(-beta * chosen) - slope, slope};
    }
    case PreferenceLoss::orpo: {
      const LogOdds plus = log_odds(chosen), minus = log_odds(rejected);
      const double ratio = plus.value - minus.value, slope = beta * logistic(-ratio);
      return {beta * softplus(-ratio), -slope * plus.slope, slope * minus.slope};
    }
  }
  return {};
}

/// A pair's part of the metrics, and dLoss/dS of its segments.
struct Pair {
  double metrics[PairMetric::count] = {};
  double chosen = 0, rejected = 0;
};
/// `sums` and `values` begin at the chosen segment, which the rejected one follows.
NRL_HOST_DEVICE inline Pair evaluate(const PairLoss::Options& o, const double* sums, const double* values) {
  Pair out;
  const double* other = values + PairValue::count;
  const double c = values[PairValue::normalizer];
  if (!(c > 0.0)) return out;
  const double per_chosen = 1.0 / fmax(values[PairValue::tokens], 1.0),
               per_rejected = 1.0 / fmax(other[PairValue::tokens], 1.0);
  const bool reference = o.type != PreferenceLoss::simpo && o.type != PreferenceLoss::orpo;
  const double a_chosen = o.average ? per_chosen : 1.0, a_rejected = o.average ? per_rejected : 1.0;
  const double a_sft = o.sft_average ? per_chosen : 1.0;
  const double chosen = a_chosen * (sums[0] - (reference ? values[PairValue::reference] : 0.0));
  const double rejected = a_rejected * (sums[1] - (reference ? other[PairValue::reference] : 0.0));
  const Phi preference = phi(o, chosen, rejected, values[PairValue::margin]);
  const double sft = -a_sft * sums[0], both = sums[0] + sums[1];
  out.metrics[PairMetric::loss] =
      c * (o.preference_weight * preference.value + o.sft_weight * sft + o.center * both * both);
  out.metrics[PairMetric::preference_loss] = c * preference.value;
  out.metrics[PairMetric::sft_loss] = c * sft;
  out.metrics[PairMetric::accuracy] = o.beta * chosen > o.beta * rejected ? 1.0 : 0.0;
  out.metrics[PairMetric::rewards_chosen] = o.beta * chosen;
  out.metrics[PairMetric::rewards_rejected] = o.beta * rejected;
  out.metrics[PairMetric::rewards_margin] = o.beta * chosen - o.beta * rejected;
  out.metrics[PairMetric::log_probs_chosen] = sums[0];
  out.metrics[PairMetric::log_probs_rejected] = sums[1];
  const double centering = 2.0 * o.center * both;
  out.chosen = c * (o.preference_weight * a_chosen * preference.chosen - o.sft_weight * a_sft + centering);
  out.rejected = c * (o.preference_weight * a_rejected * preference.rejected + centering);
  return out;
}

}  // namespace nrl::ops::pairs
