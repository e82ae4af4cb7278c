// Linear layers of experts on the GPU:
//
//   forward         out = x W_e^T
//   backward data   dx = dout W_e
//   backward weight dW_e (=, +=) = dout_e^T x_e
//
// One launch for all experts: a block finds its expert and its rows in the offsets, in device memory, so that
// neither the host nor a captured graph needs to know how many rows an expert has. The grid has room for the
// worst case, and blocks without rows leave. Each block computes a tile of one expert's result, c[m, n] = sum
// over k of a[m, k] b[n, k], where a and b lie with k or with m (n) contiguous.
//
// bf16 and f16 with 16-byte aligned rows: tensor_kernel, 128 x 128 tiles, mma.m16n8k16, three stages of
// cp.async. Else: simt_kernel, 64 x 64 tiles. Both add in f32, in an order that depends on the number of rows
// alone.

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

enum class Pass : uint8_t { forward, data, weight };

/// Operands of all experts. forward: a = x, b = weight; data: a = dout, b = weight; weight: a = dout, b = x.
template <class T, class C>
struct Problem {
  const T *a, *b;
  C* c;
  int64_t a_stride, b_stride, c_stride;  ///< elements between stored rows
  int64_t m, k;                          ///< of an expert's matrix
  const int* offsets;
  int experts;
  bool accumulate;
};

/// The tile of a block.
template <class T, class C>
struct Tile {
  const T *a = nullptr, *b = nullptr;  ///< of the expert
  C* c = nullptr;
  int64_t rows = 0, columns = 0, inner = 0;  ///< of the expert's GEMM
  int64_t row = 0, column = 0;               ///< first of the tile
};

/// The block's tile; without rows where there is nothing to do. `size`: of a tile.
template <Pass pass, class T, class C>
__device__ __forceinline__ Tile<T, C> tile_of(const Problem<T, C>& p, int size) {
  Tile<T, C> t;
  t.column = int64_t{blockIdx.x} * size;
  if constexpr (pass == Pass::weight) {
    const int e = static_cast<int>(blockIdx.z);
    const int begin = p.offsets[e];
    t.a = p.a + begin * p.a_stride;
    t.b = p.b + begin * p.b_stride;
    t.c = p.c + e * p.m * p.c_stride;
    t.rows = p.m;
    t.columns = p.k;
    t.inner = p.offsets[e + 1] - begin;
    t.row = int64_t{blockIdx.y} * size;
    return t;
  }
  // Tiles are numbered expert by expert. A warp's lanes look at 32 experts at a time.
  const int lane = static_cast<int>(threadIdx.x) % warp;
  int64_t first = 0;  // tile of expert `base`
  for (int base = 0; base < p.experts; base += warp) {
    const int e = base + lane;
    const int begin = e < p.experts ? p.offsets[e] : 0, end = e < p.experts ? p.offsets[e + 1] : 0;
    const int tiles = (end - begin + size - 1) / size;
    int sum = tiles;
#pragma unroll
    for (int o = 1; o < warp; o <<= 1) {
      const int below = __shfl_up_sync(all_lanes, sum, o);
      if (lane >= o) sum += below;
    }
    const int64_t mine = int64_t{blockIdx.y} - (first + sum - tiles);
    const unsigned found = __ballot_sync(all_lanes, mine >= 0 && mine < tiles);
    if (found != 0) {
      const int owner = __ffs(static_cast<int>(found)) - 1;
      const int64_t start = __shfl_sync(all_lanes, begin, owner);
      t.rows = __shfl_sync(all_lanes, end, owner) - start;
      t.row = int64_t{__shfl_sync(all_lanes, static_cast<int>(mine), owner)} * size;
      t.a = p.a + start * p.a_stride;
      t.b = p.b + (base + owner) * p.m * p.b_stride;
      t.c = p.c + start * p.c_stride;
      t.columns = pass == Pass::forward ? p.m : p.k;
      t.inner = pass == Pass::forward ? p.k : p.m;
      return t;
    }
    first += __shfl_sync(all_lanes, sum, warp - 1);
  }
  return t;
}

// --- tensor cores ------------------------------------------------------------------------------------------

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

