#pragma once
// From the record of a window to a profile: each rank analyzes its own window, and only the results travel.

#include <vector>

#include "apps/profile/profile.h"
#include "apps/profile/recorded.h"

namespace nrl::profile {

/// All analyses of one rank's window, which must have at least one step.
RankProfile analyze(const Recorded& recorded);

/// The profile of a run from all of its ranks, in any order; there must be at least one. Sums operations over
/// the ranks, takes the split of the rank with most own work, and finds what costs time (verdicts.h) if
/// `facts.config` loads.
Profile merge(std::vector<RankProfile> ranks, RunFacts facts);

}  // namespace nrl::profile
