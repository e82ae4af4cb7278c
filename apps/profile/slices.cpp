#include "apps/profile/slices.h"

#include <algorithm>
#include <queue>

namespace nrl::profile {
namespace {

// Order of begin; an outer range comes before those inside.
bool comes_before(const Slice& a, const Slice& b) {
  if (a.begin != b.begin) return a.begin < b.begin;
  if (a.end != b.end) return a.end > b.end;
  return a.source < b.source;
}

}  // namespace

std::vector<Slice> nested(std::vector<Slice> slices) {
  for (Slice& s : slices) s.end = std::max(s.begin, s.end);
  const auto later = [](const Slice& a, const Slice& b) { return comes_before(b, a); };
  std::priority_queue<Slice, std::vector<Slice>, decltype(later)> waiting(later, std::move(slices));
  std::vector<Slice> out;
  std::vector<int64_t> open;  // ends of the ranges around, the innermost last
  out.reserve(waiting.size());
  while (!waiting.empty()) {
    Slice s = waiting.top();
    waiting.pop();
    while (!open.empty() && open.back() <= s.begin) open.pop_back();
    if (!open.empty() && s.end > open.back()) {
      s.begin = open.back();
      waiting.push(s);
      continue;
    }
    open.push_back(s.end);
    out.push_back(s);
  }
  return out;
}

std::vector<Edge> edges_of(std::span<const Slice> slices) {
  std::vector<Edge> edges;
  edges.reserve(2 * slices.size());
  std::vector<uint32_t> open;
  const auto close = [&] {
    edges.push_back({.time = slices[open.back()].end, .index = open.back(), .begin = false});
    open.pop_back();
  };
  for (uint32_t i = 0; i < slices.size(); ++i) {
    while (!open.empty() && slices[open.back()].end <= slices[i].begin) close();
    edges.push_back({.time = slices[i].begin, .index = i});
    open.push_back(i);
  }
  while (!open.empty()) close();
  return edges;
}

std::vector<std::vector<Slice>> lanes_of(std::vector<Slice> slices) {
  std::sort(slices.begin(), slices.end(), comes_before);
  std::vector<std::vector<Slice>> lanes;
  for (Slice s : slices) {
    s.end = std::max(s.begin, s.end);
    const auto free = std::find_if(lanes.begin(), lanes.end(),
                                   [&](const auto& lane) { return lane.back().end <= s.begin; });
    (free == lanes.end() ? lanes.emplace_back() : *free).push_back(s);
  }
  return lanes;
}

}  // namespace nrl::profile
