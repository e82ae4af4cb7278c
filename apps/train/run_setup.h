#pragma once
// Everything between the command line and the first step.

#include <memory>

#include "apps/train/run.h"

namespace nrl::train {

/// Everything up to the first step. Collective; errors are agreed on (AgreedExit). Nothing is created on disk
/// before all checks have passed on all ranks. `world` must outlive the run.
std::unique_ptr<Run> set_up_run(comm::World& world, const ConfigResult& config, const PhaseNote& phase);

}  // namespace nrl::train
