#include "apps/data/packing.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "core/base/philox.h"

namespace nrl::data {
namespace {

constexpr int64_t max_rows = int64_t{1} << 40;
constexpr int64_t max_bins = int64_t{1} << 24;  // of the smallest packing
constexpr double balanced = 1e-3;               // a smaller imbalance is not improved

struct Bin {
  std::vector<int32_t> units;
  int64_t rows = 0;
  double work = 0;

  void add(int32_t unit, std::span<const PackUnit> all) {
    units.push_back(unit);
    rows += all[static_cast<size_t>(unit)].rows;
    work += all[static_cast<size_t>(unit)].work;
  }
};

int64_t usable_capacity(const PackOptions& options) {
  return options.capacity / options.row_unit * options.row_unit;
}

/// The bins with room, by position. All bins exist from the start, so that a unit that fits into none of
/// those in use takes the next one.
class FirstFit {
 public:
  FirstFit(size_t bins, int64_t capacity) : leaves_(std::bit_ceil(std::max<size_t>(bins, 1))) {
    room_.assign(2 * leaves_, capacity);
  }
  /// The first bin with at least `rows` rows of room, which are taken.
  size_t take(int64_t rows) {
    size_t node = 1;
    while (node < leaves_) node = room_[2 * node] >= rows ? 2 * node : 2 * node + 1;
    const size_t bin = node - leaves_;
    room_[node] -= rows;
    while ((node /= 2) > 0) room_[node] = std::max(room_[2 * node], room_[2 * node + 1]);
    return bin;
  }

 private:
  size_t leaves_;
  std::vector<int64_t> room_;  // a tree of maxima: the root is 1, the children of n are 2n and 2n + 1
};

class Packer {
 public:
  Packer(std::span<const PackUnit> units, const PackOptions& options)
      : units_(units), options_(options), capacity_(usable_capacity(options)) {}

  std::vector<Bin> bins() {
    std::vector<int32_t> order(units_.size());
    std::iota(order.begin(), order.end(), 0);
    switch (options_.algorithm) {
      case PackAlgorithm::modified_first_fit_decreasing:
        sort_decreasing(order);
        modified_first_fit(order);
        break;
      case PackAlgorithm::first_fit_decreasing:
        sort_decreasing(order);
        first_fit(order);
        break;
      case PackAlgorithm::first_fit_shuffle:
        shuffle(order);
        first_fit(order);
        break;
      case PackAlgorithm::sorted:
        sort_decreasing(order);
        next_fit(order);
        break;
      case PackAlgorithm::concatenative:
        next_fit(order);
        break;
      case PackAlgorithm::none:
        for (const int32_t unit : order) put(static_cast<size_t>(unit / options_.micro_batch_size), unit);
    }
    return std::move(bins_);
  }

 private:
  void sort_decreasing(std::vector<int32_t>& order) const {
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return rows(a) > rows(b); });
  }
  void shuffle(std::vector<int32_t>& order) const {
    const PhiloxStream random(options_.seed, "packing");
    for (size_t n = order.size(); n > 1; --n) std::swap(order[n - 1], order[random.bits(n) % n]);
  }
  int64_t rows(int32_t unit) const { return units_[static_cast<size_t>(unit)].rows; }

  void put(size_t bin, int32_t unit) {
    if (bin >= bins_.size()) bins_.resize(bin + 1);
    bins_[bin].add(unit, units_);
  }

  void next_fit(std::span<const int32_t> order) {
    for (const int32_t unit : order) {
      const bool fits = !bins_.empty() && bins_.back().rows + rows(unit) <= capacity_;
      put(fits ? bins_.size() - 1 : bins_.size(), unit);
    }
  }

  // Fills new bins.
  void first_fit(std::span<const int32_t> order) {
    const size_t used = bins_.size();
    FirstFit fit(order.size(), capacity_);
    for (const int32_t unit : order) put(used + fit.take(rows(unit)), unit);
  }

