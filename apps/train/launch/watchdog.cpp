#include "apps/train/launch/watchdog.h"

namespace nrl::train {

Watchdog::Finding Watchdog::look(const status::Page& page, double now_s) {
  if (const uint64_t progress = page.progress.load(std::memory_order_relaxed);
      progress != progress_ || progressed_s_ < 0) {
    progress_ = progress;
    progressed_s_ = now_s;
  }
  if (const int64_t completed = page.completed.load(std::memory_order_relaxed); completed != completed_) {
    // Several steps between two calls have the mean of their time.
    if (completed_s_ >= 0 && completed > completed_)
      times_.add((now_s - completed_s_) / static_cast<double>(completed - completed_));
    completed_ = completed;
    completed_s_ = now_s;
  }
  Finding found;
  found.silent_s = now_s - progressed_s_;
  found.median_step_s = times_.median();
  const status::Phase phase = page.phase.load(std::memory_order_relaxed);
  // Storage may stall for minutes, and goes on: reading data has the longer limit.
  const bool of_steps = found.median_step_s > 0 && phase == status::Phase::computing;
  found.limit_s =
      limits_.seconds > 0 ? limits_.seconds
      : phase == status::Phase::starting
          ? limits_.start_seconds
          : times_.limit(limits_.medians, of_steps ? limits_.least_seconds : limits_.other_seconds);
  found.over = found.silent_s > found.limit_s;
  return found;
}

}  // namespace nrl::train
