#pragma once
// Products of bf16 matrices for attention: c (rows x columns, f32) = or += a b. Operands are 32-bit words,
// each two neighboring bf16 of the inner dimension: `a` is [row][word] and `b` [word][column]. Rows and
// columns are multiples of 16, words as well.
//
// Compiled for the instruction sets that multiply bf16: on AMX tiles, or with vdpbf16ps on vectors.

#include <cstdint>

#include "core/ops/gemm/bf16_kernel.h"
#include "core/ops/gemm/tile_block.h"

namespace nrl::ops::NRL_ISA {

namespace packed {
template <class Tiles>
struct TileKernel;
}

/// A matrix of words or f32, whose rows are `ld` apart.
struct Matrix {
  float* data;
  int64_t ld;
  Matrix at(int64_t row, int64_t column) const { return {data + row * ld + column, ld}; }
};

/// On vectors. `Kernel`: the GEMM kernel (bf16_kernel.h).
template <class Kernel>
struct WordProduct {
  struct Thread {};  ///< exists on a thread while it multiplies

  static void multiply(int64_t rows, int64_t columns, int64_t words, Matrix a, Matrix b, Matrix c,
                       bool accumulate) {
    for (int64_t j = 0; j < columns; j += 2 * lanes) {
      const auto& run = columns - j >= 2 * lanes ? block<2> : block<1>;
      for (int64_t i = 0; i < rows; i += block_rows)
        run(words, a.at(i, 0), b.at(0, j), c.at(i, j), accumulate);
    }
  }

 private:
  static constexpr int block_rows = 8;  ///< two vectors of sums for each: enough to hide the latency

  template <int vectors>
  static void block(int64_t words, Matrix a, Matrix b, Matrix c, bool accumulate) {
    using Words = packed::Words<typename Kernel::Element>;
    Lanes sum[block_rows][vectors];
#pragma GCC unroll 8
    for (int i = 0; i < block_rows; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) sum[i][v] = accumulate ? load(c.at(i, v * lanes).data) : Lanes{};
    for (int64_t w = 0; w < words; ++w) {
      Lanes row[vectors];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) row[v] = load(b.at(w, v * lanes).data);
#pragma GCC unroll 8
      for (int i = 0; i < block_rows; ++i) {
        const Lanes x = packed::word(reinterpret_cast<const std::byte*>(a.at(i, w).data));
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) sum[i][v] = Words::multiply_add(x, row[v], sum[i][v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < block_rows; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) store(c.at(i, v * lanes).data, sum[i][v]);
  }
};

/// On tiles.
template <class Tiles>
struct WordProduct<packed::TileKernel<Tiles>> {
  using Thread = typename packed::TileKernel<Tiles>::Thread;

  static void multiply(int64_t rows, int64_t columns, int64_t words, Matrix a, Matrix b, Matrix c,
                       bool accumulate) {
    const TileSteps a_step{a.ld, tile_height * a.ld, tile_words}, b_step{b.ld, tile_words, tile_words * b.ld};
    for (int64_t i = 0; i < rows; i += 2 * tile_height)
      for (int64_t j = 0; j < columns; j += 2 * tile_words) {
        const bool two_rows = rows - i > tile_height, two_columns = columns - j > tile_words;
        const auto& run = two_rows ? two_columns ? multiply_tiles<Tiles, 2, 2> : multiply_tiles<Tiles, 2, 1>
                          : two_columns ? multiply_tiles<Tiles, 1, 2>
                                        : multiply_tiles<Tiles, 1, 1>;
        run(!accumulate, words, a.at(i, 0).data, a_step, b.at(0, j).data, b_step, c.at(i, j).data, c.ld, {});
      }
  }
};

using Bf16Product = WordProduct<packed::Bf16Kernel>;

}  // namespace nrl::ops::NRL_ISA
