#pragma once
// Rates of communication of the groups of one kind, side by side.

#include <string>
#include <vector>

#include "apps/machine/device_models.h"

namespace nrl::bench {

/// All groups of one axis of a layout, or of the nodes.
class GroupKind {
 public:
  /// `name` may be empty. `groups`: world ranks. `nodes`: the node of every rank.
  GroupKind(std::string name, std::vector<std::vector<int>> groups, const std::vector<int>& nodes);

  /// "tp: 4 groups of 8 ranks, inside a node".
  std::string heading() const;
  /// Lines about bus bandwidths in bytes/s, one of each group: what was expected of this GPU's links (null:
  /// no expectation), and which groups are below 80 % of the median, with their hosts; at most four of them.
  std::string remarks(const std::vector<double>& rates, const std::vector<std::string>& hosts,
                      const machine::DeviceModel* model) const;

  const std::string& name() const { return name_; }
  /// Nodes that a group lies on, at most.
  int nodes() const { return nodes_; }

  std::vector<std::vector<int>> groups;

 private:
  std::string name_;
  int nodes_ = 1;
};

}  // namespace nrl::bench
