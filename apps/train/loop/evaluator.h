#pragma once
// Evaluation during training.

#include "apps/train/loop/step_source.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// Collective, between steps. The mean loss of an engine over `batches` global batches of `source`, the same
/// on all ranks of `groups`.
double mean_loss(engine::Engine& engine, StepSource& source, int64_t batches, const parallel::Groups& groups);

/// Collective, between steps. Returns the mean loss over run.validation, which must be set, and updates the
/// best loss in run.position.
double evaluate(Run& run);

}  // namespace nrl::train
