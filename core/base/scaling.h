#pragma once
// How the stored values of an FP8 tensor relate to real ones: a scale per block or per tensor.

#include <cstdint>
#include <string_view>

#include "core/base/dtype.h"
#include "core/base/host_device.h"

namespace nrl {

/// Which elements of a matrix share a scale. A real value is the stored one times its scale.
enum class Scaling : uint8_t {
  none,      ///< stored values are the real ones
  tensor,    ///< the whole tensor, f32
  row128,    ///< 128 neighbors in a row, f32
  block128,  ///< 128 x 128, f32
  mx32,      ///< 32 neighbors in a row, E8M0 (MXFP8)
};

/// "none", "tensor", ... for messages.
constexpr std::string_view name_of(Scaling s) {
  constexpr std::string_view names[] = {"none", "tensor", "row128", "block128", "mx32"};
  return names[static_cast<int>(s)];
}

/// The smallest part of a matrix whose scales lie by themselves, so that a slice may begin or end there.
struct ScaleTile {
  int64_t rows = 0, columns = 0;  ///< 0: the whole matrix
  int64_t bytes = 0;              ///< of its scales
};
constexpr ScaleTile scale_tile(Scaling s) {
  switch (s) {
    case Scaling::row128:
      return {1, 128, 4};
    case Scaling::block128:
      return {128, 128, 4};
    case Scaling::mx32:  // 128 x 4 scales, interleaved as tensor cores read them
      return {128, 128, 512};
    case Scaling::tensor:
      return {0, 0, 4};
    case Scaling::none:
      break;
  }
  return {};
}

/// True when different parts of a matrix have different scales.
constexpr bool has_scale_blocks(Scaling s) {
  return scale_tile(s).rows > 0;
}

/// Numbers from the scale of one tensor to that of the next where GEMMs read them: cuBLASLt 13.1 refuses
/// scales of tensors at addresses that are not multiples of 16 bytes.
inline constexpr int aligned_scale = 4;

/// Rows of a matrix must be a multiple of this: they are a dimension of the transposed copy. Of tensors 16;
/// with blocks 128, the length of a block or of a tile of mx32 scales.
constexpr int64_t row_unit(Scaling s) {
  return has_scale_blocks(s) ? 128 : 16;
}
/// Groups of rows in a copy of a matrix: each begins at a multiple of the unit, so that groups share no
/// block, and has zeros behind its rows up to the next multiple. Group `group` of a matrix begins at row
/// `offset` there and here in the copy, which has grouped_rows() rows.
NRL_HOST_DEVICE constexpr int64_t group_begin(int64_t offset, int64_t group, int64_t unit) {
  return (offset / unit + group) * unit;
}
constexpr int64_t grouped_rows(int64_t rows, int64_t groups, int64_t unit) {
  return group_begin(rows, groups, unit);
}

/// Where the scales of a (rows, columns) matrix lie: bytes between the tiles below and beside each other, and
/// of all of them. The layout that cuBLASLt reads, padding included.
struct ScaleMatrix {
  int64_t row_step = 0, column_step = 0, bytes = 0;
};
constexpr ScaleMatrix scale_matrix(Scaling s, int64_t rows, int64_t columns) {
  const ScaleTile tile = scale_tile(s);
  if (!has_scale_blocks(s)) return {0, 0, tile.bytes};
  const auto padded = [](int64_t n) { return (n + 3) / 4 * 4; };
  int64_t down = (rows + tile.rows - 1) / tile.rows, across = (columns + tile.columns - 1) / tile.columns;
  if (s == Scaling::row128) {  // column by column
    down = padded(down);
    return {tile.bytes, down * tile.bytes, down * across * tile.bytes};
  }
  if (s == Scaling::block128) across = padded(across);
  return {across * tile.bytes, tile.bytes, down * across * tile.bytes};
}

/// Bytes from a matrix's first scale to that of element (row, column).
NRL_HOST_DEVICE inline int64_t scale_offset(Scaling s, int64_t row_step, int64_t column_step, int64_t row,
                                            int64_t column) {
  switch (s) {
    case Scaling::row128:
      return row * row_step + column / 128 * column_step;
    case Scaling::block128:
      return row / 128 * row_step + column / 128 * column_step;
    case Scaling::mx32:  // in a tile the scales of rows 32 apart are neighbors
      return row / 128 * row_step + column / 128 * column_step + row % 32 * 16 + row % 128 / 32 * 4 +
             column % 128 / 32;
    default:
      return 0;
  }
}

}  // namespace nrl