  // D. S. Johnson, M. R. Garey: A 71/60 theorem for bin packing, J. Complexity 1 (1985). Each unit of more
  // than half the capacity has its own bin. These bins take units of more than a third, pairs of more than a
  // sixth, then the largest units that fit; the rest is packed by first fit.
  void modified_first_fit(std::span<const int32_t> order) {
    // Units by (rows, -index): the larger one first, and of equal ones the first.
    using Key = std::pair<int64_t, int32_t>;
    std::set<Key> medium, small, rest;
    for (const int32_t unit : order) {
      const int64_t r = rows(unit);
      if (r > capacity_ - r)
        put(bins_.size(), unit);
      else if (3 * r > capacity_)
        medium.emplace(r, -unit);
      else if (6 * r > capacity_)
        small.emplace(r, -unit);
      else
        rest.emplace(r, -unit);
    }
    const auto room = [&](size_t bin) { return capacity_ - bins_[bin].rows; };
    // Moves the largest unit of at most `most` rows from a set to a bin, if there is one.
    const auto take_largest = [&](std::set<Key>& from, int64_t most, size_t bin) {
      const auto after = from.lower_bound({most + 1, INT32_MIN});
      if (after == from.begin()) return false;
      const auto largest = std::prev(after);
      put(bin, -largest->second);
      from.erase(largest);
      return true;
    };
    const size_t large = bins_.size();
    std::vector<bool> has_medium(large);
    for (size_t bin = 0; bin < large; ++bin) has_medium[bin] = take_largest(medium, room(bin), bin);
    for (size_t bin = large; bin-- > 0 && small.size() > 1;) {
      const int64_t smallest = small.begin()->first, second = std::next(small.begin())->first;
      if (has_medium[bin] || smallest + second > room(bin)) continue;
      put(bin, -small.begin()->second);
      small.erase(small.begin());
      take_largest(small, room(bin), bin);
    }
    rest.merge(medium);
    rest.merge(small);
    for (size_t bin = 0; bin < large; ++bin)
      while (take_largest(rest, room(bin), bin)) {
      }
    std::vector<int32_t> left;
    for (auto key = rest.rbegin(); key != rest.rend(); ++key) left.push_back(-key->second);
    first_fit(left);
  }

  std::span<const PackUnit> units_;
  const PackOptions& options_;
  int64_t capacity_;
  std::vector<Bin> bins_;
};

// Splits the bins of most units until there are `count` or all bins have one unit.
void split(std::vector<Bin>& bins, size_t count, std::span<const PackUnit> units) {
  using Key = std::tuple<size_t, double, int64_t>;  // units, work, -bin
  std::priority_queue<Key> most;
  const auto push = [&](size_t bin) {
    most.emplace(bins[bin].units.size(), bins[bin].work, -static_cast<int64_t>(bin));
  };
  for (size_t bin = 0; bin < bins.size(); ++bin) push(bin);
  while (bins.size() < count && !most.empty() && std::get<0>(most.top()) > 1) {
    const auto from = static_cast<size_t>(-std::get<2>(most.top()));
    most.pop();
    // Divides the units where the first part has half of the work or more; both parts have a unit.
    const Bin whole = std::move(bins[from]);
    Bin first, second;
    for (size_t i = 0; i < whole.units.size(); ++i) {
      const bool last = i + 1 == whole.units.size();
      Bin& part = i == 0 || (!last && 2 * first.work < whole.work) ? first : second;
      part.add(whole.units[i], units);
    }
    bins[from] = std::move(first);
    bins.push_back(std::move(second));
    push(from);
    push(bins.size() - 1);
  }
}

/// The bins of each rank; ranks have equal counts.
class Distribution {
 public:
  Distribution(size_t ranks, std::span<const PackUnit> units, int64_t capacity)
      : units_(units), capacity_(capacity), ranks_(ranks), work_(ranks) {}

  /// Gives the next bin to the next rank.
  void deal(std::vector<Bin> bins) {
    for (size_t i = 0; i < bins.size(); ++i) ranks_[i % ranks_.size()].push_back(std::move(bins[i]));
    for (size_t rank = 0; rank < ranks_.size(); ++rank) work_[rank] = sum_of_work(rank);
  }

