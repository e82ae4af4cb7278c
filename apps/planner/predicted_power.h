#pragma once
// The power of a rank over a predicted step, at the watts of what its device does (energy.h).

#include <vector>

#include "apps/predict/energy.h"
#include "apps/predict/step_timeline.h"

namespace nrl::planner {

/// Mean watts of the rank that `stage` follows in each of `parts` equal parts of [0, end]; empty for a device
/// whose power is not known and for a stage without work. No part exceeds the power limit. Parts in which
/// passes are hidden lack their work.
std::vector<double> predicted_power(const predict::PowerModel& power, const predict::StageTimeline& stage,
                                    double end, size_t parts);

}  // namespace nrl::planner
