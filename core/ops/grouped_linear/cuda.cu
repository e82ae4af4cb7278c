// Linear layers of experts on the GPU:
//
//   forward         out = x W_e^T
//   backward data   dx = dout W_e
//   backward weight dW_e (=, +=) = dout_e^T x_e
//
// One launch for all experts: a block finds its expert and its rows in the offsets, in device memory, so that
// neither the host nor a captured graph needs to know how many rows an expert has. The grid has room for the
// worst case, and blocks without rows leave (in hopper.cuh one block per multiprocessor takes tile after
// tile). Each block computes a tile of one expert's result, c[m, n] = sum over k of a[m, k] b[n, k], where a
// and b lie with k or with m (n) contiguous.
//
// bf16 and f16 with 16-byte aligned rows: hopper.cuh on compute capability 9.0, else tensor_kernel, 128 x 128
// tiles, mma.m16n8k16, three stages of cp.async. FP8: hopper_fp8.cuh and
// fp8.cuh, likewise. Else: simt_kernel, 64 x 64 tiles. All add in
// f32, in an order that depends on the number of rows alone.

#include "core/device/kernel.h"
#include "core/ops/grouped_linear/fp8.cuh"
#include "core/ops/grouped_linear/hopper.cuh"
#include "core/ops/grouped_linear/hopper_fp8.cuh"
#include "core/ops/grouped_linear/tiles.cuh"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/check.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

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
  } else {
    t.columns = pass == Pass::forward ? p.m : p.k;
    t.inner = pass == Pass::forward ? p.k : p.m;
    with_tile(p.offsets, p.experts, size, blockIdx.y, [&](const GroupTile& g) {
      t.rows = g.rows;
      t.row = int64_t{g.tile} * size;
      t.a = p.a + g.begin * p.a_stride;
      t.b = p.b + g.group * p.m * p.b_stride;
      t.c = p.c + g.begin * p.c_stride;
    });
  }
  return t;
}

// --- tensor cores ------------------------------------------------------------------------------------------

template <Pass pass, class T, class C>
__global__ void __launch_bounds__(tensor_threads) tensor_kernel(Problem<T, C> p) {
  constexpr bool a_k = pass != Pass::weight, b_k = pass == Pass::forward;
  constexpr int a_stage = stage_elements<a_k>, b_stage = stage_elements<b_k>;
  NRL_DYN_SHARED(T, shared);
  T *as = shared, *bs = shared + stages * a_stage;
  const Tile<T, C> t = tile_of<pass>(p, tile_rows);
  if (t.row >= t.rows || t.column >= t.columns) return;
  const int w = static_cast<int>(threadIdx.x) / warp;
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
  store_tile(sum, t.c, p.c_stride, t.row + m0, t.rows, t.column + n0, t.columns, p.accumulate);
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

// Gradients of 16-bit rows take a register more than four blocks have.
template <Pass pass, class T, class C>
__global__ void __launch_bounds__(simt_threads, pass == Pass::data && sizeof(T) == 2 ? 3 : 4)
    simt_kernel(Problem<T, C> p) {
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
      if (launch_wgmma<pass, T, C>(exec, a, b, c, offsets, m, k, accumulate)) return;
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

/// Operands (rows, inner) and (columns, inner) as stored.
template <Pass pass>
void launch_fp8(Exec& exec, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& offsets,
                bool accumulate) {
  constexpr bool weight = pass == Pass::weight;
  NRL_CHECK(packed_rows(a) && packed_rows(b) && packed_rows(c), "FP8 GEMM of experts: {} x {} gives {}",
            describe(a), describe(b), describe(c));
  const int experts = static_cast<int>(offsets.dim(0)) - 1;
  using C = std::conditional_t<weight, float, bf16>;
  const auto with = [&]<class A>() {
    Fp8Problem<C> p{.a = Fp8Operand(a),
                    .b = Fp8Operand(b),
                    .c = static_cast<C*>(c.data),
                    .c_stride = c.step(0),
                    .rows = weight ? c.dim(0) / experts : 0,
                    .columns = c.dim(1),
                    .inner = weight ? 0 : a.dim(1),
                    .offsets = static_cast<const int*>(offsets.data),
                    .experts = experts,
                    .unit = static_cast<int>(row_unit(a.scales.kind)),
                    .accumulate = accumulate};
    const auto run = [&]<Scaling scaling>() {
      constexpr bool a_e5m2 = std::is_same_v<A, fp8::Number<DType::e5m2>>;
      constexpr bool in_blocks = scaling == Scaling::row128;
      if constexpr (scaling != Scaling::mx32)
        if (launch_fp8_wgmma<weight, a_e5m2, in_blocks, C>(exec, a, b, c, offsets, accumulate)) return;
      launch_fp8_kernel<weight, A, scaling>(exec, p, c.dim(0));
    };
    if (a.scales.kind == Scaling::mx32) return run.template operator()<Scaling::mx32>();
    has_scale_blocks(a.scales.kind) ? run.template operator()<Scaling::row128>()
                                    : run.template operator()<Scaling::tensor>();
  };
  a.dtype == DType::e4m3 ? with.template operator()<fp8::Number<DType::e4m3>>()
                         : with.template operator()<fp8::Number<DType::e5m2>>();
}

void forward_launch(Exec& exec, const GroupedLinearForward& a) {
  if (is_fp8(a.x)) return launch_fp8<Pass::forward>(exec, a.x, a.weight, a.out, a.offsets, false);
  for_float_type(a.x.dtype, [&]<class T>() {
    launch<Pass::forward, T, T>(exec, a.x, a.weight, a.out, a.offsets, a.out.dim(1), a.x.dim(1), false);
  });
}

void backward_data_launch(Exec& exec, const GroupedLinearBackwardData& a) {
  if (is_fp8(a.dout)) return launch_fp8<Pass::data>(exec, a.dout, a.weight, a.dx, a.offsets, false);
  for_float_type(a.dx.dtype, [&]<class T>() {
    launch<Pass::data, T, T>(exec, a.dout, a.weight, a.dx, a.offsets, a.dout.dim(1), a.dx.dim(1), false);
  });
}

void backward_weight_launch(Exec& exec, const GroupedLinearBackwardWeight& a) {
  if (is_fp8(a.dout)) return launch_fp8<Pass::weight>(exec, a.dout, a.x, a.dweight, a.offsets, a.accumulate);
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
