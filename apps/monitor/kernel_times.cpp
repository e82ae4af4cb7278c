#include "apps/monitor/kernel_times.h"

#include <algorithm>

namespace nrl::monitor {

KernelTimes::Totals KernelTimes::step(const Totals& now, double seconds) {
  Totals spent;
  for (const auto& [name, total] : now) {
    const auto before = taken_.find(name);
    spent[name] = total - (before == taken_.end() ? 0 : before->second);
    sum_[name] += spent[name];
  }
  taken_ = now;
  seconds_ += seconds;
  return spent;
}

std::vector<std::pair<std::string, double>> KernelTimes::kernels() const {
  std::vector<std::pair<std::string, double>> out(sum_.begin(), sum_.end());
  std::stable_sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return out;
}

}  // namespace nrl::monitor
