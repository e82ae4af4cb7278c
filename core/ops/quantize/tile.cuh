#pragma once
// A tile of 128 x 128 numbers that a block rounds to FP8, and where it lies; included by cuda.cu alone. Warp
// w has rows 16 w to 16 w + 15, each lane 4 neighboring columns, in registers. The codes of the column copy
// are transposed in shared memory.
//
// With groups a block finds its tile's group and rows in the offsets (shared/gpu/groups.cuh), in the order of
// groups; behind the last one it leaves.

#include "core/device/kernel.h"
#include "core/ops/quantize.h"
#include "core/ops/quantize/codes.cuh"
#include "core/ops/shared/fp8.h"
#include "core/ops/shared/gpu/groups.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

constexpr int threads = 256, warps = threads / warp;
constexpr int side = 128, rows_per_warp = side / warps, columns_per_lane = side / warp;

/// A copy in memory; without data it is not wanted.
struct Copy {
  unsigned char* data = nullptr;
  unsigned char* scales = nullptr;
  int64_t row_step = 0, column_step = 0;

  explicit Copy(const Tensor& t)
      : data(static_cast<unsigned char*>(t.data)),
        scales(static_cast<unsigned char*>(t.scales.data)),
        row_step(t.scales.row_step),
        column_step(t.scales.column_step) {}
  template <Scaling scaling>
  __device__ __forceinline__ void store_scale(int64_t row, int64_t column, unsigned byte) const {
    unsigned char* at = scales + scale_offset(scaling, row_step, column_step, row, column);
    if constexpr (scaling == Scaling::mx32)
      *at = static_cast<unsigned char>(byte);
    else
      *reinterpret_cast<float*>(at) = fp8::scale_value(byte);
  }
};

__device__ __forceinline__ unsigned magnitude(float x) {
  return __float_as_uint(x) & fp8::magnitude_bits;
}

__device__ __forceinline__ unsigned lanes_max(unsigned v, int lanes) {
  for (int o = lanes / 2; o; o >>= 1) v = max(v, __shfl_xor_sync(all_lanes, v, o));
  return v;
}

/// *amax = max(*amax, the warp's `largest`), of the bits of magnitudes. Whole warps must call it.
__device__ __forceinline__ void raise_amax(float* amax, unsigned largest) {
  largest = lanes_max(largest, warp);
  if (threadIdx.x % warp == 0) atomicMax(reinterpret_cast<unsigned*>(amax), largest);
}

/// A word of a transposed tile in shared memory: 4 codes of row `row`. Words are permuted within a row, so
/// that neither lanes with rows 4 apart nor lanes with neighboring words meet in a bank.
struct TransposedTile {
  unsigned (&words)[side][side / 4];
  __device__ __forceinline__ unsigned& at(int row, int word) const {
    return words[row][word ^ (row / columns_per_lane)];
  }
  /// Writes the transpose of what the lane of warp `w` has: columns_per_lane codes of each of the warp's
  /// rows.
  __device__ __forceinline__ void put(const unsigned (&codes)[rows_per_warp], int lane, int w) const {
#pragma unroll
    for (int q = 0; q < rows_per_warp / 4; ++q) {
      const unsigned rows[4] = {codes[4 * q], codes[4 * q + 1], codes[4 * q + 2], codes[4 * q + 3]};
      unsigned columns[columns_per_lane];
      transpose_bytes(rows, columns);
#pragma unroll
      for (int c = 0; c < columns_per_lane; ++c)
        at(lane * columns_per_lane + c, w * (rows_per_warp / 4) + q) = columns[c];
    }
  }
};

/// Rows of the source and of the copies, which are in groups where there are offsets, else in equal parts.
struct Rows {
  const int* offsets = nullptr;
  int groups = 1, unit = 1;
  int64_t source = 0, copies = 0;        ///< of a part
  int64_t tiles_of_part = 0, tiles = 0;  ///< rows of tiles; of all groups at most

