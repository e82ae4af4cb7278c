#pragma once
// Output of `nrl-train plan`.

#include "core/config/load.h"

namespace nrl::train {

/// Prints batch arithmetic, grid and memory of a run on `world` ranks, for which the configuration must have
/// passed all checks. If ranks need different amounts of memory, the table is for those that need most.
/// `buffers`: also list every buffer. Planning for a GPU does not need one.
void print_plan(const ConfigResult& result, int world, bool buffers);

}  // namespace nrl::train
