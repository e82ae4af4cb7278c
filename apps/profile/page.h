#pragma once
// A profile as HTML pages: self-contained, without scripts or external files.

#include <string>

#include "apps/profile/profile.h"
#include "apps/profile/recorded.h"
#include "apps/profile/timeline.h"

namespace nrl::profile {

/// profile.html: verdicts, the split of each rank, `timeline`, operations with their roofline, memory with
/// what is alive at its peak, communication, ranks and the configuration. Of many ranks, the slowest and the
/// fastest ones are shown. A timeline without lanes is left out.
std::string html_page(const Profile& profile, const Timeline& timeline);

/// memory.html: the arena of a rank over the first step of its window, with the 200 largest buffers.
std::string memory_page(const Recorded& recorded);

}  // namespace nrl::profile
