#pragma once
// Tiles of the GEMMs of experts on tensor cores: how they come to shared memory and to registers, and how the
// result is stored. Elements of operands have 16 bits. Two FP8 numbers count as one element, because ldmatrix
// then loads fragments of m16n8k32 in the same way as fragments of m16n8k16.

#include "core/ops/shared/gpu/groups.cuh"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using kernel::warp;

enum class Pass : uint8_t { forward, data, weight };

inline unsigned tiles(int64_t n, int64_t size) {
  return static_cast<unsigned>((n + size - 1) / size);
}

/// `r`: rows of all experts at most; `columns`, `m`: of an expert's result.
template <Pass pass>
dim3 grid_of(int64_t r, int64_t m, int64_t columns, int experts, int size) {
  if (pass == Pass::weight) return dim3(tiles(columns, size), tiles(m, size), static_cast<unsigned>(experts));
  const int64_t most = most_tiles(r, experts, size);
  return dim3(tiles(columns, size), static_cast<unsigned>(most < 1 ? 1 : most));
}

constexpr int tile_rows = 128, tile_depth = 32, stages = 3, tensor_threads = 256;
/// Warps in a grid of 2 x 4, each with 64 x 32 elements.
constexpr int warp_rows = 64, warp_columns = 32;
/// Elements between the rows of a stage in shared memory: 16-byte units of 8 rows are in different banks.
constexpr int k_pitch = tile_depth + 8, m_pitch = tile_rows + 8;

/// Elements of an operand in one stage.
template <bool k_contiguous>
constexpr int stage_elements = k_contiguous ? tile_rows* k_pitch : tile_depth* m_pitch;

/// Starts copying depth [k, k + tile_depth) of the rows (columns) [first, first + tile_rows); zeros beyond.
template <bool k_contiguous, class T>
__device__ __forceinline__ void copy_stage(T* to, const T* from, int64_t stride, int64_t first, int64_t end,
                                           int64_t k, int64_t inner) {
  constexpr int units = (k_contiguous ? tile_depth : tile_rows) / 8;
  constexpr int lines = k_contiguous ? tile_rows : tile_depth;
  constexpr int pitch = k_contiguous ? k_pitch : m_pitch;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < lines * units; i += tensor_threads) {
    const int line = i / units, unit = i % units * 8;
    const int64_t row = k_contiguous ? first + line : k + line, column = (k_contiguous ? k : first) + unit;
    const bool real = k_contiguous ? row < end && column < inner : row < inner && column < end;
    nrl_cp_async16(to + line * pitch + unit, from + (real ? row * stride + column : 0), real);
  }
}

/// The 16 x 16 fragment of a at (m, k), or two neighboring 16 x 8 fragments of b at (n, k).
template <bool k_contiguous, bool is_a, class T>
__device__ __forceinline__ void load_fragment(unsigned* f, const T* tile, int m, int k) {
  const int lane = static_cast<int>(threadIdx.x) % warp, matrix = lane / 8, r = lane % 8;
  // a has its matrices in the order (m, k), (m + 8, k), (m, k + 8), ...; b with k first.
  const int dm = (is_a ? matrix & 1 : matrix >> 1) * 8, dk = (is_a ? matrix >> 1 : matrix & 1) * 8;
  const int element = k_contiguous ? (m + dm + r) * k_pitch + k + dk : (k + dk + r) * m_pitch + m + dm;
  nrl_ldmatrix_x4<!k_contiguous>(f, tile, element * 2);
}

/// Stores a warp's fragments at (row, column) of c, which has `rows` and `columns`.
template <class C>
__device__ __forceinline__ void store_tile(const float (&sum)[warp_rows / 16][warp_columns / 8][4], C* c,
                                           int64_t stride, int64_t row, int64_t rows, int64_t column,
                                           int64_t columns, bool accumulate) {
  const int lane = static_cast<int>(threadIdx.x) % warp;
#pragma unroll
  for (int m = 0; m < warp_rows / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = row + m * 16 + half * 8 + lane / 4;
      if (i >= rows) continue;
      C* out = c + i * stride;
#pragma unroll
      for (int n = 0; n < warp_columns / 8; ++n) {
        const int64_t j = column + n * 8 + lane % 4 * 2;
        if (j >= columns) continue;
        const float low = sum[m][n][2 * half], high = sum[m][n][2 * half + 1];
        if constexpr (sizeof(C) == 2) {
          *reinterpret_cast<unsigned*>(out + j) = pack_low<C>(low, high);
        } else {
          out[j] = accumulate ? out[j] + low : low;
          out[j + 1] = accumulate ? out[j + 1] + high : high;
        }
      }
    }
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
