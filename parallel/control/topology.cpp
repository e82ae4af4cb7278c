#include "parallel/control/topology.h"

#include <cstdint>
#include <map>
#include <utility>

namespace nrl::control {

Topology make_topology(int rank, const std::vector<int>& nodes, int arity) {
  Topology t;
  t.rank = rank;
  t.size = static_cast<int>(nodes.size());
  std::map<int, int> number;
  std::vector<int> leaders;
  auto node_of = std::make_shared<std::vector<int>>();
  node_of->reserve(nodes.size());
  for (int r = 0; r < t.size; ++r) {
    const auto [entry, is_new] =
        number.try_emplace(nodes[static_cast<size_t>(r)], static_cast<int>(leaders.size()));
    if (is_new) leaders.push_back(r);
    node_of->push_back(entry->second);
  }
  t.nodes = static_cast<int>(leaders.size());
  for (int n = t.nodes - 1; n > arity; n = (n - 1) / arity) ++t.depth;
  const int own = (*node_of)[static_cast<size_t>(rank)];
  const int leader = leaders[static_cast<size_t>(own)];
  if (rank != leader) {
    t.links.push_back({leader, true, true});
  } else {
    if (own > 0) t.links.push_back({leaders[static_cast<size_t>((own - 1) / arity)], true, false});
    for (int r = rank + 1; r < t.size; ++r)
      if ((*node_of)[static_cast<size_t>(r)] == own) t.links.push_back({r, false, true});
    for (int64_t n = int64_t{own} * arity + 1; n <= int64_t{own} * arity + arity && n < t.nodes; ++n)
      t.links.push_back({leaders[static_cast<size_t>(n)], false, false});
  }
  t.node_of = std::move(node_of);
  return t;
}

}  // namespace nrl::control