  explicit Rows(const Quantize& a)
      : source(a.source.x.dim(0) / a.parts), copies(a.row ? a.row.dim(0) / a.parts : a.column.dim(1)) {
    if (a.offsets) {
      offsets = static_cast<const int*>(a.offsets.data);
      groups = static_cast<int>(a.offsets.dim(0)) - 1;
      unit = static_cast<int>(row_unit((a.row ? a.row : a.column).scales.kind));
    }
    tiles_of_part = a.offsets ? most_tiles(source, groups, side) : (source + side - 1) / side;
    tiles = tiles_of_part * a.parts;
  }
};
/// Rows of a tile in the copies, from `first` to `end`; row i is row i - shift of the source, or zeros from
/// `zeros` on. Nothing: there is no such tile.
struct TileRows {
  int64_t first = 0, end = 0, zeros = 0, shift = 0, part = 0;
};
__device__ __forceinline__ TileRows tile_rows(const Rows& rows, int64_t tile) {
  if (!rows.offsets) {
    const int64_t part = rows.tiles == rows.tiles_of_part ? 0 : tile / rows.tiles_of_part,
                  begin = part * rows.source, end = begin + rows.source;
    return {begin + (tile - part * rows.tiles_of_part) * side, end, end, 0, part};
  }
  const GroupTile t = find_tile(rows.offsets, rows.groups, side, tile);
  const int64_t begin = group_begin(t.begin, t.group, rows.unit);
  return {begin + int64_t{t.tile} * side, begin + (t.rows + rows.unit - 1) / rows.unit * rows.unit,
          begin + t.rows, begin - t.begin};
}

/// What the scale of a tensor is found from (Quantize::measured), if anything.
struct Measured {
  const float* amax = nullptr;
  int margin = 0;

  explicit Measured(const Quantize& a) : amax(static_cast<const float*>(a.measured.data)), margin(a.margin) {}
};

/// Writes (=) the codes and scales of tiles to both copies.
template <DType format, Scaling scaling>
class TileWriter {
 public:
  /// `k`: columns of the copies. `amax`, if not null, is raised by finish().
  __device__ __forceinline__ TileWriter(const Copy& row_copy, const Copy& column_copy, float* amax,
                                        const Measured& measured, const Rows& rows, int64_t k)
      : row_copy_(row_copy),
        column_copy_(column_copy),
        amax_(amax),
        part_rows_(rows.source),
        rows_(rows.copies),
        k_(k) {
    if (in_blocks) return;
    auto* const scale = reinterpret_cast<float*>(row_copy.data ? row_copy.scales : column_copy.scales);
    if (!measured.amax) {
      inverse_ = 1.0f / *scale;
      return;
    }
    // Every block finds the scale; the first one writes it, and none reads it.
    const float found = fp8::tensor_scale(*measured.amax, format, measured.margin, 1.0f);
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale = found;
    inverse_ = 1.0f / found;
  }

