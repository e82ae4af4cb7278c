#pragma once
// An engine's state as checkpoints see it, in host memory.

#include <functional>

#include "apps/engine/engine.h"
#include "apps/train/checkpoint.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// Calls work(state) with everything as it is now: the engine's own memory on a CPU, else a copy in host
/// memory. Collective: all ranks have their copy before any of them begins; what fails there is the same
/// Error on all.
void with_state_copy(comm::World& world, engine::Engine& engine,
                     const std::function<void(const TrainState&)>& work);

/// Calls work(state), which writes the weights and, with `optimizer`, the optimizer's state; on a GPU they
/// are uploaded afterwards.
void write_state(engine::Engine& engine, bool optimizer, const std::function<void(const TrainState&)>& work);

}  // namespace nrl::train
