#pragma once
// Transfers the scalars of optimizer steps to the device and back. Double-buffered, so that the host can
// prepare the next step while one is in flight.

#include <array>
#include <cstdint>

#include "apps/plan/run_plan.h"
#include "core/device/runtime.h"
#include "core/ops/exec.h"
#include "core/ops/step.h"
#include "memory/host_copies.h"

namespace nrl::engine {

/// The factor of the loss.
struct LossScale {
  double initial = 1;
  int64_t growth_interval = 0;  ///< > 0: it adapts (ops::DecideStep)
  bool active() const { return initial != 1 || growth_interval > 0; }
};

/// Above these a finite step is skipped.
struct StepBounds {
  double loss_factor = 0;  ///< of the first metric, which gives the loss; 0: the loss has no limit
  double loss = 0;
  double grad_norm = 0;  ///< 0: no limit
};

/// Requests of a rank with a step. All ranks learn with its result that one of them asked.
struct StepRequests {
  bool stop = false;     ///< the end of the run
  bool gather = false;   ///< of rank 0: a gathering of what the ranks measured
  bool save = false;     ///< of rank 0: a checkpoint
  bool profile = false;  ///< a window of recorded steps
};

/// The scalars of a step that a checkpoint saves.
struct StepCounters {
  int64_t updates = 0, skipped_in_a_row = 0;
  double loss_scale = 0;  ///< 0: none; only used where it adapts
  int64_t clean_steps = 0;
};

/// The result of a step, identical on all ranks.
struct StepResult {
  double grad_norm = 0;
  int64_t updates = 0, skipped_in_a_row = 0;
  bool skipped = false;
  StepRequests asked;     ///< of any rank
  bool overflow = false;  ///< the step was skipped because its loss scale was too large
  bool limited = false;   ///< the step was skipped because of StepInput::bounds
  double used_loss_scale = 1;
  double loss_scale = 0;  ///< of the next step; 0: none
  int64_t clean_steps = 0;
  std::array<double, ops::StepScalar::max_metrics> metrics{};  ///< in the order of Objective::metrics()
  /// Models with experts: means over layers and microbatches of aux loss, z loss, and tokens of the busiest
  /// expert / mean.
  std::array<double, 3> router{};
  int expert_rounds = 1;              ///< the most rounds of a layer and microbatch, on this rank
  memory::HostCopyStatistics copies;  ///< of offloaded activations, on this rank
};

/// Protocol of a step: begin(), enqueue its work, finish(), later collect(). At most two
/// steps may be in flight.
class StepScalars {
 public:
  StepScalars() = default;
  /// `scalars`: (ops::StepScalar::count) f64 in device memory. `host`: on a GPU, pinned memory for
  /// plan::max_steps_in_flight times as many; null on a CPU. All must outlive this object.
  StepScalars(const Tensor& scalars, double* host, const LossScale& loss_scale, ops::Exec& exec);

  /// Restores the counters from a checkpoint.
  void restore(const StepCounters& counters);
  /// Zeroes the sums.
  void begin(double learning_rate, const StepRequests& asks, const StepBounds& bounds = {});
  /// Enqueues the copy back to the host.
  void finish();
  /// The end of the oldest step in flight; null on a CPU.
  const device::Event* oldest() const;
  /// Waits for the oldest step in flight and returns its result.
  StepResult collect();

 private:
  static constexpr int buffers = plan::max_steps_in_flight;
  double* host_scalars(int64_t step) const;

  Tensor scalars_;
  LossScale loss_scale_;
  ops::Exec* exec_ = nullptr;
  double* host_ = nullptr;
  device::Event copied_back_[buffers];
  int64_t begun_ = 0;
  int in_flight_ = 0;
};

}  // namespace nrl::engine
