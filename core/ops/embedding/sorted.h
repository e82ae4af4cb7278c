#pragma once
// Sizes of the GPU's backward pass, which sorts the tokens by id and adds groups of sorted tokens.

#include <cstdint>

namespace nrl::ops::sorted {

/// A pass of the radix sort orders by one digit; a block of `tile` threads has a token per thread.
inline constexpr int digit_bits = 9, digits = 1 << digit_bits, tile = 512;
/// Sorted tokens that a block adds. A group has at most two partial sums, of the runs that cross its ends.
inline constexpr int group = 32;

constexpr int64_t tiles_of(int64_t tokens) {
  return (tokens + tile - 1) / tile;
}
constexpr int64_t groups_of(int64_t tokens) {
  return (tokens + group - 1) / group;
}

/// Passes of the sort for ids up to `max_id`.
constexpr int passes_of(int64_t max_id) {
  int passes = 1;
  while (max_id >> (passes * digit_bits)) ++passes;
  return passes;
}

}  // namespace nrl::ops::sorted
