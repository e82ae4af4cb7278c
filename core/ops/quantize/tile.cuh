#pragma once
// A tile of 128 rows that a block rounds to FP8 (values.cuh), and where it lies; included by cuda.cu alone.
// With scales of blocks it has 128 columns, whole blocks of both copies; with one of the tensor 64, so that
// more blocks share a multiprocessor. The codes of the column copy are transposed in shared memory.
//
// With groups a block finds its tile's group and rows in the offsets (shared/gpu/groups.cuh), in the order of
// groups; a block past the last tile exits.

#include "core/device/kernel.h"
#include "core/ops/quantize.h"
#include "core/ops/quantize/codes.cuh"
#include "core/ops/quantize/values.cuh"
#include "core/ops/shared/fp8.h"
#include "core/ops/shared/gpu/groups.cuh"
#include "core/ops/shared/rows.h"

namespace nrl::ops::NRL_GPU {
namespace {

template <Scaling scaling>
constexpr int tile_columns = scaling == Scaling::tensor ? 64 : side;
template <Scaling scaling>
constexpr int tile_threads = side* tile_columns<scaling> / (rows_per_lane * columns_per_lane);

/// Rows whose loads a lane keeps in flight where a value needs several inputs. More exceed the registers of
/// two blocks of 512 threads.
template <Scaling scaling>
constexpr int rows_ahead = scaling == Scaling::tensor ? rows_per_lane : rows_per_lane / 2;

template <Scaling scaling>
int64_t tiles_across(int64_t columns) {
  const int64_t tiles = (columns + tile_columns<scaling> - 1) / tile_columns<scaling>;
  return tiles < 1 ? 1 : tiles;
}
/// A block per tile, and at least one, which writes the scale of a tensor.
inline unsigned grid_of(int64_t tiles) {
  return static_cast<unsigned>(tiles < 1 ? 1 : tiles);
}

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

/// *amax = max(*amax, the block's `largest`), of the bits of magnitudes. All threads of the block must call
/// it, with a barrier between two calls.
template <int warps>
__device__ __forceinline__ void raise_amax(float* amax, unsigned largest) {
  NRL_SHARED(unsigned, parts, [warps]);
  largest = lanes_max(largest, warp);
  if (threadIdx.x % warp == 0) parts[threadIdx.x / warp] = largest;
  __syncthreads();
  if (threadIdx.x >= warp) return;
  largest = lanes_max(threadIdx.x < warps ? parts[threadIdx.x] : 0, warp);
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(amax), largest);
}

/// The transpose of a tile of codes in shared memory: lanes write words of 4 rows and read 16. Chunks of 16
/// bytes are permuted within a column, so that neither lanes with neighboring columns of codes (of which each
/// has `per_lane`) nor those with neighboring chunks meet in a bank.
template <int columns, int per_lane>
class TransposedTile {
 public:
  static constexpr unsigned chunk = 16, chunks = side / chunk;

  __device__ __forceinline__ explicit TransposedTile(uint4 (&data)[columns][chunks]) : data_(data) {}
  /// Codes of 4 rows from `row` on, of the lane's columns from `column` on, side / 4 words apart.
  __device__ __forceinline__ unsigned* words(int column, int row) const {
    const unsigned c = static_cast<unsigned>(column), word = static_cast<unsigned>(row) / 4;
    return reinterpret_cast<unsigned*>(data_[c]) + (word ^ (c / per_lane % chunks * 4));
  }
  /// Writes columns 4 `i` to 4 `i` + 3 of words().
  static __device__ __forceinline__ void put(unsigned* to, int i, const unsigned (&codes)[4]) {
    unsigned out[4];
    transpose_bytes(codes, out);
#pragma unroll
    for (int c = 0; c < 4; ++c) to[(4 * i + c) * (side / 4)] = out[c];
  }
  /// Stores the part within `wide` columns and `high` rows. All threads of the block must call it.
  template <int threads>
  __device__ __forceinline__ void store(unsigned char* to, int64_t step, int wide, int high) const {
    const unsigned i = threadIdx.x % chunks;
    const int row = static_cast<int>(i * chunk);
#pragma unroll
    for (unsigned first = 0; first < columns; first += threads / chunks) {
      const unsigned c = first + threadIdx.x / chunks;
      const int column = static_cast<int>(c);
      if (column < wide && row < high)
        *reinterpret_cast<uint4*>(to + column * step + row) = data_[c][i ^ (c / per_lane % chunks)];
    }
  }

