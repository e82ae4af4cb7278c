#pragma once
// Four FP8 codes in a word, the first in the lowest byte. GPUs of compute capability 8.9 and later have an
// instruction for two.

#include "core/device/kernel.h"
#include "core/ops/shared/fp8.h"

namespace nrl::ops::NRL_GPU {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
/// Codes of x * inverse, beyond the format's range the largest. Not of NaN.
template <DType format>
__device__ __forceinline__ unsigned converted(const float (&x)[4], float inverse) {
  unsigned short pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float low = x[2 * i] * inverse, high = x[2 * i + 1] * inverse;
    if constexpr (format == DType::e4m3)
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pairs[i]) : "f"(high), "f"(low));
    else
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pairs[i]) : "f"(high), "f"(low));
  }
  return pairs[0] | static_cast<unsigned>(pairs[1]) << 16;
}
#endif

/// Byte c of word r becomes byte r of word c.
__device__ __forceinline__ void transpose_bytes(const unsigned (&rows)[4], unsigned (&columns)[4]) {
  const unsigned low01 = __byte_perm(rows[0], rows[1], 0x5140), low23 = __byte_perm(rows[2], rows[3], 0x5140),
                 high01 = __byte_perm(rows[0], rows[1], 0x7362),
                 high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

/// fp8::encode_saturating() of each.
template <DType format>
__device__ __forceinline__ unsigned tensor_codes(const float (&x)[4], float inverse) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned word = converted<format>(x, inverse), bits[4], largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bits[i] = __float_as_uint(x[i]) & fp8::magnitude_bits;
    largest = max(largest, bits[i]);
  }
  if (largest >= fp8::infinity_bits) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (bits[i] >= fp8::infinity_bits) word = (word & ~(0xffu << 8 * i)) | fp8::nan_code << 8 * i;
  }
#else
  unsigned word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= fp8::encode_saturating<format>(x[i], inverse) << 8 * i;
#endif
  return word;
}

/// fp8::encode() of each times the inverse of its block's scale; 0 in blocks that have none.
template <DType format>
__device__ __forceinline__ unsigned block_codes(const float (&x)[4], unsigned byte, float inverse) {
  if (byte == fp8::bad_scale) return 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return converted<format>(x, inverse);
#else
  unsigned word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= fp8::encode<format>(x[i] * inverse) << 8 * i;
  return word;
#endif
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
