#pragma once
// The scalars of optimizer steps on their way to the device and back, without the host waiting for a step
// before it has prepared the next one.

#include <array>
#include <cstdint>

#include "apps/plan/run_plan.h"
#include "core/device/runtime.h"
#include "core/ops/exec.h"
#include "core/ops/step.h"

namespace nrl::engine {

/// What a step brought, the same on all ranks.
struct StepResult {
  double grad_norm = 0;
  int64_t updates = 0, skipped_in_a_row = 0;
  bool skipped = false, stop = false;
  std::array<double, ops::StepScalar::max_metrics> metrics{};  ///< sums over the step, as the objective names
};

/// A step: begin(), its work, finish(); later collect(). At most two steps may be in flight.
class StepScalars {
 public:
  StepScalars() = default;
  /// `scalars` is (ops::StepScalar::count) f64 in the exec's memory. `host`: where the steps in flight have
  /// theirs on a GPU, plan::max_steps_in_flight times as much pinned memory; null on a CPU. All outlive this.
  StepScalars(const Tensor& scalars, double* host, ops::Exec& exec);

  /// The counters of an earlier run.
  void restore(int64_t updates, int64_t skipped_in_a_row);
  /// The sums begin at zero; `stop` when this rank was asked to.
  void begin(double learning_rate, bool stop);
  /// Enqueues the copy back to the host.
  void finish();
  /// The result of the oldest step in flight; blocks until it is there.
  StepResult collect();

 private:
  static constexpr int slots = plan::max_steps_in_flight;
  double* slot(int64_t step) const;  // host memory of a step

  Tensor scalars_;
  ops::Exec* exec_ = nullptr;
  double* host_ = nullptr;
  device::Event back_[slots];
  int64_t begun_ = 0;
  int in_flight_ = 0;
};

}  // namespace nrl::engine
