#include "apps/plan/traffic.h"

#include <algorithm>

namespace nrl::plan {

std::vector<Traffic> by_operation(std::span<const Traffic> traffic) {
  std::vector<Traffic> sorted(traffic.begin(), traffic.end()), out;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Traffic& a, const Traffic& b) { return a.purpose < b.purpose; });
  for (const Traffic& t : sorted) {
    const auto same = std::find_if(out.begin(), out.end(),
                                   [&](const Traffic& o) { return o.group == t.group && o.op == t.op; });
    if (same == out.end()) {
      out.push_back(t);
      continue;
    }
    same->count += t.count;
    same->bytes += t.bytes;
    if (t.balanced()) same->purpose = t.purpose;
  }
  return out;
}

}  // namespace nrl::plan
