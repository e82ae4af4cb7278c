#pragma once
// The defined result of a reduction in a group on one host or several, in plain loops.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/base/dtype.h"
#include "parallel/comm/communicator.h"
#include "tests/comm/world_fixture.h"

class HostOrder {
 public:
  /// `members`: world ranks in the order of the group's ranks.
  explicit HostOrder(const std::vector<int>& members) {
    std::vector<int> nodes;  // in the order of their first ranks
    for (size_t r = 0; r < members.size(); ++r) {
      const int node = test_world().nodes()[members[r]];
      const auto known = std::find(nodes.begin(), nodes.end(), node);
      const auto at = static_cast<size_t>(known - nodes.begin());
      if (known == nodes.end()) {
        nodes.push_back(node);
        hosts_.emplace_back();
      }
      hosts_[at].push_back(static_cast<int>(r));
    }
    if (hosts_.size() == members.size()) {  // one rank each: in rank order, without rounding in between
      for (size_t h = 1; h < hosts_.size(); ++h) hosts_[0].push_back(hosts_[h][0]);
      hosts_.resize(1);
    }
  }

  /// value(r) is the element of the group's rank r. Sums over a host's ranks from the lowest, then over
  /// hosts; 16 bits in fp32, rounded per host and at the end.
  template <class T, class Value>
  T reduced(nrl::comm::Reduce op, Value value) const {
    using W = std::conditional_t<sizeof(T) == 2, float, T>;
    const auto apply = [op](W a, W b) {
      return op == nrl::comm::Reduce::sum   ? static_cast<W>(a + b)
             : op == nrl::comm::Reduce::max ? std::max(a, b)
                                            : std::min(a, b);
    };
    W all{};
    for (size_t h = 0; h < hosts_.size(); ++h) {
      W acc = static_cast<W>(value(hosts_[h][0]));
      for (size_t i = 1; i < hosts_[h].size(); ++i) acc = apply(acc, static_cast<W>(value(hosts_[h][i])));
      const W rounded = static_cast<W>(T(acc));
      all = h == 0 ? rounded : apply(all, rounded);
    }
    return T(all);
  }

  size_t hosts() const { return hosts_.size(); }

 private:
  std::vector<std::vector<int>> hosts_;  ///< ranks
};
