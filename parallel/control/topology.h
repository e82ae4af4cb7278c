#pragma once
// The tree of a run's processes. Ranks here are the launcher's.

#include <memory>
#include <vector>

namespace nrl::control {

/// A neighbor in the tree.
struct Link {
  int rank = 0;
  bool up = false;     ///< leads to the parent; always the first link
  bool local = false;  ///< within the node, where the end of a link is the end of a process
};

/// One process's part. The lowest rank of a node is its leader and the parent of the node's other ranks;
/// leaders form a tree in order of their nodes, rooted at rank 0.
struct Topology {
  int rank = 0, size = 1, nodes = 1;
  int depth = 1;  ///< levels of leaders below the root; at least 1
  std::vector<Link> links;
  std::shared_ptr<const std::vector<int>>
      node_of;  ///< node of every rank, numbered from 0 in order of leaders

  bool root() const { return rank == 0; }
  bool leader() const { return links.empty() || !links[0].up || !links[0].local; }
  int node_of_rank(int r) const { return (*node_of)[static_cast<size_t>(r)]; }
};

inline constexpr int tree_arity = 32;

/// `nodes[r]` identifies the node of rank r by any number. `arity`: child leaders of a leader.
Topology make_topology(int rank, const std::vector<int>& nodes, int arity = tree_arity);

}  // namespace nrl::control
