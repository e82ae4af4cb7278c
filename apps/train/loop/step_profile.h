#pragma once
// Kernel times per step, and the trace of the steps in profiling.steps.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/monitor/kernel_times.h"
#include "apps/train/start/run.h"
#include "core/base/text.h"
#include "core/trace/trace.h"

namespace nrl::train {

/// At most one per process, because the ranges of core/trace are global. On a GPU a range costs two events in
/// the stream, so ranges are only timed in profiled steps.
class StepProfile {
 public:
  explicit StepProfile(Run& run);
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  /// Must be called before step `step` (from 1).
  void begin_step(int64_t step);
  /// Whether the trace ends with step `step`; the caller must then collect its results and call write().
  bool ends_with(int64_t step, bool last) const;
  /// Writes this rank's trace; returns the path.
  std::string write();

  struct KernelSeconds {
    double gemm = 0, attention = 0;
  };
  /// The kernel time of step `step`, in which `seconds` were spent computing. Must be called after every
  /// step.
  KernelSeconds end_step(int64_t step, double seconds);
  /// Must be called after work between steps whose kernels belong to none.
  void skip();

  /// Seconds by kernel in the steps that were timed: all, on a GPU those in profiling.steps.
  std::vector<std::pair<std::string, double>> kernels() const;
  /// Seconds spent computing in these steps.
  double timed_seconds() const { return kernel_times_.seconds(); }
  /// "of steps 3-5" where only these were timed; empty where all were.
  std::string timed_steps() const;

 private:
  void record(trace::Mode mode);
  monitor::KernelTimes::Totals totals() const;

  Run& run_;
  std::optional<StepRange> steps_;
  monitor::KernelTimes kernel_times_;
  std::optional<std::pair<int64_t, int64_t>> timed_;  // on a GPU: the first and the last step that was timed
};

}  // namespace nrl::train
