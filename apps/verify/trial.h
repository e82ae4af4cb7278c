#pragma once
// Trains a layout and the reference side by side and compares them after every step.

#include "apps/train/start/run_data.h"
#include "apps/verify/trial_result.h"
#include "core/config/load.h"
#include "parallel/comm/world/world.h"

namespace nrl::verify {

class TrialRuns;

/// Collective. Trains the first `steps` steps of both runs, until a check fails, and compares loss, gradients
/// and weights after each.
void compare_steps(TrialRuns& runs, int64_t steps);

/// Collective; the result is the same on all ranks. After every step of `steps` compares loss, gradients and
/// weights. `data` must have the samples of all steps. Errors that concern the configuration end in
/// AgreedExit.
TrialResult run_trial(comm::World& world, const ConfigResult& config, const train::TrainData& data,
                      int64_t steps);

}  // namespace nrl::verify
