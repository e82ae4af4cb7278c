#include "apps/train/loop/evaluator.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace nrl::train {

double mean_loss(engine::Engine& engine, StepSource& source, int64_t batches,
                 const parallel::Groups& groups) {
  double sum = 0, loss_tokens = 0;
  for (int64_t b = 0; b < batches; ++b) {
    sum += engine.evaluate(
        source.begin(), [&]() -> const data::HostMicroBatch& { return source.next().batch; }, b == 0);
    loss_tokens += static_cast<double>(source.totals().loss_tokens);
  }
  groups.host(parallel::group::all).all_reduce(std::span(&sum, 1));
  return -sum / std::max(loss_tokens, 1.0);
}

double evaluate(Run& run) {
  const parallel::Groups& groups = run.placement.groups();
  const auto source = validation_source(run.config, *run.validation, run.plan(), groups);
  const double loss = mean_loss(*run.engine, *source, run.validation->batches, groups);
  Position& at = run.position;
  if (std::isfinite(loss) && (at.best_val_loss == 0 || loss < at.best_val_loss)) {
    at.best_val_loss = loss;
    at.best_val_step = at.step;
  }
  return loss;
}

}  // namespace nrl::train
