#pragma once
// GEMMs of experts with bf16 and f16 operands on compute capability 9.0: c[m, n] (=, +=) = sum over k of a[m,
// k] b[n, k] by wgmma, in f32.
//
// One block per multiprocessor walks over tiles of 128 x 192. One thread loads slices of 64 of k by TMA into
// a ring of five stages; two warpgroups take every other tile, so that one stores its sums while the other
// one multiplies. Each warp that has read a stage returns it (`empty`), TMA fills it (`full`).
//
// Blocks take bands of `raster` row tiles column by column, which keeps the rows of a band in the L2 cache. A
// tile may reach beyond its expert's rows: as m they give sums that are not stored, as k (weight gradients)
// both operands are zeroed in shared memory, whatever the rows hold. Beyond the ends of a tensor TMA gives
// zeros.
//
// += adds in the L2 cache, one addition per element and launch, so that results have the same bits every
// time; subnormal numbers count as 0 there.

#include "core/ops/grouped_linear/tiles.cuh"
#include "core/ops/shared/gpu/hopper.cuh"

#if defined(__CUDACC__)
#include <algorithm>
#include <climits>

#include "core/device/cuda/tensor_map.h"
#include "core/device/runtime.h"
#endif

namespace nrl::ops::NRL_GPU {
namespace {

#if defined(__CUDACC__)

namespace wide {

using namespace kernel;

constexpr int tile_m = 128, tile_n = 192, tile_k = 64, ring = 5, raster = 16;
constexpr int halves = tile_m / 64;    ///< wgmmas have 64 rows
constexpr int block_bytes = 64 * 128;  ///< of 64 lines of 64 elements
constexpr int a_bytes = tile_m * tile_k * 2, stage_bytes = a_bytes + tile_n * tile_k * 2;
constexpr int stage_alignment = 1024;                 ///< period of the swizzle
constexpr int producer = 2, threads = 3 * warpgroup;  ///< warpgroups 0 and 1 multiply
constexpr int producer_registers = 24, consumer_registers = 240;
/// Named barriers of the consumers, one for each; 0 is __syncthreads().
constexpr int zeroed_barrier = 1, turn_barrier = 3;

/// Dynamic: stages, and the tables of Schedule.
constexpr size_t shared_bytes(int experts) {
  return stage_alignment + size_t{ring} * stage_bytes + 2 * sizeof(int) * (static_cast<size_t>(experts) + 1);
}

struct Problem {
  void* c;
  int64_t c_stride;
  int m, n, k;           ///< of an expert's GEMM. The offsets replace k for weight gradients, else m.
  int tiles_m, tiles_n;  ///< for weight gradients; else only tiles_n is used
  const int* offsets;
  int experts;
  bool accumulate;
};

struct Tile {
  int expert, begin;  ///< begin: its first row
  int rows, inner;    ///< of the expert's GEMM
  int row, column;    ///< first of the tile
};

__device__ __forceinline__ int tiles_of(int n, int size) {
  return (n + size - 1) / size;
}

/// Numbers the tiles of all experts. Values common to all tiles stay in the parameters and in shared
/// memory, since warpgroups that multiply have no register to spare.
template <Pass pass>
struct Schedule {
  int* tables;  ///< shared: row tiles before each expert, then Problem::offsets

