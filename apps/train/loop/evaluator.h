#pragma once
// Evaluation during training.

#include <vector>

#include "apps/train/loop/step_source.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// Collective, between steps. The means of the objective's metrics over `batches` global batches of `source`,
/// the same on all ranks of `groups`; the first one is the loss.
std::vector<double> mean_metrics(engine::Engine& engine, StepSource& source, int64_t batches,
                                 const parallel::Groups& groups);

/// Updates the best loss of evaluations.
void note_validation_loss(Position& at, double loss);

/// Collective, between steps. Returns mean_metrics() over run.validation, which must be set, and updates the
/// best loss in run.position.
std::vector<double> evaluate(Run& run);

}  // namespace nrl::train
