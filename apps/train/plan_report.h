#pragma once
// What a run would do and allocate, for people (`nrl-train plan`).

#include "core/config/load.h"

namespace nrl::train {

/// Prints batch arithmetic, grid and memory of a run on `world` ranks, for which the configuration must have
/// passed all checks. Where ranks need different memory, the largest comes first. `buffers`: every buffer of
/// that rank as well. No device is needed for the plan of one.
void print_plan(const ConfigResult& result, int world, bool buffers);

}  // namespace nrl::train
