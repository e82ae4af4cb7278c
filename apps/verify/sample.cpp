// A sample of layouts that has as many pairs and triples of their values as it can.

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "apps/verify/layouts.h"
#include "core/base/philox.h"

namespace nrl::verify {
namespace {

constexpr int refusals_to_give_up = 16;
constexpr int covered = -1;

/// The sets of `size` values that layouts have, up to three.
class Coverage {
 public:
  explicit Coverage(int size) : size_(size) {}

  /// Whether it has a set that no valid layout had, and that was not given up.
  bool adds(std::span<const int> values) const {
    bool out = false;
    each(values, [&](uint64_t set) {
      const auto at = tries_.find(set);
      out = out || at == tries_.end() || (at->second != covered && at->second < refusals_to_give_up);
    });
    return out;
  }

  void add(std::span<const int> values, bool valid) {
    each(values, [&](uint64_t set) {
      int& tries = tries_[set];
      if (tries != covered) tries = valid ? covered : tries + 1;
    });
  }

 private:
  template <class Visit>
  void each(std::span<const int> values, const Visit& visit) const {
    const auto n = values.size();
    const auto number = [&](size_t i) { return static_cast<uint64_t>(values[i]); };
    for (size_t i = 0; i < n; ++i)
      for (size_t j = i + 1; j < n; ++j) {
        const uint64_t pair = number(i) << 20 | number(j);
        if (size_ == 2) visit(pair);
        for (size_t k = j + 1; size_ == 3 && k < n; ++k) visit(pair << 20 | number(k));
      }
  }

  int size_;
  std::unordered_map<uint64_t, int> tries_;  // refusals, or `covered`
};

}  // namespace

Sample take_sample(const Layouts& all, int64_t count, const std::function<bool(size_t)>& valid) {
  std::vector<size_t> order(all.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const PhiloxStream random(0, "verified layouts");
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return std::pair(random.bits(a), a) < std::pair(random.bits(b), b); });
  Sample out;
  std::vector<bool> tried(all.size());
  // Whether it went through all layouts.
  const auto pass = [&](Coverage* coverage) {
    for (const size_t i : order) {
      if (std::ssize(out.layouts) >= count) return false;
      if (tried[i] || (coverage && !coverage->adds(all.values(i)))) continue;
      tried[i] = true;
      const bool ok = valid(i);
      if (ok) out.layouts.push_back(i);
      if (coverage) coverage->add(all.values(i), ok);
    }
    return true;
  };
  Coverage pairs(2), triples(3);
  if (pass(&pairs)) out.strength = 2;
  for (const size_t i : out.layouts) triples.add(all.values(i), true);
  if (pass(&triples)) out.strength = 3;
  pass(nullptr);
  std::sort(out.layouts.begin(), out.layouts.end());
  return out;
}

}  // namespace nrl::verify
