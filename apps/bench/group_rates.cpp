#include "apps/bench/group_rates.h"

#include <algorithm>
#include <set>

#include "core/base/sample.h"
#include "core/base/text.h"

namespace nrl::bench {

GroupKind::GroupKind(std::string name, std::vector<std::vector<int>> of_ranks, const std::vector<int>& nodes)
    : groups(std::move(of_ranks)), name_(std::move(name)) {
  for (const std::vector<int>& group : groups) {
    std::set<int> on;
    for (const int rank : group) on.insert(nodes.at(static_cast<size_t>(rank)));
    nodes_ = std::max(nodes_, static_cast<int>(on.size()));
  }
}

std::string GroupKind::heading() const {
  return fmt::format("{}{}{} of {}, {}", name_, name_.empty() ? "" : ": ",
                     counted(static_cast<int64_t>(groups.size()), "group"),
                     counted(static_cast<int64_t>(groups.front().size()), "rank"),
                     nodes_ == 1 ? "inside a node" : fmt::format("across {} nodes", nodes_));
}

std::string GroupKind::remarks(const std::vector<double>& rates, const std::vector<std::string>& hosts,
                               const machine::DeviceModel* model) const {
  constexpr double slow = 0.8;
  constexpr int most = 4;
  const double typical = median(rates);
  std::string out;
  if (model) {
    const double expected = (nodes_ == 1 ? model->node : model->network).bandwidth;
    out +=
        fmt::format("all_reduce: {:.0f} GB/s on the bus, {:.0f} % of the {:.0f} that are assumed of {} {}\n",
                    typical * 1e-9, 100 * typical / expected, expected * 1e-9, model->product,
                    nodes_ == 1 ? "inside a node" : "across nodes");
  }
  int found = 0;
  for (size_t g = 0; g < rates.size(); ++g) {
    if (rates[g] >= slow * typical || ++found > most) continue;
    std::vector<std::string> on;
    for (const int rank : groups[g]) {
      const std::string& host = hosts[rank];
      if (std::find(on.begin(), on.end(), host) == on.end()) on.push_back(host);
    }
    out += fmt::format("slow: ranks {} ({}): all_reduce reaches {:.0f} % of the median group\n",
                       joined(
                           [&] {
                             std::vector<std::string> ranks;
                             for (const int rank : groups[g]) ranks.push_back(std::to_string(rank));
                             return ranks;
                           }(),
                           ", ", 8),
                       joined(on, ", ", most), 100 * rates[g] / typical);
  }
  if (found > most) out += fmt::format("and {} more\n", found - most);
  return out;
}

}  // namespace nrl::bench
