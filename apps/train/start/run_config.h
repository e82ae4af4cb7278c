#pragma once
// Reads and checks the configuration of a run, the same on all its ranks.

#include <optional>
#include <string>
#include <vector>

#include "apps/train/start/run_check.h"
#include "core/config/load.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// check_but_memory(), and of a run on this machine's CPU whether it fits into the memory, by planning it.
void check_run(ConfigResult& result, const RunSetting& setting);

/// check_run(), for a configuration that is only tried: an error in which the check itself ends, as may the
/// planning of memory, becomes a problem too. Internal errors are thrown.
void check_tried_run(ConfigResult& result, const RunSetting& setting);

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