  /// Gives all ranks similar work.
  void balance(std::vector<Bin> bins, bool move_units) {
    const size_t each = bins.size() / ranks_.size();
    std::stable_sort(bins.begin(), bins.end(), [](const Bin& a, const Bin& b) { return a.work > b.work; });
    // Longest processing time first: the next bin goes to the rank with the least work.
    using Key = std::pair<double, size_t>;
    std::priority_queue<Key, std::vector<Key>, std::greater<>> least;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) least.emplace(0.0, rank);
    for (Bin& bin : bins) {
      const size_t rank = least.top().second;
      least.pop();
      work_[rank] += bin.work;
      ranks_[rank].push_back(std::move(bin));
      if (ranks_[rank].size() < each) least.emplace(work_[rank], rank);
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank) update(rank);
    // Relieves the rank of most work by exchanges with another one until that does not help.
    const double mean = std::accumulate(work_.begin(), work_.end(), 0.0) / static_cast<double>(work_.size());
    const size_t most_steps = 64 + 4 * ranks_.size() * each;
    for (size_t step = 0; step < most_steps; ++step) {
      const auto heavy = static_cast<size_t>(std::max_element(work_.begin(), work_.end()) - work_.begin());
      if (work_[heavy] <= mean * (1 + balanced)) break;
      std::vector<size_t> others(work_.size());
      std::iota(others.begin(), others.end(), 0);
      std::stable_sort(others.begin(), others.end(), [&](size_t a, size_t b) { return work_[a] < work_[b]; });
      if (std::none_of(others.begin(), others.end(),
                       [&](size_t light) { return light != heavy && exchange(heavy, light, move_units); }))
        break;
    }
  }

  void order(BinOrder order) {
    for (auto& bins : ranks_) {
      // update() has sorted them by increasing work.
      if (order == BinOrder::largest_first) {
        std::reverse(bins.begin(), bins.end());
        continue;
      }
      std::vector<Bin> placed(bins.size());
      for (size_t i = 0; i < bins.size(); ++i)
        placed[i % 2 == 0 ? i / 2 : bins.size() - 1 - i / 2] = std::move(bins[i]);
      bins = std::move(placed);
    }
  }

  double imbalance() const {
    const double sum = std::accumulate(work_.begin(), work_.end(), 0.0);
    const double most = *std::max_element(work_.begin(), work_.end());
    return sum > 0 ? most * static_cast<double>(work_.size()) / sum - 1 : 0;
  }
  const std::vector<Bin>& bins(size_t rank) const { return ranks_[rank]; }

 private:
  double work(int32_t unit) const { return units_[static_cast<size_t>(unit)].work; }
  int64_t room(const Bin& bin) const { return capacity_ - bin.rows; }

  void update(size_t rank) {
    auto& bins = ranks_[rank];
    std::stable_sort(bins.begin(), bins.end(), [](const Bin& a, const Bin& b) { return a.work < b.work; });
    work_[rank] = sum_of_work(rank);
  }
  double sum_of_work(size_t rank) const {
    double sum = 0;
    for (const Bin& bin : ranks_[rank]) sum += bin.work;
    return sum;
  }

  // Makes the best exchange between two ranks; false if none helps. Two bins are swapped, or with
  // `move_units` one unit is moved.
  bool exchange(size_t heavy, size_t light, bool move_units) {
    const double gap = work_[heavy] - work_[light];
    // The larger of the two ranks is relieved by `moved` work if that is less than the gap, most by half of
    // it.
    double best = gap / 2 * (1 - 1e-6);
    const auto better = [&](double moved) {
      const double distance = std::abs(moved - gap / 2);
      if (distance >= best) return false;
      best = distance;
      return true;
    };
    auto &from = ranks_[heavy], &to = ranks_[light];
    std::optional<std::pair<Bin*, Bin*>> swap;
    for (Bin& bin : from) {
      const double wanted = bin.work - gap / 2;
      auto other = std::lower_bound(to.begin(), to.end(), wanted,
                                    [](const Bin& b, double work) { return b.work < work; });
      if (other != to.end() && better(bin.work - other->work)) swap = {&bin, &*other};
      if (other != to.begin() && better(bin.work - std::prev(other)->work)) swap = {&bin, &*std::prev(other)};
    }
    std::optional<std::pair<Bin*, size_t>> move;
    const auto roomiest =
        std::min_element(to.begin(), to.end(), [](const Bin& a, const Bin& b) { return a.rows < b.rows; });
    for (Bin& bin : from)
      for (size_t i = 0; move_units && bin.units.size() > 1 && i < bin.units.size(); ++i)
        if (units_[static_cast<size_t>(bin.units[i])].rows <= room(*roomiest) && better(work(bin.units[i])))
          move = {&bin, i};
    if (move) {
      auto& [bin, i] = *move;
      roomiest->add(bin->units[i], units_);
      Bin rest;
      for (size_t k = 0; k < bin->units.size(); ++k)
        if (k != i) rest.add(bin->units[k], units_);
      *bin = std::move(rest);
    } else if (swap) {
      std::swap(*swap->first, *swap->second);
    } else {
      return false;
    }
    update(heavy);
    update(light);
    return true;
  }

  std::span<const PackUnit> units_;
  int64_t capacity_;
  std::vector<std::vector<Bin>> ranks_;
  std::vector<double> work_;
};

