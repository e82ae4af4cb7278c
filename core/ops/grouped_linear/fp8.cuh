#pragma once
// GEMMs of experts with FP8 operands on tensor cores: c[m, n] (=, +=) = sum over k of a[m, k] b[n, k]. k is
// contiguous in both copies (linear.h), and tokens are in padded groups (quantize.h). c is bf16, in wgrad
// f32. Tiles, blocks and stages are as in tensor_kernel; a stage has 64 numbers (64 bytes) of k.
//
// Every 128 numbers of k, with mx32 scales every 32, are summed apart, then multiplied by the scales of their
// blocks, if there are any, and added in f32; scales of tensors are applied at the end. FP8 tensor cores
// (8.9, 12.0) keep some 14 bits of a long sum, so that all recipes do it. Tensor cores of Blackwell (10.0)
// have FP8 in tcgen05 alone: there mma.m16n8k32 becomes conversions and two f16 m16n8k16, which is exact.
// On 9.0 hopper_fp8.cuh is used.

#include "core/ops/grouped_linear/tiles.cuh"
#include "core/ops/shared/check.h"
#include "core/ops/shared/fp8.h"

namespace nrl::ops::NRL_GPU {
namespace {

/// Length of the partial sums over k, but with mx32 scales: the numbers that share a block scale.
constexpr int summed_apart = 128;

/// An operand of all experts. Their matrices are side by side in wgrad, and stacked otherwise.
struct Fp8Operand {
  const unsigned char* data;
  int64_t stride;  ///< bytes between rows
  const unsigned char* scales;
  int64_t row_step, column_step;  ///< bytes between scales

