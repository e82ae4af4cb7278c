#pragma once
// The end of an optimizer step over all parameter groups: global gradient norm, clipping and AdamW over what
// this rank owns. Everything is enqueued; no host waits for a value.

#include "apps/engine/group_tensors.h"
#include "core/config/config.h"
#include "core/ops/exec.h"
#include "parallel/comm/communicator.h"

namespace nrl::engine {

class Optimizer {
 public:
  /// `scalars`: (ops::StepScalar::count) f64. `max_norm` 0: gradients are not clipped. `max_skipped`: see
  /// ops::DecideStep. Refers to the groups' memory and to `exec`.
  Optimizer(const OptimizerConfig& config, double max_norm, int64_t max_skipped,
            std::vector<GroupTensors> groups, const Tensor& scalars, ops::Exec& exec)
      : config_(config),
        max_norm_(max_norm),
        max_skipped_(max_skipped),
        groups_(std::move(groups)),
        scalars_(scalars),
        exec_(exec) {}

  /// After the gradients' reduction: sums the step's scalars over `all`, every rank of the run (see
  /// ops::StepScalar), decides whether and how the step is taken, and updates. Gradients are zero afterwards.
  /// Null: nothing is summed, for collecting the kernels of a step (ops::Exec::needed).
  void step(comm::Communicator* all);

 private:
  void update(const GroupTensors& group);

  OptimizerConfig config_;
  double max_norm_;
  int64_t max_skipped_;
  std::vector<GroupTensors> groups_;
  Tensor scalars_;
  ops::Exec& exec_;
};

}  // namespace nrl::engine
