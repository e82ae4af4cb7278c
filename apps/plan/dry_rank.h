#pragma once
// A planned rank in dry runs (ops::DryRun): one microbatch, the parameters and the groups of ranks, all
// without memory. Answers what the plan itself must know of the passes.

#include <optional>
#include <span>
#include <vector>

#include "apps/machine/device_models.h"
#include "apps/model/decoder.h"
#include "apps/plan/batch.h"
#include "apps/plan/param_groups.h"
#include "core/ops/dry_run.h"
#include "parallel/comm/ledger.h"
#include "parallel/grid/groups.h"

namespace nrl::plan {

/// A device that runs `recipe`: a CPU with `threads` threads per rank, or a GPU with usual_properties().
/// `products`: see ops::DryDevice.
ops::DryDevice usual_device(DeviceType type, int threads, const precision::Recipe& recipe,
                            ops::Bf16Products products = ops::Bf16Products::upcast);

/// The parts of a plan that a dry run needs.
struct PlannedRank {
  model::Decoder& decoder;
  const parallel::ProcessGrid& grid;
  std::span<const parallel::GroupId> group_ids;  ///< empty: a layout of one rank
  std::span<const parallel::GroupChannels> channels;
  const model::ParameterList& parameters;
  std::span<const ParamGroup> groups;
  precision::Recipe recipe;
  DeviceType device = DeviceType::cpu;
  int partials = 1;  ///< Exec::partials()
  ops::Bf16Products products = ops::Bf16Products::upcast;
  BatchShape batch;  ///< of one microbatch
};

struct RunPlan;
/// Refers to the parts of a solved plan.
PlannedRank planned_rank(const RunPlan& plan);

class DryRank {
 public:
  explicit DryRank(const PlannedRank& rank);

  ops::Exec& exec() { return exec_; }
  const model::MicroBatch& microbatch() const { return tensors_->microbatches().front(); }
  /// By parameter.
  std::vector<model::ParameterView> views() const;
  /// They count what they would communicate. Null without group_ids.
  const parallel::Groups* groups() const { return groups_ ? &*groups_ : nullptr; }
  /// Counts their operations.
  comm::Ledger& ledger() { return ledger_; }

 private:
  const PlannedRank& rank_;
  ops::DryDevice device_;
  ops::Exec exec_;
  std::optional<BatchTensors> tensors_;
  comm::Ledger ledger_;
  std::optional<parallel::Groups> groups_;
};

/// The workspace that the ops of a step need, in the decoder's passes and in the update. Binds the decoder to
/// no memory.
size_t needed_workspace(const PlannedRank& rank);

}  // namespace nrl::plan
