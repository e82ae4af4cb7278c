#pragma once
// The estimated time of a training step of a layout on many ranks, without them: the calls of a dry run of
// its pipeline stages, the bytes of its plan, and the schedules run against each other, at the assumed rates
// of a device (apps/machine/device_models.h).

#include <memory>
#include <span>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/machine/device_models.h"
#include "core/base/cluster_node.h"
#include "core/config/load.h"
#include "core/ops/dry_run.h"

namespace nrl::predict {

/// The device of a model of one, which computes nothing.
class ModeledDevice : public ops::DryDevice {
 public:
  /// `threads`: of a rank on a CPU.
  ModeledDevice(const machine::DeviceModel& model, bool tf32, int threads);

  const machine::DeviceModel& model() const { return model_; }
  int threads() const { return exec().threads; }

 private:
  machine::DeviceModel model_;
};

/// Seconds of a step. They add up to `step` on the rank that needs longest.
struct StepEstimate {
  double step = 0;
  double compute = 0;   ///< of the busiest stage: passes, and update
  double layers = 0;    ///< communication in its layers: tensor, context and expert parallelism
  double pipeline = 0;  ///< waiting for other stages
  double data = 0;      ///< reduction of gradients and gathering of weights that no computation hides
};

/// The plan of one rank of each kind of pipeline stage: the first, the second for those between, the last.
struct StagePlans {
  std::vector<int> stages;                            ///< ascending
  std::vector<std::unique_ptr<plan::RunPlan>> plans;  ///< of these

  /// Bytes of the rank that needs most.
  int64_t memory() const;
};
/// `config` must have passed check_run() for `world` ranks. `capacity`: bytes that a rank's plan may have,
/// for policy.recompute: auto.
StagePlans plan_stages(const Config& config, const model::ModelSpec& spec, int world,
                       const ModeledDevice& device, double capacity);

/// Estimates the step of these plans and uses them up. `nodes`: of the ranks; empty: one node. Communication
/// in layers counts in full: distributed.tp_comm_overlap may hide some of it. `expert_load`: rows that the
/// experts of the busiest rank get, over the rows with a balanced router.
StepEstimate estimate_step(const Config& config, StagePlans plans, const ModeledDevice& device,
                           std::span<const ClusterNode> nodes, double expert_load = 1);

}  // namespace nrl::predict
