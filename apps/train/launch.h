#pragma once
// How the ranks of a run start and fail together: one message, one exit code.

#include <functional>
#include <string>
#include <vector>

#include "apps/train/run_check.h"
#include "core/config/load.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// Thrown on every rank, with a code that the ranks have agreed on, after the message was printed once.
struct AgreedExit {
  Exit code;
};

/// Runs `body` on the processes of this run and ends it: the result is the exit code, and so is an error,
/// which is the same on all ranks or ends them all.
int run_in_world(const std::function<int(comm::World&)>& body);

/// Runs `work` on every rank and agrees on the outcome. Collective; `work` must not communicate.
comm::ErrorConsensus attempt_collectively(comm::World& world, const std::function<void()>& work);

/// Runs `work` on every rank; when it fails anywhere, one message is printed and every rank throws AgreedExit
/// with the same code. Collective; `work` must not communicate.
void run_collectively(comm::World& world, const std::function<void()>& work);

/// Reads the configuration on rank 0, checks it against the world, and gives it to all. Problems are printed
/// on rank 0; errors end in AgreedExit on all ranks. `setting` says what is checked; its numbers of ranks are
/// filled in here.
ConfigResult load_config_collectively(comm::World& world, const std::string& path,
                                      const std::vector<std::string>& overrides, RunSetting setting = {});

}  // namespace nrl::train
