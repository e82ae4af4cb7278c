#pragma once
// Output of `nrl-train plan`.

#include <map>
#include <memory>
#include <vector>

#include "apps/machine/device_models.h"
#include "apps/plan/run_plan.h"
#include "apps/plan/traffic.h"
#include "apps/train/launch/device_choice.h"
#include "core/config/load.h"
#include "core/ops/dry_run.h"

namespace nrl::planner {

/// True if plan and run know the same memory, so that they take the same microbatch: a GPU's, or that of
/// CPU ranks on this machine alone.
bool knows_memory(const Config& config, int world, const train::DeviceChoice& device);

/// True if the memory is this machine's only because nothing says otherwise: a configuration that does
/// not name the CPU (device: cpu) or the nodes (cluster), for several ranks and without a GPU here.
bool assumes_this_machine(const Config& config, int world, const train::DeviceChoice& device);

/// Ranks that hold equal parts of the model: they differ in their data and in their shards of parameters.
struct PartPlan {
  int threads = 1;                      ///< of a rank
  std::unique_ptr<plan::RunPlan> plan;  ///< of the first rank with the largest shards
  /// By the bytes that their shards are smaller; ascending ranks.
  std::map<int64_t, std::vector<int>> ranks;
};
/// The plans of a run's ranks, those that need most memory first, and the traffic of a step of the first one.
struct RankPlans {
  std::unique_ptr<ops::DryDevice> device;  ///< that the first plan is bound to
  std::vector<PartPlan> parts;
  std::vector<plan::Traffic> traffic;

  /// The plan of each stage that needs most memory; null where there is none.
  std::vector<const plan::RunPlan*> by_stage(int stages) const;
  const plan::RunPlan& largest() const { return *parts.front().plan; }
  /// All ranks by the bytes that they need less than the largest().
  std::map<int64_t, std::vector<int>> by_need() const;
};
RankPlans plan_all(const ConfigResult& result, int world, const BatchPlan& batch,
                   const train::DeviceChoice& device, const machine::DeviceModel* gpu);

/// Prints batch arithmetic, grid and memory of a run on `world` ranks, for which the configuration must have
/// passed all checks but the one of the memory. If ranks need different amounts of memory, the table is for
/// the ranks that need most. `batch`: as decided. `device`: to plan for; a GPU need not be there. `gpu`: its
/// model, if it was named. `plans`: plan_all() of the same. `buffers`: also list every buffer.
void print_plan(const ConfigResult& result, int world, const BatchPlan& batch,
                const train::DeviceChoice& device, const machine::DeviceModel* gpu, const RankPlans& plans,
                bool buffers);

/// Prints all that a rank does in an optimizer step (model::Decoder::program_text()).
void print_program(const ConfigResult& result, int world, const BatchPlan& batch, int rank,
                   const train::DeviceChoice& device);

}  // namespace nrl::planner
