#pragma once
// Backward kernels of the norms; included by cuda.cu alone. With dy = dout * weight and
// xhat = (x - mean) * rstd, where RMS norm has mean = 0 and lacks the term mean_dy:
//
//   dx       = rstd * (dy - mean_dy - xhat * mean_dy_xhat) + dresidual   (means over the row)
//   dweight += sum over rows of dout * xhat
//   dbias   += sum over rows of dout
//
// Reads dout, x, mean, rstd, weight, dresidual. Writes dx (=), which may be dout or dresidual, and
// one partial sum of dweight and dbias per block (=, workspace), which add_partials_kernel adds up (+=). If
// it is wanted, amax = max(amax, |dx|).
//
// norm_rows_backward_kernel: `threads_per_row` neighboring threads take a row, N packs of E elements (16
// bytes) each, and copy their next row to shared memory meanwhile; a block has several rows at a time, and
// the grid strides over the rows. For longer rows norm_columns_kernel (a thread per E columns, blockIdx.x
// numbers ranges of rows) makes the partial sums and norm_long_rows_backward_kernel (a block per row) dx.

#include <climits>

#include "core/ops/kernel_table.h"
#include "core/ops/shared/gpu/amax.cuh"
#include "core/ops/shared/gpu/partials.cuh"
#include "core/ops/shared/gpu/rows.cuh"
#include "core/ops/shared/scratch.h"

namespace nrl::ops::NRL_GPU {
namespace {

template <class T>
struct BackwardArguments {
  Rows<const T> dout, x, dresidual;
  Rows<T> dx;
  FloatVector<T> weight;
  const float *mean, *rstd;
  int64_t rows, d;
  float inverse_d;
  unsigned* amax;    ///< the bits of a float >= 0
  bool with_weight;  ///< partial sums of dweight (and dbias) are wanted
  Partials partials;
};

/// The rows [begin, end) of a block.
struct RowRange {
  int64_t begin, end;
  __device__ __forceinline__ explicit RowRange(int64_t rows)
      : begin(rows * blockIdx.x / gridDim.x), end(rows * (blockIdx.x + 1) / gridDim.x) {}
};

constexpr int backward_threads = 512;

/// dx and the partial sums in one pass, for rows of up to threads_per_row * N packs. A thread keeps the
/// weights and the sums of its columns in registers; in the ring of two rows it reads only what it copied
/// itself.
template <class T, NormKind kind, int N>
__global__ void __launch_bounds__(backward_threads, 2 / N)
    norm_rows_backward_kernel(BackwardArguments<T> a, int threads_per_row) {
  constexpr int E = per_pack<T>;
  constexpr bool layer = kind == NormKind::layer;
  NRL_DYN_SHARED(uint4, ring);  // (stage, dout or x or dresidual, pack, thread)
  RowGroup group(threads_per_row);
  const int rows_per_block = static_cast<int>(blockDim.x) / threads_per_row;
  const int column = group.lane() * E, step = threads_per_row * E, d = static_cast<int>(a.d);
  float dweight[N][E] = {}, dbias[layer ? N : 1][E] = {}, weight[N][E];
#pragma unroll
  for (int k = 0; k < N; ++k)
    if (column + k * step < d) a.weight.get(column + k * step, weight[k]);
  unsigned amax = 0;
  const int rows = static_cast<int>(a.rows), stride = static_cast<int>(gridDim.x) * rows_per_block;
  float next_mean = 0, next_rstd = 0;
  const auto at = [&](int stage, int which, int k) {
    return ring + ((stage * 3 + which) * N + k) * backward_threads + threadIdx.x;
  };
  const auto fetch = [&](int row, int stage) {
    if (row < rows) {
      const T *dout = a.dout[row], *x = a.x[row], *residual = a.dresidual.data ? a.dresidual[row] : nullptr;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int c = column + k * step;
        if (c >= d) continue;
        nrl_cp_async16(at(stage, 0, k), dout + c);
        nrl_cp_async16(at(stage, 1, k), x + c);
        if (residual) nrl_cp_async16(at(stage, 2, k), residual + c);
      }
      if constexpr (layer) next_mean = a.mean[row];
      next_rstd = a.rstd[row];
    }
    nrl_cp_async_commit();
  };
  const auto read = [&](int stage, int which, int k, float(&v)[E]) {
    load_floats(reinterpret_cast<const T*>(at(stage, which, k)), v);
  };
  int first = static_cast<int>(blockIdx.x) * rows_per_block;
  fetch(first + group.index(), 0);
  for (int stage = 0; first < rows; first += stride, stage ^= 1) {
    const int row = first + group.index();
    const int end = row < rows ? d : 0;  // a thread without a row has no columns
    const float mean = next_mean, rstd = next_rstd;
    fetch(row + stride, stage ^ 1);
    nrl_cp_async_wait<1>();
    Pack<T, E> dout[N];
    float sum_dy_centered = 0, sum_dy = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (column + k * step >= end) continue;
      float g[E], v[E];
      dout[k].load(reinterpret_cast<const T*>(at(stage, 0, k)));
      dout[k].get(g);
      read(stage, 1, k, v);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        const float dy = g[i] * weight[k][i], centered = v[i] - mean;
        sum_dy_centered += dy * centered;
        dweight[k][i] += g[i] * (centered * rstd);
        if constexpr (layer) {
          sum_dy += dy;
          dbias[k][i] += g[i];
        }
      }
    }
    if constexpr (layer) {
      const float2 both = group.sum(make_float2(sum_dy_centered, sum_dy));
      sum_dy_centered = both.x;
      sum_dy = both.y;
    } else {
      sum_dy_centered = group.sum(sum_dy_centered);
    }
    const float mean_dy_xhat = sum_dy_centered * rstd * a.inverse_d, mean_dy = sum_dy * a.inverse_d;
    T* dx = a.dx[row];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = column + k * step;
      if (c >= end) continue;
      float g[E], v[E], residual[E] = {};
      dout[k].get(g);
      read(stage, 1, k, v);  // again, because registers are few
      if (a.dresidual.data) read(stage, 2, k, residual);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        v[i] = rstd * (g[i] * weight[k][i] - mean_dy - (v[i] - mean) * rstd * mean_dy_xhat) + residual[i];
      }
      if (a.amax) add_magnitudes(amax, v);
      store_floats(dx + c, v);
    }
  }
  if (a.amax) combine_amax<T>(a.amax, amax);
  if (!a.with_weight) return;
  __syncthreads();  // the ring is read no more
  auto* sums = reinterpret_cast<float*>(ring);
  for (int which = 0; which < (layer ? 2 : 1); ++which) {
    float* row_sums = sums + group.index() * d;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = column + k * step;
      if (c >= d) continue;
      if (which == 0) {
        store_floats(row_sums + c, dweight[k]);
      } else if constexpr (layer) {
        store_floats(row_sums + c, dbias[k]);
      }
    }
    write_partial(sums, rows_per_block, d, a.partials.of(blockIdx.x, which));
  }
}

