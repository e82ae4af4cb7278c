#pragma once
// The predicted time of every forward step of a rank's blocks, from the cost formulas of its ops
// (core/ops/cost.h) and round rates of a device. Only their proportions matter: they decide what is worth
// recomputing, and need neither a device nor memory.

#include <map>
#include <vector>

#include "apps/model/decoder.h"
#include "apps/plan/batch.h"
#include "apps/plan/param_groups.h"

namespace nrl::plan {

/// Seconds by step of a layer's table. Communication counts nothing.
using StepTimes = std::map<const memory::LayerTable*, std::vector<double>>;

/// A planned rank.
struct PlannedRank {
  model::Decoder& decoder;
  const parallel::ProcessGrid& grid;
  std::span<const parallel::GroupId> group_ids;
  std::span<const parallel::GroupChannels> channels;
  const memory::MemoryPlan& memory;
  const model::ParameterList& parameters;
  std::span<const ParamGroup> groups;
  precision::Recipe recipe;
  DeviceType device = DeviceType::cpu;
  int partials = 1;  ///< Exec::partials()
  BatchShape batch;  ///< of one microbatch
};
/// Predicts the step times of a microbatch. Binds the decoder to memory that does not exist: it must not be
/// used afterwards.
StepTimes forward_step_times(const PlannedRank& rank);

}  // namespace nrl::plan
