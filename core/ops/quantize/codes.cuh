#pragma once
// FP8 codes in words, the first in the lowest byte. GPUs of compute capability 8.9 and later have an
// instruction for two.

#include "core/device/kernel.h"
#include "core/ops/shared/fp8.h"

namespace nrl::ops::NRL_GPU {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
/// Codes of two numbers, beyond the format's range the largest, and of NaN NaN.
template <DType format>
__device__ __forceinline__ unsigned converted(float low, float high) {
  unsigned short pair;
  if constexpr (format == DType::e4m3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
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
__device__ __forceinline__ unsigned tensor_codes(float x0, float x1, float x2, float x3, float inverse) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  // The instruction takes infinity for a large number: adding 0 x makes it NaN, and keeps the rest.
  const auto scaled = [inverse](float x) { return __fmaf_rn(x, 0.0f, x * inverse); };
  return converted<format>(scaled(x0), scaled(x1)) | converted<format>(scaled(x2), scaled(x3)) << 16;
#else
  return fp8::encode_saturating<format>(x0, inverse) | fp8::encode_saturating<format>(x1, inverse) << 8 |
         fp8::encode_saturating<format>(x2, inverse) << 16 |
         fp8::encode_saturating<format>(x3, inverse) << 24;
#endif
}

/// fp8::encode() of each. `bad`: their scales are NaN, and the codes 0.
template <DType format>
__device__ __forceinline__ unsigned block_codes(float x0, float x1, float x2, float x3, bool bad) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const unsigned word = converted<format>(x0, x1) | converted<format>(x2, x3) << 16;
#else
  const unsigned word = fp8::encode<format>(x0) | fp8::encode<format>(x1) << 8 |
                        fp8::encode<format>(x2) << 16 | fp8::encode<format>(x3) << 24;
#endif
  return bad ? 0 : word;
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
