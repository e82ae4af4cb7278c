#pragma once
// The process grid in the output of `nrl-train plan`.

#include "apps/plan/run_plan.h"
#include "apps/plan/traffic.h"

namespace nrl::planner {

/// Prints both grids, the nodes that the section `cluster` describes, the groups of ranks that the run will
/// make, and what the rank with the plan `plan` sends per step in them.
void print_grid(const Config& config, const plan::RunPlan& plan, std::span<const plan::Traffic> traffic);

/// "rank 3", "ranks 0-2, 5": at most `most` ranges.
std::string rank_list(const std::vector<int>& ranks, size_t most = 8);

}  // namespace nrl::planner
