#pragma once
// Sets up a training run.

#include <memory>

#include "apps/monitor/start_phases.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// Collective: everything between configuration and first step. Errors end in AgreedExit on all ranks.
/// Nothing is created on disk before all checks have passed on all ranks. `world` must outlive the run.
std::unique_ptr<Run> set_up_run(comm::World& world, const ConfigResult& config, monitor::StartPhases& phases);

}  // namespace nrl::train