 private:
  uint4 (&data_)[columns][chunks];
};

/// Rows of the source and of the copies, which are in groups where there are offsets, else in equal parts.
struct Rows {
  const int* offsets = nullptr;
  int groups = 1;
  int64_t source = 0, copies = 0;  ///< of a part
  Divider tiles_of_part;           ///< rows of tiles
  int64_t tiles = 0;               ///< of all parts, or groups at most

  explicit Rows(const Quantize& a)
      : source(a.source.x.dim(0) / a.parts), copies(a.row ? a.row.dim(0) / a.parts : a.column.dim(1)) {
    if (a.offsets) {
      offsets = static_cast<const int*>(a.offsets.data);
      groups = static_cast<int>(a.offsets.dim(0)) - 1;
    }
    const int64_t of_part = a.offsets ? most_tiles(source, groups, side) : (source + side - 1) / side;
    tiles_of_part = Divider(of_part < 1 ? 1 : of_part);
    tiles = of_part * a.parts;
  }
};
__device__ __forceinline__ int within(int64_t n, int most) {
  return n < 0 ? 0 : n < most ? static_cast<int>(n) : most;
}
/// Rows of a tile in the copies: `rows` from `first` on. Row i is row i - shift of the source, or zeros from
/// the tile's row `real` on. No rows: there is no such tile. 32 bits, since the numbers live through the
/// kernel; no matrix has 2^31 rows.
struct TileRows {
  int first = 0, shift = 0, part = 0, rows = 0, real = 0;
};
template <Scaling scaling>
__device__ __forceinline__ TileRows tile_rows(const Rows& rows, int64_t tile) {
  if (!rows.offsets) {
    const unsigned part = rows.tiles_of_part.short_quotient(static_cast<unsigned>(tile));
    const int64_t row = (tile - part * rows.tiles_of_part.divisor()) * side;
    const int count = within(rows.source - row, side);
    return {static_cast<int>(part * rows.source + row), 0, static_cast<int>(part), count, count};
  }
  const GroupTile t = find_tile(rows.offsets, rows.groups, side, tile);
  constexpr int64_t unit = row_unit(scaling);
  const int64_t begin = group_begin(t.begin, t.group, unit), row = int64_t{t.tile} * side;
  return {static_cast<int>(begin + row), static_cast<int>(begin - t.begin), 0,
          within((t.rows + unit - 1) / unit * unit - row, side), within(t.rows - row, side)};
}

/// The amax from which the kernel computes the tensor's scale (Quantize::measured); null if the scale is
/// given.
struct Measured {
  const float* amax = nullptr;
  int margin = 0;

  explicit Measured(const Quantize& a) : amax(static_cast<const float*>(a.measured.data)), margin(a.margin) {}
};

/// Rows of the source that the lane reads: from `row` on, `count` of them.
struct LaneRows {
  int64_t row = 0;
  int count = 0;
};
__device__ __forceinline__ LaneRows lane_rows(const TileRows& at, const LanePlace& place, bool inside) {
  return {at.first + place.row - at.shift, inside ? within(at.real - place.row, rows_per_lane) : 0};
}

/// Writes (=) the codes and scales of a tile to both copies.
template <DType format, Scaling scaling>
class TileWriter {
 public:
  static constexpr int columns = tile_columns<scaling>, threads = tile_threads<scaling>,
                       warps = threads / warp;

  /// `k`: columns of the copies. `amax`, if not null, is raised.
  __device__ __forceinline__ TileWriter(const Copy& row_copy, const Copy& column_copy, float* amax,
                                        const Measured& measured, const Rows& rows, int64_t k)
      : row_copy_(row_copy),
        column_copy_(column_copy),
        amax_(amax),
        part_rows_(rows.source),
        rows_(rows.copies),
        k_(k) {
    if constexpr (in_blocks) return;
    scale_ = reinterpret_cast<float*>(row_copy.data ? row_copy.scales : column_copy.scales);
    given_ = *(measured.amax ? measured.amax : scale_);
  }

  /// Finds the scale of the tensor. Apart from the constructor, so that the block's loads of the tile are in
  /// flight already. All threads must call it before write().
  __device__ __forceinline__ void find_scale(const Measured& measured) {
    if constexpr (in_blocks) return;
    float scale = given_;
    if (measured.amax) {
      // Every block finds the scale; the first one writes it, and none reads it.
      scale = fp8::tensor_scale(given_, format, measured.margin, 1.0f);
      if (blockIdx.x == 0 && threadIdx.x == 0) *scale_ = scale;
    }
    inverse_ = 1.0f / scale;
  }
  /// True when the block has neither a tile nor a scale to write.
  static __device__ __forceinline__ bool is_idle(const TileRows& at) {
    return at.rows == 0 && (in_blocks || blockIdx.x > 0);
  }

