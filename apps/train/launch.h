#pragma once
// Starts the ranks of a run and makes them fail together: one message, one exit code.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/train/run_check.h"
#include "core/config/load.h"
#include "parallel/comm/agreement.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// Thrown on all ranks with the same exit code, after one rank has printed the message.
struct AgreedExit {
  Exit code;
};

/// Initializes the world, runs `body`, and finalizes the world. Returns the exit code, of an error too. An
/// error that not all ranks have agreed on aborts the other ranks.
int run_in_world(const std::function<int(comm::World&)>& body);

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

/// Collective: reads and checks the configuration on rank 0 and broadcasts it. Problems are printed on rank
/// 0; errors end in AgreedExit on all ranks. The rank counts of `setting` are set here. May renumber the
/// ranks of `world`, so that the groups of the grid stay inside nodes.
ConfigResult load_config_collectively(comm::World& world, const std::string& path,
                                      const std::vector<std::string>& overrides, RunSetting setting = {});

/// The same, but prints nothing: unset on all ranks if there are errors. `found`: on rank 0 all problems.
std::optional<ConfigResult> try_config_collectively(comm::World& world, const std::string& path,
                                                    const std::vector<std::string>& overrides,
                                                    RunSetting setting, Diagnostics& found);

}  // namespace nrl::train
