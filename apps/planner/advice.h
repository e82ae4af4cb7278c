#pragma once
// Predicts the gain of the keys that may mend a finding of a profile.

#include "apps/profile/profile.h"

namespace nrl::planner {

/// Replaces profile.findings: each with the overrides that gain most. Candidates (profile::find_verdicts) are
/// loaded and checked as a run's configuration is, planned, and priced by predict::DryStages at the profile's
/// own rates (window_rates.h; gemm_times.h for GEMMs in other shapes): the predicted step is the measured one
/// less the difference of the two estimates. One that is refused, does not fit, or gains less than 1 % is
/// left out; one that changes numbers is taken only if no other helps. The model does not cover copies to and
/// from the host: their overrides have no prediction. Findings are sorted by the gain, the ones without any
/// last. Does nothing to findings of a configuration that does not load here.
void advise(profile::Profile& profile);

}  // namespace nrl::planner
