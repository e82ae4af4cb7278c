#pragma once
// What a run says about itself before its first step.

#include "apps/train/run_io/facts.h"
#include "apps/train/session.h"

namespace nrl::train {

/// `peak_flops`: of a rank, the denominator of MFU.
RunFacts describe_run(Session& session, double peak_flops);

}  // namespace nrl::train
