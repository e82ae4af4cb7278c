#include "parallel/grid/nodes.h"

#include <algorithm>
#include <numeric>

#include "core/base/error.h"

namespace nrl::parallel {

std::vector<int> node_of_ranks(std::span<const ClusterNode> nodes) {
  std::vector<int> out;
  for (size_t n = 0; n < nodes.size(); ++n)
    out.insert(out.end(), static_cast<size_t>(nodes[n].ranks), static_cast<int>(n));
  return out;
}

std::vector<ClusterNode> nodes_of(std::span<const int> node_of_rank, std::span<const std::string> hosts) {
  NRL_CHECK(node_of_rank.size() == hosts.size(), "{} ranks, {} hosts", node_of_rank.size(), hosts.size());
  std::vector<ClusterNode> out;
  for (size_t r = 0; r < hosts.size(); ++r) {
    const auto node = static_cast<size_t>(node_of_rank[r]);
    if (node == out.size()) out.push_back({hosts[r], 0});
    NRL_CHECK(node + 1 == out.size(), "the ranks of node {} are not consecutive", node);
    ++out.back().ranks;
  }
  return out;
}

GroupsOnNodes groups_on_nodes(const ProcessGrid& grid, const GroupId& id, std::span<const int> node_of_rank) {
  GroupsOnNodes out;
  for (std::vector<int>& group : grid.groups(id)) {
    const auto node = [&](int rank) { return node_of_rank[rank]; };
    const bool spans = !node_of_rank.empty() && std::any_of(group.begin(), group.end(), [&](int rank) {
      return node(rank) != node(group.front());
    });
    ++out.groups;
    out.size = static_cast<int>(group.size());
    if (out.first.empty() || (spans && out.spanning == 0)) out.first = std::move(group);
    if (spans) ++out.spanning;
  }
  return out;
}

NodeSpans node_spans(const GridSizes& sizes, std::span<const ClusterNode> nodes) {
  const std::vector<int> node_of = node_of_ranks(nodes);
  const ProcessGrid grid(sizes, static_cast<int>(node_of.size()), 0);
  const auto spanning = [&](const GroupId& id) { return groups_on_nodes(grid, id, node_of).spanning; };
  return {.tensor = spanning(group::tp) + spanning(group::etp),
          .expert = spanning(group::etp_ep),
          .context = spanning(group::tp_cp)};
}

std::vector<int> best_node_order(const GridSizes& sizes, std::span<const ClusterNode> nodes) {
  std::vector<int> given(nodes.size());
  std::iota(given.begin(), given.end(), 0);
  const auto ranks = [&](int node) { return nodes[node].ranks; };
  if (std::all_of(given.begin(), given.end(), [&](int n) { return ranks(n) == ranks(0); })) return given;
  const auto spans_of = [&](const std::vector<int>& order) {
    std::vector<ClusterNode> ordered;
    for (int n : order) ordered.push_back(nodes[n]);
    return node_spans(sizes, ordered);
  };
  // Nodes that hold whole groups come first, so that they stay aligned: by how many kinds of groups they
  // hold, then by size.
  const int tp = sizes.tp, etp = sizes.etp == 0 ? sizes.tp : sizes.etp;
  const auto whole = [&](int node) {
    int kinds = 0;
    for (const int block : {tp, etp, etp * sizes.ep, tp * sizes.cp})
      kinds += ranks(node) % block == 0 ? 1 : 0;
    return kinds;
  };
  std::vector<int> sorted = given;
  std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) {
    return whole(a) != whole(b) ? whole(a) > whole(b) : ranks(a) > ranks(b);
  });
  return spans_of(sorted) < spans_of(given) ? sorted : given;
}

}  // namespace nrl::parallel
