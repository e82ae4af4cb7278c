#include "apps/profile/summary.h"

#include <algorithm>
#include <vector>

#include "core/base/sample.h"

namespace nrl::profile {
namespace {

constexpr double slow_kernel_s = 1e-3;  // the mean of a call: NeMo RL's threshold_ms

}  // namespace

const RankProfile& slowest(const Profile& profile) {
  return *std::max_element(profile.ranks.begin(), profile.ranks.end(),
                           [](const auto& a, const auto& b) { return a.own_work() < b.own_work(); });
}

const RankProfile& largest(const Profile& profile) {
  return *std::max_element(profile.ranks.begin(), profile.ranks.end(),
                           [](const auto& a, const auto& b) { return a.memory.peak < b.memory.peak; });
}

double communication_seconds(const RankProfile& rank) {
  double seconds = 0;
  for (const GroupTime& g : rank.groups) seconds += g.busy;
  return seconds;
}

double utilization(const Split& split) {
  return split.wall > 0 ? (split.compute + split.recompute + split.update) / split.wall : 0;
}

double exposed_seconds(const Split& split) {
  return split.late + split.wire + split.bubble + split.imbalance;
}

JsonValue memory_json(const Profile& profile) {
  const RankProfile& rank = largest(profile);
  const MemoryUse& m = rank.memory;
  const double efficiency = m.arena > 0 ? static_cast<double>(m.mean) / static_cast<double>(m.arena) : 0;
  return JsonValue::object({{"rank", rank.rank},
                            {"allocated", m.mean},
                            {"cached", m.arena},
                            {"max_allocated", m.peak},
                            {"max_cached", m.arena},
                            {"peak_allocated", m.peak},
                            {"peak_cached", m.arena},
                            {"avg_allocated", m.mean},
                            {"avg_cached", m.arena},
                            {"memory_efficiency", efficiency},
                            {"total_allocations", m.intervals},
                            {"total_deallocations", m.intervals},
                            {"total_allocated_bytes", m.interval_bytes},
                            {"total_freed_bytes", m.interval_bytes},
                            {"memory_leak_bytes", 0}});
}

JsonValue summary_json(const Profile& profile) {
  const RankProfile& rank = slowest(profile);
  const double wall = profile.split.wall, communication = communication_seconds(rank);
  const auto percent = [&](double seconds) { return wall > 0 ? 100 * seconds / wall : 0; };
  const auto step = [&](double q) { return rank.step_s.empty() ? wall : quantile(rank.step_s, q); };
  int64_t operations = 0;
  double bytes = 0, moved = 0, moving = 0;
  for (const GroupTime& g : rank.groups) {
    operations += g.calls;
    bytes += static_cast<double>(g.bytes);
  }
  std::vector<std::string> slow;
  for (const Operation& o : profile.operations) {
    if (o.bound == Bound::memory) {
      moved += o.bytes;
      moving += o.seconds;
    }
    if (o.calls > 0 && o.seconds > slow_kernel_s * static_cast<double>(o.calls)) slow.push_back(o.name);
  }
  std::sort(slow.begin(), slow.end());
  slow.erase(std::unique(slow.begin(), slow.end()), slow.end());
  return JsonValue::object(
      {{"total_time_ms", wall * 1e3},
       {"step_ms_p50", step(0.5) * 1e3},
       {"step_ms_p95", step(0.95) * 1e3},
       {"step_ms_p99", step(0.99) * 1e3},
       {"tokens_per_s", wall > 0 ? static_cast<double>(profile.facts.tokens_per_step) / wall : 0},
       {"flops_per_s", wall > 0 ? profile.facts.flops_per_step / wall : 0},
       {"gpu_utilization", 100 * utilization(profile.split)},
       {"communication_operations", operations},
       {"total_communication_time_ms", communication * 1e3},
       {"communication_overhead_percent", percent(communication)},
       {"exposed_communication_percent", percent(exposed_seconds(profile.split))},
       {"total_communication_memory_gb", bytes * 1e-9},
       {"network_bandwidth_gbps", communication > 0 ? bytes / communication * 1e-9 : 0},
       {"bandwidth_gbps", moving > 0 ? moved / moving * 1e-9 : 0},
       {"slow_kernels", slow}});
}

}  // namespace nrl::profile
