#pragma once
// Sizes of paged attention on the CPU, which the dispatch function needs for the workspace.

#include <algorithm>
#include <cstdint>

#include "core/ops/shared/scratch.h"

namespace nrl::ops::paged {

inline constexpr int64_t largest_d = 256;
inline constexpr int64_t key_tile = 64;
inline constexpr int64_t widest = 16;  ///< D is padded to the widest vector

/// Scratch memory of a thread: for the queries of all heads of a group, of a block of rows.
struct Block {
  int64_t rows, vectors, padded;  ///< vectors: rows x heads of a group

  Block(int64_t group, int64_t d)
      : rows(std::max<int64_t>(1, 32 / group)),
        vectors(rows * group),
        padded((d + widest - 1) / widest * widest) {}
  /// q; out; scores; m, l.
  size_t bytes() const {
    return 2 * scratch_bytes(vectors * padded) + scratch_bytes(vectors * key_tile) +
           2 * scratch_bytes(vectors);
  }
};

}  // namespace nrl::ops::paged
