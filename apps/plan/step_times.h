#pragma once
// The predicted time of every forward step of a rank's blocks, from the cost formulas of its ops
// (core/ops/cost.h), its communication and a device's rates. Only their proportions matter: they decide what
// is worth recomputing, and need neither a device nor memory.

#include <map>
#include <vector>

#include "apps/machine/fabric.h"
#include "apps/plan/dry_rank.h"

namespace nrl::plan {

/// Seconds by step of a layer's table. A step that communicates takes its operations in full: a recomputation
/// hides none of them.
using StepTimes = std::map<const memory::LayerTable*, std::vector<double>>;

/// Predicts the step times of a microbatch on such devices. Binds the decoder to memory that does not exist:
/// it must not be used afterwards.
StepTimes forward_step_times(PlannedRank rank, const machine::DeviceModel& device,
                             const machine::Fabric& fabric);

}  // namespace nrl::plan
