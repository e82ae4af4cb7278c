#pragma once
// Copies of GEMM operands in panels of 32-bit words, for packed_avx512.h.

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined operands inside its own intrinsics for uninitialized variables.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "core/ops/gemm/packed_sizes.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA::packed {
using namespace nrl::ops::packed;  // NOLINT: the sizes, which no instruction set changes

/// Elements of a 32-bit word.
template <class T>
constexpr int64_t per_word = 4 / sizeof(T);

/// `a` is (outer = rows, inner), `b` (outer = columns, inner): as stored, or transposed.
struct Operand {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t ld = 0;
  bool transposed = false;  ///< element (o, i) is data[i * ld + o], else data[o * ld + i]
};

/// Part of an operand of elements S.
template <class S>
struct Part {
  const S* data;
  int64_t ld;
  bool transposed;
  Part(const Operand& x, int64_t outer, int64_t inner)
      : data(static_cast<const S*>(x.data) + (x.transposed ? inner * x.ld + outer : outer * x.ld + inner)),
        ld(x.ld),
        transposed(x.transposed) {}
};

NRL_INLINE __mmask16 first(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1);
}

NRL_INLINE __m512 upcast(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

/// 16 x 16 words, transposed.
NRL_INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

/// Up to 16 words of T of a row; `elements` are left.
template <class T>
NRL_INLINE __m512i load_words(const float* x, int64_t elements) {
  return _mm512_maskz_loadu_epi32(first(elements), x);
}
template <class T>
NRL_INLINE __m512i load_words(const bf16* x, int64_t elements) {
  if constexpr (std::is_same_v<T, float>)
    return _mm512_castps_si512(upcast(_mm256_maskz_loadu_epi16(first(elements), x)));
  return _mm512_maskz_loadu_epi16(elements >= 32 ? ~__mmask32{0} : (__mmask32{1} << elements) - 1, x);
}
/// The words of T of up to 16 neighboring rows; `pair`: the word has a second element.
template <class T>
NRL_INLINE __m512i load_outer(const float* x, int64_t, __mmask16 valid, bool) {
  return _mm512_maskz_loadu_epi32(valid, x);
}
template <class T>
NRL_INLINE __m512i load_outer(const bf16* x, int64_t ld, __mmask16 valid, bool pair) {
  const __m256i low = _mm256_maskz_loadu_epi16(valid, x);
  if constexpr (std::is_same_v<T, float>) return _mm512_castps_si512(upcast(low));
  const __m256i high = pair ? _mm256_maskz_loadu_epi16(valid, x + ld) : _mm256_setzero_si256();
  // Elements of `low` and `high` (32 and on) in turn.
  const __m512i in_turn = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39,
                                           7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return _mm512_permutex2var_epi16(_mm512_castsi256_si512(low), in_turn, _mm512_castsi256_si512(high));
}

/// Packing prefetches words of a transposed operand, whose rows may be pages apart, and bytes of each of 16
/// rows, which are more streams than the hardware prefetcher follows.
inline constexpr int64_t words_ahead = 32, bytes_ahead = 256;

/// The words [begin, end) of a panel of `width` rows of a transposed operand; rows from `outer` on are zero.
template <class T, class S>
NRL_INLINE void pack_transposed(const Part<S>& x, int64_t outer, int64_t width, int64_t inner, int64_t begin,
                                int64_t end, float* panel) {
  static_assert(tile_columns <= 32);
  constexpr int64_t per = per_word<T>;
  const int64_t whole = std::min(end, inner / per);
  const __mmask16 valid[] = {first(outer), first(outer - 16)}, stored[] = {first(width), first(width - 16)};
  const S* from = x.data + begin * per * x.ld;
  float* to = panel + begin * width;
  for (int64_t w = begin; w < end; ++w, from += per * x.ld, to += width) {
#pragma GCC unroll 2
    for (int64_t row = words_ahead * per; row < (words_ahead + 1) * per; ++row) {
      _mm_prefetch(from + row * x.ld, _MM_HINT_T0);
      if (width > 16) _mm_prefetch(from + row * x.ld + 16, _MM_HINT_T0);
    }
    _mm512_mask_storeu_epi32(to, stored[0], load_outer<T>(from, x.ld, valid[0], w < whole));
    if (width > 16)
      _mm512_mask_storeu_epi32(to + 16, stored[1], load_outer<T>(from + 16, x.ld, valid[1], w < whole));
  }
}

/// A panel of `width` rows of `inner` elements; rows from `outer` on are zero.
template <class T, class S>
void pack_rows(const Part<S>& x, int64_t outer, int64_t width, int64_t inner, float* panel) {
  constexpr int64_t per = per_word<T>;
  const int64_t words = (inner + per - 1) / per;
  for (int64_t o = 0; o < width; o += 16) {
    const __mmask16 stored = first(width - o);
    for (int64_t w = 0; w < words; w += 16) {
      constexpr int64_t ahead = bytes_ahead / static_cast<int64_t>(sizeof(S));
      __m512i r[16];
      for (int64_t i = o; i < std::min(o + 16, outer); ++i)
        _mm_prefetch(x.data + i * x.ld + w * per + ahead, _MM_HINT_T0);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        r[i] = o + i < outer ? load_words<T>(x.data + (o + i) * x.ld + w * per, inner - w * per)
                             : _mm512_setzero_si512();
      transpose(r);
      const int64_t count = std::min<int64_t>(16, words - w);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        if (i < count) _mm512_mask_storeu_epi32(panel + (w + i) * width + o, stored, r[i]);
    }
  }
}
/// Calls body(Part) with the element type of an operand that is packed as T.
template <class T, class Body>
NRL_INLINE void with_part(const Operand& x, int64_t outer, int64_t inner, const Body& body) {
  if constexpr (std::is_same_v<T, float>)
    if (x.dtype == DType::f32) return body(Part<float>(x, outer, inner));
  body(Part<bf16>(x, outer, inner));
}

/// `n` rows in tiles of at most `size.rows`: of nearly equal heights, or where rows are padded all but the
/// last of full height.
struct Tiling {
  TileSize size;
  int64_t n = 0, count = 0;
  Tiling(int64_t rows, const TileSize& tile)
      : size(tile), n(rows), count((rows + tile.rows - 1) / tile.rows) {}
  int64_t begin(int64_t i) const { return size.row_unit == 1 ? n * i / count : std::min(n, i * size.rows); }
  int64_t height(int64_t i) const { return begin(i + 1) - begin(i); }
};

/// The tiles [from, to) of rows of a, which begin at `row`.
template <class T>
void pack_group(const Operand& a, int64_t row, const Tiling& tiling, int64_t from, int64_t to, int64_t k,
                int64_t inner, float* panels) {
  const int64_t words = (inner + per_word<T> - 1) / per_word<T>, origin = tiling.begin(from);
  const auto panel = [&](int64_t i) { return panels + (tiling.begin(i) - origin) * words; };
  if (!a.transposed) {
    for (int64_t i = from; i < to; ++i)
      with_part<T>(a, row + tiling.begin(i), k, [&](const auto& x) {
        pack_rows<T>(x, tiling.height(i), tiling.height(i), inner, panel(i));
      });
    return;
  }
  // All tiles of a few rows of the memory before the next rows, which may be pages away.
  constexpr int64_t together = 32;
  with_part<T>(a, row + origin, k, [&](auto x) {
    const auto* const begin = x.data;
    for (int64_t w = 0; w < words; w += together)
      for (int64_t i = from; i < to; ++i) {
        x.data = begin + tiling.begin(i) - origin;
        pack_transposed<T>(x, tiling.height(i), tiling.height(i), inner, w, std::min(words, w + together),
                           panel(i));
      }
  });
}

}  // namespace nrl::ops::NRL_ISA::packed

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