  /// The tile at (at.first, column0), of columns up to `end`, of which value(r, c) is row r of the warp and
  /// column c of the lane, 0 outside. All threads of the block must call it.
  template <class Value>
  __device__ __forceinline__ void write(const TileRows& at, int64_t column0, int64_t end,
                                        const Value& value) {
    const int64_t row0 = at.first, n = at.end;
    // Of the part: its first row, and that of its transpose.
    const int64_t part_row = at.part * part_rows_, part_column = at.part * k_;
    NRL_SHARED(unsigned, words, [side][side / 4]);
    NRL_SHARED(unsigned, part, [warps][side]);
    const TransposedTile tile{words};
    const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
    const int64_t row = row0 + w * rows_per_warp, column = column0 + lane * columns_per_lane;
    const bool inside = column < end;
    // Of the lane's columns, over the warp's rows.
    unsigned largest[columns_per_lane] = {};
    if (in_blocks || amax_) {
#pragma unroll
      for (int r = 0; r < rows_per_warp; ++r)
#pragma unroll
        for (int c = 0; c < columns_per_lane; ++c) largest[c] = max(largest[c], magnitude(value(r, c)));
    }
    if (!in_blocks && amax_) {
#pragma unroll
      for (int c = 0; c < columns_per_lane; ++c) largest_ = max(largest_, largest[c]);
    }
    unsigned block = 0;
    if (in_blocks && (scaling == Scaling::block128 || column_copy_.data)) {
#pragma unroll
      for (int c = 0; c < columns_per_lane; ++c) part[w][lane * columns_per_lane + c] = largest[c];
      __syncthreads();
    }
    if (scaling == Scaling::block128) {
      unsigned mine = 0;
#pragma unroll
      for (int i = 0; i < warps; ++i)
#pragma unroll
        for (int c = 0; c < columns_per_lane; ++c) mine = max(mine, part[i][lane * columns_per_lane + c]);
      block = fp8::scale_of<format>(lanes_max(mine, warp));
      if (threadIdx.x == 0) {
        if (row_copy_.data) row_copy_.template store_scale<scaling>(row0, column0, block);
        if (column_copy_.data)
          column_copy_.template store_scale<scaling>(part_column + column0, row0 - part_row, block);
      }
    }
    const float block_inverse = in_blocks ? fp8::inverse_scale(block) : inverse_;
    // The codes of both copies, where they have the same scale.
    unsigned codes[rows_per_warp];
    if constexpr (!in_lines) {
#pragma unroll
      for (int r = 0; r < rows_per_warp; ++r) {
        const float x[4] = {value(r, 0), value(r, 1), value(r, 2), value(r, 3)};
        codes[r] =
            in_blocks ? block_codes<format>(x, block, block_inverse) : tensor_codes<format>(x, block_inverse);
      }
    }
    if (row_copy_.data) {
#pragma unroll
      for (int r = 0; r < rows_per_warp; ++r) {
        unsigned word = 0;
        if constexpr (in_lines) {
          unsigned m = 0;
#pragma unroll
          for (int c = 0; c < columns_per_lane; ++c) m = max(m, magnitude(value(r, c)));
          constexpr int lanes = group / columns_per_lane;
          const unsigned byte = fp8::scale_of<format>(lanes_max(m, lanes));
          const float inverse = fp8::inverse_scale(byte);
          const float x[4] = {value(r, 0), value(r, 1), value(r, 2), value(r, 3)};
          word = block_codes<format>(x, byte, inverse);
          if (lane % lanes == 0 && (whole_tile || (inside && row + r < n)))
            row_copy_.template store_scale<scaling>(row + r, column, byte);
        } else {
          word = codes[r];
        }
        if (inside && row + r < n)
          *reinterpret_cast<unsigned*>(row_copy_.data + (row + r) * k_ + column) = word;
      }
    }
    if (column_copy_.data) {
      if constexpr (in_lines) {
#pragma unroll
        for (int c = 0; c < columns_per_lane; ++c) {
          constexpr int sharing = group / rows_per_warp;  // warps
          unsigned m = 0;
#pragma unroll
          for (int i = 0; i < sharing; ++i)
            m = max(m, part[w / sharing * sharing + i][lane * columns_per_lane + c]);
          const unsigned byte = fp8::scale_of<format>(m);
          const float inverse = fp8::inverse_scale(byte);
          if (w % sharing == 0 && (whole_tile || (inside && row < n)))
            column_copy_.template store_scale<scaling>(part_column + column + c, row - part_row, byte);
#pragma unroll
          for (int q = 0; q < rows_per_warp / 4; ++q) {
            const float x[4] = {value(4 * q, c), value(4 * q + 1, c), value(4 * q + 2, c),
                                value(4 * q + 3, c)};
            tile.at(lane * columns_per_lane + c, w * (rows_per_warp / 4) + q) =
                block_codes<format>(x, byte, inverse);
          }
        }
      } else {
        tile.put(codes, lane, w);
      }
      __syncthreads();
      for (int j = w; j < side && column0 + j < end; j += warps)
        if (row0 + lane * 4 < n)
          *reinterpret_cast<unsigned*>(column_copy_.data + (part_column + column0 + j) * rows_ + row0 -
                                       part_row + lane * 4) = tile.at(j, lane);
    }
    __syncthreads();
  }

  /// After the last tile. All threads of the block must call it.
  __device__ __forceinline__ void finish() const {
    if (!in_blocks && amax_) raise_amax(amax_, largest_);
  }

 private:
  static constexpr bool in_blocks = scaling != Scaling::tensor;
  static constexpr bool in_lines = scaling == Scaling::row128 || scaling == Scaling::mx32;
  static constexpr bool whole_tile = scaling == Scaling::mx32;  // scales beyond the matrix are written
  static constexpr int group = whole_tile ? 32 : side;

  Copy row_copy_, column_copy_;
  float* amax_;
  int64_t part_rows_, rows_, k_;
  float inverse_ = 1.0f;  ///< of the scale of the tensor
  unsigned largest_ = 0;
};

}  // namespace
}  // namespace nrl::ops::NRL_GPU
