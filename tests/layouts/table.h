#pragma once
// The table of layouts and features: its rows and columns as data.

#include <string>
#include <vector>

namespace nrl::test {

struct Value {
  std::string name;                 ///< the row or column
  std::vector<std::string> keys;    ///< overrides of a configuration
  std::vector<std::string> tags{};  ///< dimensions that need one of these apply
  /// True if sums have another order than without it, or numbers are rounded elsewhere, even where one rank
  /// computes them.
  bool reorders = false;
  std::string only{};  ///< applies if earlier values have all of these tags
};

/// A cell of the table has one value of each dimension that applies.
struct Dimension {
  std::string name;
  bool layout = false;        ///< its values are rows; otherwise columns
  std::string only{};         ///< applies if earlier values have all of these tags
  std::vector<Value> values;  ///< the default is first
};

/// The dimensions on this number of ranks.
std::vector<Dimension> table(int ranks);

/// The configuration of which the values are overrides.
extern const char* const layouts_config;

}  // namespace nrl::test
