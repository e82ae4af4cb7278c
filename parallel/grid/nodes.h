#pragma once
// The nodes of a job and how the groups of a grid lie on them.

#include <span>
#include <string>
#include <vector>

#include "core/base/cluster_node.h"
#include "parallel/grid/grid.h"

namespace nrl::parallel {

/// ClusterNode of every rank: 0 for the first nodes[0].ranks ranks, and so on.
std::vector<int> node_of_ranks(std::span<const ClusterNode> nodes);

/// The nodes of a job from the node and the host name of every rank.
std::vector<ClusterNode> nodes_of(std::span<const int> node_of_rank, std::span<const std::string> hosts);

/// How the groups of one kind lie on the nodes.
struct GroupsOnNodes {
  int groups = 0;          ///< number of groups
  int size = 1;            ///< ranks of a group
  int spanning = 0;        ///< groups with ranks on several nodes
  std::vector<int> first;  ///< members of the first spanning group; if none spans, of the first group
};
/// `node_of_rank` empty: nodes are unknown, and no group counts as spanning.
GroupsOnNodes groups_on_nodes(const ProcessGrid& grid, const GroupId& id, std::span<const int> node_of_rank);

/// Number of groups on several nodes, by what they cost: tensor parallelism communicates most, then expert
/// and context parallelism. Compared in this order.
struct NodeSpans {
  int tensor = 0;   ///< tp and etp
  int expert = 0;   ///< etp-ep
  int context = 0;  ///< tp-cp
  auto operator<=>(const NodeSpans&) const = default;
};
NodeSpans node_spans(const GridSizes& sizes, std::span<const ClusterNode> nodes);

/// The order in which nodes should take consecutive ranks: the given one, unless another one has fewer
/// spanning groups. With nodes of equal size that is never the case.
std::vector<int> best_node_order(const GridSizes& sizes, std::span<const ClusterNode> nodes);

}  // namespace nrl::parallel
