#pragma once
// The dropout mask in GPU kernels: of the op itself and of what has it fused.

#include <cmath>

#include "core/base/philox.h"
#include "core/device/kernel/kernel.h"
#include "core/ops/dropout/dropout.h"

namespace nrl::ops::NRL_GPU {

/// What decides over an element, passed to kernels by value.
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
      const PhiloxBlock words = philox4x32(block, stream, seed_);
      const auto k = static_cast<unsigned>(element) % 4;
      // Not words[k]: an array indexed at run time would live in memory.
      const uint32_t low = k & 1 ? words[1] : words[0], high = k & 1 ? words[3] : words[2];
      v[0] = (k & 2 ? high : low) >= threshold_ ? v[0] * scale_ : 0.0f;
    } else {
#pragma unroll
      for (int b = 0; b < E / 4; ++b) {
        const PhiloxBlock words = philox4x32(block + static_cast<uint64_t>(b), stream, seed_);
#pragma unroll
        for (int k = 0; k < 4; ++k) v[4 * b + k] = words[k] >= threshold_ ? v[4 * b + k] * scale_ : 0.0f;
      }
    }
  }

 private:
  uint64_t seed_ = 0, stream_ = 0;
  const int64_t* step_ = nullptr;
  uint32_t threshold_ = 0;
  float scale_ = 1;
};

}  // namespace nrl::ops::NRL_GPU
