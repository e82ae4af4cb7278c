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
#include <utility>

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

#if defined(NRL_ISA_avx512)
NRL_INLINE Lanes upcast_bf16(__m256i bits) {
  // One permutation moves each element to the upper half of its word.
  const __m512i upper =
      _mm512_set_epi32(15 << 16, 14 << 16, 13 << 16, 12 << 16, 11 << 16, 10 << 16, 9 << 16, 8 << 16, 7 << 16,
                       6 << 16, 5 << 16, 4 << 16, 3 << 16, 2 << 16, 1 << 16, 0);
  return reinterpret_cast<Lanes>(
      _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, upper, _mm512_castsi256_si512(bits)));
}
#endif

NRL_INLINE Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
NRL_INLINE Lanes load(const bf16* p) {
#if defined(NRL_ISA_avx512)
  return upcast_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
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

/// A step of transpose() with rows a and b: their words (h = 1) or pairs of words (h = 2) in turns within 128
/// bits, from h = 4 on the even and the odd ones of their 128 bits, one row after the other. `l`: all lanes.
template <int h, int... l>
NRL_INLINE void exchange(Lanes& a, Lanes& b, std::integer_sequence<int, l...>) {
  constexpr auto even = [](int lane) {
    const int part = lane % 4, begin = lane - part;
    return h == 1   ? begin + part / 2 + part % 2 * lanes
           : h == 2 ? begin + part % 2 + part / 2 * lanes
                    : 2 * begin + part;
  };
  constexpr int odd = h < 4 ? 2 : 4;
  const Lanes first = __builtin_shufflevector(a, b, even(l)...);
  b = __builtin_shufflevector(a, b, (even(l) + odd)...);
  a = first;
}
/// The transpose of lanes x lanes words: v[i][j] <-> v[j][i].
template <int h = 1>
NRL_INLINE void transpose(Lanes (&v)[lanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i)
    if ((i & h) == 0) exchange<h>(v[i], v[i + h], std::make_integer_sequence<int, lanes>());
  if constexpr (h == 2) {
#pragma GCC unroll 4
    for (int i = 0; i < lanes; i += 4) std::swap(v[i + 1], v[i + 2]);
  }
  if constexpr (2 * h < lanes) transpose<2 * h>(v);
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
/// The first elements of a vector: `count` of them, none if it is negative, at most all. Loads give zeros for
/// the others, and stores leave them alone.
class FirstLanes {
 public:
#if defined(NRL_ISA_avx512)
  explicit FirstLanes(int64_t count)
      : mask_(static_cast<__mmask16>(count >= lanes ? 0xffff
                                     : count <= 0   ? 0
                                                    : (1u << count) - 1)) {}
  Lanes load(const float* p) const {
    return _mm512_maskz_loadu_ps(mask_, p);
  }
  Lanes load(const bf16* p) const {
    return upcast_bf16(load_bits(p));
  }
  Lanes load(const f16* p) const {
    return _mm512_maskz_cvtph_ps(0xffff, load_bits(p));
  }
  __m256i load_bits(const void* p) const {
    return _mm256_maskz_loadu_epi16(mask_, p);
  }
  WordLanes load(const uint32_t* p) const {
    return reinterpret_cast<WordLanes>(_mm512_maskz_loadu_epi32(mask_, p));
  }
  void store(float* p, Lanes v) const {
    _mm512_mask_storeu_ps(p, mask_, v);
  }
  template <class T>
  void store(T* p, Lanes v) const {
    T rounded[lanes];
    NRL_ISA::store(rounded, v);
    _mm256_mask_storeu_epi16(p, mask_, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rounded)));
  }
  Lanes existing(Lanes v) const {
    return _mm512_maskz_mov_ps(mask_, v);
  }

 private:
  __mmask16 mask_;
#else
  explicit FirstLanes(int64_t count)
      : count_(static_cast<size_t>(count < 0       ? 0
                                   : count < lanes ? count
                                                   : lanes)) {}
  template <class T>
  auto load(const T* p) const {
    if (count_ == lanes) return NRL_ISA::load(p);
    T part[lanes] = {};
    std::memcpy(static_cast<void*>(part), p, count_ * sizeof(T));
    return NRL_ISA::load(part);
  }
  template <class T>
  void store(T* p, Lanes v) const {
    if (count_ == lanes) return NRL_ISA::store(p, v);
    T part[lanes];
    NRL_ISA::store(part, v);
    std::memcpy(static_cast<void*>(p), part, count_ * sizeof(T));
  }
  Lanes existing(Lanes v) const {
    for (size_t l = count_; l < lanes; ++l) v[l] = 0;
    return v;
  }

 private:
  size_t count_;
#endif
};

/// Calls body(i, access) for the vectors of elements [i, i + lanes) of n, the last of which may have fewer:
/// access.load(p + i) pads with zeros, and access.store(p + i, v) writes no element past the n.
template <class Body>
NRL_INLINE void for_lanes(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, WholeLanes());
  if (i < n) body(i, FirstLanes(n - i));
}

}  // namespace nrl::ops::NRL_ISA
