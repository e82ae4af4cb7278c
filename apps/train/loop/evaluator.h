#pragma once
// Evaluation during training.

#include "apps/train/start/run.h"

namespace nrl::train {

/// Collective, between steps. The mean loss of an engine over the samples of `loading`, the same on all ranks
/// of `groups`.
double mean_loss(engine::Engine& engine, const data::TokenDataset& dataset,
                 const data::LoaderOptions& loading, const parallel::Groups& groups);

/// Collective, between steps. Returns the mean loss over run.validation, which must be set, and updates the
/// best loss in run.position.
double evaluate(Run& run);

}  // namespace nrl::train
