#pragma once
// Measurements of the operations between the ranks of this launch.

#include <functional>
#include <vector>

#include "apps/bench/bench.h"
#include "apps/bench/group_rates.h"
#include "apps/machine/fabric.h"
#include "apps/train/start/placement.h"
#include "parallel/comm/world/bench.h"

namespace nrl::bench {

/// Calls `use` with the timings of every kind of groups that are made: the groups of the configuration's
/// layout, or inside and across nodes. All groups of a kind are timed at once, as in training. Collective.
void for_each_kind(comm::World& world, const Args& args, const ConfigResult& config,
                   const train::Placement& placement,
                   const std::function<void(const GroupKind&, comm::Communicator& group,
                                            const std::vector<comm::CommTiming>&)>& use);

/// The same as points of a profile: f32 where an operation is timed in several types. Collective.
std::vector<machine::MeasuredOperation> measure_links(comm::World& world, const Args& args);

}  // namespace nrl::bench
