#pragma once
// Cells that together have every pair of values that the program allows.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/layouts/table.h"

namespace nrl::test {

/// The number of its value in each dimension; -1: the dimension does not apply.
using Cell = std::vector<int>;

std::vector<std::string> overrides(const std::vector<Dimension>& dimensions, const Cell& cell);
/// "tp 2, sp, zb_h1, bf16": the values that are not defaults.
std::string name_of(const std::vector<Dimension>& dimensions, const Cell& cell);

/// Two values: dimension and number of each, the earlier dimension first.
struct Pair {
  int dimension[2], value[2];
  auto operator<=>(const Pair&) const = default;
};

struct Covering {
  std::vector<Cell> cells;
  /// The first cell that has the pair. Values whose dimensions never apply together are no pair.
  std::map<Pair, int> pairs;
  std::map<Pair, std::string> refused;  ///< why no cell has it
};

/// The first words of a problem, without the numbers in the others.
std::string kind_of(const std::string& problem);

/// Why the program refuses a cell; empty if it allows it.
using Problems = std::function<std::vector<std::string>(const Cell&)>;

/// Searches cells for all pairs, at most `most` cells. Early cells have many new pairs each, late ones few.
/// The result is the same in every call, and fewer cells are the first ones of more.
///
/// A pair counts as refused after the search has failed from several cells that have it: no change of another
/// value leaves fewer problems, or another problem that was not met before.
Covering cover(const std::vector<Dimension>& dimensions, const Problems& problems, size_t most);

}  // namespace nrl::test
