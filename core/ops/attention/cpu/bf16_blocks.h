#pragma once
// The steps of blocked attention on bf16 (bf16_products.h): operands as words, and the rows of scores between
// the products. Scores are f32, [query][key] with rows of key_block; probabilities and gradients of scores
// are rounded to bf16 where they are multiplied.

#include <cstdint>
#include <limits>

#include "core/ops/attention/cpu/bf16_products.h"
#include "core/ops/attention/cpu/blocks.h"
#include "core/ops/attention/cpu/keep.h"

namespace nrl::ops::NRL_ISA {

using PairWords = packed::Words<bf16>;
static_assert(lanes == 16 && bf16_multiple == 2 * lanes);

inline constexpr int64_t block_words = key_block / 2;  ///< of a row over a block of keys or queries
inline constexpr int64_t vectors = key_block / lanes;  ///< of a row of scores

/// A block of rows of a head; elements outside of rows x d are taken for zeros.
struct HeadBlock {
  const bf16* data;
  int64_t step, rows, d;

  /// 16 words along row `r`, from word `w` on.
  Lanes along(int64_t r, int64_t w) const {
    return r < rows ? PairWords::along(data + r * step + 2 * w, d - 2 * w) : Lanes{};
  }
  /// Words of the rows 2 `pair` and the next one, of 16 columns from `c` on.
  Lanes across(int64_t pair, int64_t c) const {
    return 2 * pair < rows
               ? PairWords::across(data + 2 * pair * step + c, step, FirstLanes(d - c), 2 * pair + 1 < rows)
               : Lanes{};
  }
};

/// to [row][word of D], `height` rows.
inline void pack_along(const HeadBlock& x, int64_t height, int64_t words, float* to) {
  for (int64_t r = 0; r < height; ++r)
    for (int64_t w = 0; w < words; w += lanes) micro::store(to + r * words + w, x.along(r, w));
}
/// to [word of D][row], rows of key_block.
inline void pack_along_transposed(const HeadBlock& x, int64_t words, float* to) {
  for (int64_t r = 0; r < key_block; r += lanes)
    for (int64_t w = 0; w < words; w += lanes) {
      Lanes v[lanes];
#pragma GCC unroll 16
      for (int l = 0; l < lanes; ++l) v[l] = x.along(r + l, w);
      transpose(v);
#pragma GCC unroll 16
      for (int l = 0; l < lanes; ++l) micro::store(to + (w + l) * key_block + r, v[l]);
    }
}
/// to [pair of rows][column], rows of `padded`.
inline void pack_across(const HeadBlock& x, int64_t padded, float* to) {
  for (int64_t p = 0; p < block_words; ++p)
    for (int64_t c = 0; c < padded; c += lanes) micro::store(to + p * padded + c, x.across(p, c));
}
/// to [column][pair of rows].
inline void pack_across_transposed(const HeadBlock& x, int64_t padded, float* to) {
  for (int64_t p = 0; p < block_words; p += lanes)
    for (int64_t c = 0; c < padded; c += lanes) {
      Lanes v[lanes];
#pragma GCC unroll 16
      for (int l = 0; l < lanes; ++l) v[l] = x.across(p + l, c);
      transpose(v);
#pragma GCC unroll 16
      for (int l = 0; l < lanes; ++l) micro::store(to + (c + l) * block_words + p, v[l]);
    }
}
/// The rows `to` (rows x d) = factor * the columns of `from` [column][row], rows of key_block.
inline void unpack_transposed(int64_t rows, int64_t d, const float* from, float factor, bf16* to,
                              int64_t step) {
  for (int64_t r = 0; r < rows; r += lanes)
    for (int64_t c = 0; c < d; c += lanes) {
      Lanes v[lanes];
#pragma GCC unroll 16
      for (int l = 0; l < lanes; ++l) v[l] = micro::load(from + (c + l) * key_block + r);
      transpose(v);
      const FirstLanes columns(d - c);
      for (int64_t l = 0; l < std::min<int64_t>(lanes, rows - r); ++l)
        columns.store(to + (r + l) * step + c, v[l] * factor);
    }
}

/// Two vectors in bf16, `low` first.
NRL_ALWAYS __m512i in_bf16(Lanes low, Lanes high) {
#if defined(NRL_ISA_avx512_bf16)
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
#else
  alignas(64) bf16 both[2 * lanes];
  store(both, low);
  store(both + lanes, high);
  return _mm512_load_si512(both);
#endif
}
/// The words of pairs of both halves.
NRL_ALWAYS Lanes paired(__m512i halves) {
  const __m512i in_turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                           7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return reinterpret_cast<Lanes>(_mm512_maskz_permutexvar_epi16(~__mmask32{0}, in_turn, halves));
}
template <int half>
NRL_ALWAYS void store_half(float* to, __m512i both) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_extracti64x4_epi64(0xff, both, half));
}
/// 2^x with a relative error of 2^-18, for results that are rounded to bf16. NaN stays NaN. The polynomial is
/// the minimax fit on [0, 1].
NRL_ALWAYS Lanes exp2_rounded(Lanes x) {
  const Lanes f = _mm512_maskz_reduce_ps(0xffff, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Lanes p = micro::splat(0.01353416791f);
  p = p * f + 0.05201146062f;
  p = p * f + 0.2414427569f;
  p = p * f + 0.6930038345f;
  p = p * f + 1.000002593f;
  return _mm512_maskz_scalef_ps(0xffff, p, x);
}

/// The op of all elements of each of 16 vectors, in a lane each.
template <int h = 1, class Op>
NRL_ALWAYS Lanes reduce_rows(Lanes (&v)[lanes], const Op& op) {
#pragma GCC unroll 16
  for (int i = 0; i < lanes; i += 2 * h) {
    exchange<h>(v[i], v[i + h], std::make_integer_sequence<int, lanes>());
    v[i] = op(v[i], v[i + h]);
  }
  if constexpr (2 * h < lanes) return reduce_rows<2 * h>(v, op);
  return v[0];
}

/// A bit for each key of a block.
using KeyBits = uint64_t;
NRL_ALWAYS KeyBits first_keys(int64_t n) {
  return n <= 0 ? 0 : ~KeyBits{0} >> (key_block - std::min(n, key_block));
}
NRL_ALWAYS __mmask16 bits_of_vector(KeyBits bits, int64_t v) {
  return static_cast<__mmask16>(bits >> v * lanes);
}

/// The kept probabilities of a block: for each 16 queries and each key, a bit for each query.
class KeepBits {
 public:
  explicit KeepBits(std::byte* memory) : bits_(reinterpret_cast<uint16_t*>(memory)) {}

  void draw(const KeepMask& mask, const Block& b, int64_t row, int64_t head, int64_t key, int64_t key_row) {
    for (int64_t i = 0; i < b.queries; i += lanes)
      mask.for_keys(
          row + i, head, key, key_row, b.keys_of(i, lanes),
          [to = bits_ + i * vectors](int64_t j, micro::IntVec keep) __attribute__((always_inline)) {
            to[j] = _mm512_movepi32_mask(reinterpret_cast<__m512i>(keep));
          });
  }
  /// The bits of keys [16 v, 16 v + 16) for query `i`.
  NRL_ALWAYS __mmask16 of(int64_t i, int64_t v) const {
    const __m256i keys =
        _mm256_load_si256(reinterpret_cast<const __m256i*>(bits_ + i / lanes * key_block + v * lanes));
    return _mm512_test_epi32_mask(_mm512_maskz_cvtepu16_epi32(0xffff, keys),
                                  _mm512_maskz_set1_epi32(0xffff, 1 << (i % lanes)));
  }

 private:
  uint16_t* bits_;  ///< (query / 16, key)
};

/// A block whose elements are all visible and not at the end of a sequence needs no masks.
struct VisibleKeys {
  const Block& b;
  /// By queries [i, i + 16).
  bool all(int64_t i) const { return b.full && b.keys == key_block && i + lanes <= b.queries; }
  /// The vectors that queries [i, i + 16) see.
  Range vectors_of(int64_t i) const {
    const Range keys = i < b.queries ? b.keys_of(i, lanes) : Range{0, 0};
    return {keys.begin / lanes, ceil_div(std::max(keys.begin, keys.end), lanes)};
  }
  KeyBits of(int64_t i) const {
    if (i >= b.queries) return 0;
    const Range keys = b.keys_of(i, 1);
    return first_keys(keys.end) & ~first_keys(keys.begin);
  }
};

/// The strip of a block from query `first` on.
inline Block strip_of(const Block& b, int64_t first) {
  return {std::min(strip_queries, b.queries - first),
          b.keys,
          {b.mask.causal, b.mask.window, b.mask.shift + first}};
}

/// Range of words of the keys or queries of `r`, in whole tiles.
inline Range words_of(const Range& r) {
  const int64_t begin = r.begin / bf16_multiple * tile_words;
  return {begin, std::max(begin, ceil_div(r.end, bf16_multiple) * tile_words)};
}

/// s [query][key] = a b over the words of D: S = Q K^T, or dP = dO V^T.
inline void score_product(const Block& b, int64_t words, const float* a, const float* keys, float* s) {
  const int64_t queries = round_up(b.queries, lanes);
  for (int64_t i = 0; i < queries; i += 2 * lanes) {
    const Range r = b.keys_of(i, 2 * lanes);
    const int64_t begin = r.begin / lanes * lanes, end = round_up(std::max(r.begin, r.end), lanes);
    if (begin < end)
      Bf16Product::multiply(std::min<int64_t>(2 * lanes, queries - i), end - begin, words,
                            {const_cast<float*>(a) + i * words, words},
                            {const_cast<float*>(keys) + begin, key_block},
                            {s + i * key_block + begin, key_block}, false);
  }
}
/// out [query][column] = or += a b over the words of keys: O += P V, dQ += dS K.
inline void by_query(const Block& b, int64_t padded, const float* a, const float* keys, float* out,
                     bool accumulate) {
  const int64_t queries = round_up(b.queries, lanes);
  for (int64_t i = 0; i < queries; i += 2 * lanes) {
    const Range w = words_of(b.keys_of(i, 2 * lanes));
    Bf16Product::multiply(std::min<int64_t>(2 * lanes, queries - i), padded, w.end - w.begin,
                          {const_cast<float*>(a) + i * block_words + w.begin, block_words},
                          {const_cast<float*>(keys) + w.begin * padded, padded}, {out + i * padded, padded},
                          accumulate);
  }
}
/// out [column][key] += a b over the words of queries: dV^T += dO^T P, dK^T += Q^T dS.
inline void by_key(const Block& b, int64_t padded, const float* columns, const float* pairs, float* out) {
  const int64_t keys = round_up(b.keys, lanes);
  for (int64_t j = 0; j < keys; j += 2 * lanes) {
    const Range w = words_of(b.queries_of(j, 2 * lanes));
    if (w.begin < w.end)
      Bf16Product::multiply(padded, std::min<int64_t>(2 * lanes, keys - j), w.end - w.begin,
                            {const_cast<float*>(columns) + w.begin, block_words},
                            {const_cast<float*>(pairs) + w.begin * key_block + j, key_block},
                            {out + j, key_block}, true);
  }
}

}  // namespace nrl::ops::NRL_ISA
