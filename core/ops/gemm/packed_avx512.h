#pragma once
// GEMM on packed operands with AVX-512:
//
//   c (rows, columns) = or += a b + bias
//
// for f32 operands with FMAs, and with AVX512_BF16 for bf16 operands with vdpbf16ps, which multiplies pairs
// of bf16 and adds both products to an f32 sum (with AMX: packed_amx.h). Operands are copied into panels of
// 32-bit words [word of the inner dimension][row of a or column of b]; a word is an f32 or two neighboring
// bf16 of the inner dimension. The panels of a block are packed once by all threads, which then share its
// tiles. For few columns tiles read the rows of a in place.
//
// An element of c is summed in the order of the inner dimension, whatever the other dimensions and the
// threads: results depend on neither.

#include <array>
#include <utility>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined operands inside its own intrinsics for uninitialized variables.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "core/device/cpu/parallel.h"
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

/// Where a block of sums goes: += `add` (f32) and bias, rounded to bf16 where `rounded` is given.
struct Result {
  float* f32 = nullptr;
  bf16* rounded = nullptr;
  int64_t ld = 0;              ///< of f32, or of rounded
  const float* add = nullptr;  ///< f32 sums to add; may be f32 itself
  int64_t add_ld = 0;
  bool accumulate = false;  ///< adds the old values of `rounded`
  const float* bias = nullptr;

  Result at(int64_t row, int64_t column) const {
    Result r = *this;
    if (f32) r.f32 += row * ld + column;
    if (rounded) r.rounded += row * ld + column;
    if (add) r.add += row * add_ld + column;
    if (bias) r.bias += column;
    return r;
  }
};

NRL_INLINE __mmask16 first(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1);
}

