#pragma once
// Private to the MPI backend: how the ranks of a group lie on hosts.

#include <span>
#include <vector>

namespace nrl::comm {

struct HostLayout {
  /// The ranks of each host, ascending. Hosts are in the order of their first ranks.
  std::vector<std::vector<int>> hosts;
  // By rank.
  std::vector<int> host_of;   ///< index in `hosts`
  std::vector<int> index_of;  ///< position among the ranks of its host

  HostLayout() = default;
  /// `host_of_rank` has equal numbers for ranks of one host, in any order.
  explicit HostLayout(std::span<const int> host_of_rank);

  int ranks() const { return static_cast<int>(host_of.size()); }
  /// True when the ranks lie on several hosts and some share one.
  bool spans() const { return hosts.size() > 1 && hosts.size() < host_of.size(); }
  /// The rank of a host that sends and receives block `block` of a vector in `ranks()` blocks: the block's
  /// own rank on its host; elsewhere the rank of the same index, so that all ranks of a host share the work.
  int carrier(int block, int host) const;
  /// The most blocks that one rank carries.
  int most_carried() const;
};

}  // namespace nrl::comm
