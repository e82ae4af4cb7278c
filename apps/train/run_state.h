#pragma once
// Access to an engine's state in host memory, for saving and loading checkpoints.

#include <functional>

#include "apps/engine/engine.h"
#include "apps/train/checkpoint.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// Collective: calls work(state) with the current state: the engine's own memory on a CPU, else a copy in
/// host memory. `work` starts only if all ranks have their copy; otherwise all throw the same Error.
void with_state_copy(comm::World& world, engine::Engine& engine,
                     const std::function<void(const TrainState&)>& work);

/// Calls work(state), which must write the weights and, with `optimizer`, the optimizer state; on a GPU they
/// are uploaded afterwards. Not collective.
void write_state(engine::Engine& engine, bool optimizer, const std::function<void(const TrainState&)>& work);

}  // namespace nrl::train
