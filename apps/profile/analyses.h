#pragma once
// The analyses that analyze() and merge() put together. All are pure functions.

#include <span>
#include <vector>

#include "apps/profile/profile.h"
#include "apps/profile/recorded.h"
#include "apps/profile/sweep.h"

namespace nrl::profile {

/// Splits the wall time of a step by cause.
Split split_of(const Recorded& recorded, const Rows& rows);

/// The ops of the compute row by name and part, by the time lost. An op within another one has its own time,
/// which the outer one does not count.
std::vector<Operation> operations_of(const Recorded& recorded, const Rows& rows);
/// The same ops by the layer in which they ran, named as its ranges are; "no layer" for the rest.
std::vector<Operation> layers_of(const Recorded& recorded, const Rows& rows);
/// Adds equal operations together, and sorts by the time lost.
std::vector<Operation> merge_operations(std::vector<Operation> operations);

/// The memory plan against the clock of the window's last step.
MemoryUse memory_of(const Recorded& recorded);

/// Communication by group, operation and algorithm, the most exposed first.
std::vector<GroupTime> groups_of(const Recorded& recorded);

/// Collectives in which this rank arrived last, and the seconds that others waited for it.
struct Arrivals {
  int64_t last = 0;
  double caused_s = 0;
};
Arrivals arrivals_of(const Recorded& recorded);

/// A rank beside the others.
struct Standing {
  int rank = 0;
  double score = 1;                   ///< own work of the fastest rank of its pipeline stage / own work
  Severity severity = Severity::low;  ///< medium below 0.9, high below 0.7
  const char* longer = nullptr;       ///< the part that most exceeds the median rank's; null: none by 1 %
  double longer_s = 0;                ///< by this much
};
/// By rank.
std::vector<Standing> standings(const Profile& profile);

/// Seconds of own work of each pipeline stage, as the mean over its ranks.
std::vector<double> stage_work(const Profile& profile);

}  // namespace nrl::profile
