#pragma once
// The layouts of a number of ranks, and samples of them.

#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/config/config.h"

namespace nrl::verify {

/// Combinations of values, one of each choice: the grid, a schedule, a sharding strategy, ... There may be a
/// million; they share the values.
class Layouts {
 public:
  struct Value {
    std::string label;                   ///< in the layout's name; empty: not named
    std::vector<std::string> overrides;  ///< "key=value"
  };

  /// Every combination of one value of each choice. The values of `turns` take turns among them.
  void add(const std::vector<std::vector<Value>>& choices, const std::vector<std::vector<Value>>& turns);

  size_t size() const { return layouts_.size(); }
  std::string name(size_t i) const;  ///< "tp 2 x dp 2  optim  overlap"
  std::vector<std::string> overrides(size_t i) const;
  /// Numbers of its values, the same in all layouts that have the value.
  std::span<const int> values(size_t i) const { return layouts_[i]; }

 private:
  std::vector<Value> values_;
  std::map<std::pair<std::string, std::vector<std::string>>, int> numbers_;  // of values
  std::vector<std::vector<int>> layouts_;
};

/// Every combination of axis sizes whose product is `ranks`, and of sizes of the expert grid, with the values
/// that the option table allows for the options of its axes, and with microbatches as configured and of one
/// sequence. Not all are valid: loading the configuration with the overrides decides.
Layouts all_layouts(const Config& config, int64_t layers, int ranks);

struct Sample {
  std::vector<size_t> layouts;  ///< ascending
  /// 2 if it has every pair of values that valid layouts have, 3 if every triple, otherwise 0. Values that
  /// are refused together 16 times count as never allowed.
  int strength = 0;
};

/// `count` valid layouts: in a random order that is always the same, first those with a pair of values that
/// none before has, then with a new triple, then any.
Sample take_sample(const Layouts& all, int64_t count, const std::function<bool(size_t)>& valid);

}  // namespace nrl::verify
