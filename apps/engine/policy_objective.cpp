#include "apps/engine/policy_objective.h"

#include <array>

#include "apps/plan/loss.h"
#include "core/ops/segments.h"

namespace nrl::engine {

using Column = plan::PolicyColumn;
using PolicyM = ops::PolicyMetric;

std::span<const MetricSpec> PolicyGradient::metrics() const {
  static constexpr auto specs = [] {
    std::array<MetricSpec, PolicyM::count> s;
    s[PolicyM::loss] = {"loss"};
    s[PolicyM::kl] = {"kl_penalty", Per::one, "kl"};
    s[PolicyM::ratio] = {"probs_ratio", Per::tokens};
    s[PolicyM::ratio_clamped] = {"probs_ratio_clamped", Per::tokens};
    s[PolicyM::clipped] = {"clip_fraction", Per::tokens, "clipped"};
    s[PolicyM::entropy] = {"entropy", Per::tokens};
    s[PolicyM::approx_entropy] = {"approx_entropy", Per::tokens};
    return s;
  }();
  return specs;
}

model::Dependence PolicyGradient::dependence() const {
  return plan::has_sequence_ratios(options_.type) ? model::Dependence::sequence : model::Dependence::token;
}

ops::PolicyLoss PolicyGradient::loss(ops::Exec& exec, const model::MicroBatch& batch,
                                     const model::HeadOutput& out, int64_t begin, int64_t count) const {
  const auto part = [&](const Tensor& t) { return t ? t.rows(begin, count) : Tensor{}; };
  const auto column = [&](Column::Index c) { return part(batch.columns[c]); };
  ops::PolicyLoss a{.log_prob = part(out.log_prob),
                    .target = part(batch.target),
                    .normalizer = column(Column::normalizer),
                    .advantage = column(Column::advantage),
                    .old = on_policy_ ? Tensor{} : column(Column::old),
                    .reference = compares_ ? column(Column::reference) : Tensor{},
                    .importance = column(Column::importance),
                    .entropy = part(out.entropy),
                    .options = options_};
  if (by_sequence()) {
    const int64_t sequences = batch.sequence_values.dim(0);
    a.segment = part(batch.segment);
    a.tokens = make_tensor(batch.sequence_values.ptr<double>(), DType::f64, {sequences});
    a.log_ratios = out.segment_sums.rows(0, sequences);
    ops::segment_sum(exec, {.x = out.log_prob,
                            .minus = on_policy_ ? out.log_prob : batch.columns[Column::old],
                            .target = batch.target,
                            .segment = batch.segment,
                            .out = a.log_ratios});
    out.sum_over_rows(a.log_ratios);
  }
  return a;
}

void PolicyGradient::weights(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out,
                             int64_t begin, int64_t count) {
  ops::PolicyLoss a = loss(exec, batch, out, begin, count);
  a.weight = out.weight.rows(begin, count);
  if (options_.entropy_coef != 0) a.entropy_weight = out.entropy_weight.rows(begin, count);
  ops::policy_loss(exec, a);
}

void PolicyGradient::add_metrics(ops::Exec& exec, const model::MicroBatch& batch,
                                 const model::HeadOutput& out, const Tensor& sums) {
  ops::PolicyLoss a = loss(exec, batch, out, 0, batch.target.dim(0));
  a.metrics = sums;
  ops::policy_loss(exec, a);
}

ops::PolicyLoss::Options policy_options(const Config& config) {
  const PolicyLossConfig& c = config.loss_fn;
  return {.type = c.type,
          .lower = c.ratio_clip_min,
          .upper = c.ratio_clip_max,
          .dual_clip = c.ratio_clip_c.value_or(0),
          .kl_penalty = c.use_kl_in_reward ? 0 : c.reference_policy_kl_penalty,
          .kl_type = c.reference_policy_kl_type,
          .entropy_coef = c.entropy_coef};
}

}  // namespace nrl::engine