// Checks the arguments.
void require(std::span<const PackUnit> units, const PackOptions& o) {
  NRL_CHECK(o.capacity > 0 && o.capacity <= max_rows && o.row_unit > 0 && o.row_unit <= max_rows,
            "capacity {}, row unit {}", o.capacity, o.row_unit);
  NRL_CHECK(
      o.ranks > 0 && o.bins_multiple > 0 && o.bins_multiple <= max_bins / o.ranks && o.micro_batch_size > 0,
      "{} ranks, multiple {}, {} units per microbatch", o.ranks, o.bins_multiple, o.micro_batch_size);
  NRL_CHECK(units.size() <= INT32_MAX / 2, "{} units", units.size());
  for (const PackUnit& unit : units)
    NRL_CHECK(unit.rows > 0 && unit.rows <= max_rows && std::isfinite(unit.work) && unit.work >= 0,
              "a unit has {} rows and work {}", unit.rows, unit.work);
  // The most rows that cannot be divided.
  int64_t most = 0, rows = 0;
  const bool fixed = o.algorithm == PackAlgorithm::none;
  for (size_t i = 0; i < units.size(); ++i) {
    if (!fixed || static_cast<int64_t>(i) % o.micro_batch_size == 0) rows = 0;
    rows += units[i].rows;
    most = std::max(most, rows);
  }
  if (most > usable_capacity(o))
    fail(Exit::config, "a microbatch has at most {} rows{}, but {} {}. Fix: allow at least {} rows",
         o.capacity, o.row_unit > 1 ? fmt::format(" in multiples of {}", o.row_unit) : "",
         fixed ? fmt::format("the {} sequences or pairs of one have", o.micro_batch_size)
               : "the longest sequence or pair has",
         most, (most + o.row_unit - 1) / o.row_unit * o.row_unit);
}

std::vector<int32_t> sorted_units(const Bin& bin) {
  std::vector<int32_t> units = bin.units;
  std::sort(units.begin(), units.end());
  return units;
}

}  // namespace

Packing pack(std::span<const PackUnit> units, const PackOptions& options) {
  require(units, options);
  using Algorithm = PackAlgorithm;
  const Algorithm algorithm = options.algorithm;
  const auto ranks = static_cast<size_t>(options.ranks);
  Packing packing;
  packing.bins.resize(ranks);
  if (units.empty()) return packing;
  std::vector<Bin> bins = Packer(units, options).bins();
  const size_t step = ranks * static_cast<size_t>(options.bins_multiple);
  const size_t count = (bins.size() + step - 1) / step * step;
  if (algorithm != Algorithm::none) split(bins, count, units);
  bins.resize(count);

  double rows = 0, capacity = 0;
  for (const Bin& bin : bins) {
    rows += static_cast<double>(bin.rows);
    if (!bin.units.empty()) capacity += static_cast<double>(options.capacity);
  }
  Distribution distribution(ranks, units, usable_capacity(options));
  if (algorithm == Algorithm::none) {
    distribution.deal(std::move(bins));
  } else {
    distribution.balance(std::move(bins),
                         algorithm != Algorithm::sorted && algorithm != Algorithm::concatenative);
    distribution.order(options.order);
  }
  packing.efficiency = rows / capacity;
  packing.imbalance = distribution.imbalance();
  for (size_t rank = 0; rank < ranks; ++rank)
    for (const Bin& bin : distribution.bins(rank)) packing.bins[rank].push_back(sorted_units(bin));
  return packing;
}

}  // namespace nrl::data
