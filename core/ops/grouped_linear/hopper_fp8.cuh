#pragma once
// GEMMs of experts with FP8 operands on compute capability 9.0: c[m, n] (=, +=) = sum over k of a[m, k]
// b[n, k] by wgmma. Operands, scales and sums of 128 of k are as in fp8.cuh; tiles, stages, the order of
// tiles and += are as in hopper.cuh.
//
// A stage has 128 of k. Both warpgroups multiply 64 rows of the same tile, since each needs registers for two
// sums; while one adds its 128 of k in f32, the other one multiplies.

#include "core/ops/grouped_linear/fp8.cuh"
#include "core/ops/grouped_linear/hopper.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

#if defined(__CUDACC__)

namespace wide {

constexpr int fp8_k = summed_apart;  ///< of a stage: lines of 128 bytes, as 64 of 16 bits
static_assert(fp8_k == 2 * tile_k);
/// Scales of b's columns in a stage: weight gradients with scales of blocks only.
constexpr int scale_bytes = tile_n * 4;

/// The producer also finds scales.
constexpr int fp8_producer_registers = 40, fp8_consumer_registers = 232;

struct ScaledProblem : Problem {
  Fp8Operand a, b;
  int unit;  ///< row_unit()
};

constexpr size_t fp8_shared_bytes(int experts, bool scaled) {
  return shared_bytes(experts) + (scaled ? size_t{ring} * scale_bytes : 0);
}

/// Zeroes the k from `real` on of a stage. All threads of both warpgroups must call it.
__device__ __forceinline__ void zero_fp8_k(unsigned char* stage, int real) {
  const int first = real / 16, units = 8 - first;  // of 16 bytes in a line
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < (tile_m + tile_n) * units; i += 2 * warpgroup) {
    const int line = i / units, unit = first + i % units;
    *reinterpret_cast<uint4*>(stage + line * 128 + (unit ^ line % 8) * 16) = make_uint4(0, 0, 0, 0);
  }
  async_proxy_fence();
  named_barrier_sync(zeroed_barrier, 2 * warpgroup);
}

}  // namespace wide

