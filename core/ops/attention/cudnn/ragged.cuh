#pragma once
// The kernels of ragged.h, which says what they compute; included by cuda.cu alone. One thread per sequence,
// 32 x 32 tiles of a transpose, one thread per 16 bytes of a copied row.

#include "core/device/kernel.h"
#include "core/ops/attention/cudnn/ragged.h"

namespace nrl::ops::NRL_GPU {
namespace {

constexpr int side_threads = 256, transpose_tile = 32, transpose_rows = 8;

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

unsigned blocks_of(int64_t n, int64_t per_block) {
  return static_cast<unsigned>((n + per_block - 1) / per_block);
}

}  // namespace

void ragged_description(void* stream, const int32_t* cu, int64_t sequences, int64_t room,
                        const attention::RowSteps& steps, int32_t* lengths, int64_t* offsets) {
  NRL_LAUNCH((ragged_description_kernel), blocks_of(room + 1, side_threads), side_threads, 0, stream, cu,
             sequences, room, steps, lengths, offsets);
}

void transpose_f32(void* stream, const float* from, int64_t from_step, int64_t rows, int64_t columns,
                   float* to, int64_t to_step) {
  if (rows == 0 || columns == 0) return;
  const unsigned blocks = blocks_of(rows, transpose_tile) * blocks_of(columns, transpose_tile);
  NRL_LAUNCH((transpose_kernel), blocks, transpose_tile * transpose_rows, 0, stream, from, from_step, rows,
             columns, to, to_step);
}

void spread_rows_bf16(void* stream, const bf16* from, int64_t rows, int64_t width, bf16* to, int64_t to_step,
                      int multiprocessors) {
  const int64_t units = rows * width / 8;
  if (units == 0) return;
  NRL_LAUNCH((spread_rows_kernel), kernel::grid_for(units, side_threads, multiprocessors), side_threads, 0,
             stream, from, units, width / 8, to, to_step);
}

}  // namespace nrl::ops::NRL_GPU
