#pragma once
// Starts the ranks of a run and makes them fail together: one message, one exit code.

#include <functional>

#include "apps/engine/engine.h"
#include "apps/train/launch/agreed.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// When the control plane (run_control.h) connects the ranks. From then on they end together whatever
/// happens.
enum class Watch {
  at_once,     ///< with the default limits
  configured,  ///< in load_config_collectively(), as section `reliability` says
};

/// Initializes the world, runs `body`, and finalizes the world. Returns the exit code, of an error too. An
/// error that not all ranks have agreed on ends the other ranks.
int run_in_world(const std::function<int(comm::World&)>& body, Watch watch = Watch::at_once);

/// engine.collect(). If the device does not respond, prints the error and ends every process of the run: the
/// unwinding of an exception would block.
engine::StepResult collect_step(comm::World& world, engine::Engine& engine);

}  // namespace nrl::train
