#pragma once
// The kernels of ragged.h, which says what they compute; included by cuda.cu alone. One thread per sequence,
// 32 x 32 tiles of a transpose, one block per 1,024 statistics, one thread per 16 bytes of a
// copied or cleared row.

#include "core/device/kernel.h"
#include "core/ops/attention.h"
#include "core/ops/attention/cudnn/ragged.h"

namespace nrl::ops::NRL_GPU {
namespace {

constexpr int side_threads = 256, transpose_tile = 32, transpose_rows = 8, statistics_part = 1024;

/// The sequence that a row belongs to and its place there; -1: none.
struct BlockPlace {
  int64_t sequence = -1, at = 0;
};
__device__ __forceinline__ BlockPlace place_in_blocks(int64_t row, int64_t sequences, const RowBlocks& b) {
  const int64_t r = row - b.first;
  if (r < 0) return {};
  const int64_t s = sequences == 1 ? 0 : r / b.step, at = r - s * b.step;
  return s < sequences && at < b.rows ? BlockPlace{s, at} : BlockPlace{};
}

__global__ void __launch_bounds__(side_threads)
    ragged_description_kernel(const int32_t* cu, int64_t sequences, int64_t room, attention::RowSteps steps,
                              int32_t* lengths, int64_t* offsets) {
  const int64_t s = static_cast<int64_t>(blockIdx.x) * side_threads + threadIdx.x;
  if (s > room) return;
  const int64_t begin = cu[s < sequences ? s : sequences];
  if (s < room) lengths[s] = s < sequences ? static_cast<int32_t>(cu[s + 1] - begin) : 0;
#pragma unroll
  for (int i = 0; i < attention::most_row_steps; ++i)
    if (i < steps.count) offsets[i * (room + 1) + s] = begin * steps.step[i];
}

__global__ void __launch_bounds__(transpose_tile* transpose_rows)
    transpose_kernel(const float* from, int64_t from_step, int64_t rows, int64_t columns, float* to,
                     int64_t to_step) {
  NRL_SHARED(float, tile, [transpose_tile * (transpose_tile + 1)]);
  const int x = static_cast<int>(threadIdx.x) % transpose_tile,
            y = static_cast<int>(threadIdx.x) / transpose_tile;
  const int64_t tiles = (columns + transpose_tile - 1) / transpose_tile,
                r0 = blockIdx.x / tiles * transpose_tile, c0 = blockIdx.x % tiles * transpose_tile;
  for (int i = y; i < transpose_tile; i += transpose_rows)
    if (r0 + i < rows && c0 + x < columns)
      tile[i * (transpose_tile + 1) + x] = from[(r0 + i) * from_step + c0 + x];
  __syncthreads();
  for (int i = y; i < transpose_tile; i += transpose_rows)
    if (c0 + i < columns && r0 + x < rows)
      to[(c0 + i) * to_step + r0 + x] = tile[x * (transpose_tile + 1) + i];
}

/// One block per part of a head's rows.
template <bool pack>
__global__ void __launch_bounds__(side_threads)
    move_statistics_kernel(float* ours, int64_t row_step, int64_t rows, int64_t heads, int64_t sequences,
                           RowBlocks blocks, float* packed) {
  const int64_t parts = (rows + statistics_part - 1) / statistics_part, head = blockIdx.x / parts,
                begin = blockIdx.x % parts * statistics_part;
  const int64_t end = begin + statistics_part < rows ? begin + statistics_part : rows;
  for (int64_t row = begin + threadIdx.x; row < end; row += side_threads) {
    const BlockPlace place = place_in_blocks(row, sequences, blocks);
    float* const mine = ours + head * row_step + row;
    const int64_t at = (place.sequence * heads + head) * blocks.rows + place.at;
    if (pack) {
      if (place.sequence >= 0) packed[at] = *mine;
    } else {
      *mine = place.sequence >= 0 ? packed[at] : -INFINITY;
    }
  }
}

/// One block per row, in turns.
__global__ void __launch_bounds__(side_threads)
    clear_other_rows_kernel(bf16* x, int64_t rows, int64_t units_per_row, int64_t step, int64_t sequences,
                            RowBlocks blocks) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    if (place_in_blocks(row, sequences, blocks).sequence >= 0) continue;
    const kernel::Pack<bf16> zeros{};
    for (int64_t i = threadIdx.x; i < units_per_row; i += side_threads) zeros.store(x + row * step + i * 8);
  }
}

