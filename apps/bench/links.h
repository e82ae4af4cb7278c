#pragma once
// Measurements of the operations between the ranks of this launch.

#include <functional>
#include <vector>

#include "apps/bench/bench.h"
#include "apps/bench/group_rates.h"
#include "apps/machine/profile.h"
#include "apps/train/start/placement.h"
#include "parallel/comm/world/bench.h"

namespace nrl::bench {

/// Calls `use` with the timings of every kind of groups that are made: the groups of the configuration's
/// layout, or inside and across nodes. All groups of a kind are timed at once, as in training. Collective.
void for_each_kind(comm::World& world, const Args& args, const ConfigResult& config,
                   const train::Placement& placement,
                   const std::function<void(const GroupKind&, comm::Communicator& group,
                                            const std::vector<comm::CommTiming>&)>& use);

struct LinkRates {
  std::vector<machine::MeasuredOperation> operations;
  std::vector<machine::MeasuredOverlap> overlap;  ///< in a group of the kind with most ranks
};
/// The same as points of a profile, f32 where an operation is timed in several types, and calls beside
/// operations in `rounds` rounds (measure_overlap()). Collective.
LinkRates measure_links(comm::World& world, const Args& args, int rounds);

}  // namespace nrl::bench
