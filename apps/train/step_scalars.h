#pragma once
// The scalars of optimizer steps on their way to the device and back, without the host waiting for a step
// before it has prepared the next one.

#include <cstdint>

#include "core/device/runtime.h"
#include "core/ops/exec.h"
#include "core/ops/step/step.h"

namespace nrl::train {

/// What a step brought, the same on all ranks.
struct StepResult {
  double log_prob_sum = 0, grad_norm = 0;
  int64_t updates = 0, skipped_in_a_row = 0;
  bool skipped = false, stop = false;
};

/// A step: begin(), its work, finish(); later collect(). At most two steps may be under way.
class StepScalars {
 public:
  StepScalars() = default;
  /// `scalars` is (ops::StepScalar::count) f64 in the exec's memory; both outlive this.
  StepScalars(const Tensor& scalars, ops::Exec& exec);

  /// The counters that go on from an earlier run.
  void restore(int64_t updates, int64_t skipped_in_a_row);
  /// The sums begin at zero; `stop` when this rank was asked to.
  void begin(double learning_rate, bool stop);
  /// Enqueues the way back.
  void finish();
  int under_way() const { return under_way_; }
  /// The result of the oldest step under way; blocks until it is there.
  StepResult collect();

 private:
  static constexpr int slots = 2;
  double* slot(int64_t step) const;  // host memory of a step

  Tensor scalars_;
  ops::Exec* exec_ = nullptr;
  device::Memory pinned_;
  device::Event back_[slots];
  int64_t begun_ = 0;
  int under_way_ = 0;
};

}  // namespace nrl::train
