#pragma once
// The step loop.

#include "core/config/load.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// Trains as the configuration says. Collective over the world; returns the exit code that all ranks leave
/// with.
Exit train(comm::World& world, const ConfigResult& config);

}  // namespace nrl::train
