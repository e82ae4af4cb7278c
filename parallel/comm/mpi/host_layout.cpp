#include "parallel/comm/mpi/host_layout.h"

#include <algorithm>
#include <map>

namespace nrl::comm {

HostLayout::HostLayout(std::span<const int> host_of_rank) {
  std::map<int, int> numbers;
  for (const int name : host_of_rank) {
    const int host = numbers.try_emplace(name, static_cast<int>(numbers.size())).first->second;
    if (static_cast<size_t>(host) == hosts.size()) hosts.emplace_back();
    std::vector<int>& here = hosts[host];
    index_of.push_back(static_cast<int>(here.size()));
    here.push_back(ranks());
    host_of.push_back(host);
  }
}

int HostLayout::carrier(int block, int host) const {
  const std::vector<int>& here = hosts[host];
  return here[static_cast<size_t>(index_of[static_cast<size_t>(block)]) % here.size()];
}

int HostLayout::most_carried() const {
  int most = 0;
  for (size_t h = 0; h < hosts.size(); ++h) {
    std::vector<int> carried(host_of.size());
    for (int block = 0; block < ranks(); ++block)
      most = std::max(most, ++carried[carrier(block, static_cast<int>(h))]);
  }
  return most;
}

}  // namespace nrl::comm
