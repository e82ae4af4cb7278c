#pragma once
// What a run says about itself before its first step.

#include "apps/train/report/facts.h"
#include "apps/train/run.h"

namespace nrl::train {

/// `peak_flops`: of a rank, the denominator of MFU.
RunFacts describe_run(const Run& run, double peak_flops);

}  // namespace nrl::train
