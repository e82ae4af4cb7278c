#pragma once
// The rotation of RoPE in GPU kernels: the op itself and kernels that fuse it.

#include "core/ops/shared/element.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {

/// The table of cosines and sines with the positions of the tokens. Without a table nothing is rotated:
/// half is 0.
struct Rotation {
  const float* table = nullptr;
  const int32_t* positions = nullptr;
  int half = 0;  ///< pairs of a head: (i, i + half) for i < half
  float sign = 1;

  Rotation() = default;
  Rotation(const Tensor& table_, const Tensor& positions_, bool inverse)
      : table(static_cast<const float*>(table_.data)),
        positions(static_cast<const int32_t*>(positions_.data)),
        half(table_.data ? static_cast<int>(table_.dim(1) / 2) : 0),
        sign(inverse ? -1.0f : 1.0f) {}

  /// Cosines and sines of pairs i .. i + E - 1 of a token.
  template <int E>
  __device__ __forceinline__ void angles(int64_t token, int i, float (&cosines)[E], float (&sines)[E]) const {
    const float* row = table + static_cast<int64_t>(positions[token]) * 2 * half + i;
    FloatVector<float> at;
    at.data = row;
    at.get(0, cosines);
    at.data = row + half;
    at.get(0, sines);
#pragma unroll
    for (int k = 0; k < E; ++k) sines[k] *= sign;
  }
};

template <int E>
__device__ __forceinline__ void rotate(float (&first)[E], float (&second)[E], const float (&cosines)[E],
                                       const float (&sines)[E]) {
#pragma unroll
  for (int k = 0; k < E; ++k) {
    const element::Pair<float> y = element::rope_pair(first[k], second[k], cosines[k], sines[k]);
    first[k] = y.first;
    second[k] = y.second;
  }
}

/// True when both halves of the rotated part consist of 16-byte packs; the rest of a head may be unaligned.
inline bool packed_rotation(const Tensor& x, const Tensor& table) {
  const int64_t pack = 16 / size_of(x.dtype);
  return kernel::aligned16(x.data) && kernel::aligned16(table.data) && x.step(0) % pack == 0 &&
         x.step(1) % pack == 0 && table.dim(1) / 2 % pack == 0;
}

}  // namespace nrl::ops::NRL_GPU
