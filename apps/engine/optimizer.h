#pragma once
// The end of an optimizer step on the flat buffers: global gradient norm, clipping and AdamW over what this
// rank owns. Everything is enqueued; no host waits for a value.

#include "apps/plan/run_plan.h"
#include "core/ops/exec.h"
#include "parallel/comm/communicator.h"

namespace nrl::engine {

/// The flat buffers of a rank, as the optimizer sees them, in the memory of its device.
struct FlatState {
  Tensor weights;              ///< (total) what the layers read
  Tensor gradients;            ///< (total) f32
  Tensor master;               ///< (state) f32; empty when the weights are f32
  Tensor exp_avg, exp_avg_sq;  ///< (state) f32
  Tensor scalars;              ///< (ops::StepScalar::count) f64
  Tensor chunks;               ///< (C, 4) i64, the plan's chunk_table
};

class Optimizer {
 public:
  Optimizer(const plan::RunPlan& plan, const OptimizerConfig& config, double max_norm, int64_t max_skipped,
            const FlatState& state, ops::Exec& exec)
      : plan_(plan),
        config_(config),
        max_norm_(max_norm),
        max_skipped_(max_skipped),
        state_(state),
        exec_(exec) {}

  /// After the gradients' reduction: sums the step's scalars over `dp` (see ops::StepScalar), decides whether
  /// and how the step is taken, and updates. Gradients are zero afterwards.
  void step(comm::Communicator& dp);

 private:
  const plan::RunPlan& plan_;
  OptimizerConfig config_;
  double max_norm_;
  int64_t max_skipped_;
  FlatState state_;
  ops::Exec& exec_;
};

}  // namespace nrl::engine
