#pragma once
// Sizes of the GPU's backward pass: tokens are sorted by id, and sums run over groups of sorted tokens.

#include <cstdint>

namespace nrl::ops::sorted {

/// A pass of the sort orders by one digit. A block of `tile` threads has that many tokens.
inline constexpr int digit_bits = 9, digits = 1 << digit_bits, tile = 512;
/// Sorted tokens that a block adds. Runs of one id that cross groups leave pieces, at most two in a group.
inline constexpr int group = 32;

constexpr int64_t tiles_of(int64_t tokens) {
  return (tokens + tile - 1) / tile;
}
constexpr int64_t groups_of(int64_t tokens) {
  return (tokens + group - 1) / group;
}

}  // namespace nrl::ops::sorted
