#include "apps/train/evaluator.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace nrl::train {

double evaluate(Run& run) {
  const plan::RunPlan& plan = run.plan();
  data::LoaderOptions loading = make_loader_options(run.config, plan.batch, run.placement.grid_position());
  loading.steps = run.validation->batches;
  loading.prefetch = data::LoaderOptions{}.prefetch;  // small: allocated in addition to the training loader
  data::BatchLoader loader(*run.validation->dataset, loading);
  plan::BatchCounts counts;
  const auto next = [&]() -> const data::HostMicroBatch& {
    const data::HostMicroBatch& batch = loader.next();
    counts = counts + plan::count(batch, plan.spec.window);
    return batch;
  };
  double sums[2] = {run.engine->evaluate(loading.steps * loading.accumulation, next), 0};
  // Ranks that split a sample or the layers have read the same samples.
  if (plan.layout.reports_tokens() && plan.layout.context_rank == 0)
    sums[1] = static_cast<double>(counts.loss_tokens);
  run.placement.groups().host(parallel::group::all).all_reduce(std::span(sums));
  const double loss = -sums[0] / std::max(sums[1], 1.0);
  Position& at = run.position;
  if (std::isfinite(loss) && (at.best_val_loss == 0 || loss < at.best_val_loss)) {
    at.best_val_loss = loss;
    at.best_val_step = at.step;
  }
  return loss;
}

}  // namespace nrl::train