  /// All threads must call it.
  __device__ __forceinline__ Schedule(int* shared, const Problem& p) : tables(shared) {
    if (threadIdx.x < warp) {
      const int lane = static_cast<int>(threadIdx.x);
      int before = 0;
      for (int base = 0; base <= p.experts; base += warp) {
        const int e = base + lane;
        const int begin = e <= p.experts ? p.offsets[e] : 0;
        const int tiles = e < p.experts ? tiles_of(p.offsets[e + 1] - begin, tile_m) : 0;
        int sum = tiles;
#pragma unroll
        for (int o = 1; o < warp; o <<= 1) {
          const int below = __shfl_up_sync(all_lanes, sum, o);
          if (lane >= o) sum += below;
        }
        if (e <= p.experts) {
          tables[e] = before + sum - tiles;
          tables[p.experts + 1 + e] = begin;
        }
        before += __shfl_sync(all_lanes, sum, warp - 1);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ int total(const Problem& p) const {
    return (pass == Pass::weight ? p.experts * p.tiles_m : tables[p.experts]) * p.tiles_n;
  }

  __device__ __forceinline__ Tile tile(int t, const Problem& p) const {
    Tile out;
    int local, row_tiles;  // tile of the expert, and how many it has
    if constexpr (pass == Pass::weight) {
      out.expert = t / (p.tiles_m * p.tiles_n);
      local = t - out.expert * p.tiles_m * p.tiles_n;
      row_tiles = p.tiles_m;
    } else {
      const int row_tile = t / p.tiles_n;
      int low = 0, high = p.experts - 1;  // finds the last expert whose tiles begin at or before it
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (tables[middle] <= row_tile)
          low = middle;
        else
          high = middle - 1;
      }
      out.expert = low;
      local = t - tables[low] * p.tiles_n;
      row_tiles = tables[low + 1] - tables[low];
    }
    const int* const offsets = tables + p.experts + 1 + out.expert;
    out.begin = offsets[0];
    const int rows = offsets[1] - out.begin;
    out.rows = pass == Pass::weight ? p.m : rows;
    out.inner = pass == Pass::weight ? rows : p.k;
    const int band = local / (raster * p.tiles_n);
    local -= band * raster * p.tiles_n;
    const int in_band = min(raster, row_tiles - band * raster), column = local / in_band;
    out.row = (band * raster + local - column * in_band) * tile_m;
    out.column = column * tile_n;
    return out;
  }
};

/// Position in the ring. Waits for the phase of `parity` of stage `at`.
struct Position {
  int at = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance(int steps) {
    const int after = at + steps;
    parity ^= after / ring & 1;
    at = after % ring;
  }
  __device__ __forceinline__ void next() {
    if (++at == ring) at = 0, parity ^= 1;
  }
};

/// Starts loading `size` of m (or n) from `first`, and 64 of k from `k`.
template <bool mn_major, int size>
__device__ __forceinline__ void load_operand(unsigned to, const CUtensorMap* map, unsigned barrier, int first,
                                             int k, int matrix) {
  if constexpr (mn_major) {
#pragma unroll
    for (int i = 0; i < size; i += 64)
      tma_load(to + i / 64 * block_bytes, map, barrier, first + i, k, matrix);
  } else {
    tma_load(to, map, barrier, k, first, matrix);
  }
}

/// Zeroes the k from `real` on of a stage of MN-major operands. All threads of warpgroup `group` must call
/// it.
__device__ __forceinline__ void zero_k(unsigned char* stage, int real, int group) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % warpgroup; i < (tile_k - real) * 8; i += warpgroup)
#pragma unroll
    for (int block = 0; block < stage_bytes; block += block_bytes)
      *reinterpret_cast<uint4*>(stage + block + real * 128 + i * 16) = make_uint4(0, 0, 0, 0);
  async_proxy_fence();
  named_barrier_sync(zeroed_barrier + group, warpgroup);
}

/// Transposes pairs of columns among four lanes. Before, pairs[i] holds the lane's columns of block i of 8;
/// after, it is pair i of block `quad`.
__device__ __forceinline__ void transpose_quad(unsigned (&pairs)[4], int quad) {
  const bool odd = quad & 1, high = quad & 2;
  const unsigned r0 = __shfl_xor_sync(all_lanes, odd ? pairs[0] : pairs[1], 1);
  const unsigned r1 = __shfl_xor_sync(all_lanes, odd ? pairs[2] : pairs[3], 1);
  const unsigned a0 = odd ? r0 : pairs[0], a1 = odd ? pairs[1] : r0;  // of block quad & 1
  const unsigned b0 = odd ? r1 : pairs[2], b1 = odd ? pairs[3] : r1;  // of the one two further
  const unsigned s0 = __shfl_xor_sync(all_lanes, high ? a0 : b0, 2);
  const unsigned s1 = __shfl_xor_sync(all_lanes, high ? a1 : b1, 2);
  pairs[0] = high ? s0 : a0;
  pairs[1] = high ? s1 : a1;
  pairs[2] = high ? b0 : s0;
  pairs[3] = high ? b1 : s1;
}

/// Stores a warpgroup's 64 x 192 sums to c, of which `rows` and `columns` exist. Lanes exchange sums, so that
/// each stores 16 bytes.
template <class C>
__device__ __forceinline__ void store_sums(const float (&d)[tile_n / 2], C* c, int64_t stride, int rows,
                                           int columns, bool accumulate) {
  const int lane = static_cast<int>(threadIdx.x) % warp, quad = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = static_cast<int>(threadIdx.x) % warpgroup / warp * 16 + half * 8 + lane / 4;
    C* out = c + row * stride;
    if constexpr (sizeof(C) == 2) {
#pragma unroll
      for (int j = 0; j < tile_n; j += 32) {
        unsigned pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          pairs[i] = pack_low<C>(d[j / 2 + 4 * i + 2 * half], d[j / 2 + 4 * i + 2 * half + 1]);
        transpose_quad(pairs, quad);
        if (const int column = j + quad * 8; row < rows && column < columns)
          *reinterpret_cast<uint4*>(out + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    } else {
      const bool odd = quad & 1;
#pragma unroll
      for (int j = 0; j < tile_n; j += 16) {
        const float x0 = d[j / 2 + 2 * half], x1 = d[j / 2 + 2 * half + 1];
        const float y0 = d[j / 2 + 4 + 2 * half], y1 = d[j / 2 + 4 + 2 * half + 1];
        const float r0 = __shfl_xor_sync(all_lanes, odd ? x0 : y0, 1);
        const float r1 = __shfl_xor_sync(all_lanes, odd ? x1 : y1, 1);
        const float4 v = odd ? make_float4(r0, r1, y0, y1) : make_float4(x0, x1, r0, r1);
        const int column = j + (odd ? 8 : 0) + (quad & 2) * 2;
        if (row >= rows || column >= columns) continue;
        if (accumulate)
          reduce_add4(out + column, v);
        else
          *reinterpret_cast<float4*>(out + column) = v;
      }
    }
  }
}

}  // namespace wide

// Code for other architectures only traps; launch_wgmma() does not call it.
template <Pass pass, class T, class C>
__global__ void __launch_bounds__(wide::threads, 1)
    wgmma_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                 const __grid_constant__ wide::Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using namespace wide;
  constexpr bool a_mn = pass == Pass::weight, b_mn = pass != Pass::forward;
  NRL_SHARED(uint64_t, full_barriers, [ring]);
  NRL_SHARED(uint64_t, empty_barriers, [ring]);
  NRL_DYN_SHARED(unsigned char, dynamic);
  const unsigned full = shared_address(full_barriers), empty = shared_address(empty_barriers);
  unsigned char* const stages = dynamic + (-shared_address(dynamic) & (stage_alignment - 1));
  if (threadIdx.x == 0) {
    for (int i = 0; i < ring; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, warpgroup / warp);
    }
    mbarrier_init_fence();
  }
  const Schedule<pass> schedule(reinterpret_cast<int*>(stages + ring * stage_bytes), p);
  const int group = static_cast<int>(threadIdx.x) / warpgroup, lane = static_cast<int>(threadIdx.x) % warp;
  const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  Position stage;

