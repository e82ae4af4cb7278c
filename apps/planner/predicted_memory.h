#pragma once
// The memory of a rank over a predicted step: the lifetimes of its plan at the times of its passes.

#include <span>

#include "apps/plan/run_plan.h"
#include "apps/predict/step_timeline.h"
#include "apps/profile/profile.h"

namespace nrl::planner {

/// The plan of a stage's rank: of the dry run if there was one, else of `others`, by stage, which may be
/// empty. Null: the stage is not planned.
const plan::RunPlan* plan_of(const predict::DryStages& stages, std::span<const plan::RunPlan* const> others,
                             const predict::StageTimeline& stage);

/// `plan`: of the rank that `stage` follows. The curve has each pass at its begin and, of each of its equal
/// parts, where that needs most memory; there are the more parts, the fewer passes are shown. Memory changes
/// when the call of the program's step begins, in passes without calls at equal distances.
profile::MemoryUse predicted_memory(const plan::RunPlan& plan, const predict::StageTimeline& stage);

}  // namespace nrl::planner
