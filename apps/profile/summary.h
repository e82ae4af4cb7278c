#pragma once
// Figures computed from a profile, for its JSON and tables.

#include "apps/profile/profile.h"
#include "core/io/json.h"

namespace nrl::profile {

/// The rank with most own work, whose split the profile has.
const RankProfile& slowest(const Profile& profile);
/// The rank with most memory at its peak.
const RankProfile& largest(const Profile& profile);

/// Seconds of communication, from start to end, whether hidden or not.
double communication_seconds(const RankProfile& rank);
/// The share of a step in which the compute row computes, 0 to 1.
double utilization(const Split& split);
/// late, wire, bubble and imbalance.
double exposed_seconds(const Split& split);

/// The members `memory` and `summary` of profile.json, with the names of PyTorch's allocator and of NeMo RL's
/// profilers. An arena is what they call cached.
JsonValue memory_json(const Profile& profile);
JsonValue summary_json(const Profile& profile);

}  // namespace nrl::profile
