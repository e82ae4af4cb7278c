#pragma once
// Entry point of training.

#include "core/config/load.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// Collective over the world: sets up and executes the training run. Returns the exit code of all ranks.
Exit train(comm::World& world, const ConfigResult& config);

}  // namespace nrl::train
