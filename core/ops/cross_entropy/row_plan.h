#pragma once
// How a GPU's block takes a row of logits.

#include "core/ops/exec.h"

namespace nrl::ops {

/// A block of `threads` owns a row. It reads the row twice: for the maximum and the sum, then for the
/// gradient. Between the two it keeps `kept` chunks, those that it read first, in shared memory; the others
/// are the last ones read and come from the L2 cache.
struct RowPlan {
  int threads = 0;
  int kept = 0;  ///< chunks of threads * row_units vectors of 16 bytes

  static constexpr int row_units = 2;  ///< vectors of a thread in a chunk
  constexpr int64_t chunk_bytes() const { return int64_t{16} * row_units * threads; }
};

/// For rows of v logits; `gradient`: the second pass takes place.
RowPlan row_plan(const Exec& exec, int64_t v, bool gradient);

}  // namespace nrl::ops
