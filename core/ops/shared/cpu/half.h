#pragma once
// f16 elements as vectors of float and back, a vector at a time, with the instructions of F16C and AVX-512
// where there are any. Loops of single elements vectorize too (f16), but take several times as long.

#if defined(NRL_ISA_avx2) || defined(NRL_ISA_avx512)
#include <immintrin.h>
#endif

#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {

#if defined(NRL_ISA_avx512)
inline constexpr int half_lanes = 16;
#elif defined(NRL_ISA_avx2)
inline constexpr int half_lanes = 8;
#else
inline constexpr int half_lanes = 4;
#endif
typedef float HalfLanes __attribute__((vector_size(half_lanes * sizeof(float)), may_alias));

NRL_INLINE HalfLanes load_f16(const f16* p) {
#if defined(NRL_ISA_avx512)
  // The zero-masking form with a full mask: GCC 12 warns falsely about its own header for the plain one.
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(NRL_ISA_avx2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  HalfLanes v;
  for (int l = 0; l < half_lanes; ++l) v[l] = static_cast<float>(p[l]);
  return v;
#endif
}

/// As f16(float): to nearest even, beyond 65504 to infinity; NaN stays one.
NRL_INLINE void store_f16(f16* p, HalfLanes v) {
#if defined(NRL_ISA_avx512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(NRL_ISA_avx2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int l = 0; l < half_lanes; ++l) p[l].bits = f16::round(v[l]);
#endif
}

}  // namespace nrl::ops::NRL_ISA