// Code for other architectures only traps; launch_fp8_wgmma() does not call it.
template <bool weight, bool a_e5m2, bool in_blocks, class C>
__global__ void __launch_bounds__(wide::threads, 1)
    fp8_wgmma_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                     const __grid_constant__ wide::ScaledProblem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using namespace wide;
  constexpr Pass pass = weight ? Pass::weight : Pass::forward;
  constexpr Scaling a_scaling = in_blocks ? Scaling::row128 : Scaling::tensor;
  constexpr Scaling b_scaling = !in_blocks ? Scaling::tensor : weight ? Scaling::row128 : Scaling::block128;
  constexpr bool b_by_column = in_blocks && weight;  // b's scales come with the stage
  NRL_SHARED(uint64_t, full_barriers, [ring]);
  NRL_SHARED(uint64_t, empty_barriers, [ring]);
  NRL_DYN_SHARED(unsigned char, dynamic);
  const unsigned full = shared_address(full_barriers), empty = shared_address(empty_barriers);
  unsigned char* const stages = dynamic + (-shared_address(dynamic) & (stage_alignment - 1));
  unsigned char* const column_scales = stages + ring * stage_bytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < ring; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, 2 * warpgroup / warp);
    }
    mbarrier_init_fence();
  }
  const Schedule<pass> schedule(
      reinterpret_cast<int*>(column_scales + (b_by_column ? ring * scale_bytes : 0)), p);
  const int group = static_cast<int>(threadIdx.x) / warpgroup, lane = static_cast<int>(threadIdx.x) % warp;
  const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  const auto inner_of = [&](const Tile& t) {
    return weight ? (t.inner + p.unit - 1) / p.unit * p.unit : t.inner;
  };
  Position stage;

  if (group == producer) {
    lower_registers<fp8_producer_registers>();
    if (threadIdx.x != producer * warpgroup) return;
    tma_prefetch(&a_map);
    tma_prefetch(&b_map);
    stage.parity = 1;  // at first the stages are empty
    for (int t = first; t < schedule.total(p); t += step) {
      const Tile tile = schedule.tile(t, p);
      const int begin = static_cast<int>(group_begin(tile.begin, tile.expert, p.unit));
      const int a_first = weight ? tile.row : begin + tile.row, k_first = weight ? begin : 0,
                k_end = k_first + inner_of(tile), matrix = weight ? 0 : tile.expert;
#pragma unroll 1
      for (int k = k_first; k < k_end; k += fp8_k) {
        const unsigned barrier = full + stage.at * 8, to = shared_address(stages) + stage.at * stage_bytes;
        mbarrier_wait(empty + stage.at * 8, stage.parity);
        if constexpr (b_by_column) {
          const int bytes = min(tile_n, p.n - tile.column) * 4;
          mbarrier_arrive_expect(barrier, stage_bytes + bytes);
          bulk_load(shared_address(column_scales) + stage.at * scale_bytes,
                    p.b.scales + scale_offset(b_scaling, p.b.row_step, p.b.column_step, tile.column, k),
                    bytes, barrier);
        } else {
          mbarrier_arrive_expect(barrier, stage_bytes);
        }
        tma_load(to, &a_map, barrier, k / 2, a_first, 0);
        tma_load(to + a_bytes, &b_map, barrier, k / 2, tile.column, matrix);
        stage.next();
      }
    }
    return;
  }

  raise_registers<fp8_consumer_registers>();
  // The thread's rows of a tile are own_row and own_row + 8; its first column is own_column.
  const int own_row = group * 64 + static_cast<int>(threadIdx.x) % warpgroup / warp * 16 + lane / 4,
            own_column = lane % 4 * 2;
  for (int t = first; t < schedule.total(p); t += step) {
    const Tile tile = schedule.tile(t, p);
    const int inner = inner_of(tile), steps = tiles_of(inner, fp8_k);
    const int64_t begin = group_begin(tile.begin, tile.expert, p.unit);
    float d[tile_n / 2] = {};
    // Scales of the thread's rows own_row and own_row + 8, and with block128 of the tile's first block of
    // columns and the next. Of rows and columns that do not exist the last ones are read; padding has some as
    // well.
    const unsigned char *a_scales = nullptr, *b_scales = nullptr;
    int to_next = 0, to_right = 0;
    if constexpr (in_blocks) {
      const int last = weight ? p.m - 1 : INT_MAX, row = min(tile.row + own_row, last);
      a_scales = p.a.scales + scale_offset(a_scaling, p.a.row_step, p.a.column_step,
                                           (weight ? 0 : begin) + row, weight ? begin : 0);
      to_next = (min(row + 8, last) - row) * static_cast<int>(sizeof(float));
      if constexpr (!weight) {
        b_scales = p.b.scales + scale_offset(b_scaling, p.b.row_step, p.b.column_step,
                                             int64_t{tile.expert} * p.n + tile.column, 0);
        to_right = tile.column / 128 * 128 + 128 < p.n ? static_cast<int>(p.b.row_step) : 0;
      }
    }
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
      float a_scale[2], b_scale[2];  // read while the tensor cores work
      if constexpr (in_blocks) {
        a_scale[0] = *reinterpret_cast<const float*>(a_scales);
        a_scale[1] = *reinterpret_cast<const float*>(a_scales + to_next);
        a_scales += p.a.column_step;
        if constexpr (!weight) {
          b_scale[0] = *reinterpret_cast<const float*>(b_scales);
          b_scale[1] = *reinterpret_cast<const float*>(b_scales + to_right);
          b_scales += p.b.column_step;
        }
      }
      mbarrier_wait(full + stage.at * 8, stage.parity);
      unsigned char* const at = stages + stage.at * stage_bytes;
      if constexpr (weight && !in_blocks)
        if (const int real = inner - s * fp8_k; real < fp8_k) zero_fp8_k(at, real);
      const uint64_t a = wgmma_descriptor<false>(shared_address(at) + group * block_bytes);
      const uint64_t b = wgmma_descriptor<false>(shared_address(at) + a_bytes);
      float part[tile_n / 2];
      wgmma_fence();
      wgmma_m64n192k32<a_e5m2, false>(part, a, b);
#pragma unroll
      for (int k = 1; k < fp8_k / 32; ++k)
        wgmma_m64n192k32<a_e5m2, true>(part, a + k * wgmma_k_step<false>, b + k * wgmma_k_step<false>);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(part);
      if constexpr (!b_by_column)
        if (lane == 0) mbarrier_arrive(empty + stage.at * 8);
      if constexpr (!in_blocks) {
#pragma unroll
        for (int i = 0; i < tile_n / 2; ++i) d[i] += part[i];
      } else if constexpr (!weight) {
        // The tile begins at a multiple of 64: its second 64 columns are in the first block or in the next.
        const float middle = tile.column % 128 == 0 ? b_scale[0] : b_scale[1];
#pragma unroll
        for (int i = 0; i < tile_n / 2; ++i)
          d[i] += part[i] * (a_scale[i % 4 / 2] * (i < 32 ? b_scale[0] : i < 64 ? middle : b_scale[1]));
      } else {
        const auto* scales =
            reinterpret_cast<const float*>(column_scales + stage.at * scale_bytes) + own_column;
#pragma unroll
        for (int j = 0; j < tile_n / 8; ++j) {
          const float2 b_of = *reinterpret_cast<const float2*>(scales + j * 8);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            d[4 * j + i] += part[4 * j + i] * (a_scale[i / 2] * (i % 2 == 0 ? b_of.x : b_of.y));
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty + stage.at * 8);
      }
      stage.next();
    }
    if constexpr (!in_blocks) {
      const float a_scale = p.a.scale(a_scaling, 0, 0), b_scale = p.b.scale(b_scaling, 0, 0);
#pragma unroll
      for (int i = 0; i < tile_n / 2; ++i) d[i] = d[i] * a_scale * b_scale;
    }
    const int64_t row = (weight ? tile.expert * p.m : tile.begin) + tile.row + group * 64;
    store_sums(d, static_cast<C*>(p.c) + row * p.c_stride + tile.column, p.c_stride,
               tile.rows - tile.row - group * 64, p.n - tile.column, p.accumulate);
  }
