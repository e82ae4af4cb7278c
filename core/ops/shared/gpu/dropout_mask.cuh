#pragma once
// The dropout mask in GPU kernels: the op itself and kernels that fuse it.

#include <cmath>

#include "core/device/kernel.h"
#include "core/ops/dropout.h"

namespace nrl::ops::NRL_GPU {

/// philox4x32 (core/base/philox.h) with products of 32 by 32 bits, one instruction each. nvcc compiles that
/// function to products of 64 bits, which the GPU emulates, and random numbers limit the speed of dropout.
__device__ __forceinline__ uint4 philox4x32_words(uint64_t block, uint64_t stream, uint64_t seed) {
  auto low = [](uint64_t x) { return static_cast<unsigned>(x); };
  auto high = [](uint64_t x) { return static_cast<unsigned>(x >> 32); };
  uint4 c = make_uint4(low(block), high(block), low(stream), high(stream));
  unsigned k0 = low(seed), k1 = high(seed);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t x = uint64_t{0xD2511F53u} * c.x, z = uint64_t{0xCD9E8D57u} * c.z;
    c = make_uint4(high(z) ^ c.y ^ k0, low(z), high(x) ^ c.w ^ k1, low(x));
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

/// Decides which elements are dropped; passed to kernels by value.
class DropoutMask {
 public:
  DropoutMask() = default;
  DropoutMask(float p, uint64_t seed, uint64_t stream, const Tensor& step)
      : seed_(seed),
        stream_(stream),
        step_(static_cast<const int64_t*>(step.data)),
        // uniform >= p, where uniform has 24 bits: the same as comparing the bits, because scaling by 2^24 is
        // exact. p < 1 leaves 2^24 - 1 at most.
        threshold_(static_cast<uint32_t>(std::ceil(static_cast<double>(p) * 16777216.0)) << 8),
        scale_(1.0f / (1.0f - p)) {}

  /// The stream of this step. Once per thread: it may be a read of device memory.
  __device__ __forceinline__ uint64_t stream() const { return dropout_stream(stream_, step_); }

  /// Drops or scales the global elements [element, element + E). With E > 1, element is a multiple of 4.
  template <int E>
  __device__ __forceinline__ void apply(uint64_t stream, int64_t element, float (&v)[E]) const {
    const auto block = static_cast<uint64_t>(element) / 4;
    if constexpr (E == 1) {
      const uint4 words = philox4x32_words(block, stream, seed_);
      const auto k = static_cast<unsigned>(element) % 4;
      const unsigned low = k & 1 ? words.y : words.x, high = k & 1 ? words.w : words.z;
      drop(v[0], k & 2 ? high : low);
    } else {
#pragma unroll
      for (int b = 0; b < E / 4; ++b) {
        const uint4 words = philox4x32_words(block + static_cast<uint64_t>(b), stream, seed_);
        drop(v[4 * b], words.x);
        drop(v[4 * b + 1], words.y);
        drop(v[4 * b + 2], words.z);
        drop(v[4 * b + 3], words.w);
      }
    }
  }

 private:
  __device__ __forceinline__ void drop(float& v, unsigned word) const {
    v = word >= threshold_ ? v * scale_ : 0.0f;
  }
  uint64_t seed_ = 0, stream_ = 0;
  const int64_t* step_ = nullptr;
  uint32_t threshold_ = 0;
  float scale_ = 1;
};

}  // namespace nrl::ops::NRL_GPU
