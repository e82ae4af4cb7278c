#include "apps/train/launch/watchdog.h"

#include <algorithm>
#include <vector>

#include "core/base/sample.h"

namespace nrl::train {
namespace {

constexpr size_t history = 33;
constexpr size_t least_known = 3;
constexpr double most_medians = 3;  // a hang that ended by itself must not raise the limit

}  // namespace

double Watchdog::median() const {
  return steps_.size() < least_known ? 0 : nrl::median({steps_.begin(), steps_.end()});
}

Watchdog::Finding Watchdog::look(const status::Page& page, double now_s) {
  if (const uint64_t progress = page.progress.load(std::memory_order_relaxed);
      progress != progress_ || progressed_s_ < 0) {
    progress_ = progress;
    progressed_s_ = now_s;
  }
  if (const int64_t completed = page.completed.load(std::memory_order_relaxed); completed != completed_) {
    // Several steps between two calls have the mean of their time.
    if (completed_s_ >= 0 && completed > completed_) {
      const double known = median(),
                   mean = (now_s - completed_s_) / static_cast<double>(completed - completed_);
      steps_.push_back(known > 0 ? std::min(mean, most_medians * known) : mean);
      if (steps_.size() > history) steps_.pop_front();
    }
    completed_ = completed;
    completed_s_ = now_s;
  }
  Finding found;
  found.silent_s = now_s - progressed_s_;
  found.median_step_s = median();
  const status::Phase phase = page.phase.load(std::memory_order_relaxed);
  // Storage may stall for minutes, and goes on: reading data has the longer limit.
  const bool of_steps = found.median_step_s > 0 && phase == status::Phase::computing;
  found.limit_s = limits_.seconds > 0                ? limits_.seconds
                  : phase == status::Phase::starting ? limits_.start_seconds
                  : of_steps ? std::max(limits_.least_seconds, limits_.medians * found.median_step_s)
                             : std::max(limits_.other_seconds, limits_.medians * found.median_step_s);
  found.over = found.silent_s > found.limit_s;
  return found;
}

}  // namespace nrl::train
