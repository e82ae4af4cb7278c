#pragma once
// The optimizer step on the flat buffers: global gradient norm, clipping and AdamW over what this rank owns.

#include <vector>

#include "apps/plan/run_plan.h"
#include "core/ops/exec.h"
#include "parallel/comm/communicator.h"

namespace nrl::train {

/// The flat buffers of a rank, as the optimizer sees them.
struct FlatState {
  Tensor weights;              ///< (total) what the layers read
  Tensor gradients;            ///< (total) f32
  Tensor master;               ///< (state) f32; empty when the weights are f32
  Tensor exp_avg, exp_avg_sq;  ///< (state) f32
};

class Optimizer {
 public:
  Optimizer(const plan::RunPlan& plan, const OptimizerConfig& config, const FlatState& state,
            ops::Exec& exec);

  /// L2 norm over all gradients of the model after their reduction; the same on every rank of `dp`. Not
  /// finite when any gradient is.
  double gradient_norm(comm::Communicator& dp);

  /// One AdamW update of what this rank owns with gradients scaled by `grad_scale`; `update` counts applied
  /// updates from 1. Gradients are zero afterwards.
  void step(double lr, double grad_scale, int64_t update);

  /// Forgets the gradients (a skipped step).
  void discard_gradients();

 private:
  // Ranges that lie behind each other with the same decay are updated in one call.
  struct Run {
    int64_t flat, state, count;
    bool decay;
  };
  const plan::RunPlan& plan_;
  OptimizerConfig config_;
  FlatState state_;
  ops::Exec& exec_;
  std::vector<Run> runs_;
};

}  // namespace nrl::train
