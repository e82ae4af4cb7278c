#pragma once
// The update of an optimizer step over all parameter groups: global gradient norm, clipping, and AdamW on the
// ranges that this rank owns. All work is enqueued; the host waits for no value.

#include "apps/engine/group_tensors.h"
#include "apps/engine/offloaded_update.h"
#include "core/config/config.h"
#include "core/ops/exec.h"
#include "parallel/comm/communicator.h"

namespace nrl::engine {

class Optimizer {
 public:
  /// `scalars`: (ops::StepScalar::count) f64. `max_norm`: 0 disables clipping. `max_skipped`
  /// and `growth_interval`: see ops::DecideStep. `staging`, `host`: of offloaded state in a GPU run. The
  /// memory and `exec` must outlive the optimizer.
  Optimizer(const OptimizerConfig& config, double max_norm, int64_t max_skipped, int64_t growth_interval,
            std::vector<GroupTensors> groups, const Tensor& scalars, const memory::Arenas& arenas,
            const OffloadedUpdate::Staging& staging, const OffloadedUpdate::Host& host, ops::Exec& exec);

  /// Must be called after the gradients are reduced. Sums the step scalars (ops::StepScalar) over `all`, the
  /// ranks of the run, decides on the device whether to skip the step, and updates. Zeroes the
  /// gradients for the next step.
  void step(comm::Communicator& all);
  /// See OffloadedUpdate::observe().
  void observe(memory::HostObserver* observer) { offloaded_.observe(observer); }
  /// Zeroes the gradients that the next step accumulates into (ParamGroup::zeroed).
  void zero_gradients();

 private:
  ops::AdamW arguments(const GroupTensors& group, const plan::UpdateCall& call) const;

  OptimizerConfig config_;
  double max_norm_;
  int64_t max_skipped_, growth_interval_;
  std::vector<GroupTensors> groups_;
  Tensor scalars_;
  ops::Exec& exec_;
  OffloadedUpdate offloaded_;
};

}  // namespace nrl::engine
