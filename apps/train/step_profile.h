#pragma once
// Kernel times per step, and the trace of the steps in profiling.steps.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/train/run.h"
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
  /// Time since the last call.
  KernelSeconds take();
  /// Total seconds by kernel.
  std::vector<std::pair<std::string, double>> kernels() const;

 private:
  void record(trace::Mode mode);
  std::vector<trace::Total> totals() const;

  Run& run_;
  std::optional<StepRange> steps_;
  KernelSeconds taken_;
};

}  // namespace nrl::train
