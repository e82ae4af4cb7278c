#pragma once
// Access to an engine's state, for saving and loading checkpoints.

#include <functional>

#include "apps/engine/engine.h"
#include "apps/state/checkpoint.h"

namespace nrl::train {

/// Waits for gathers in flight. The engine's weights and optimizer state in its own memory, which `staging`
/// (Engine::staging()) accesses.
TrainState state_of(engine::Engine& engine, Staging* staging);

/// Calls work(state), which may read and write the weights and the optimizer state in the engine's own
/// memory, on a GPU through TrainState::staging. No step may be in flight. Writes are done on return.
void with_state(engine::Engine& engine, const std::function<void(const TrainState&)>& work);

}  // namespace nrl::train