  if (group == producer) {
    lower_registers<producer_registers>();
    if (threadIdx.x != producer * warpgroup) return;
    tma_prefetch(&a_map);
    tma_prefetch(&b_map);
    stage.parity = 1;  // at first the stages are empty
    for (int t = first; t < schedule.total(p); t += step) {
      const Tile tile = schedule.tile(t, p);
      const int a_first = pass == Pass::weight ? tile.row : tile.begin + tile.row;
      const int k_first = pass == Pass::weight ? tile.begin : 0, k_end = k_first + tile.inner,
                matrix = pass == Pass::weight ? 0 : tile.expert;
#pragma unroll 1
      for (int k = k_first; k < k_end; k += tile_k) {
        const unsigned barrier = full + stage.at * 8, to = shared_address(stages) + stage.at * stage_bytes;
        mbarrier_wait(empty + stage.at * 8, stage.parity);
        mbarrier_arrive_expect(barrier, stage_bytes);
        load_operand<a_mn, tile_m>(to, &a_map, barrier, a_first, k, 0);
        load_operand<b_mn, tile_n>(to + a_bytes, &b_map, barrier, tile.column, k, matrix);
        stage.next();
      }
    }
    return;
  }

  raise_registers<consumer_registers>();
  int owner = 0;
  for (int t = first; t < schedule.total(p); t += step, owner ^= 1) {
    const Tile tile = schedule.tile(t, p);
    const int steps = tiles_of(tile.inner, tile_k);
    if (owner != group) {
      stage.advance(steps);
      continue;
    }
    float d[halves][tile_n / 2] = {};
    // Warpgroups multiply in turn: parity tells phases apart only if a wait begins no more than one phase
    // ahead.
    if (t != first) named_barrier_sync(turn_barrier + group, 2 * warpgroup);
    int before = 0;  // stage of the wgmmas that may be unfinished
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
      mbarrier_wait(full + stage.at * 8, stage.parity);
      unsigned char* const at = stages + stage.at * stage_bytes;
      if constexpr (pass == Pass::weight)
        if (const int real = tile.inner - s * tile_k; real < tile_k) zero_k(at, real, group);
      const uint64_t a = wgmma_descriptor<a_mn>(shared_address(at));
      const uint64_t b = wgmma_descriptor<b_mn>(shared_address(at) + a_bytes);
#pragma unroll
      for (int h = 0; h < halves; ++h) wgmma_pin(d[h]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < tile_k / 16; ++k)
#pragma unroll
        for (int h = 0; h < halves; ++h)
          wgmma_m64n192k16<T, a_mn, b_mn>(d[h], a + k * wgmma_k_step<a_mn> + h * (block_bytes >> 4),
                                          b + k * wgmma_k_step<b_mn>);
      wgmma_commit();
      if (s > 0) {
        wgmma_wait<1>();
        if (lane == 0) mbarrier_arrive(empty + before * 8);
      }
      before = stage.at;
      stage.next();
    }
    if (t + step < schedule.total(p)) named_barrier_arrive(turn_barrier + (group ^ 1), 2 * warpgroup);
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < halves; ++h) wgmma_pin(d[h]);
    if (steps > 0 && lane == 0) mbarrier_arrive(empty + before * 8);
    const int64_t row = (pass == Pass::weight ? tile.expert * p.m : tile.begin) + tile.row;
    C* const c = static_cast<C*>(p.c) + row * p.c_stride + tile.column;
#pragma unroll
    for (int h = 0; h < halves; ++h)
      store_sums(d[h], c + h * 64 * p.c_stride, p.c_stride, tile.rows - tile.row - h * 64, p.n - tile.column,
                 p.accumulate);
  }
