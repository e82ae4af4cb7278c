// Communication by group and operation, and the ranks that others waited for.

#include <algorithm>
#include <cmath>
#include <map>

#include "apps/profile/analyses.h"
#include "core/base/sample.h"

namespace nrl::profile {
namespace {

constexpr int64_t few_bytes = 4096;  // take no longer than an operation without any

// When the last rank arrived, as far as it was later than this one; 0: this one waited for no other.
int64_t last_arrival(const Recorded& recorded, size_t i) {
  if (i >= recorded.last_arrival.size()) return 0;
  const int64_t last = recorded.last_arrival[i];
  const double late = static_cast<double>(last - recorded.messages[i].enqueued_ns) * 1e-9;
  return last > 0 && late > recorded.clock_error ? last : 0;
}

bool collective(comm::Op op) {
  return op != comm::Op::send && op != comm::Op::recv && op != comm::Op::exchange && op != comm::Op::split;
}

}  // namespace

std::vector<GroupTime> groups_of(const Recorded& recorded) {
  struct Sum {
    GroupTime time;
    double calls = 0, bytes = 0;
    std::vector<double> small;  // seconds after the last arrival
  };
  std::map<std::pair<std::string, std::string>, Sum> sums;
  for (size_t i = 0; i < recorded.messages.size(); ++i) {
    const comm::LogEntry& m = recorded.messages[i];
    if (m.ended_ns == 0 || m.op == comm::Op::split) continue;
    const GroupOfRanks group = m.group < recorded.groups.size() ? recorded.groups[m.group] : GroupOfRanks{};
    Sum& sum = sums[{group.name, std::string(comm::name_of(m.op))}];
    GroupTime& t = sum.time;
    t.ranks = std::max(t.ranks, group.ranks);
    t.nodes = std::max(t.nodes, group.nodes);
    sum.calls += 1;
    sum.bytes += static_cast<double>(m.bytes);
    t.wire_bytes += comm::wire_bytes(m.op, static_cast<double>(m.bytes), group.ranks);
    const int64_t began = m.started_ns > 0 ? m.started_ns : m.enqueued_ns;
    const auto busy = static_cast<double>(std::max<int64_t>(m.ended_ns - began, 0)) * 1e-9;
    const auto late = std::clamp(static_cast<double>(last_arrival(recorded, i) - began) * 1e-9, 0.0, busy);
    t.busy += busy;
    t.late += late;
    t.wire += busy - late;
    if (m.bytes <= few_bytes) sum.small.push_back(busy - late);
    t.exposed += static_cast<double>(m.exposed_ns) * 1e-9;
  }
  const auto steps = static_cast<double>(recorded.step_begins.size() - 1);
  std::vector<GroupTime> groups;
  for (auto& [key, sum] : sums) {
    GroupTime& t = sum.time;
    t.group = key.first;
    t.operation = key.second;
    t.calls = std::llround(sum.calls / steps);
    t.bytes = std::llround(sum.bytes / steps);
    if (!sum.small.empty()) t.latency = median(std::move(sum.small));
    t.link = t.nodes > 1 ? recorded.peaks.network : recorded.peaks.link;
    for (double* per_step : {&t.wire_bytes, &t.busy, &t.exposed, &t.late, &t.wire}) *per_step /= steps;
    groups.push_back(std::move(t));
  }
  std::stable_sort(groups.begin(), groups.end(),
                   [](const GroupTime& a, const GroupTime& b) { return a.exposed > b.exposed; });
  return groups;
}

Arrivals arrivals_of(const Recorded& recorded) {
  Arrivals arrivals;
  for (size_t i = 0; i < recorded.messages.size(); ++i) {
    const comm::LogEntry& m = recorded.messages[i];
    const bool alone = m.group >= recorded.groups.size() || recorded.groups[m.group].ranks < 2;
    if (alone || !collective(m.op) || i >= recorded.last_arrival.size() || recorded.last_arrival[i] == 0)
      continue;
    if (m.enqueued_ns < recorded.last_arrival[i]) continue;
    ++arrivals.last;
    if (i < recorded.waited.size()) arrivals.caused_s += static_cast<double>(recorded.waited[i]) * 1e-9;
  }
  return arrivals;
}

}  // namespace nrl::profile