#else
  __trap();
#endif
}

/// Launches fp8_wgmma_kernel; false where the device, the build or the operands do not allow it.
template <bool weight, bool a_e5m2, bool in_blocks, class C>
bool launch_fp8_wgmma(Exec& exec, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& offsets,
                      bool accumulate) {
  using namespace wide;
  // A process uses one device.
  static const int registers =
      device::registers_of(reinterpret_cast<const void*>(fp8_wgmma_kernel<weight, a_e5m2, in_blocks, C>));
  const int64_t experts = offsets.dim(0) - 1;
  const int64_t rows = weight ? c.dim(0) / experts : c.dim(0), columns = c.dim(1);
  constexpr Pass pass = weight ? Pass::weight : Pass::forward;
  const int64_t most = most_tiles_of<pass>(rows, columns, experts);
  const size_t shared = fp8_shared_bytes(static_cast<int>(experts), in_blocks && weight);
  if (most == 0 || std::max({a.dim(0), a.dim(1), experts * columns, c.dim(0), 2 * most}) > INT_MAX ||
      !runs_on(exec, registers, shared))
    return false;
  CUtensorMap a_map, b_map;
  // Maps have elements of 16 bits.
  if (!device::encode_tensor_map(a_map, a.data, 1, a.dim(0), a.dim(1) / 2, a.step(0) / 2, tile_m) ||
      !device::encode_tensor_map(b_map, b.data, weight ? 1 : experts, columns, b.dim(1) / 2, b.step(0) / 2,
                                 tile_n))
    return false;
  const ScaledProblem p{problem_of(c, offsets, rows, columns, weight ? 0 : a.dim(1), accumulate),
                        Fp8Operand(a), Fp8Operand(b), static_cast<int>(row_unit(a.scales.kind))};
  const unsigned grid = kernel::grid_for(most, 1, exec.multiprocessors, 1);
  NRL_LAUNCH((fp8_wgmma_kernel<weight, a_e5m2, in_blocks, C>), grid, wide::threads, shared, exec.stream,
             a_map, b_map, p);
  return true;
}

#else

/// The simulator has no wgmma.
template <bool weight, bool a_e5m2, bool in_blocks, class C>
bool launch_fp8_wgmma(Exec&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool) {
  return false;
}

#endif

}  // namespace
}  // namespace nrl::ops::NRL_GPU
