#pragma once
// Copies of GEMM operands in panels of 32-bit words, for packed.h.

#include "core/ops/gemm/packed_sizes.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA::packed {
using namespace nrl::ops::packed;  // NOLINT: the sizes, which no instruction set changes

/// Tiles of the result are two vectors wide, with as many rows as there are registers for their sums.
inline constexpr TileSize vector_tile{.rows = lanes == 16 ? 14 : 6, .columns = 2 * lanes};

/// How elements are packed and multiplied as T: `per` of them are a word, neighbors along the inner
/// dimension.
template <class T>
struct Words;

/// f32: elements of any type are upcast.
template <>
struct Words<float> {
  static constexpr int64_t per = 1;
  /// Up to `lanes` words of a row, of which `elements` are left.
  template <class S>
  NRL_INLINE Lanes along(const S* x, int64_t elements) {
    return FirstLanes(elements).load(x);
  }
  /// A word of each of up to `lanes` neighboring rows of a transposed operand; `pair`: all elements of the
  /// word exist.
  template <class S>
  NRL_INLINE Lanes across(const S* x, int64_t, const FirstLanes& valid, bool) {
    return valid.load(x);
  }
  NRL_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return sum + a * b; }
};

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

/// Packing prefetches words of a transposed operand, whose rows may be pages apart, and bytes of each of 16
/// rows, which are more streams than the hardware prefetcher follows.
inline constexpr int64_t words_ahead = 32, bytes_ahead = 256;
/// Words of a transposed operand that are packed for all of its rows before the next words.
inline constexpr int64_t words_together = 32;

// A vector may be wider than a row of a panel. What it holds behind the row then goes to the next words,
// which are packed later; the last words of a panel are stored one by one where vectors would reach beyond
// it.

/// The words [begin, end) of a panel of `width` rows of a transposed operand; rows from `outer` on are zero.
template <class T, class S>
NRL_INLINE void pack_transposed(const Part<S>& x, int64_t outer, int64_t width, int64_t inner, int64_t begin,
                                int64_t end, float* panel) {
  constexpr int64_t per = Words<T>::per;
  const int64_t whole = std::min(end, inner / per);
  struct Vectors {
    FirstLanes left, right;
    explicit Vectors(int64_t count) : left(count), right(count - lanes) {}
  };
  const auto pack = [&](int64_t w, int64_t last, const Vectors& loaded, const Vectors& stored)
      __attribute__((always_inline)) {
    const S* from = x.data + w * per * x.ld;
    float* to = panel + w * width;
    for (; w < last; ++w, from += per * x.ld, to += width) {
#pragma GCC unroll 2
      for (int64_t row = words_ahead * per; row < (words_ahead + 1) * per; ++row) {
        __builtin_prefetch(from + row * x.ld);
        if (width > lanes) __builtin_prefetch(from + row * x.ld + lanes);
      }
      stored.left.store(to, Words<T>::across(from, x.ld, loaded.left, w < whole));
      if (width > lanes)
        stored.right.store(to + lanes, Words<T>::across(from + lanes, x.ld, loaded.right, w < whole));
    }
  };
  // Whole vectors of an operand are loaded where its next row follows.
  const int64_t behind = (width + lanes - 1) / lanes * lanes - width;
  const int64_t careful = behind == 0 ? 0 : std::max<int64_t>(1, (behind + width - 1) / width);
  const int64_t safe = outer == width && x.ld >= behind ? std::max(begin, end - careful) : begin;
  pack(begin, safe, Vectors(2 * lanes), Vectors(2 * lanes));
  pack(safe, end, Vectors(outer), Vectors(width));
}

/// A panel of `width` rows of `inner` elements; rows from `outer` on are zero.
template <class T, class S>
void pack_rows(const Part<S>& x, int64_t outer, int64_t width, int64_t inner, float* panel) {
  constexpr int64_t per = Words<T>::per;
  const int64_t words = (inner + per - 1) / per;
  // The last rows first: what is behind theirs belongs to the first ones.
  for (int64_t o = (width - 1) / lanes * lanes; o >= 0; o -= lanes) {
    const FirstLanes stored(width - o);
    for (int64_t w = 0; w < words; w += lanes) {
      constexpr int64_t ahead = bytes_ahead / static_cast<int64_t>(sizeof(S));
      Lanes r[lanes];
      for (int64_t i = o; i < std::min(o + lanes, outer); ++i)
        __builtin_prefetch(x.data + i * x.ld + w * per + ahead);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i)
        r[i] = o + i < outer ? Words<T>::along(x.data + (o + i) * x.ld + w * per, inner - w * per) : Lanes{};
      transpose(r);
      float* const to = panel + w * width + o;
      const int64_t count = words - w;
      if ((w + lanes - 1) * width + o + lanes <= words * width) {
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) store(to + i * width, r[i]);
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i)
          if (i < count) stored.store(to + i * width, r[i]);
      }
    }
  }
}

/// Calls body(Part) with the element type of an operand that is packed as T.
template <class T, class Body>
NRL_INLINE void with_part(const Operand& x, int64_t outer, int64_t inner, const Body& body) {
  if constexpr (std::is_same_v<T, float>)
    for_float_type(x.dtype, [&]<class S>() { body(Part<S>(x, outer, inner)); });
  else
    body(Part<T>(x, outer, inner));
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
  const int64_t words = (inner + Words<T>::per - 1) / Words<T>::per, origin = tiling.begin(from);
  const auto panel = [&](int64_t i) { return panels + (tiling.begin(i) - origin) * words; };
  if (!a.transposed) {
    for (int64_t i = from; i < to; ++i)
      with_part<T>(a, row + tiling.begin(i), k, [&](const auto& x) {
        pack_rows<T>(x, tiling.height(i), tiling.height(i), inner, panel(i));
      });
    return;
  }
  // All tiles of a few rows of the memory before the next rows, which may be pages away.
  with_part<T>(a, row + origin, k, [&](auto x) {
    const auto* const begin = x.data;
    for (int64_t w = 0; w < words; w += words_together)
      for (int64_t i = from; i < to; ++i) {
        x.data = begin + tiling.begin(i) - origin;
        pack_transposed<T>(x, tiling.height(i), tiling.height(i), inner, w,
                           std::min(words, w + words_together), panel(i));
      }
  });
}

}  // namespace nrl::ops::NRL_ISA::packed