  /// The tile at (at.first, column0), of columns up to `end`, whose values are 0 outside. All threads of the
  /// block must call it; before another tile, after a barrier.
  template <class Values>
  __device__ __forceinline__ void write(const TileRows& at, int64_t column0, int64_t end,
                                        const Values& values) const {
    NRL_SHARED(uint4, data, [columns][side / 16]);
    const Tile tile(data);
    // In the tile; a lane's columns are inside or none is.
    const int wide = within(end - column0, columns), high = at.rows;
    // The transpose of the part: its first row, and the tile's column there.
    const int64_t part_column = at.part * k_ + column0, row0 = at.first,
                  part_row = row0 - at.part * part_rows_;
    if constexpr (in_lines) {
      write_lines(row0, column0, part_column, part_row, wide, high, values, tile);
    } else {
      write_whole(row0, column0, part_column, part_row, wide, high, values, tile);
    }
    if (!column_copy_.data) return;
    __syncthreads();
    tile.template store<threads>(column_copy_.data + part_column * rows_ + part_row, rows_, wide, high);
  }

 private:
  static constexpr bool in_blocks = scaling != Scaling::tensor;
  static constexpr bool in_lines = scaling == Scaling::row128 || scaling == Scaling::mx32;
  static constexpr bool whole_tile = scaling == Scaling::mx32;  // scales beyond the matrix are written
  static constexpr int group = whole_tile ? 32 : side, groups = side / group;
  using Tile = TransposedTile<columns, columns_per_lane>;

  /// Codes of both copies, which have the same scale.
  template <class Values>
  __device__ __forceinline__ void write_whole(int64_t row0, int64_t column0, int64_t part_column,
                                              int64_t part_row, int wide, int high, const Values& values,
                                              const Tile& tile) const {
    const LanePlace place;
    float inverse = inverse_;
    bool bad = false;
    if constexpr (in_blocks) {
      NRL_SHARED(unsigned, parts, [warps]);
      const unsigned largest = lanes_max(values.largest(), warp);
      if (place.lane == 0) parts[place.w] = largest;
      __syncthreads();
      static_assert(warps <= warp && (warps & (warps - 1)) == 0);
      const unsigned byte = fp8::scale_of<format>(lanes_max(parts[place.lane % warps], warps));
      inverse = fp8::inverse_scale(byte);
      bad = byte == fp8::bad_scale;
      if (threadIdx.x == 0) {
        if (row_copy_.data) row_copy_.template store_scale<scaling>(row0, column0, byte);
        if (column_copy_.data) column_copy_.template store_scale<scaling>(part_column, part_row, byte);
      }
    } else if (amax_) {
      raise_amax<warps>(amax_, values.largest());
    }
    unsigned codes[pairs / 2][rows_per_lane];
#pragma unroll
    for (int i = 0; i < pairs / 2; ++i)
#pragma unroll
      for (int r = 0; r < rows_per_lane; ++r) {
        const float2 low = values.pair(r, 2 * i), high = values.pair(r, 2 * i + 1);
        codes[i][r] = in_blocks ? block_codes<format>(low.x * inverse, low.y * inverse, high.x * inverse,
                                                      high.y * inverse, bad)
                                : tensor_codes<format>(low.x, low.y, high.x, high.y, inverse);
      }
    store_rows(codes, row0, column0, wide, high);
    if (column_copy_.data) {
      unsigned* const to = tile.words(place.column, place.row);
#pragma unroll
      for (int i = 0; i < pairs / 2; ++i) tile.put(to, i, codes[i]);
    }
  }

