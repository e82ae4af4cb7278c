#pragma once
// The banner printed before the first step.

#include "apps/monitor/facts.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// `peak_flops`: peak FLOP/s of a rank, the denominator of MFU.
monitor::RunFacts describe_run(const Run& run, double peak_flops);

}  // namespace nrl::train
