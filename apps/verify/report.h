#pragma once
// Output of `nrl-train verify`.

#include "apps/verify/trial_result.h"

namespace nrl::verify {

/// The table of one layout: losses, and the worst tensors of each kind.
void print_trial(const TrialResult& result);
/// One line: what was compared, or what differs.
std::string verdict(const TrialResult& result);

/// A row of the table of layouts; the header comes from layout_header().
std::string layout_row(const std::string& name, const TrialResult& result);
std::string layout_header();

}  // namespace nrl::verify
