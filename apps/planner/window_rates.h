#pragma once
// The rates that a window of recorded steps gives to estimates.

#include <string>
#include <vector>

#include "apps/machine/profile.h"
#include "apps/predict/step_time.h"
#include "apps/profile/profile.h"

namespace nrl::planner {

/// The calls of the rank of a stage, with the number of times that each is in a step.
struct StageCalls {
  const engine::DryStep& step;
  double repeated;  ///< microbatches of the step over those that were dry-run

  double count(const ops::Call& call) const { return call.microbatch < 0 ? 1 : repeated; }
};
StageCalls calls_of(const predict::DryStages& stages, const predict::DryStages::Stage& stage);

/// Seconds of a step in which the device waits for the host, or nothing is known to happen.
double gaps_of(const profile::Split& split);

struct WindowRates {
  machine::Profile profile;
  std::vector<std::string> left_out;  ///< operations that the profile has no times of, with the reason
};
/// The times of calls and of messages between stages, the gaps between calls and the spread of the ranks.
/// `stages`: of the configuration that the window is of; `base`: the name of their device's model.
WindowRates window_rates(const profile::Profile& window, const predict::DryStages& stages,
                         const std::string& base);

}  // namespace nrl::planner
