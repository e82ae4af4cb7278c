#include "apps/machine/fabric.h"

#include <algorithm>
#include <map>

#include "core/base/error.h"
#include "parallel/grid/nodes.h"

namespace nrl::machine {
namespace {

using Digits = std::vector<parallel::GroupDigit>;

/// The number of blocks of `unit` consecutive ranks that a group touches, if it is the same for all groups
/// and all blocks hold as many members.
std::optional<int> blocks_of(const Digits& digits, int unit, int world) {
  if (unit >= world) return 1;
  int blocks = 1;
  for (const parallel::GroupDigit& d : digits) {
    const int span = d.size * d.stride;
    if (d.stride % unit == 0)
      blocks *= d.size;
    else if (unit % d.stride != 0)
      return std::nullopt;
    else if (unit % span == 0)
      continue;
    else if (span % unit == 0)
      blocks *= span / unit;
    else
      return std::nullopt;
  }
  return blocks;
}

int members_of(const Digits& digits) {
  int n = 1;
  for (const parallel::GroupDigit& d : digits) n *= d.size;
  return n;
}

/// True if operations of `a` take longer: fewer adapters for more bytes.
bool worse(const Crossing& a, const Crossing& b) {
  if ((a.domains > 1) != (b.domains > 1)) return a.domains > 1;
  if (a.spine != b.spine) return a.spine;
  if (a.inside != b.inside) return a.domains > 1 ? a.inside < b.inside : a.inside > b.inside;
  return a.domains > b.domains;
}

std::vector<int> even_sizes(const DeviceModel& device, int world) {
  const int each = device.gpu() ? std::min(device.node_ranks, world) : world;
  std::vector<int> out(static_cast<size_t>(world / each), each);
  if (world % each != 0) out.push_back(world % each);
  return out;
}

}  // namespace

Fabric::Fabric(const ClusterConfig& cluster, const DeviceModel& device, std::span<const ClusterNode> nodes,
               int world)
    : world_(world),
      nccl_(device.gpu()),
      nvls_(device.major >= 9 && device.node_ranks > 2),
      node_(device.node),
      network_(device.network) {
  const FabricConfig& f = cluster.fabric;
  if (f.adapter_gbit) network_.bandwidth = adapter_efficiency * *f.adapter_gbit * 1e9 / 8;
  network_.bandwidth *= f.adapters_per_rank;
  rail_optimized_ = f.rail_optimized;
  oversubscription_ = f.oversubscription;

  std::vector<int> sizes;  // of nodes
  for (const ClusterNode& node : nodes) sizes.push_back(node.ranks);
  if (sizes.empty()) sizes = even_sizes(device, world);
  const auto segment = static_cast<size_t>(nodes.empty() ? 1 : cluster.segment_size.value_or(1));
  std::vector<int> domains;
  for (size_t n = 0; n < sizes.size(); ++n)
    if (n % segment == 0)
      domains.push_back(sizes[n]);
    else
      domains.back() += sizes[n];
  const auto most = static_cast<int>(std::min<int64_t>(f.leaf_ranks, 1 << 30));
  leaf_ranks_ = std::max(most / sizes.front(), 1) * sizes.front();
  int sum = 0;
  for (const int n : domains) sum += n;
  NRL_CHECK(sum == world, "nodes of {} ranks for {}", sum, world);
  domain_ranks_ = *std::max_element(domains.begin(), domains.end());
  const auto equal = [](const std::vector<int>& v) {
    return std::all_of(v.begin(), v.end(), [&](int n) { return n == v.front(); });
  };
  if (equal(sizes) && equal(domains)) return;
  int leaf = 0, behind_leaf = 0;
  for (size_t n = 0; n < sizes.size(); ++n) {
    if (behind_leaf > 0 && behind_leaf + sizes[n] > most) {
      ++leaf;
      behind_leaf = 0;
    }
    behind_leaf += sizes[n];
    const int domain = static_cast<int>(n / segment);
    for (int i = 0; i < sizes[n]; ++i) {
      const bool first = places_.empty() || places_.back().domain != domain;
      places_.push_back({domain, first ? 0 : places_.back().index + 1, leaf});
    }
  }
}

Fabric::Place Fabric::place_of(int rank) const {
  if (!places_.empty()) return places_[rank];
  return {rank / domain_ranks_, rank % domain_ranks_, rank / leaf_ranks_};
}

Crossing Fabric::crossing(const parallel::ProcessGrid& grid, const parallel::GroupId& id) const {
  NRL_CHECK(grid.ranks() == world_, "a grid of {} ranks on a fabric of {}", grid.ranks(), world_);
  if (!places_.empty()) return worst_of(grid, id);
  const std::optional<Digits> digits = grid.digits(id);
  if (!digits) return worst_of(grid, id);
  const std::optional<int> domains = blocks_of(*digits, domain_ranks_, world_),
                           leaves = oversubscription_ > 1 ? blocks_of(*digits, leaf_ranks_, world_) : 1;
  if (!domains || !leaves) return worst_of(grid, id);
  const int n = members_of(*digits), inside = n / *domains;
  const bool several = *domains > 1;
  return {.ranks = n,
          .domains = *domains,
          .inside = inside,
          .rails = several && inside > 1,
          .spine = several && *leaves > 1};
}

Crossing Fabric::crossing(std::span<const int> members) const {
  std::map<int, int> domains, leaves, indices;  // with their numbers of members
  for (const int rank : members) {
    const Place place = place_of(rank);
    ++domains[place.domain];
    ++indices[place.index];
    if (oversubscription_ > 1) ++leaves[place.leaf];
  }
  Crossing out;
  out.ranks = static_cast<int>(members.size());
  out.domains = static_cast<int>(domains.size());
  out.inside = out.ranks;
  for (const auto& [domain, count] : domains) out.inside = std::min(out.inside, count);
  out.rails = out.domains > 1 && indices.size() > 1;
  out.spine = out.domains > 1 && leaves.size() > 1;
  return out;
}

Crossing Fabric::worst_of(const parallel::ProcessGrid& grid, const parallel::GroupId& id) const {
  std::optional<Crossing> out;
  for (const std::vector<int>& group : grid.groups(id)) {
    const Crossing c = crossing(group);
    if (!out || worse(c, *out)) out = c;
  }
  NRL_CHECK(out, "no group {}", name_of(id));
  return *out;
}

}  // namespace nrl::machine
