#pragma once
// The estimated time of a training step of a layout on many ranks, without them: the calls and operations of
// a dry run of its pipeline stages, each on its own resources (replay.h), and the schedules of all stages run
// against each other, at the rates of a device (apps/machine/device_models.h) and its links (fabric.h).

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/machine/device_models.h"
#include "apps/plan/stage_plans.h"
#include "apps/predict/replay.h"
#include "apps/predict/stage_time.h"
#include "core/base/cluster_node.h"
#include "core/config/load.h"
#include "core/ops/dry_run.h"

namespace nrl::predict {

/// The device of a model of one, which computes nothing.
class ModeledDevice : public ops::DryDevice {
 public:
  /// `threads`: of a rank on a CPU. `profile`: of the device, whose facts `model` has already.
  ModeledDevice(const machine::DeviceModel& model, bool tf32, int threads,
                std::optional<machine::Profile> profile = std::nullopt);

  /// The same device for another thread: an execution context serves one at a time.
  ModeledDevice another() const { return {model_, tf32_, threads(), profile_}; }

  const machine::DeviceModel& model() const { return model_; }
  const machine::Profile* profile() const { return profile_ ? &*profile_ : nullptr; }
  int threads() const { return exec().threads; }

 private:
  machine::DeviceModel model_;
  bool tf32_;
  std::optional<machine::Profile> profile_;
};

/// Factors on calls and operations that run at once, with `local_ranks` on a node.
machine::Overlap overlap_of(const ModeledDevice& device, int local_ranks);

/// Seconds of a step. The parts add up to `step` on the rank that needs longest.
struct StepEstimate {
  double step = 0;
  double compute = 0;   ///< the passes
  double layers = 0;    ///< exposed communication in layers: tensor, context and expert parallelism
  double pipeline = 0;  ///< waiting for other stages
  double data = 0;      ///< exposed reductions of gradients and of their norm, and gathers of weights
  double offload = 0;   ///< exposed copies to and from the host, and updates there
  double update = 0;    ///< gradient norm and optimizer
  double host = 0;      ///< gaps between kernels
  double spread = 0;    ///< waiting for the slowest of equal ranks (spread.h)
  Busy busy = {};       ///< of each resource the rank that occupies it longest
  /// The weakest source of the numbers that were used.
  machine::Source kernels = machine::Source::assumed, links = machine::Source::assumed;

  /// "kernels assumed, links assumed"; without links if no rank occupies one.
  std::string sources() const;
  /// Kernels and the gaps between them.
  double computing() const { return compute + update + host; }
};

/// plan::plan_stages() with the configured batch. `config` must have passed check_run() for `world` ranks.
/// `capacity`: bytes that a rank's plan may have, for policy.recompute: auto. `only_fitting`: ends with the
/// first stage whose plan has more.
plan::StagePlans plan_stages(const Config& config, const model::ModelSpec& spec, int world,
                             const ModeledDevice& device, double capacity, bool only_fitting = false);

/// The schedules of all stages and their times, from which a step was estimated.
struct StepDerivation {
  std::vector<StageItems> items;  ///< by DryStages::stages()
  std::vector<pipeline::Schedule> schedules;
  pipeline::Simulation simulation;
};

/// The dry runs of these plans, from which a step is estimated at any rates.
class DryStages {
 public:
  /// Uses the plans up. `nodes`: of the ranks; empty: as machine::Fabric takes it. `expert_load`: rows that
  /// the busiest rank gets, over the rows with a balanced router. `device` must outlive this object.
  DryStages(const Config& config, plan::StagePlans plans, const ModeledDevice& device,
            std::span<const ClusterNode> nodes, double expert_load = 1);
  ~DryStages();
  DryStages(DryStages&&) noexcept;

  /// `derivation`: set if it is not null.
  StepEstimate estimate(const machine::Scenario& scenario = machine::likely,
                        StepDerivation* derivation = nullptr) const;

  /// A stage whose rank was dry-run; the stages after it, before the next such stage, have the same times.
  struct Stage {
    int stage = 0;
    std::unique_ptr<engine::Engine> engine;
    engine::DryStep step;
  };
  const std::vector<Stage>& stages() const { return stages_; }
  const ModeledDevice& device() const { return device_; }
  const machine::Fabric& fabric() const { return fabric_; }
  int64_t microbatches() const { return microbatches_; }
  Rates rates(const machine::CallTimes& calls) const;
  machine::CallTimes call_times(const machine::Scenario& scenario = machine::likely) const {
    return {device_.model(), device_.profile(), scenario};
  }
  const model::ModelLayout& layout() const { return layout_; }
  pipeline::ScheduleOptions schedule() const { return schedule_; }

 private:
  const ModeledDevice& device_;
  machine::Fabric fabric_;
  model::ModelLayout layout_;
  pipeline::ScheduleOptions schedule_;
  int64_t microbatches_ = 1;
  machine::Overlap overlap_;
  double expert_load_ = 1, spread_ = 0;
  std::vector<Stage> stages_;
};

/// Estimates the step of these plans and uses them up, as DryStages.
StepEstimate estimate_step(const Config& config, plan::StagePlans plans, const ModeledDevice& device,
                           std::span<const ClusterNode> nodes, double expert_load = 1);

}  // namespace nrl::predict
