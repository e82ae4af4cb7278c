#pragma once
// Shuffles of arrays that are larger than the memory for them.

#include <cstdint>
#include <functional>
#include <span>

#include "apps/data/numpy_random.h"
#include "apps/data/order_space.h"

namespace nrl::data {

/// How an array in a file is shuffled. The order does not depend on it.
struct ShuffleOptions {
  int64_t block = int64_t{1} << 23;  ///< elements that are shuffled in memory; a power of two
  int threads = 4;                   ///< of the last pass

  /// Anonymous memory, and bytes of the temporary file, to shuffle `count` elements in a file.
  int64_t memory(int64_t count) const;
  int64_t scratch(int64_t count) const;
};

/// Fills `values` with the elements from `first` on before the shuffle.
using InitialValues = std::function<void(int64_t first, std::span<uint32_t> values)>;

/// Writes `count` elements to byte `at` of `space`, in the order in which random.shuffle() leaves the initial
/// values, and leaves `random` in the same state. In a file it reads and writes long runs only:
///
/// Step i of the shuffle, i = count - 1 .. 1, swaps elements i and partner(i) <= i and is the last one to
/// touch element i. Elements are divided into blocks, which are processed from the last to the first. The
/// value that step i takes from element i is known when all later blocks are done. If the partner lies in the
/// same block, the step is executed at once; else the value is stored for the partner's block, which
/// exchanges it for that of the partner when it is its turn. The values of a block are stored in its own part
/// of the array, grouped by the block of the partner, and the partners likewise in the temporary file. The
/// last pass brings each block into order: the groups keep the order of the steps, and partners are drawn
/// again from the state of the generator at the beginning of the block.
void shuffle_into(const OrderSpace& space, int64_t at, int64_t count, NumpyRandomState& random,
                  const InitialValues& initial, const ShuffleOptions& options = {});

}  // namespace nrl::data
