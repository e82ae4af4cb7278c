#pragma once
// The register-blocked products and vector functions that attention is made of, compiled once
// per instruction set.
//
// Layouts are chosen so that no product needs a transposed copy inside the loop and softmax runs along vector
// lanes: a block of scores is kept as S^T, [key][query], with queries in lanes.

#include <algorithm>
#include <cstdint>

#include "core/base/dtype.h"
#include "core/ops/shared/cpu/lanes.h"

namespace nrl::ops::NRL_ISA::micro {

#if defined(NRL_ISA_avx512)
inline constexpr int max_vectors = 4;
#else
inline constexpr int max_vectors = 2;
#endif

#define NRL_ALWAYS inline __attribute__((always_inline))

using Vec = Lanes;
using IntVec = IntLanes;
using UintVec = WordLanes;

NRL_ALWAYS Vec splat(float x) {
  return x - Vec{};
}
NRL_ALWAYS IntVec splat_int(int32_t x) {
  return x - IntVec{};
}
/// Aligned, as store().
NRL_ALWAYS Vec load(const float* p) {
  return *reinterpret_cast<const Vec*>(p);
}
NRL_ALWAYS void store(float* p, Vec v) {
  *reinterpret_cast<Vec*>(p) = v;
}
NRL_ALWAYS Vec select(IntVec mask, Vec a, Vec b) {
  return mask ? a : b;
}

NRL_ALWAYS IntVec iota() {
  IntVec v;
  for (int i = 0; i < lanes; ++i) v[i] = i;
  return v;
}

/// The smallest integer that is not less than x; magnitudes from 2^22 on within 1.
NRL_ALWAYS Vec ceil(Vec x) {
  constexpr float magic = 12582912.0f;
  const Vec nearest = (x + magic) - magic;
  return nearest < x ? nearest + 1.0f : nearest;
}

/// 2^x within 1 ulp for x in [-126, 127]; 2^-126 below that (masked elements are cleared by the caller), NaN
/// stays NaN. Minimax polynomial of 2^f on |f| <= 1/2, relative error 2.6e-9.
NRL_ALWAYS Vec exp2(Vec x) {
  x = x < -126.0f ? splat(-126.0f) : x;
#if defined(NRL_ISA_avx512)
  // The zero-masking forms with a full mask: GCC 12 warns falsely about its own header for the plain ones.
  const Vec n = _mm512_maskz_roundscale_ps(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = x - n;
#else
  constexpr float magic = 12582912.0f + 127.0f;  // the low bits of x + magic are round(x) + 127
  const Vec shifted = x + magic;
  const Vec f = x - (shifted - magic);
#endif
  Vec p = splat(0.0001559467817f);
  p = p * f + 0.00134066439f;
  p = p * f + 0.009617692973f;
  p = p * f + 0.05550310551f;
  p = p * f + 0.2402265278f;
  p = p * f + 0.693147215f;
  p = p * f + 1.0f;
#if defined(NRL_ISA_avx512)
  return _mm512_maskz_scalef_ps(0xffff, p, n);
#else
  return p * reinterpret_cast<Vec>(reinterpret_cast<IntVec>(shifted) << 23);
#endif
}

/// log2(x) for x >= 2^-126: the exponent bits as a first guess, then two steps of Halley's method on 2^y = x.
NRL_ALWAYS Vec log2(Vec x) {
  Vec y = __builtin_convertvector(reinterpret_cast<IntVec>(x), Vec) * 0x1p-23f - 126.957f;
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Vec e = exp2(y);
    y = y + 2.885390082f * (x - e) / (x + e);  // 2 / ln 2
  }
  return y;
}

/// Rows of a tile for a width in vectors: as many accumulators as the registers hold.
constexpr int tile_rows(int vectors) {
#if defined(NRL_ISA_avx512)
  constexpr int rows[] = {0, 16, 8, 8, 6};
#else
  constexpr int rows[] = {0, 8, 6};
#endif
  return rows[vectors];
}
inline constexpr int max_tile_rows = 16;

/// c (rows x vectors) = or += a (rows x [begin, end)) * b. `a` is read element by element: a[i * lda + p], or
/// with `across` a[p * lda + i]. b and c are aligned.
template <int rows, int vectors, bool across>
NRL_ALWAYS void tile(int64_t begin, int64_t end, const float* a, int64_t lda, const float* b, int64_t ldb,
                     float* c, int64_t ldc, bool accumulate) {
  Vec sum[rows][vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sum[i][v] = Vec{};
  const float* b_row = b + begin * ldb;
  const float* a_at = a + (across ? begin * lda : begin);
#pragma GCC unroll 2
  for (int64_t p = begin; p < end; ++p) {
    Vec row[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) row[v] = load(b_row + v * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const Vec x = splat(a_at[across ? i : i * lda]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[i][v] += x * row[v];
    }
    b_row += ldb;
    a_at += across ? lda : 1;
  }
  if (accumulate) {
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[i][v] += load(c + i * ldc + v * lanes);
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store(c + i * ldc + v * lanes, sum[i][v]);
}

struct Range {
  int64_t begin, end;
};

/// One strip of `vectors` vectors of c, from top to bottom. `depth(i, n)` is the range of the reduction that
/// rows [i, i + n) need.
template <int vectors, bool across, class Depth>
__attribute__((noinline)) void strip(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb,
                                     float* c, int64_t ldc, bool accumulate, const Depth& depth) {
  constexpr int full = tile_rows(vectors);
  int64_t i = 0;
  const auto run = [&]<int count>() __attribute__((always_inline)) {
    const Range r = depth(i, count);
    tile<count, vectors, across>(r.begin, r.end, a + (across ? i : i * lda), lda, b, ldb, c + i * ldc, ldc,
                                 accumulate);
    i += count;
  };
  while (rows - i >= full) run.template operator()<full>();
  while (rows - i >= 4) run.template operator()<4>();
  while (rows - i >= 1) run.template operator()<1>();
}

/// Calls body.operator()<n>() for n = count, 1 to max_vectors.
template <class Body>
NRL_ALWAYS void with_vectors(int64_t count, const Body& body) {
  switch (count) {
    case 1:
      return body.template operator()<1>();
    case 2:
      return body.template operator()<2>();
#if defined(NRL_ISA_avx512)
    case 3:
      return body.template operator()<3>();
    case 4:
      return body.template operator()<4>();
#endif
    default:
      return;
  }
}

/// c (rows x width) = or += a b, width a multiple of `lanes`.
template <bool across, class Depth>
void product(int64_t rows, int64_t width, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
             int64_t ldc, bool accumulate, const Depth& depth) {
  int64_t vectors = width / lanes, strips = (vectors + max_vectors - 1) / max_vectors;
  for (int64_t v = 0; strips > 0; --strips) {
    const int64_t take = (vectors - v + strips - 1) / strips;  // even strips: 5 = 3 + 2, not 4 + 1
    with_vectors(take, [&]<int count>() {
      strip<count, across>(rows, a, lda, b + v * lanes, ldb, c + v * lanes, ldc, accumulate, depth);
    });
    v += take;
  }
}

/// As product() with a read along rows and the whole depth, but rows [i, i + n) get only the columns of
/// width(i, n), rounded to vectors. Steps of `lanes` rows make squares with the vectors, and leave strips of
/// every width enough accumulators.
template <class Width>
void staircase(int64_t rows, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
               float* c, int64_t ldc, const Width& width) {
  for (int64_t i = 0; i < rows; i += lanes) {
    const int64_t count = std::min<int64_t>(lanes, rows - i);
    const Range r = width(i, count);
    const int64_t first = r.begin / lanes * lanes, last = (r.end + lanes - 1) / lanes * lanes;
    if (first < last)
      product<false>(count, last - first, a + i * lda, lda, b + first, ldb, c + i * ldc + first, ldc, false,
                     [depth](int64_t, int64_t) {
                       return Range{0, depth};
                     });
  }
}

}  // namespace nrl::ops::NRL_ISA::micro
