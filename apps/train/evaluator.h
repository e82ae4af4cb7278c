#pragma once
// The evaluations of a training run.

#include "apps/train/run.h"

namespace nrl::train {

/// Collective, between steps. The mean loss over the run's validation data, which must be there; notes the
/// best one in run.position.
double evaluate(Run& run);

}  // namespace nrl::train