template <Pass pass, class T, class C>
__global__ void __launch_bounds__(tensor_threads) tensor_kernel(Problem<T, C> p) {
  constexpr bool a_k = pass != Pass::weight, b_k = pass == Pass::forward;
  constexpr int a_stage = stage_elements<a_k>, b_stage = stage_elements<b_k>;
  NRL_DYN_SHARED(T, shared);
  T *as = shared, *bs = shared + stages * a_stage;
  const Tile<T, C> t = tile_of<pass>(p, tile_rows);
  if (t.row >= t.rows || t.column >= t.columns) return;
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int m0 = w / 4 * warp_rows, n0 = w % 4 * warp_columns;
  const int64_t steps = (t.inner + tile_depth - 1) / tile_depth;
  const auto copy = [&](int64_t step) {
    const int64_t at = step % stages;
    if (step < steps) {
      copy_stage<a_k>(as + at * a_stage, t.a, p.a_stride, t.row, t.rows, step * tile_depth, t.inner);
      copy_stage<b_k>(bs + at * b_stage, t.b, p.b_stride, t.column, t.columns, step * tile_depth, t.inner);
    }
    nrl_cp_async_commit();
  };
  float sum[warp_rows / 16][warp_columns / 8][4] = {};
  for (int s = 0; s + 1 < stages; ++s) copy(s);
  for (int64_t step = 0; step < steps; ++step) {
    nrl_cp_async_wait<stages - 2>();
    __syncthreads();
    copy(step + stages - 1);
    const T *a = as + step % stages * a_stage, *b = bs + step % stages * b_stage;
#pragma unroll
    for (int k = 0; k < tile_depth; k += 16) {
      unsigned fb[warp_columns / 8][2];
#pragma unroll
      for (int n = 0; n < warp_columns; n += 16) load_fragment<b_k, false>(fb[n / 8], b, n0 + n, k);
#pragma unroll
      for (int m = 0; m < warp_rows; m += 16) {
        unsigned fa[4];
        load_fragment<a_k, true>(fa, a, m0 + m, k);
        nrl_mma_m16n8k16<T, warp_columns / 8>(sum[m / 16], fa, fb);
      }
    }
  }
  nrl_cp_async_wait<0>();
#pragma unroll
  for (int m = 0; m < warp_rows / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = t.row + m0 + m * 16 + half * 8 + lane / 4;
      if (row >= t.rows) continue;
      C* out = t.c + row * p.c_stride;
#pragma unroll
      for (int n = 0; n < warp_columns / 8; ++n) {
        const int64_t column = t.column + n0 + n * 8 + lane % 4 * 2;
        if (column >= t.columns) continue;
        const float low = sum[m][n][2 * half], high = sum[m][n][2 * half + 1];
        if constexpr (sizeof(C) == 2) {
          *reinterpret_cast<unsigned*>(out + column) = pack_low<T>(low, high);
        } else {
          out[column] = p.accumulate ? out[column] + low : low;
          out[column + 1] = p.accumulate ? out[column + 1] + high : high;
        }
      }
    }
}

// --- any shape ---------------------------------------------------------------------------------------------

constexpr int simt_tile = 64, simt_depth = 16, simt_threads = 256;

/// Copies a tile to shared memory, [k][m], zero beyond the ends.
template <bool k_contiguous, class T>
__device__ __forceinline__ void load_tile(float (*to)[simt_tile], const T* from, int64_t stride,
                                          int64_t first, int64_t end, int64_t k, int64_t inner) {
  for (int i = static_cast<int>(threadIdx.x); i < simt_tile * simt_depth; i += simt_threads) {
    const int dm = k_contiguous ? i / simt_depth : i % simt_tile;
    const int dk = k_contiguous ? i % simt_depth : i / simt_tile;
    const int64_t row = first + dm, depth = k + dk;
    const bool real = row < end && depth < inner;
    to[dk][dm] =
        real ? static_cast<float>(from[k_contiguous ? row * stride + depth : depth * stride + row]) : 0.0f;
  }
}

