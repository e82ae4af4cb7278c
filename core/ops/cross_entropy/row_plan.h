#pragma once
// How a GPU block processes a row of logits.

#include "core/ops/exec.h"

namespace nrl::ops {

/// A block of `threads` reads a row twice: for the maximum and the sum, then for the gradient. It keeps the
/// first `kept` chunks that it read in shared memory; the others were read last and come from the L2 cache.
struct RowPlan {
  int threads = 0;
  int kept = 0;  ///< chunks of threads * row_units vectors of 16 bytes

  static constexpr int row_units = 2;  ///< vectors of a thread in a chunk
  constexpr int64_t chunk_bytes() const { return int64_t{16} * row_units * threads; }
};

/// For rows of v logits of this type; `gradient`: the gradient is computed too.
RowPlan row_plan(const Exec& exec, int64_t v, DType dtype, bool gradient);

}  // namespace nrl::ops
