#pragma once
// The kernel of packed.h that multiplies bf16 on AMX tiles: 2 x 2 tiles of 16 x 16 f32 sums, to which
// tdpbf16ps adds the products of 32 elements of the inner dimension. Panels of b are laid out as in the
// vector kernels: 16 of its words [word][column] are a tile. A tile of a is [row][word]: rows of a are
// copied, and columns transposed. Rows and words are padded with zeros.
//
// An element of c is the sum over pieces of 32 elements of the inner dimension in their order.

#include "core/ops/gemm/packed.h"
#include "core/ops/gemm/pairs_avx512.h"
#include "core/ops/gemm/tile_block.h"

namespace nrl::ops::NRL_ISA::packed {

inline constexpr int64_t tile_columns = amx_tile.columns;
static_assert(amx_tile.rows == 2 * tile_height && tile_columns == 2 * tile_words &&
              amx_tile.row_unit == tile_height && amx_tile.word_unit == tile_words);

/// The tiles [16 words][16 rows] from word `w` on of `height` rows of a, padded to whole tiles.
NRL_INLINE void pack_tiles(const Part<bf16>& x, int64_t height, int64_t inner, int64_t w, float* tile) {
  const int64_t words = (inner + 1) / 2;
  for (int64_t o = 0; o < height; o += tile_height, tile += tile_height * tile_words) {
    Lanes r[tile_height];
    if (x.transposed) {
      const FirstLanes valid(height - o);
      const bf16* const from = x.data + 2 * w * x.ld + o;
      for (int64_t row = 2 * words_ahead; row < 2 * (words_ahead + tile_words) && o == 0; ++row)
        __builtin_prefetch(from + row * x.ld);
#pragma GCC unroll 16
      for (int64_t i = 0; i < tile_words; ++i)
        r[i] = w + i < words ? Words<bf16>::across(from + 2 * i * x.ld, x.ld, valid, 2 * (w + i) + 1 < inner)
                             : Lanes{};
      transpose(r);
    } else {
      const bf16* const from = x.data + o * x.ld + 2 * w;
      for (int64_t i = 0; i < std::min(tile_height, height - o); ++i)
        __builtin_prefetch(from + i * x.ld + bytes_ahead / 2);
#pragma GCC unroll 16
      for (int64_t i = 0; i < tile_height; ++i)
        r[i] = o + i < height ? Words<bf16>::along(from + i * x.ld, inner - 2 * w) : Lanes{};
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < tile_height; ++i) store(tile + i * tile_words, r[i]);
  }
}

/// `Tiles`: the operations of tiles_amx.h or of tiles_emulated.h.
template <class Tiles>
struct TileKernel {
  using Element = bf16;
  static constexpr TileSize size = amx_tile;
  /// Its tiles belong to the thread as long as it multiplies.
  struct Thread {
    Thread() { Tiles::configure(); }
    ~Thread() { Tiles::release(); }
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;
  };

  /// Where all tiles are whole.
  static bool in_place(const Product& p) {
    return reads_in_place<bf16>(p) && p.rows % tile_height == 0 && p.inner % (2 * tile_words) == 0 &&
           p.a.ld % 2 == 0;
  }

  /// As pack_group(), in panels [16 words][padded rows][words].
  static void pack(const Operand& a, int64_t row, const Tiling& tiling, int64_t from, int64_t to, int64_t k,
                   int64_t inner, float* panels) {
    const int64_t words = size.padded_words((inner + 1) / 2), origin = tiling.begin(from);
    const auto pack_words = [&](int64_t i, int64_t w) {
      pack_tiles(Part<bf16>(a, row + tiling.begin(i), k), tiling.height(i), inner, w,
                 panels + (tiling.begin(i) - origin) * words + w * size.padded_rows(tiling.height(i)));
    };
    // Along the rows of the memory.
    if (a.transposed)
      for (int64_t w = 0; w < words; w += tile_words)
        for (int64_t i = from; i < to; ++i) pack_words(i, w);
    else
      for (int64_t i = from; i < to; ++i)
        for (int64_t w = 0; w < words; w += tile_words) pack_words(i, w);
  }

  /// A tile of rows multiplies some of its words, which the first-level cache keeps, with all stripes before
  /// the next words.
  static void multiply(const Task& t) {
    alignas(64) float only[size.rows * tile_columns];
    for (int64_t i = t.from; i < t.to; ++i) {
      const int64_t height = t.tiling.height(i), row = t.row(i);
      int64_t w = 0;
      do {  // empty sums are written, too
        const int64_t words = std::min(size.words, t.words - w);
        const bool begins = w == 0, ends = w + words == t.words;
        const auto* const a =
            t.in_place ? reinterpret_cast<const float*>(t.a + row * t.ld) + w
                       : reinterpret_cast<const float*>(t.a) + row * t.words + w * size.padded_rows(height);
        const int64_t ld = t.in_place ? t.ld / 4 : tile_words;
        const TileSteps a_step{ld, tile_height * ld,
                               t.in_place ? tile_words : size.padded_rows(height) * tile_words};
        constexpr TileSteps b_step{tile_columns, tile_words, tile_words * tile_columns};
        for (int64_t column = 0; column < t.columns; column += tile_columns) {
          const Result c = t.c.at(row, column);
          float* const sums = begins && ends ? only : t.sums + column * size.rows;
          const RowFetch fetch{c, ends ? height : 0};
          const auto multiply_rows = [&]<int row_tiles>() {
            multiply_tiles<Tiles, row_tiles, 2, true>(begins, words, a, a_step,
                                                      t.b + column * t.words + w * tile_columns, b_step, sums,
                                                      tile_columns, fetch);
          };
          height > tile_height ? multiply_rows.template operator()<2>()
                               : multiply_rows.template operator()<1>();
          if (ends) finish_tile(sums, c, height, t.columns - column);
        }
        w += size.words;
      } while (w < t.words);
    }
  }

 private:
  /// Prefetches rows of the result, a few with each tile of words: all at once they would hold up the panels.
  struct RowFetch {
    const Result& c;
    int64_t rows;
    inline __attribute__((always_inline)) void operator()(int64_t word) const {
      constexpr int64_t each = 4;
      const int64_t row = word / tile_words * each;
      if (row >= rows) return;
#pragma GCC unroll 4
      for (int64_t i = 0; i < each; ++i) __builtin_prefetch(c.of(row + i, 0), 1);
    }
  };

  static void finish_tile(const float* sums, const Result& c, int64_t height, int64_t columns) {
    const FirstLanes left(columns), right(columns - tile_words);
    for_float_type(c.dtype, [&]<class C>() {
      for (int64_t i = 0; i < height; ++i, sums += tile_columns) {
        finish<C>(NRL_ISA::load(sums), c, i, 0, left);
        finish<C>(NRL_ISA::load(sums + tile_words), c, i, tile_words, right);
      }
    });
  }
};

}  // namespace nrl::ops::NRL_ISA::packed
