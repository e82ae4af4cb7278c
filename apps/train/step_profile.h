#pragma once
// Times of kernels by step, and the trace of the steps that profiling.steps names.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/train/run.h"
#include "core/base/text.h"
#include "core/trace/trace.h"

namespace nrl::train {

/// One per process: the ranges of core/trace are the process's. On a GPU a range costs two events in the
/// stream, so that ranges are timed in profiled steps only.
class StepProfile {
 public:
  explicit StepProfile(Run& run);
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  /// Call before step `step` (from 1).
  void begin_step(int64_t step);
  /// Whether the trace ends with step `step`, made; its results must then be collected and write() called.
  bool ends_with(int64_t step, bool last) const;
  /// Writes this rank's trace; returns the path.
  std::string write();

  struct KernelSeconds {
    double gemm = 0, attention = 0;
  };
  /// Spent since the last call.
  KernelSeconds take();
  /// Seconds by kernel since the start.
  std::vector<std::pair<std::string, double>> kernels() const;

 private:
  void record(trace::Mode mode);
  std::vector<trace::Total> totals() const;

  Run& run_;
  std::optional<StepRange> steps_;
  KernelSeconds taken_;
};

}  // namespace nrl::train
