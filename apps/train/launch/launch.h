#pragma once
// Starts the ranks of a run and makes them fail together: one message, one exit code.

#include <functional>
#include <string>

#include "apps/engine/engine.h"
#include "parallel/comm/agreement.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

class RunControl;

/// Thrown on all ranks with the same exit code, after one rank has printed the message.
struct AgreedExit {
  Exit code;
  std::string text = {};  ///< the message
};

/// Initializes the world, runs `body`, and finalizes the world. Returns the exit code, of an error too. An
/// error that not all ranks have agreed on aborts the other ranks.
int run_in_world(const std::function<int(comm::World&)>& body);

/// The same of a training run, whose body may connect the control plane (run_control.h). From then on the
/// ranks end together whatever happens.
int run_watched(const std::function<int(comm::World&, RunControl&)>& body);

/// engine.collect(). If the device does not respond, prints the error and ends every process of the run: the
/// unwinding of an exception would block.
engine::StepResult collect_step(comm::World& world, engine::Engine& engine);

/// Collective: runs `work` on every rank and agrees on the outcome (comm::attempt_on_all()). `work` must not
/// communicate.
comm::ErrorConsensus attempt_collectively(comm::World& world, const std::function<void()>& work);

/// Returns if the ranks agreed on no error; else one rank prints the message and all throw AgreedExit.
void require_agreed(comm::World& world, const comm::ErrorConsensus& consensus);

/// Collective: runs `work` on every rank. If it fails on any rank, one message is printed and all ranks throw
/// AgreedExit with the same code. `work` must not communicate.
void run_collectively(comm::World& world, const std::function<void()>& work);

}  // namespace nrl::train