constexpr int column_threads = 128;

/// The partial sums alone, for rows that do not fit into registers. blockIdx.y numbers blocks of columns.
template <class T, NormKind kind, int E>
__global__ void __launch_bounds__(column_threads) norm_columns_kernel(BackwardArguments<T> a) {
  constexpr bool layer = kind == NormKind::layer;
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * column_threads + threadIdx.x) * E;
  if (c >= a.d) return;
  float dweight[E] = {}, dbias[E] = {};
  const RowRange range(a.rows);
#pragma unroll 4
  for (int64_t row = range.begin; row < range.end; ++row) {
    Pack<T, E> dout, x;
    float g[E], v[E];
    dout.load(a.dout[row] + c);
    x.load(a.x[row] + c);
    dout.get(g);
    x.get(v);
    const float mean = layer ? a.mean[row] : 0.0f, rstd = a.rstd[row];
#pragma unroll
    for (int i = 0; i < E; ++i) {
      dweight[i] += g[i] * ((v[i] - mean) * rstd);
      dbias[i] += g[i];
    }
  }
#pragma unroll
  for (int i = 0; i < E; ++i) {
    a.partials.of(blockIdx.x, 0)[c + i] = dweight[i];
    if constexpr (layer) a.partials.of(blockIdx.x, 1)[c + i] = dbias[i];
  }
}

/// dx alone, for rows of any length and alignment.
template <class T, NormKind kind, int E>
__global__ void __launch_bounds__(512) norm_long_rows_backward_kernel(BackwardArguments<T> a) {
  constexpr bool layer = kind == NormKind::layer;
  RowGroup block(static_cast<int>(blockDim.x));
  const int64_t stride = static_cast<int64_t>(blockDim.x) * E, start = static_cast<int64_t>(threadIdx.x) * E;
  unsigned amax = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T *dout_row = a.dout[row], *x_row = a.x[row];
    const T* residual_row = a.dresidual.data ? a.dresidual[row] : nullptr;
    T* dx = a.dx[row];
    const float mean = layer ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    float sum_dy_centered = 0, sum_dy = 0;
    for (int64_t c = start; c < a.d; c += stride) {
      Pack<T, E> dout, x;
      float g[E], v[E], weight[E];
      dout.load(dout_row + c);
      x.load(x_row + c);
      dout.get(g);
      x.get(v);
      a.weight.get(c, weight);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        const float dy = g[i] * weight[i];
        sum_dy_centered += dy * (v[i] - mean);
        if constexpr (layer) sum_dy += dy;
      }
    }
    const float2 both = block.sum(make_float2(sum_dy_centered, sum_dy));
    const float mean_dy_xhat = both.x * rstd * a.inverse_d, mean_dy = both.y * a.inverse_d;
    for (int64_t c = start; c < a.d; c += stride) {
      Pack<T, E> dout, x;
      float g[E], v[E], weight[E], residual_v[E] = {};
      dout.load(dout_row + c);
      x.load(x_row + c);
      dout.get(g);
      x.get(v);
      a.weight.get(c, weight);
      if (residual_row) {
        Pack<T, E> residual;
        residual.load(residual_row + c);
        residual.get(residual_v);
      }
#pragma unroll
      for (int i = 0; i < E; ++i) {
        g[i] = rstd * (g[i] * weight[i] - mean_dy - (v[i] - mean) * rstd * mean_dy_xhat) + residual_v[i];
      }
      if (a.amax) add_magnitudes(amax, g);
      dout.set(g);
      dout.store(dx + c);
    }
  }
  if (a.amax) combine_amax<T>(a.amax, amax);
}

