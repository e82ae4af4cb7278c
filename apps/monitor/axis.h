#pragma once
// The horizontal axis of charts of runs.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "apps/monitor/run_history.h"

namespace nrl::monitor {

enum class By { steps, tokens, hours };

/// The runs with the axis' value of every point in place of its step: tokens, or milliseconds of training.
/// These count from the start of the run, without the time from the last row of a session to the start of the
/// next one.
std::vector<RunHistory> placed_by(std::span<const RunHistory> runs, By by);

/// How many of these values are one unit of the axis.
double axis_unit(By by);
/// "step 20", "15.4 k tokens", "0.25 h".
std::string axis_text(By by, int64_t value);
/// "step 1 to 20", "256 to 15.4 k tokens", "0 to 0.25 h".
std::string axis_range(By by, int64_t first, int64_t last);

}  // namespace nrl::monitor