/// f32 to bf16 bits, rounded as bf16(float).
NRL_INLINE __m256i round_bf16(__m512 v) {
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i bits = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

NRL_INLINE __m512 upcast(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

/// sum += a b, or for words of two bf16 sum += a[0] b[0] + a[1] b[1].
template <class T>
NRL_INLINE __m512 multiply_add(__m512 a, __m512 b, __m512 sum) {
#if defined(NRL_ISA_avx512_bf16)
  if constexpr (std::is_same_v<T, bf16>)
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#endif
  return _mm512_fmadd_ps(a, b, sum);
}

NRL_INLINE void finish(__m512 sum, const Result& c, int64_t row, int64_t column, __mmask16 valid) {
  if (c.bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(valid, c.bias + column));
  if (c.add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(valid, c.add + row * c.add_ld + column));
  const int64_t at = row * c.ld + column;
  if (c.f32) {
    _mm512_mask_storeu_ps(c.f32 + at, valid, sum);
    return;
  }
  if (c.accumulate) sum = _mm512_add_ps(sum, upcast(_mm256_maskz_loadu_epi16(valid, c.rounded + at)));
  _mm256_mask_storeu_epi16(c.rounded + at, valid, round_bf16(sum));
}

/// A word in all lanes.
NRL_INLINE __m512 word(const std::byte* p) {
  float x;
  std::memcpy(&x, p, sizeof x);
  return _mm512_set1_ps(x);
}

/// One tile: `rows` rows of a against 32 columns of b. The words of a are in a panel, or in rows `ld` bytes
/// apart.
template <class T, int rows, bool packed>
void tile(int64_t words, const std::byte* a, int64_t ld, const float* b, const Result& c, int64_t columns) {
  const __mmask16 left = first(columns), right = first(columns - 16);
  __m512 sum[rows][2];
#pragma GCC unroll 14
  for (int i = 0; i < rows; ++i) {
    sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    if (c.f32) {
      _mm_prefetch(c.f32 + i * c.ld, _MM_HINT_T0);
      _mm_prefetch(c.f32 + i * c.ld + 16, _MM_HINT_T0);
    } else {
      _mm_prefetch(c.rounded + i * c.ld, _MM_HINT_T0);
    }
  }
  for (int64_t w = 0; w < words; ++w) {
    const __m512 b0 = _mm512_load_ps(b + w * tile_columns), b1 = _mm512_load_ps(b + w * tile_columns + 16);
#pragma GCC unroll 14
    for (int i = 0; i < rows; ++i) {
      const __m512 x = word(a + (packed ? (w * rows + i) * 4 : w * 4 + i * ld));
      sum[i][0] = multiply_add<T>(x, b0, sum[i][0]);
      sum[i][1] = multiply_add<T>(x, b1, sum[i][1]);
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < rows; ++i) {
    finish(sum[i][0], c, i, 0, left);
    finish(sum[i][1], c, i, 16, right);
  }
}

using Tile = void (*)(int64_t, const std::byte*, int64_t, const float*, const Result&, int64_t);
template <class T, bool packed, size_t... rows>
constexpr std::array<Tile, sizeof...(rows)> tiles_of(std::index_sequence<rows...>) {
  return {tile<T, static_cast<int>(rows) + 1, packed>...};
}
/// By rows - 1.
template <class T, bool packed>
inline constexpr auto tiles = tiles_of<T, packed>(std::make_index_sequence<vector_tile.rows>());

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

/// The stripe of tile_columns columns of b from `column` on.
template <class T>
void pack_stripe(const Operand& b, int64_t column, int64_t columns, int64_t k, int64_t inner, float* panel) {
  with_part<T>(b, column, k, [&](const auto& x) {
    if (b.transposed)
      pack_transposed<T>(x, columns, tile_columns, inner, 0, (inner + per_word<T> - 1) / per_word<T>, panel);
    else
      pack_rows<T>(x, columns, tile_columns, inner, panel);
  });
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

struct Product {
  int64_t rows = 0, columns = 0, inner = 0;
  Operand a, b;
  Tensor c;  ///< (rows, columns) f32 or bf16
  bool accumulate = false;
  const float* bias = nullptr;  ///< optional (columns)
};

/// True if tiles read the rows of `a` where they are: whole words of rows that do not compete for the same
/// sets of the first-level cache, for so few columns that panels would not pay.
template <class T>
bool reads_in_place(const Product& p) {
  constexpr int64_t few_columns = 1024, cache_way = 4096;
  const int64_t row_bytes = p.a.ld * static_cast<int64_t>(sizeof(T));
  return p.columns <= few_columns && p.a.dtype == dtype_of<T>::value && !p.a.transposed &&
         p.inner % per_word<T> == 0 && row_bytes % cache_way != 0;
}

/// How multiply() packs rows of `a` and multiplies: on vector registers.
template <class T>
struct VectorKernel {
  using Element = T;
  static constexpr TileSize size = vector_tile;
  struct Thread {};  ///< exists on a thread while it multiplies
  static bool in_place(const Product& p) { return reads_in_place<T>(p); }
  static constexpr auto pack = pack_group<T>;
  static void multiply(int64_t height, bool in_place, int64_t words, const std::byte* a, int64_t ld,
                       const float* b, const Result& c, int64_t columns) {
    const auto& run = in_place ? tiles<T, false> : tiles<T, true>;
    run[static_cast<size_t>(height - 1)](words, a, ld, b, c, columns);
  }
};

/// One block: the rows of `a` from `row`, the columns of `b` from `column`, the inner elements from `k`.
struct Range {
  int64_t row, rows, column, columns, k, inner;
};

/// Packs the columns of b and multiplies them with all rows of a. Each thread packs the rows of a that it
/// works on, a group of tiles at a time, which then stays in its second-level cache while the columns of b
/// pass by.
template <class Kernel>
void multiply_block(int threads, const Product& p, const Range& r, const Blocks& blocks, float* a_panels,
                    float* b_panels, const Result& c) {
  using T = typename Kernel::Element;
  const int64_t filled = (r.inner + per_word<T> - 1) / per_word<T>, words = Kernel::size.padded_words(filled);
  const int64_t stripes = (r.columns + tile_columns - 1) / tile_columns;
  const Tiling tiling(r.rows, Kernel::size);
  const int64_t groups = (tiling.count + blocks.group - 1) / blocks.group;
  const auto pack_b = [&](int64_t s) {
    const int64_t column = s * tile_columns;
    float* const panel = b_panels + column * words;
    pack_stripe<T>(p.b, r.column + column, std::min(r.columns - column, tile_columns), r.k, r.inner, panel);
    std::fill(panel + filled * tile_columns, panel + words * tile_columns, 0.0f);
  };
  const bool in_place = Kernel::in_place(p);
  const int64_t row_bytes = p.a.ld * static_cast<int64_t>(sizeof(T));
  // Units are pairs of a group and a stripe; `packed` is the group that `panels` hold.
  const auto work = [&](int64_t unit, int64_t& packed, float* panels) {
    const int64_t g = unit / stripes, column = unit % stripes * tile_columns;
    const int64_t from = tiling.count * g / groups, to = tiling.count * (g + 1) / groups;
    if (packed != g && !in_place) Kernel::pack(p.a, r.row, tiling, from, to, r.k, r.inner, panels);
    packed = g;
    const auto* a =
        in_place ? reinterpret_cast<const std::byte*>(Part<T>(p.a, r.row + tiling.begin(from), r.k).data)
                 : reinterpret_cast<const std::byte*>(panels);
    for (int64_t i = from; i < to; ++i) {
      const int64_t height = tiling.height(i);
      Kernel::multiply(height, in_place, words, a, row_bytes, b_panels + column * words,
                       c.at(tiling.begin(i), column), r.columns - column);
      a += height * (in_place ? row_bytes : words * 4);
    }
  };
  const int64_t units = groups * stripes;
  constexpr int64_t too_little = 32768;  // a thread team would cost more than it saves
  const int64_t team = r.rows * r.columns * r.inner < too_little ? 1 : std::min<int64_t>(threads, units);
  if (team <= 1) {
    [[maybe_unused]] const typename Kernel::Thread thread;
    int64_t packed = -1;
    for (int64_t s = 0; s < stripes; ++s) pack_b(s);
    for (int64_t u = 0; u < units; ++u) work(u, packed, a_panels);
    return;
  }
#pragma omp parallel num_threads(static_cast <int>(team))
  {
    [[maybe_unused]] const typename Kernel::Thread thread;
    int64_t packed = -1;
    float* const panels = a_panels + omp_get_thread_num() * blocks.a_size();
#pragma omp for schedule(static)
    for (int64_t s = 0; s < stripes; ++s) pack_b(s);
#pragma omp for schedule(guided)
    for (int64_t u = 0; u < units; ++u) work(u, packed, panels);
  }
}

/// The whole product, with scratch of Blocks::bytes(). A kernel of bf16 multiplies operands that both are.
template <class Kernel>
void multiply(int threads, const Product& p, Scratch& scratch) {
  if (p.rows == 0 || p.columns == 0) return;
  const bool rounded = p.c.dtype == DType::bf16;
  const Blocks blocks(p.rows, p.columns, p.inner, sizeof(typename Kernel::Element), rounded, Kernel::size);
  float* const a_panels = scratch.floats(threads * blocks.a_size());
  float* const b_panels = scratch.floats(blocks.b_size());
  float* const sums = scratch.floats(blocks.sums_size());
  const int64_t ld = p.c.step(0);
  for (int64_t i = 0; i < p.rows; i += blocks.rows)
    for (int64_t j = 0; j < p.columns; j += blocks.columns)
      for (int64_t k = 0; k == 0 || k < p.inner; k += blocks.inner) {  // empty sums are written, too
        const Range r{.row = i,
                      .rows = std::min(blocks.rows, p.rows - i),
                      .column = j,
                      .columns = std::min(blocks.columns, p.columns - j),
                      .k = k,
                      .inner = std::min(blocks.inner, p.inner - k)};
        const bool first_piece = k == 0, last_piece = k + blocks.inner >= p.inner;
        Result c;
        if (rounded && !last_piece) {
          c.f32 = sums;
          c.ld = r.columns;
        } else {
          (rounded ? static_cast<void>(c.rounded = data_of<bf16>(p.c) + i * ld + j)
                   : static_cast<void>(c.f32 = data_of<float>(p.c) + i * ld + j));
          c.ld = ld;
          c.accumulate = rounded && p.accumulate;
        }
        if (last_piece && p.bias) c.bias = p.bias + j;
        if (!first_piece || (p.accumulate && !rounded)) {
          c.add = rounded ? sums : c.f32;
          c.add_ld = rounded ? r.columns : ld;
        }
        multiply_block<Kernel>(threads, p, r, blocks, a_panels, b_panels, c);
      }
}

}  // namespace nrl::ops::NRL_ISA::packed

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
