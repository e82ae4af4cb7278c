#pragma once
// Blocking of the packed GEMM (packed.h, packed_amx.h) and the scratch memory that follows from it.
// Needs no instruction set: a plan is made on any machine.

#include <algorithm>
#include <cstdint>

#include "core/ops/shared/scratch.h"

namespace nrl::ops::packed {

/// The result is computed in tiles of at most so many columns, in registers.
inline constexpr int64_t max_tile_columns = 32;
/// Rows and columns of a tile, and the units to which rows of `a` and words of both operands are padded with
/// zeros.
struct TileSize {
  int64_t rows = 1, columns = max_tile_columns, row_unit = 1, word_unit = 1;
  int64_t words = 0;  ///< that a tile multiplies with a batch of columns before the next ones; 0: all at once
  constexpr int64_t padded_rows(int64_t n) const { return (n + row_unit - 1) / row_unit * row_unit; }
  constexpr int64_t padded_words(int64_t n) const { return (n + word_unit - 1) / word_unit * word_unit; }
};
/// In AMX 2 x 2 tiles of 16 x 16 sums over 16 words at a time. AMX needs one operand from the first-level
/// cache, where 32 rows of 256 words take two thirds of 48 KiB; the other one is not kept there.
inline constexpr TileSize amx_tile{.rows = 32, .row_unit = 16, .word_unit = 16, .words = 256};
/// The inner dimension is cut into pieces of this many packed bytes per row.
inline constexpr int64_t piece_bytes = 4096;
/// Rows of `a` that a thread packs at a time: half of a second-level cache of 1 MiB.
inline constexpr int64_t group_bytes = 512 << 10;
static_assert(group_bytes >= amx_tile.rows * piece_bytes);
/// Columns that a tile of rows passes at a time, so that rows of the result are written in longer pieces: at
/// most so many, and bytes that the second-level cache has beside the rows of `a`.
inline constexpr int64_t batch_columns = 256, batch_bytes = 256 << 10;
/// Columns of `b` that are packed at a time, and rows whose f32 sums a 16-bit result needs at a time.
inline constexpr int64_t block_columns = 2048, block_rows = 2048;

/// Operands in FP8 are decoded to f32 in tiles of this many rows: scratch memory has a bound, and decoding
/// takes about 1 % of the time of the GEMM.
inline constexpr int64_t decoded_rows = 2048;

/// How a result (rows, columns) of sums over `inner` is cut. `element`: bytes of a packed element.
struct Blocks {
  int64_t rows = 0, columns = 0, inner = 0;  ///< of a block, at most
  int64_t packed_rows = 0;                   ///< `rows` with padding
  int64_t words = 0;                         ///< 32-bit words of a packed row, with padding
  int64_t group = 0;                         ///< tiles of rows of `a` that a thread packs at a time
  bool sums = false;                         ///< a 16-bit result of several pieces needs f32 sums
  int64_t tile_sums = 0;                     ///< of a thread whose tile does not multiply all words at once
  int64_t batch = 0;                         ///< stripes that a tile of rows passes at a time, at most

  /// Without `tile` the sizes of scratch memory are enough for any tile in vector registers.
  constexpr Blocks(int64_t all_rows, int64_t all_columns, int64_t all_inner, int64_t element, bool rounded,
                   const TileSize& tile = {})
      : inner(piece_bytes / element),
        words(tile.padded_words((std::min(all_inner, inner) * element + 3) / 4)),
        sums(rounded && all_inner > inner) {
    rows = sums ? std::min(all_rows, block_rows) : all_rows;
    columns =
        std::min((all_columns + max_tile_columns - 1) / max_tile_columns * max_tile_columns, block_columns);
    packed_rows = tile.padded_rows(rows);
    group = group_bytes / 4 / std::max<int64_t>(words, 1) / tile.rows;
    if (tile.words > 0 && words > tile.words) tile_sums = tile.rows * batch_columns;
    batch = std::clamp<int64_t>(batch_bytes / 4 / tile.columns / std::max<int64_t>(words, 1), 1,
                                batch_columns / tile.columns);
  }
  /// Words of the packed rows of one thread, the packed columns and the sums. They do not fall when a
  /// dimension grows.
  constexpr int64_t a_size() const { return std::min(packed_rows * words, group_bytes / 4); }
  constexpr int64_t b_size(int threads) const {
    // Threads that pack stripes for themselves have a batch each, but not more batches than there are.
    const int64_t one = std::max(std::min(batch_bytes / 4, batch_columns * words), max_tile_columns * words);
    return std::max(columns * words, std::min(threads * one, columns * words + one));
  }
  constexpr int64_t sums_size() const { return sums ? rows * columns : 0; }
  constexpr size_t bytes(int threads) const {
    return scratch_bytes(threads * a_size()) + scratch_bytes(b_size(threads)) +
           scratch_bytes(threads * tile_sums) + scratch_bytes(sums_size());
  }
};

}  // namespace nrl::ops::packed
