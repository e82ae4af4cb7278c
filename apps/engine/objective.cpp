#include "apps/engine/objective.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/ops/optimizer.h"

namespace nrl::engine {

double LossCounts::mean(const MetricSpec& metric, double sum) const {
  const double divisor = metric.per == Per::one ? 1 : metric.per == Per::tokens ? tokens : examples;
  return metric.sign * sum / std::max(divisor, 1.0);
}

void Objective::weights(ops::Exec&, const model::MicroBatch&, const model::HeadOutput&, int64_t, int64_t) {
  NRL_CHECK(false, "this objective uses the loss weights of the batch");
}

void Objective::loss_weights(ops::Exec&, const model::MicroBatch&, const Tensor&) {
  NRL_CHECK(false, "this objective uses the loss weights of the batch");
}

std::span<const MetricSpec> LanguageModeling::metrics() const {
  static constexpr MetricSpec specs[] = {{"loss", Per::tokens, {}, -1}};
  return specs;
}

void LanguageModeling::add_metrics(ops::Exec& exec, const model::MicroBatch&, const model::HeadOutput& out,
                                   const Tensor& sums) {
  ops::add_sum(exec, {.x = out.log_prob, .out = sums.rows(0, 1)});
}

}  // namespace nrl::engine
