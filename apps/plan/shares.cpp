#include "apps/plan/shares.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace nrl::plan {

Shares divide(const std::vector<int64_t>& things, int64_t elements, int64_t element_bytes, int holders,
              int64_t least, int64_t unit) {
  const int64_t in_things = std::accumulate(things.begin(), things.end(), int64_t{0});
  const int64_t all = in_things + elements * element_bytes;
  const auto writers =
      static_cast<size_t>(std::clamp<int64_t>(all / std::max<int64_t>(least, 1), 1, holders));
  // The largest first, each to the rank that has least.
  std::vector<size_t> order(things.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return things[a] > things[b]; });
  std::vector<int64_t> load(writers);
  std::vector<size_t> writer(things.size());
  for (const size_t i : order) {
    writer[i] = static_cast<size_t>(std::min_element(load.begin(), load.end()) - load.begin());
    load[writer[i]] += things[i];
  }
  // The elements make up for the differences.
  std::vector<int64_t> room(writers);
  const int64_t each = all / static_cast<int64_t>(writers);
  for (size_t w = 0; w < writers; ++w) room[w] = std::max<int64_t>(each - load[w], 0);
  const double sum = static_cast<double>(std::accumulate(room.begin(), room.end(), int64_t{0}));
  const auto rank_of = [&](size_t w) {
    return static_cast<size_t>(static_cast<int64_t>(w) * holders / static_cast<int64_t>(writers));
  };
  Shares out;
  for (const size_t w : writer) out.thing.push_back(static_cast<int>(rank_of(w)));
  out.end.assign(static_cast<size_t>(holders), 0);
  double before = 0;
  for (size_t w = 0; w < writers; ++w) {
    before += static_cast<double>(room[w]);
    int64_t end = elements;
    if (w + 1 < writers && sum > 0)
      end = static_cast<int64_t>(static_cast<double>(elements) * (before / sum)) / unit * unit;
    const size_t next = w + 1 < writers ? rank_of(w + 1) : out.end.size();
    for (size_t rank = rank_of(w); rank < next; ++rank) out.end[rank] = end;
  }
  return out;
}

}  // namespace nrl::plan
