#pragma once
// Vectors of float of the instruction set that the including file is compiled for (NRL_ISA), loaded from rows
// of any element type and rounded back once. Kernels that store 16-bit elements loop over these vectors: of
// scalar loops the compiler makes vectors of the narrowest type, whose conversions take longer than the
// arithmetic.

#if defined(NRL_ISA_avx2) || defined(NRL_ISA_avx512)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "core/base/dtype.h"

#define NRL_INLINE static inline __attribute__((always_inline))

namespace nrl::ops::NRL_ISA {

#if defined(NRL_ISA_avx512)
inline constexpr int lanes = 16;
#elif defined(NRL_ISA_avx2)
inline constexpr int lanes = 8;
#else
inline constexpr int lanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(lanes * 4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(lanes * 4), may_alias));
typedef uint32_t WordLanes __attribute__((vector_size(lanes * 4), may_alias));
typedef uint16_t HalfLanes __attribute__((vector_size(lanes * 2), may_alias));

// Intrinsics are used in their zero-masking forms with a full mask: GCC 12 warns falsely about its own
// headers for the plain ones.

NRL_INLINE Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
NRL_INLINE Lanes load(const bf16* p) {
#if defined(NRL_ISA_avx512)
  // One permutation moves each element to the upper half of its word.
  const __m512i upper =
      _mm512_set_epi32(15 << 16, 14 << 16, 13 << 16, 12 << 16, 11 << 16, 10 << 16, 9 << 16, 8 << 16, 7 << 16,
                       6 << 16, 5 << 16, 4 << 16, 3 << 16, 2 << 16, 1 << 16, 0);
  const __m512i halves = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return reinterpret_cast<Lanes>(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, upper, halves));
#elif defined(NRL_ISA_avx2)
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<Lanes>(_mm256_slli_epi32(words, 16));
#else
  HalfLanes halves;
  std::memcpy(&halves, p, sizeof halves);
  return reinterpret_cast<Lanes>(__builtin_convertvector(halves, WordLanes) << 16);
#endif
}
NRL_INLINE Lanes load(const f16* p) {
#if defined(NRL_ISA_avx512)
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(NRL_ISA_avx2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Lanes v;
  for (int l = 0; l < lanes; ++l) v[l] = static_cast<float>(p[l]);
  return v;
#endif
}

NRL_INLINE WordLanes load(const uint32_t* p) {
  WordLanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

NRL_INLINE void store(float* p, Lanes v) {
  std::memcpy(p, &v, sizeof v);
}
/// As bf16(float): to nearest even, NaN stays NaN. With AVX512_BF16 subnormal numbers (below 1.2e-38) become
/// zero, for which the products take them anyway.
NRL_INLINE void store(bf16* p, Lanes v) {
#if defined(NRL_ISA_avx512_bf16)
  const __m256bh stored = _mm512_maskz_cvtneps_pbh(0xffff, v);
#else
  const WordLanes u = reinterpret_cast<WordLanes>(v);
  const WordLanes rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, quiet_nan = (u >> 16) | 0x40u;
  const WordLanes bits = (v != v) ? quiet_nan : rounded;
  const HalfLanes stored = __builtin_convertvector(bits, HalfLanes);
#endif
  std::memcpy(static_cast<void*>(p), &stored, sizeof stored);
}
/// As f16(float): to nearest even, beyond 65504 to infinity; NaN stays one.
NRL_INLINE void store(f16* p, Lanes v) {
#if defined(NRL_ISA_avx512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(NRL_ISA_avx2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int l = 0; l < lanes; ++l) p[l].bits = f16::round(v[l]);
#endif
}

/// a > b ? a : b of each element: b if one of them is NaN.
NRL_INLINE Lanes max(Lanes a, Lanes b) {
#if defined(NRL_ISA_avx512)
  return _mm512_maskz_max_ps(0xffff, a, b);
#else
  return a > b ? a : b;
#endif
}
NRL_INLINE float sum_lanes(Lanes v) {
  float s = 0;
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) s += v[i];
  return s;
}

/// How for_lanes() accesses a whole vector, and the last elements of a row.
struct WholeLanes {
  template <class T>
  NRL_INLINE auto load(const T* p) {
    return NRL_ISA::load(p);
  }
  template <class T>
  NRL_INLINE void store(T* p, Lanes v) {
    NRL_ISA::store(p, v);
  }
  /// v with zeros where there is no element.
  NRL_INLINE Lanes existing(Lanes v) { return v; }
};
struct FirstLanes {
  size_t count;
  template <class T>
  auto load(const T* p) const {
    T part[lanes] = {};
    std::memcpy(static_cast<void*>(part), p, count * sizeof(T));
    return NRL_ISA::load(part);
  }
  template <class T>
  void store(T* p, Lanes v) const {
    T part[lanes];
    NRL_ISA::store(part, v);
    std::memcpy(static_cast<void*>(p), part, count * sizeof(T));
  }
  Lanes existing(Lanes v) const {
    for (size_t l = count; l < lanes; ++l) v[l] = 0;
    return v;
  }
};

/// Calls body(i, access) for the vectors of elements [i, i + lanes) of n, the last of which may have fewer:
/// access.load(p + i) pads with zeros, and access.store(p + i, v) writes no element past the n.
template <class Body>
NRL_INLINE void for_lanes(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, WholeLanes());
  if (i < n) body(i, FirstLanes{static_cast<size_t>(n - i)});
}

}  // namespace nrl::ops::NRL_ISA
