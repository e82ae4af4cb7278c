#include "apps/train/loop/evaluator.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace nrl::train {

std::vector<double> mean_metrics(engine::Engine& engine, StepSource& source, int64_t batches,
                                 const parallel::Groups& groups) {
  const std::span<const engine::MetricSpec> specs = engine.objective().metrics();
  std::vector<double> sums(specs.size());
  engine::LossCounts counts;
  for (int64_t b = 0; b < batches; ++b) {
    const engine::Engine::Metrics of_batch = engine.evaluate(
        source.begin(), [&]() -> const data::HostMicroBatch& { return source.next().batch; }, b == 0);
    const engine::LossCounts more = source.totals().counts();
    // A metric without a divisor is a mean over its global batch.
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i] += of_batch[i] * (specs[i].per == engine::Per::one ? more.examples : 1);
    counts.tokens += more.tokens;
    counts.examples += more.examples;
  }
  groups.host(parallel::group::all).all_reduce(std::span(sums));
  for (size_t i = 0; i < sums.size(); ++i) {
    if (specs[i].per == engine::Per::one) sums[i] /= std::max(counts.examples, 1.0);
    sums[i] = counts.mean(specs[i], sums[i]);
  }
  return sums;
}

void note_validation_loss(Position& at, double loss) {
  if (std::isfinite(loss) && (at.best_val_loss == 0 || loss < at.best_val_loss)) {
    at.best_val_loss = loss;
    at.best_val_step = at.step;
  }
}

std::vector<double> evaluate(Run& run) {
  const parallel::Groups& groups = run.placement.groups();
  const auto source = validation_source(run.config, *run.validation, run.plan(), groups);
  std::vector<double> metrics = mean_metrics(*run.engine, *source, run.validation->batches, groups);
  note_validation_loss(run.position, metrics.front());
  return metrics;
}

}  // namespace nrl::train
