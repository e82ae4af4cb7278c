#pragma once
// Tells from the status page of this process (core/base/status.h) how long it has made no progress, and
// whether that is too long.

#include <cstdint>

#include "core/base/status.h"
#include "core/base/step_times.h"

namespace nrl::train {

struct WatchdogLimits {
  double seconds = 0;   ///< without progress, in every phase; 0: the limits below
  double medians = 20;  ///< where a step computes: so many times the median step, and at least:
  double least_seconds = 60;
  double other_seconds = 600;  ///< before three steps are known; reading data, evaluations, checkpoints
  double start_seconds = 1800;
};

/// Pure but for the page that it is given. One thread.
class Watchdog {
 public:
  explicit Watchdog(const WatchdogLimits& limits = {}) : limits_(limits) {}

  struct Finding {
    double silent_s = 0;  ///< since the last progress that was seen
    double limit_s = 0;
    double median_step_s = 0;  ///< 0: fewer than three are known
    bool over = false;
  };
  /// `now_s`: monotonic, from call to call. Call at least once a second.
  Finding look(const status::Page& page, double now_s);

 private:
  WatchdogLimits limits_;
  StepTimes times_;
  uint64_t progress_ = 0;
  int64_t completed_ = 0;
  double progressed_s_ = -1, completed_s_ = -1;  // -1: not yet
};

}  // namespace nrl::train
