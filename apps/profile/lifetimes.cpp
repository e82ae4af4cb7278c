#include "apps/profile/lifetimes.h"

#include <algorithm>

#include "core/base/error.h"
#include "memory/plan.h"

namespace nrl::profile {

std::vector<LiveRange> live_ranges(const Recorded& recorded, int64_t step) {
  const auto index = static_cast<size_t>(step - recorded.first_step);
  NRL_CHECK(step >= recorded.first_step && index + 1 < recorded.step_begins.size(), "step {} of {} to {}",
            step, recorded.first_step, recorded.last_step);
  const int64_t begin = recorded.step_begins[index], end = recorded.step_begins[index + 1];
  int last = 0;
  for (const auto& buffer : recorded.buffers)
    for (const memory::Lifetime& life : buffer.lifetimes) last = std::max(last, life.last);
  std::vector<int64_t> times(static_cast<size_t>(last) + 2, end);
  for (const trace::Event& event : recorded.window.events) {
    if (event.tag.step != step || event.tag.tick < 0 || event.tag.tick > last) continue;
    if (event.row == recorded.compute_row)
      times[event.tag.tick] = std::clamp(event.begin, begin, times[event.tag.tick]);
  }
  for (size_t tick = times.size() - 1; tick-- > 0;) times[tick] = std::min(times[tick], times[tick + 1]);
  std::vector<LiveRange> ranges;
  for (uint32_t i = 0; i < recorded.buffers.size(); ++i) {
    const memory::MemoryPlan::Buffer& buffer = recorded.buffers[i];
    if (buffer.tier != memory::Tier::device) continue;
    if (buffer.always()) ranges.push_back({i, begin, end});
    for (const memory::Lifetime& life : buffer.lifetimes)
      ranges.push_back({i, times[life.first], times[life.last + 1]});
  }
  return ranges;
}

}  // namespace nrl::profile
