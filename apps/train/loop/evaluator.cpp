#include "apps/train/loop/evaluator.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace nrl::train {

double mean_loss(engine::Engine& engine, const data::TokenDataset& dataset,
                 const data::LoaderOptions& loading, const parallel::Groups& groups) {
  const plan::RunPlan& plan = engine.plan();
  data::BatchLoader loader(dataset, loading);
  plan::BatchCounts counts;
  const auto next = [&]() -> const data::HostMicroBatch& {
    const data::HostMicroBatch& batch = loader.next();
    counts = counts + plan::count(batch, plan.spec.window);
    return batch;
  };
  double sums[2] = {engine.evaluate(loading.steps * loading.accumulation, next), 0};
  // Ranks that split a sample or the layers have read the same samples.
  if (plan.layout.reports_tokens() && plan.layout.context_rank == 0)
    sums[1] = static_cast<double>(counts.loss_tokens);
  groups.host(parallel::group::all).all_reduce(std::span(sums));
  return -sums[0] / std::max(sums[1], 1.0);
}

double evaluate(Run& run) {
  data::LoaderOptions loading =
      make_loader_options(run.config, run.plan().batch, run.placement.grid_position());
  loading.steps = run.validation->batches;
  loading.prefetch = data::LoaderOptions{}.prefetch;  // small: allocated in addition to the training loader
  const double loss = mean_loss(*run.engine, *run.validation->dataset, loading, run.placement.groups());
  Position& at = run.position;
  if (std::isfinite(loss) && (at.best_val_loss == 0 || loss < at.best_val_loss)) {
    at.best_val_loss = loss;
    at.best_val_step = at.step;
  }
  return loss;
}

}  // namespace nrl::train
