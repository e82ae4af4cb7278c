#pragma once
// A profile as the analyses make it, for the page.

#include "apps/profile/profile.h"

namespace nrl::profile {

/// A profile of `ranks` ranks, with findings, operations of all bounds, communication and memory.
Profile sample_profile(int ranks);

}  // namespace nrl::profile
