#pragma once
// The dropout mask of attention probabilities. Each probability has 16 random bits; eight keys of a query
// share a Philox block, whose number depends on query, head and key alone. The mask is the same on every
// backend, in the forward and the backward pass and in any layout of the batch.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/base/host_device.h"

namespace nrl::ops::attention {

/// Keys of a query that share a Philox block: key 8 g + e has the 16 bits from bit 16 (e % 2) of word e / 2.
inline constexpr int keys_per_block = 8;
inline constexpr int key_block_bits = 24, row_head_bits = 64 - key_block_bits;

/// The Philox block of keys [8 g, 8 g + 8) of a query, with keys counted from the first of the sequence and
/// `row` from the first query of the step's batch.
NRL_HOST_DEVICE constexpr uint64_t philox_block_of(int64_t row, int64_t heads, int64_t head, int64_t g) {
  return static_cast<uint64_t>(row * heads + head) << key_block_bits | static_cast<uint64_t>(g);
}

/// A probability whose 16 bits are below this is dropped: p rounded to a multiple of 2^-16.
inline uint32_t drop_below(float p) {
  return static_cast<uint32_t>(std::clamp(std::lround(static_cast<double>(p) * 65536), 0L, 65535L));
}
/// Factor of the kept probabilities for the rounded p: the expectation is exact. 1 when p is 0.
inline float keep_scale(float p) {
  return 65536.0f / static_cast<float>(65536 - drop_below(p));
}

}  // namespace nrl::ops::attention