  explicit Fp8Operand(const Tensor& t)
      : data(static_cast<const unsigned char*>(t.data)),
        stride(t.step(0)),
        scales(static_cast<const unsigned char*>(t.scales.data)),
        row_step(t.scales.row_step),
        column_step(t.scales.column_step) {}
  __device__ __forceinline__ float scale(Scaling scaling, int64_t row, int64_t column) const {
    return fp8::scale_at(scaling, scales, row_step, column_step, row, column);
  }
};

template <class C>
struct Fp8Problem {
  Fp8Operand a, b;
  C* c;
  int64_t c_stride;
  int64_t rows, columns, inner;  ///< of an expert's GEMM; the offsets give `rows`, in wgrad `inner`
  const int* offsets;
  int experts;
  int unit;  ///< row_unit()
  bool accumulate;
};

/// weight: the kernel computes wgrad. A: type of the numbers of a; b is e4m3.
template <bool weight, class A, Scaling a_scaling, class C>
__global__ void __launch_bounds__(tensor_threads) fp8_kernel(Fp8Problem<C> p) {
  constexpr bool in_blocks = a_scaling != Scaling::tensor, each_32 = a_scaling == Scaling::mx32;
  constexpr Scaling b_scaling = a_scaling == Scaling::row128 && !weight ? Scaling::block128 : a_scaling;
  constexpr int stage = stage_elements<true>, steps_per_block = summed_apart / 2 / tile_depth;
  constexpr int row_tiles = warp_rows / 16, column_tiles = warp_columns / 8;
  NRL_DYN_SHARED(uint16_t, shared);
  uint16_t *as = shared, *bs = shared + stages * stage;
  GroupTile t;
  if constexpr (weight) {
    t.group = static_cast<int>(blockIdx.z);
    t.begin = p.offsets[t.group];
    t.rows = p.offsets[t.group + 1] - t.begin;
    t.tile = static_cast<int>(blockIdx.y);
  } else {
    t = find_tile(p.offsets, p.experts, tile_rows, blockIdx.y);
  }
  const int64_t rows = weight ? p.rows : t.rows, tile_row = int64_t{t.tile} * tile_rows,
                tile_column = int64_t{blockIdx.x} * tile_rows;
  if (tile_row >= rows || tile_column >= p.columns) return;
  // Where the expert is in the copies.
  const int64_t begin = group_begin(t.begin, t.group, p.unit);
  const int64_t a_row = weight ? 0 : begin, b_row = weight ? 0 : t.group * p.columns,
                depth = weight ? begin : 0,
                inner = weight ? (t.rows + p.unit - 1) / p.unit * p.unit : p.inner;
  const auto* a = reinterpret_cast<const uint16_t*>(p.a.data + a_row * p.a.stride + depth);
  const auto* b = reinterpret_cast<const uint16_t*>(p.b.data + b_row * p.b.stride + depth);
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int m0 = w / 4 * warp_rows, n0 = w % 4 * warp_columns;
  const int blocks = static_cast<int>((inner + summed_apart - 1) / summed_apart),
            steps = blocks * steps_per_block;
  const auto copy = [&](int step) {
    const int at = step % stages;
    const int64_t k = int64_t{step} * tile_depth;
    if (step < steps) {
      copy_stage<true>(as + at * stage, a, p.a.stride / 2, tile_row, rows, k, inner / 2);
      copy_stage<true>(bs + at * stage, b, p.b.stride / 2, tile_column, p.columns, k, inner / 2);
    }
    nrl_cp_async_commit();
  };
  float sum[row_tiles][column_tiles][4] = {}, part[row_tiles][column_tiles][4] = {};
  float a_scale[row_tiles][2], b_scale[column_tiles][2];
  const auto load_scales = [&](int64_t column) {
    const int l = nrl_opaque(lane);  // or the addresses of all scales are kept in registers
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = tile_row + m0 + m * 16 + half * 8 + l / 4;
        a_scale[m][half] = row < rows ? p.a.scale(a_scaling, a_row + row, column) : 0.0f;
      }
#pragma unroll
    for (int n = 0; n < column_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // With block128 the tile has one scale.
        const int64_t row = tile_column + (b_scaling != Scaling::block128 ? n0 + n * 8 + l % 4 * 2 + i : 0);
        b_scale[n][i] = row < p.columns ? p.b.scale(b_scaling, b_row + row, column) : 0.0f;
      }
  };
  const auto add_part = [&] {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int n = 0; n < column_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[m][n][i] += in_blocks ? part[m][n][i] * a_scale[m][i / 2] * b_scale[n][i % 2] : part[m][n][i];
          part[m][n][i] = 0;
        }
  };
  for (int s = 0; s + 1 < stages; ++s) copy(s);
  for (int block = 0; block < blocks; ++block) {
    // Issued here to overlap with the products.
    if constexpr (in_blocks && !each_32) {
      load_scales(depth + int64_t{block} * summed_apart);
    }
    // Unrolled, the fragments of several steps would not fit into the registers next to two sums.
#pragma unroll 1
    for (int i = 0; i < steps_per_block; ++i) {
      const int step = block * steps_per_block + i;
      nrl_cp_async_wait<stages - 2>();
      __syncthreads();
      copy(step + stages - 1);
      const uint16_t *sa = as + step % stages * stage, *sb = bs + step % stages * stage;
#pragma unroll 1
      for (int k = 0; k < tile_depth; k += 16) {
        if constexpr (each_32) load_scales(depth + 2 * (int64_t{step} * tile_depth + k));
        unsigned fb[column_tiles][2];
#pragma unroll
        for (int n = 0; n < warp_columns; n += 16) load_fragment<true, false>(fb[n / 8], sb, n0 + n, k);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          unsigned fa[4];
          load_fragment<true, true>(fa, sa, m0 + m * 16, k);
          nrl_mma_m16n8k32<A, fp8::Number<DType::e4m3>, column_tiles>(part[m], fa, fb);
        }
        if constexpr (each_32) add_part();
      }
    }
    if constexpr (!each_32) add_part();
  }
  nrl_cp_async_wait<0>();
  if constexpr (!in_blocks) {
    const float a_all = p.a.scale(a_scaling, 0, 0), b_all = p.b.scale(b_scaling, 0, 0);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int n = 0; n < column_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = sum[m][n][i] * a_all * b_all;
  }
  C* c = p.c + (weight ? t.group * p.rows : t.begin) * p.c_stride;
  store_tile(sum, c, p.c_stride, tile_row + m0, rows, tile_column + n0, p.columns, p.accumulate);
}

template <bool weight, class A, Scaling scaling, class C>
void launch_fp8_kernel(Exec& exec, const Fp8Problem<C>& p, int64_t rows) {
  constexpr size_t shared = sizeof(uint16_t) * stages * 2 * stage_elements<true>;
  constexpr Pass pass = weight ? Pass::weight : Pass::forward;
  const dim3 grid = grid_of<pass>(rows, p.rows, p.columns, p.experts, tile_rows);
  NRL_LAUNCH((fp8_kernel<weight, A, scaling, C>), grid, tensor_threads, shared, exec.stream, p);
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
