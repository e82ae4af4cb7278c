#pragma once
// Evaluation during training.

#include "apps/train/run.h"

namespace nrl::train {

/// Collective, between steps. Returns the mean loss over run.validation, which must be set, and updates the
/// best loss in run.position.
double evaluate(Run& run);

}  // namespace nrl::train
