#pragma once
// Estimates of the divergence of a policy from a reference, outside of ops.

#include "core/config/objective_enums.h"

namespace nrl::ops {

/// k(difference) of a token as in PolicyLoss, clamped alike; difference: log-probability of the reference
/// minus the policy's.
double kl_estimate(KlEstimator type, double difference);

}  // namespace nrl::ops
