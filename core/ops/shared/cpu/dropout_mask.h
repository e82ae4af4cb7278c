#pragma once
// The dropout mask on the CPU: the op itself and kernels that fuse it.

#include <algorithm>
#include <cstdint>

#include "core/ops/dropout.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {

/// Philox blocks computed at a time.
inline constexpr int64_t dropout_chunk_blocks = 64;

/// Philox4x32-10 for the blocks [first, first + dropout_chunk_blocks), as core/base/philox.h computes them
/// one by one; the words of block j land in out[4 j ...].
inline void philox_chunk(uint64_t first, uint64_t stream, uint64_t seed, uint32_t* out) {
#pragma omp simd
  for (int64_t j = 0; j < dropout_chunk_blocks; ++j) {
    const uint64_t counter = first + static_cast<uint64_t>(j);
    uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
    uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
      const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(p1);
      c3 = static_cast<uint32_t>(p0);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out[4 * j] = c0;
    out[4 * j + 1] = c1;
    out[4 * j + 2] = c2;
    out[4 * j + 3] = c3;
  }
}

/// Decides which elements are dropped.
struct DropoutMask {
  float p, scale;
  uint64_t seed, stream;

  DropoutMask(float probability, uint64_t seed_, uint64_t stream_, const Tensor& step)
      : p(probability),
        scale(1.0f / (1.0f - probability)),
        seed(seed_),
        stream(dropout_stream(stream_, static_cast<const int64_t*>(step.data))) {}

  /// x (values whose random words are `words`) dropped or scaled.
  NRL_INLINE Lanes apply(Lanes x, WordLanes words, float p, float scale) {
    const Lanes uniform = __builtin_convertvector(reinterpret_cast<IntLanes>(words >> 8), Lanes) * 0x1.0p-24f;
    const Lanes scaled = x * scale;
    return uniform >= p ? scaled : Lanes{};
  }

  /// Calls body(i, words, count) for pieces of the row whose global elements are [first, first + n): words[k]
  /// belongs to element first + i + k.
  template <class Body>
  void for_words(int64_t first, int64_t n, const Body& body) const {
    alignas(64) uint32_t words[4 * dropout_chunk_blocks];
    for (int64_t i = 0; i < n;) {
      // Whole Philox blocks are computed; the first piece may begin within one.
      const int64_t element = first + i, skip = element % 4,
                    count = std::min(n - i, 4 * dropout_chunk_blocks - skip);
      philox_chunk(static_cast<uint64_t>(element / 4), stream, seed, words);
      body(i, words + skip, count);
      i += count;
    }
  }
};

}  // namespace nrl::ops::NRL_ISA