__global__ void __launch_bounds__(side_threads)
    spread_rows_kernel(const bf16* from, int64_t units, int64_t units_per_row, bf16* to, int64_t to_step) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * side_threads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * side_threads + threadIdx.x; i < units; i += stride) {
    const int64_t row = i / units_per_row, unit = i % units_per_row;
    kernel::Pack<bf16> pack;
    pack.load(from + i * 8);
    pack.store(to + row * to_step + unit * 8);
  }
}

__global__ void fp8_numbers_kernel(float scale, int64_t d, const float* dout_scale, const float* v_scale,
                                   float* numbers) {
  numbers[attention::one] = 1.0f;
  numbers[attention::p_scale] = 1.0f / probability_code_scale;
  numbers[attention::p_code_scale] = probability_code_scale;
  const float ds = dout_scale ? score_gradient_scale(scale, d, *dout_scale, *v_scale) : 1.0f;
  numbers[attention::ds_scale] = ds;
  numbers[attention::ds_code_scale] = 1.0f / ds;
}

unsigned blocks_of(int64_t n, int64_t per_block) {
  return static_cast<unsigned>((n + per_block - 1) / per_block);
}

template <bool pack>
void move_statistics(void* stream, float* ours, int64_t row_step, int64_t rows, int64_t heads,
                     int64_t sequences, const RowBlocks& blocks, float* packed) {
  if (heads * rows == 0) return;
  const unsigned grid = static_cast<unsigned>(heads) * blocks_of(rows, statistics_part);
  NRL_LAUNCH((move_statistics_kernel<pack>), grid, side_threads, 0, stream, ours, row_step, rows, heads,
             sequences, blocks, packed);
}

}  // namespace

void ragged_description(void* stream, const int32_t* cu, int64_t sequences, int64_t room,
                        const attention::RowSteps& steps, int32_t* lengths, int64_t* offsets) {
  NRL_LAUNCH((ragged_description_kernel), blocks_of(room + 1, side_threads), side_threads, 0, stream, cu,
             sequences, room, steps, lengths, offsets);
}

void write_fp8_numbers(void* stream, float scale, int64_t d, const float* dout_scale, const float* v_scale,
                       float* numbers) {
  NRL_LAUNCH((fp8_numbers_kernel), 1, 1, 0, stream, scale, d, dout_scale, v_scale, numbers);
}

void transpose_f32(void* stream, const float* from, int64_t from_step, int64_t rows, int64_t columns,
                   float* to, int64_t to_step) {
  if (rows == 0 || columns == 0) return;
  const unsigned blocks = blocks_of(rows, transpose_tile) * blocks_of(columns, transpose_tile);
  NRL_LAUNCH((transpose_kernel), blocks, transpose_tile * transpose_rows, 0, stream, from, from_step, rows,
             columns, to, to_step);
}

void pack_statistics(void* stream, const float* ours, int64_t row_step, int64_t rows, int64_t heads,
                     int64_t sequences, const RowBlocks& blocks, float* packed) {
  move_statistics<true>(stream, const_cast<float*>(ours), row_step, rows, heads, sequences, blocks, packed);
}

void unpack_statistics(void* stream, const float* packed, int64_t heads, int64_t sequences,
                       const RowBlocks& blocks, float* ours, int64_t row_step, int64_t rows) {
  move_statistics<false>(stream, ours, row_step, rows, heads, sequences, blocks, const_cast<float*>(packed));
}

void clear_other_rows_bf16(void* stream, bf16* x, int64_t rows, int64_t width, int64_t step,
                           int64_t sequences, const RowBlocks& blocks, int multiprocessors) {
  if (rows * width == 0) return;
  NRL_LAUNCH((clear_other_rows_kernel), kernel::grid_for(rows, 1, multiprocessors), side_threads, 0, stream,
             x, rows, width / 8, step, sequences, blocks);
}

void spread_rows_bf16(void* stream, const bf16* from, int64_t rows, int64_t width, bf16* to, int64_t to_step,
                      int multiprocessors) {
  const int64_t units = rows * width / 8;
  if (units == 0) return;
  NRL_LAUNCH((spread_rows_kernel), kernel::grid_for(units, side_threads, multiprocessors), side_threads, 0,
             stream, from, units, width / 8, to, to_step);
}

}  // namespace nrl::ops::NRL_GPU
