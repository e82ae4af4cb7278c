// The memory plan against the clock. Sums are taken by tick, not by time, so that the peak is the planned one
// even if ticks take no time.

#include <algorithm>
#include <map>
#include <tuple>

#include "apps/profile/analyses.h"
#include "apps/profile/lifetimes.h"

namespace nrl::profile {
namespace {

using Bytes = std::array<int64_t, memory::category_count>;

constexpr size_t most_points = 256;  // of the curve
constexpr size_t most_alive = 64;    // at the peak

int64_t total(const Bytes& bytes) {
  int64_t sum = 0;
  for (const int64_t b : bytes) sum += b;
  return sum;
}

// The points of most memory in equal stretches, for drawing.
std::vector<std::pair<double, Bytes>> thinned(const std::vector<std::pair<double, Bytes>>& curve) {
  if (curve.size() <= most_points) return curve;
  std::vector<std::pair<double, Bytes>> out;
  for (size_t i = 0; i < most_points; ++i) {
    const auto from = curve.begin() + static_cast<long>(i * curve.size() / most_points),
               to = curve.begin() + static_cast<long>((i + 1) * curve.size() / most_points);
    out.push_back(*std::max_element(
        from, to, [](const auto& a, const auto& b) { return total(a.second) < total(b.second); }));
    out.back().first = from->first;
  }
  return out;
}

}  // namespace

MemoryUse memory_of(const Recorded& recorded) {
  struct Change {
    double time = 0;  // the latest of its tick
    Bytes bytes{};
  };
  const size_t steps = recorded.step_begins.size() - 1;
  const int64_t begin = recorded.step_begins[steps - 1];
  const auto seconds = [&](int64_t time) { return static_cast<double>(time - begin) * 1e-9; };
  MemoryUse use;
  use.arena = recorded.arena_bytes;
  std::map<int, Change> changes;  // by tick; -1: from the begin on
  struct Range {
    LiveRange live;
    int first, last;
  };
  std::vector<Range> ranges;
  uint32_t buffer = 0;
  size_t life = 0;
  for (const LiveRange& live : live_ranges(recorded, recorded.first_step + static_cast<int64_t>(steps) - 1)) {
    if (use.intervals == 0 || live.buffer != buffer) {
      life = 0;
      ++use.buffers;
    }
    buffer = live.buffer;
    const memory::MemoryPlan::Buffer& b = recorded.buffers[buffer];
    const auto category = static_cast<size_t>(b.category);
    const memory::Lifetime ticks = b.always() ? memory::Lifetime{-1, INT32_MAX - 1} : b.lifetimes[life++];
    ranges.push_back({live, ticks.first, ticks.last});
    ++use.intervals;
    use.interval_bytes += b.bytes;
    for (const auto& [tick, time, sign] :
         {std::tuple(ticks.first, live.begin, 1), std::tuple(ticks.last + 1, live.end, -1)}) {
      Change& change = changes[tick];
      change.time = std::max(change.time, seconds(time));
      change.bytes[category] += sign * b.bytes;
    }
  }
  Bytes now{};
  std::vector<std::pair<double, Bytes>> curve;
  int peak_tick = -1;
  double mean = 0;
  const double end = seconds(recorded.step_begins[steps]);
  for (const auto& [tick, change] : changes) {
    if (!curve.empty()) mean += static_cast<double>(total(now)) * (change.time - curve.back().first);
    for (size_t c = 0; c < now.size(); ++c) now[c] += change.bytes[c];
    if (tick == INT32_MAX) break;
    if (total(now) > use.peak) {
      use.peak = total(now);
      use.peak_at = change.time;
      peak_tick = tick;
    }
    // Among ticks that take no time, the one with most memory is shown.
    if (curve.empty() || change.time > curve.back().first)
      curve.emplace_back(change.time, now);
    else if (total(now) > total(curve.back().second))
      curve.back().second = now;
  }
  use.mean = end > 0 ? static_cast<int64_t>(mean / end) : 0;
  use.curve = thinned(curve);
  for (const Range& r : ranges) {
    if (r.first > peak_tick || r.last < peak_tick) continue;
    const memory::MemoryPlan::Buffer& b = recorded.buffers[r.live.buffer];
    use.at_peak.push_back({.name = b.name,
                           .category = b.category,
                           .bytes = b.bytes,
                           .from = seconds(r.live.begin),
                           .to = seconds(r.live.end)});
  }
  std::stable_sort(use.at_peak.begin(), use.at_peak.end(),
                   [](const Alive& a, const Alive& b) { return a.bytes > b.bytes; });
  if (use.at_peak.size() > most_alive) use.at_peak.resize(most_alive);
  return use;
}

}  // namespace nrl::profile
