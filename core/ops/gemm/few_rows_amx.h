#pragma once
// The GEMM of few_rows.h on AMX tiles, which hold 2 x 16 rows of the weight where they lie in memory.

#include "core/ops/gemm/few_rows.h"
#include "core/ops/gemm/packed_amx.h"

namespace nrl::ops::NRL_ISA::packed {

template <class Tiles>
struct FewRowsKernel<TileKernel<Tiles>> {
  static constexpr int64_t block = 2 * tile_height;
  using Thread = typename TileKernel<Tiles>::Thread;
  static_assert(lanes == tile_height && lanes == tile_words);
  /// Words between prefetches of the next rows.
  static constexpr int64_t step = 4 * tile_words;

  /// Whole tiles of words, and of rows of the weight.
  static bool suits(const Product& p) {
    return p.inner % (2 * tile_words) == 0 && p.b.ld % 2 == 0 && p.columns >= block;
  }

  template <int column_tiles>
  static void multiply(const FewRows& f, int64_t row, int64_t rows) {
    constexpr int64_t ld = column_tiles * tile_words, piece = piece_bytes / 4;
    const Product& p = f.p;
    // The last rows with those before them, whose sums are not written again.
    const int64_t first = std::min(row, p.columns - block), again = row - first;
    const auto* const w = reinterpret_cast<const float*>(static_cast<const bf16*>(p.b.data) + first * p.b.ld);
    const int64_t w_ld = p.b.ld / 2;
    const TileSteps w_step{w_ld, tile_height * w_ld, tile_words},
        x_step{tile_words, f.words * tile_words, tile_words * tile_words};
    alignas(64) float sums[block * ld], total[block * ld];
    for (int64_t begin = 0; begin < f.words; begin += piece) {
      const int64_t end = std::min(f.words, begin + piece);
      for (int64_t k = begin; k < end; k += step) {
        const int64_t words = std::min(step, end - k);
        for (int64_t r = 0; r < block; ++r)
          for (int64_t i = 0; i < words; i += tile_words)
            __builtin_prefetch(w + (block + r) * w_ld + k + i, 0, 2);
        multiply_tiles<Tiles, 2, column_tiles>(k == begin, words, w + k, w_step, f.panels + k * tile_words,
                                               x_step, sums, ld);
      }
      for (int64_t r = 0; r < block; ++r)
        for (int64_t c = 0; c < ld; c += lanes) {
          Lanes sum = load(sums + r * ld + c);
          if (end == f.words && p.bias) sum += p.bias[first + r];
          store(total + r * ld + c, begin == 0 ? sum : sum + load(total + r * ld + c));
        }
    }
    for (int64_t r = again; r < again + rows; r += lanes)
      for (int64_t c = 0; c < ld; c += lanes) {
        Lanes part[lanes];
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) part[i] = load(total + std::min<int64_t>(r + i, block - 1) * ld + c);
        write_transposed(p, part, first + r, std::min<int64_t>(lanes, again + rows - r), c);
      }
  }
  static void multiply(const FewRows& f, int64_t row, int64_t rows) {
    f.count() > 1 ? multiply<2>(f, row, rows) : multiply<1>(f, row, rows);
  }
};

}  // namespace nrl::ops::NRL_ISA::packed