#else
  __trap();
#endif
}

namespace wide {

/// True where the device, and the build for it, have a kernel. Code that only stops has hardly any registers.
inline bool runs_on(const Exec& exec, int registers, size_t shared) {
  const device::Properties& gpu = exec.device->properties();
  return gpu.major == 9 && gpu.minor == 0 && registers > producer_registers &&
         shared + 1024 <= gpu.shared_memory_optin;
}

inline Problem problem_of(const Tensor& c, const Tensor& offsets, int64_t m, int64_t n, int64_t k,
                          bool accumulate) {
  Problem p{};
  p.c = c.data;
  p.c_stride = c.step(0);
  p.m = static_cast<int>(m);
  p.n = static_cast<int>(n);
  p.k = static_cast<int>(k);
  p.tiles_m = static_cast<int>(tiles(m, tile_m));
  p.tiles_n = static_cast<int>(tiles(n, tile_n));
  p.offsets = static_cast<const int*>(offsets.data);
  p.experts = static_cast<int>(offsets.dim(0)) - 1;
  p.accumulate = accumulate;
  return p;
}

/// Tiles at most. rows: of all experts, or in weight gradients of each.
template <Pass pass>
int64_t most_tiles_of(int64_t rows, int64_t columns, int64_t experts) {
  return (pass == Pass::weight ? experts * tiles(rows, tile_m) : most_tiles(rows, experts, tile_m)) *
         tiles(columns, tile_n);
}

}  // namespace wide

/// Launches wgmma_kernel; false where the device, the build or the operands do not allow it. m, k: of an
/// expert's matrix.
template <Pass pass, class T, class C>
bool launch_wgmma(Exec& exec, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& offsets,
                  int64_t m, int64_t k, bool accumulate) {
  using namespace wide;
  // A process uses one device.
  static const int registers = device::registers_of(reinterpret_cast<const void*>(wgmma_kernel<pass, T, C>));
  constexpr bool weight = pass == Pass::weight;
  const int64_t rows = a.dim(0), experts = offsets.dim(0) - 1, columns = pass == Pass::forward ? m : k;
  const int64_t most = most_tiles_of<pass>(weight ? m : rows, columns, experts);
  const size_t shared = shared_bytes(static_cast<int>(experts));
  if (rows == 0 || std::max({rows, experts * m, k, 2 * most}) > INT_MAX || !runs_on(exec, registers, shared))
    return false;
  CUtensorMap a_map, b_map;
  const bool mapped =
      device::encode_tensor_map(a_map, a.data, 1, rows, a.dim(1), a.step(0), weight ? 64 : tile_m) &&
      (weight ? device::encode_tensor_map(b_map, b.data, 1, rows, k, b.step(0), 64)
              : device::encode_tensor_map(b_map, b.data, experts, m, k, b.step(0),
                                          pass == Pass::forward ? tile_n : 64));
  if (!mapped) return false;
  const Problem p = problem_of(c, offsets, m, columns, pass == Pass::forward ? k : m, accumulate);
  const unsigned grid = kernel::grid_for(most, 1, exec.multiprocessors, 1);
  NRL_LAUNCH((wgmma_kernel<pass, T, C>), grid, wide::threads, shared, exec.stream, a_map, b_map, p);
  return true;
}

#else

/// The simulator has no wgmma.
template <Pass pass, class T, class C>
bool launch_wgmma(Exec&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, bool) {
  return false;
}

#endif

}  // namespace
}  // namespace nrl::ops::NRL_GPU
