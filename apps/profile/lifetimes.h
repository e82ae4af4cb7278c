#pragma once
// The memory plan against the clock: nothing allocates in the step loop, so the lifetimes of buffers in ticks
// and the measured time of each tick are the memory timeline.

#include <cstdint>
#include <vector>

#include "apps/profile/recorded.h"

namespace nrl::profile {

/// A buffer of Recorded::buffers holds data from `begin` to `end`, nanoseconds as in trace::Event.
struct LiveRange {
  uint32_t buffer = 0;
  int64_t begin = 0, end = 0;
};

/// The live ranges of all buffers of the device's tier in a step of the window; always-alive buffers for the
/// whole step. A tick begins with its first event in the compute row; a tick without events with the next one
/// that has some.
std::vector<LiveRange> live_ranges(const Recorded& recorded, int64_t step);

}  // namespace nrl::profile
