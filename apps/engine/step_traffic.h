#pragma once
// The communication of a training step, counted in a dry run of it: on a device that computes nothing, in
// groups that move nothing. The collective log of a run must agree.

#include "apps/engine/engine.h"
#include "core/ops/dry_run.h"

namespace nrl::engine {

/// Counts the operations of the rank that `plan` is for; groups of one rank are left out.
/// The plan cannot be executed afterwards: it is bound to memory that does not exist. `device`: of the plan's
/// type; must outlive the plan.
std::vector<plan::Traffic> step_traffic(std::unique_ptr<plan::RunPlan>& plan, const TrainingOptions& options,
                                        const ops::DryDevice& device);

}  // namespace nrl::engine