/// Launches norm_rows_backward_kernel and returns its number of blocks, the same on every GPU. As many share
/// a multiprocessor as registers allow.
template <class T, NormKind kind, int N>
int launch_rows(Exec& exec, const BackwardArguments<T>& a) {
  const int64_t wanted = (a.d / per_pack<T> + N - 1) / N;
  const int threads_per_row = wanted <= kernel::warp ? power_of_two(wanted) : round_up(wanted, kernel::warp),
            rows_per_block = backward_threads / threads_per_row, threads = rows_per_block * threads_per_row;
  const int64_t blocks = min(partial_blocks(exec, 2 / N), (a.rows + rows_per_block - 1) / rows_per_block);
  constexpr size_t ring = 2 * 3 * N * backward_threads * sizeof(uint4);  // more than the sums take
  NRL_LAUNCH((norm_rows_backward_kernel<T, kind, N>), static_cast<unsigned>(blocks), threads, ring,
             exec.stream, a, threads_per_row);
  return static_cast<int>(blocks);
}

template <class T, NormKind kind>
void backward(Exec& exec, const NormBackward& b) {
  BackwardArguments<T> a{};
  a.dout = Rows<const T>(b.dout);
  a.x = Rows<const T>(b.x);
  a.dresidual = Rows<const T>(b.dresidual);
  a.dx = Rows<T>(b.dx);
  a.weight = FloatVector<T>(b.weight, b.weight_offset);
  a.mean = static_cast<const float*>(b.mean.data);
  a.rstd = static_cast<const float*>(b.rstd.data);
  a.d = b.x.dim(-1);
  a.rows = b.x.numel() / a.d;
  a.inverse_d = 1.0f / static_cast<float>(a.d);
  float *dweight = static_cast<float*>(b.dweight.data), *dbias = static_cast<float*>(b.dbias.data);
  a.amax = static_cast<unsigned*>(b.amax.data);
  a.with_weight = dweight || dbias;
  a.partials = {reinterpret_cast<float*>(exec.workspace.data), a.d};
  constexpr int E = per_pack<T>;
  const bool packed = packed_rows(b.dout) && packed_rows(b.x) && packed_rows(b.dresidual) &&
                      packed_rows(b.dx) && kernel::aligned16(b.weight.data);
  const int64_t packs = a.d / E;
  if (packed && packs <= 2 * backward_threads && a.rows <= INT_MAX / 2) {
    const int blocks =
        packs <= backward_threads ? launch_rows<T, kind, 1>(exec, a) : launch_rows<T, kind, 2>(exec, a);
    if (a.with_weight) add_partials(exec, a.partials, blocks, dweight, dbias);
    return;
  }
  auto launch = [&]<int width>() {
    // The partial sums first: dx may be dout.
    if (a.with_weight) {
      const int64_t blocks = min(partial_blocks(exec, 2), (a.rows + 7) / 8);
      const int64_t column_blocks = (a.d + column_threads * width - 1) / (column_threads * width);
      NRL_LAUNCH((norm_columns_kernel<T, kind, width>),
                 dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(column_blocks)), column_threads, 0,
                 exec.stream, a);
      add_partials(exec, a.partials, static_cast<int>(blocks), dweight, dbias);
    }
    const int threads = min(512, round_up((a.d + 4 * width - 1) / (4 * width), kernel::warp));
    const unsigned grid = kernel::grid_for(a.rows, 1, exec.multiprocessors, max(8, 2048 / threads));
    NRL_LAUNCH((norm_long_rows_backward_kernel<T, kind, width>), grid, threads, 0, exec.stream, a);
  };
  packed ? launch.template operator()<E>() : launch.template operator()<1>();
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