template <Pass pass, class T, class C>
__global__ void __launch_bounds__(simt_threads, 4) simt_kernel(Problem<T, C> p) {
  NRL_SHARED(float, a, [simt_depth][simt_tile]);
  NRL_SHARED(float, b, [simt_depth][simt_tile]);
  const Tile<T, C> t = tile_of<pass>(p, simt_tile);
  if (t.row >= t.rows || t.column >= t.columns) return;
  const int m0 = static_cast<int>(threadIdx.x) / 16 * 4, n0 = static_cast<int>(threadIdx.x) % 16 * 4;
  float sum[4][4] = {};
  for (int64_t k = 0; k < t.inner; k += simt_depth) {
    load_tile<pass != Pass::weight>(a, t.a, p.a_stride, t.row, t.rows, k, t.inner);
    load_tile<pass == Pass::forward>(b, t.b, p.b_stride, t.column, t.columns, k, t.inner);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < simt_depth; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += a[d][m0 + i] * b[d][n0 + j];
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t row = t.row + m0 + i, column = t.column + n0 + j;
      if (row >= t.rows || column >= t.columns) continue;
      C* out = t.c + row * p.c_stride + column;
      *out = p.accumulate ? C(static_cast<float>(*out) + sum[i][j]) : C(sum[i][j]);
    }
}

// --- launches ----------------------------------------------------------------------------------------------

unsigned tiles(int64_t n, int64_t size) {
  return static_cast<unsigned>((n + size - 1) / size);
}

/// `r`: rows of all experts at most; `columns`, `m`: of an expert's result.
template <Pass pass>
dim3 grid_of(int64_t r, int64_t m, int64_t columns, int experts, int size) {
  if (pass == Pass::weight) return dim3(tiles(columns, size), tiles(m, size), static_cast<unsigned>(experts));
  // Each expert may have a tile that is not full.
  const int64_t most = r < experts ? r : r / size + experts;
  return dim3(tiles(columns, size), static_cast<unsigned>(most < 1 ? 1 : most));
}

template <Pass pass, class T, class C>
void launch(Exec& exec, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& offsets, int64_t m,
            int64_t k, bool accumulate) {
  Problem<T, C> p{};
  p.a = static_cast<const T*>(a.data);
  p.b = static_cast<const T*>(b.data);
  p.c = static_cast<C*>(c.data);
  p.a_stride = a.step(0);
  p.b_stride = b.step(0);
  p.c_stride = c.step(0);
  p.m = m;
  p.k = k;
  p.offsets = static_cast<const int*>(offsets.data);
  p.experts = static_cast<int>(offsets.dim(0)) - 1;
  p.accumulate = accumulate;
  const int64_t columns = pass == Pass::forward ? m : k;
  if constexpr (sizeof(T) == 2) {
    if (packed_rows(a) && packed_rows(b) && packed_rows(c)) {
      constexpr size_t shared =
          sizeof(T) * stages * (stage_elements<pass != Pass::weight> + stage_elements<pass == Pass::forward>);
      const dim3 grid = grid_of<pass>(a.dim(0), m, columns, p.experts, tile_rows);
      NRL_LAUNCH((tensor_kernel<pass, T, C>), grid, tensor_threads, shared, exec.stream, p);
      return;
    }
  }
  const dim3 grid = grid_of<pass>(a.dim(0), m, columns, p.experts, simt_tile);
  NRL_LAUNCH((simt_kernel<pass, T, C>), grid, simt_threads, 0, exec.stream, p);
}

void forward_launch(Exec& exec, const GroupedLinearForward& a) {
  for_float_type(a.x.dtype, [&]<class T>() {
    launch<Pass::forward, T, T>(exec, a.x, a.weight, a.out, a.offsets, a.out.dim(1), a.x.dim(1), false);
  });
}

void backward_data_launch(Exec& exec, const GroupedLinearBackwardData& a) {
  for_float_type(a.dx.dtype, [&]<class T>() {
    launch<Pass::data, T, T>(exec, a.dout, a.weight, a.dx, a.offsets, a.dout.dim(1), a.dx.dim(1), false);
  });
}

void backward_weight_launch(Exec& exec, const GroupedLinearBackwardWeight& a) {
  for_float_type(a.x.dtype, [&]<class T>() {
    launch<Pass::weight, T, float>(exec, a.dout, a.x, a.dweight, a.offsets, a.dout.dim(1), a.x.dim(1),
                                   a.accumulate);
  });
}

}  // namespace

void fill_grouped_linear(KernelTable& table) {
  table.grouped_linear_forward = forward_launch;
  table.grouped_linear_backward_data = backward_data_launch;
  table.grouped_linear_backward_weight = backward_weight_launch;
}

}  // namespace nrl::ops::NRL_GPU