  template <class Values>
  __device__ __forceinline__ void write_lines(int64_t row0, int64_t column0, int64_t part_column,
                                              int64_t part_row, int wide, int high, const Values& values,
                                              const Tile& tile) const {
    // Magnitudes of 16 bits: of rows within 32 columns, of columns within 16 rows. Inverse scales: of rows,
    // then of columns; NaN where the scale is.
    constexpr int strip = 32, strips = side / strip;
    NRL_SHARED(uint2, row_parts, [strips][side / 4]);
    NRL_SHARED(uint4, column_parts, [warps_down][side / 8]);
    NRL_SHARED(float4, inverses, [2][groups][side / 4]);
    const LanePlace place;
    LineMaxima most = values.line_maxima();
    constexpr int lanes_across = strip / columns_per_lane;
#pragma unroll
    for (unsigned& m : most.rows)
#pragma unroll
      for (int o = 1; o < lanes_across; o *= 2) m = __vmaxu2(m, __shfl_xor_sync(all_lanes, m, o));
#pragma unroll
    for (unsigned& m : most.columns)
#pragma unroll
      for (int o = warp_columns / columns_per_lane; o < warp; o *= 2)
        m = __vmaxu2(m, __shfl_xor_sync(all_lanes, m, o));
    if (place.lane % lanes_across == 0)
      row_parts[place.column / strip][place.row / rows_per_lane] = make_uint2(most.rows[0], most.rows[1]);
    if (place.lane < warp_columns / columns_per_lane)
      column_parts[place.w % warps_down][place.column / 8] =
          make_uint4(most.columns[0], most.columns[1], most.columns[2], most.columns[3]);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 2 * groups * side; i += threads) {
      const int line = i % side, g = i / side % groups;
      const bool of_column = i >= groups * side;
      if (!(of_column ? column_copy_ : row_copy_).data) continue;
      unsigned m = 0;
      const auto take = [&](const void* parts, int count) {
        for (int p = 0; p < count; ++p)
          m = max(m, unsigned{static_cast<const unsigned short*>(parts)[(g * count + p) * side + line]});
      };
      of_column ? take(column_parts, warps_down / groups) : take(row_parts, strips / groups);
      const unsigned byte = fp8::scale_of<format>(m << 16);
      reinterpret_cast<float*>(inverses)[i] =
          byte == fp8::bad_scale ? fp8::scale_value(byte) : fp8::inverse_scale(byte);
      if (of_column) {
        if (whole_tile || (line < wide && g * group < high))
          column_copy_.template store_scale<scaling>(part_column + line, part_row + g * group, byte);
      } else if (whole_tile || (line < high && g * group < wide)) {
        row_copy_.template store_scale<scaling>(row0 + line, column0 + g * group, byte);
      }
    }
    __syncthreads();
    if (row_copy_.data) {
      const float4 of_rows = inverses[0][place.column / group][place.row / rows_per_lane];
      const float inverse[rows_per_lane] = {of_rows.x, of_rows.y, of_rows.z, of_rows.w};
      unsigned codes[pairs / 2][rows_per_lane];
#pragma unroll
      for (int i = 0; i < pairs / 2; ++i)
#pragma unroll
        for (int r = 0; r < rows_per_lane; ++r) {
          const float2 low = values.pair(r, 2 * i), high = values.pair(r, 2 * i + 1);
          codes[i][r] = block_codes<format>(low.x * inverse[r], low.y * inverse[r], high.x * inverse[r],
                                            high.y * inverse[r], is_bad(inverse[r]));
        }
      store_rows(codes, row0, column0, wide, high);
    }
    if (!column_copy_.data) return;
    unsigned* const to = tile.words(place.column, place.row);
#pragma unroll
    for (int i = 0; i < pairs / 2; ++i) {
      const float4 of_columns = inverses[1][place.row / group][place.column / 4 + i];
      const float inverse[4] = {of_columns.x, of_columns.y, of_columns.z, of_columns.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float first = inverse[2 * j], second = inverse[2 * j + 1];
        float2 x[rows_per_lane];
#pragma unroll
        for (int r = 0; r < rows_per_lane; ++r) x[r] = values.pair(r, 2 * i + j);
        unsigned* const at = to + (4 * i + 2 * j) * (side / 4);
        at[0] = block_codes<format>(x[0].x * first, x[1].x * first, x[2].x * first, x[3].x * first,
                                    is_bad(first));
        at[side / 4] = block_codes<format>(x[0].y * second, x[1].y * second, x[2].y * second, x[3].y * second,
                                           is_bad(second));
      }
    }
  }

  static __device__ __forceinline__ bool is_bad(float inverse) {
    return inverse != inverse;
  }

  /// Writes the lane's codes to the row copy, if it is wanted.
  __device__ __forceinline__ void store_rows(const unsigned (&codes)[pairs / 2][rows_per_lane], int64_t row0,
                                             int64_t column0, int wide, int high) const {
    const LanePlace place;
    if (!row_copy_.data || place.column >= wide) return;
    unsigned char* const to = row_copy_.data + (row0 + place.row) * k_ + column0 + place.column;
#pragma unroll
    for (int r = 0; r < rows_per_lane; ++r)
      if (place.row + r < high) *reinterpret_cast<uint2*>(to + r * k_) = make_uint2(codes[0][r], codes[1][r]);
  }

  Copy row_copy_, column_copy_;
  float* amax_;
  int64_t part_rows_, rows_, k_;
  float* scale_ = nullptr;
  float given_ = 1.0f, inverse_ = 1.0f;  ///< of the tensor: amax or the scale; the scale's inverse
};

}  // namespace
}  // namespace nrl::ops::NRL_GPU
