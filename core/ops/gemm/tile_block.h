#pragma once
// Products of pairs of bf16 on AMX tiles of 16 x 16 f32 sums. `Tiles`: the operations of tiles_amx.h or of
// tiles_emulated.h.

#include <cstdint>

namespace nrl::ops::NRL_ISA {

/// Words in a row of a tile, and its rows.
inline constexpr int64_t tile_words = 16, tile_height = 16;

/// Distances between the rows of an operand, between its tiles of rows (a) or columns (b), and between its
/// tiles of the inner dimension. In words.
struct TileSteps {
  int64_t row, tile, words;
};

/// Does nothing beside the products of a tile.
struct Nothing {
  void operator()(int64_t) const {}
};

/// c = (if `begins`) or += a b, for one or two tiles of rows and of columns, over whole tiles of words. A
/// tile of a is [row][word], of b [word][column], of c [row][column], the second one of a row right of the
/// first. `b_once`: the first-level cache need not keep b. `beside(w)` is called before the products from
/// word w on, at the start of each tile.
template <class Tiles, int row_tiles, int column_tiles, bool b_once = false, class Beside = Nothing>
inline void multiply_tiles(bool begins, int64_t words, const float* a, const TileSteps& a_step,
                           const float* b, const TileSteps& b_step, float* c, int64_t c_ld,
                           const Beside& beside = {}) {
  const auto load_b = [&]<int tile>(const float* from) {
    if constexpr (b_once)
      Tiles::template stream<tile>(from, b_step.row);
    else
      Tiles::template load<tile>(from, b_step.row);
  };
  float* const lower = c + tile_height * c_ld;
  if (begins) {
    Tiles::template zero<0>();
    if constexpr (column_tiles > 1) Tiles::template zero<1>();
    if constexpr (row_tiles > 1) Tiles::template zero<2>();
    if constexpr (row_tiles > 1 && column_tiles > 1) Tiles::template zero<3>();
  } else {
    Tiles::template load<0>(c, c_ld);
    if constexpr (column_tiles > 1) Tiles::template load<1>(c + tile_words, c_ld);
    if constexpr (row_tiles > 1) Tiles::template load<2>(lower, c_ld);
    if constexpr (row_tiles > 1 && column_tiles > 1) Tiles::template load<3>(lower + tile_words, c_ld);
  }
  for (int64_t w = 0; w < words; w += tile_words, a += a_step.words, b += b_step.words) {
    beside(w);
    Tiles::template load<4>(a, a_step.row);
    load_b.template operator()<6>(b);
    if constexpr (row_tiles > 1) Tiles::template load<5>(a + a_step.tile, a_step.row);
    if constexpr (column_tiles > 1) load_b.template operator()<7>(b + b_step.tile);
    Tiles::template multiply_add<0, 4, 6>();
    if constexpr (column_tiles > 1) Tiles::template multiply_add<1, 4, 7>();
    if constexpr (row_tiles > 1) Tiles::template multiply_add<2, 5, 6>();
    if constexpr (row_tiles > 1 && column_tiles > 1) Tiles::template multiply_add<3, 5, 7>();
  }
  Tiles::template store<0>(c, c_ld);
  if constexpr (column_tiles > 1) Tiles::template store<1>(c + tile_words, c_ld);
  if constexpr (row_tiles > 1) Tiles::template store<2>(lower, c_ld);
  if constexpr (row_tiles > 1 && column_tiles > 1) Tiles::template store<3>(lower + tile_words, c_ld);
}

}  // namespace nrl::ops::NRL_ISA
