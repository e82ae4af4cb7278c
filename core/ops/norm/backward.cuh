#pragma once
// Backward kernels of the norms; included by cuda.cu alone.

#include "core/ops/kernel_table.h"
#include "core/ops/shared/gpu/partials.cuh"
#include "core/ops/shared/gpu/rows.cuh"
#include "core/ops/shared/scratch.h"

namespace nrl::ops::NRL_GPU {
namespace {

template <class T>
struct BackwardArguments {
  Rows<const T> dout, x, dresidual;
  Rows<T> dx;
  FloatVector weight;
  const float *mean, *rstd;
  int64_t rows, d;
  float inverse_d;
  bool with_weight;  ///< partial sums of dweight (and dbias) are wanted
  Partials partials;
};

/// Rows [begin, end) of a block.
struct Share {
  int64_t begin, end;
  __device__ __forceinline__ explicit Share(int64_t rows)
      : begin(rows * blockIdx.x / gridDim.x), end(rows * (blockIdx.x + 1) / gridDim.x) {}
};

/// dx and the sums over rows in one pass: `lanes` threads share a row and hold it in registers, each up to N
/// packs of it, with the sums of its columns.
template <class T, NormKind kind, int N, int most_threads>
__global__ void __launch_bounds__(most_threads, most_threads <= 384 ? 2 : 1)
    norm_rows_backward_kernel(BackwardArguments<T> a, int lanes) {
  constexpr int E = per_pack<T>;
  constexpr bool layer = kind == NormKind::layer;
  NRL_DYN_SHARED(float, sums);
  RowGroup group(lanes);
  const int groups = static_cast<int>(blockDim.x) / lanes, d = static_cast<int>(a.d);
  float dweight[N][E] = {}, dbias[layer ? N : 1][E] = {};
  const Share share(a.rows);
  for (int64_t first = share.begin; first < share.end; first += groups) {
    const int64_t row = first + group.index();
    const bool mine = row < share.end;
    const int end = mine ? d : 0;  // no columns for threads without a row
    Pack<T, E> dout[N], x[N], residual[N];
    const T *dout_row = a.dout[row], *x_row = a.x[row];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = (group.lane() + k * lanes) * E;
      if (c >= end) continue;
      dout[k].load(dout_row + c);
      x[k].load(x_row + c);
    }
    const float mean = layer && mine ? a.mean[row] : 0.0f, rstd = mine ? a.rstd[row] : 0.0f;
    float along = 0, level = 0;  // sums of dy * xhat / rstd and of dy
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = (group.lane() + k * lanes) * E;
      if (c >= end) continue;
      float g[E], v[E], weight[E];
      dout[k].get(g);
      x[k].get(v);
      a.weight.get(c, weight);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        const float dy = g[i] * weight[i], centred = v[i] - mean;
        along += dy * centred;
        dweight[k][i] += g[i] * (centred * rstd);
        if constexpr (layer) {
          level += dy;
          dbias[k][i] += g[i];
        }
      }
    }
    // Under way while the block adds up; earlier it would take registers that hold sums.
    if (a.dresidual.data) {
      const T* residual_row = a.dresidual[row];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int c = (group.lane() + k * lanes) * E;
        if (c < end) residual[k].load(residual_row + c);
      }
    }
    if constexpr (layer) {
      const float2 both = group.sum(make_float2(along, level));
      along = both.x;
      level = both.y;
    } else {
      along = group.sum(along);
    }
    const float c1 = along * rstd * a.inverse_d, c0 = level * a.inverse_d;
    T* dx = a.dx[row];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = (group.lane() + k * lanes) * E;
      if (c >= end) continue;
      float g[E], v[E], weight[E], other[E] = {};
      dout[k].get(g);
      x[k].get(v);
      a.weight.get(c, weight);
      if (a.dresidual.data) residual[k].get(other);
#pragma unroll
      for (int i = 0; i < E; ++i)
        g[i] = rstd * (g[i] * weight[i] - c0 - (v[i] - mean) * rstd * c1) + other[i];
      dout[k].set(g);
      dout[k].store(dx + c);
    }
  }
  if (!a.with_weight) return;
  for (int which = 0; which < (layer ? 2 : 1); ++which) {
    float* mine = sums + static_cast<int64_t>(group.index()) * d;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = (group.lane() + k * lanes) * E;
      if (c >= d) continue;
      if (which == 0) {
        store_floats(mine + c, dweight[k]);
      } else if constexpr (layer) {
        store_floats(mine + c, dbias[k]);
      }
    }
    write_partial(sums, groups, d, a.partials.of(blockIdx.x, which));
  }
}

constexpr int column_threads = 128;

/// The sums over rows alone, for rows that do not fit: a thread has E columns. blockIdx.y numbers blocks of
/// columns.
template <class T, NormKind kind, int E>
__global__ void __launch_bounds__(column_threads) norm_columns_kernel(BackwardArguments<T> a) {
  constexpr bool layer = kind == NormKind::layer;
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * column_threads + threadIdx.x) * E;
  if (c >= a.d) return;
  float dweight[E] = {}, dbias[E] = {};
  const Share share(a.rows);
#pragma unroll 4
  for (int64_t row = share.begin; row < share.end; ++row) {
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

/// dx of rows of any length and place: a block per row.
template <class T, NormKind kind, int E>
__global__ void __launch_bounds__(512) norm_long_rows_backward_kernel(BackwardArguments<T> a) {
  constexpr bool layer = kind == NormKind::layer;
  RowGroup block(static_cast<int>(blockDim.x));
  const int64_t step = static_cast<int64_t>(blockDim.x) * E, start = static_cast<int64_t>(threadIdx.x) * E;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T *dout_row = a.dout[row], *x_row = a.x[row];
    const T* residual_row = a.dresidual.data ? a.dresidual[row] : nullptr;
    T* dx = a.dx[row];
    const float mean = layer ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    float along = 0, level = 0;
    for (int64_t c = start; c < a.d; c += step) {
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
        along += dy * (v[i] - mean);
        if constexpr (layer) level += dy;
      }
    }
    const float2 both = block.sum(make_float2(along, level));
    const float c1 = both.x * rstd * a.inverse_d, c0 = both.y * a.inverse_d;
    for (int64_t c = start; c < a.d; c += step) {
      Pack<T, E> dout, x;
      float g[E], v[E], weight[E], other[E] = {};
      dout.load(dout_row + c);
      x.load(x_row + c);
      dout.get(g);
      x.get(v);
      a.weight.get(c, weight);
      if (residual_row) {
        Pack<T, E> residual;
        residual.load(residual_row + c);
        residual.get(other);
      }
#pragma unroll
      for (int i = 0; i < E; ++i)
        g[i] = rstd * (g[i] * weight[i] - c0 - (v[i] - mean) * rstd * c1) + other[i];
      dout.set(g);
      dout.store(dx + c);
    }
  }
}

template <class T, NormKind kind>
void backward(Exec& exec, const NormBackward& b) {
  constexpr bool layer = kind == NormKind::layer;
  BackwardArguments<T> a{};
  a.dout = Rows<const T>(b.dout);
  a.x = Rows<const T>(b.x);
  a.dresidual = Rows<const T>(b.dresidual);
  a.dx = Rows<T>(b.dx);
  a.weight = FloatVector(b.weight);
  a.mean = static_cast<const float*>(b.mean.data);
  a.rstd = static_cast<const float*>(b.rstd.data);
  a.d = b.x.dim(-1);
  a.rows = b.x.numel() / a.d;
  a.inverse_d = 1.0f / static_cast<float>(a.d);
  float *dweight = static_cast<float*>(b.dweight.data), *dbias = static_cast<float*>(b.dbias.data);
  a.with_weight = dweight || dbias;
  a.partials = {reinterpret_cast<float*>(exec.workspace.data), a.d};
  const auto most_blocks = static_cast<int64_t>(exec.threads);

  constexpr int E = per_pack<T>;
  constexpr int deep = layer ? 1 : 2;  // packs of a thread: a norm with bias has twice as many sums to hold
  constexpr int usual = 384,
                largest = layer ? 1024 : 512;  // threads; two blocks of the usual size share a multiprocessor
  const bool packed = packed_rows(b.dout) && packed_rows(b.x) && packed_rows(b.dresidual) &&
                      packed_rows(b.dx) && kernel::aligned16(b.weight.data);
  const int64_t packs = a.d / E;
  if (packed && packs <= static_cast<int64_t>(largest) * deep) {
    const int64_t lanes_wanted = (packs + deep - 1) / deep;
    const bool part_of_warp = lanes_wanted <= kernel::warp;
    const int lanes = part_of_warp ? power_of_two(lanes_wanted) : round_up(lanes_wanted, kernel::warp);
    const int groups = max(1, usual / lanes), threads = groups * lanes;
    const int64_t blocks = min(most_blocks, (a.rows + groups - 1) / groups);
    const size_t shared = a.with_weight ? static_cast<size_t>(groups) * a.d * sizeof(float) : 0;
    const auto grid = static_cast<unsigned>(blocks);
    if (threads <= usual) {
      NRL_LAUNCH((norm_rows_backward_kernel<T, kind, deep, usual>), grid, threads, shared, exec.stream, a,
                 lanes);
    } else {
      NRL_LAUNCH((norm_rows_backward_kernel<T, kind, deep, largest>), grid, threads, shared, exec.stream, a,
                 lanes);
    }
    if (a.with_weight) add_partials(exec, a.partials, static_cast<int>(blocks), dweight, dbias);
    return;
  }
  auto launch = [&]<int width>() {
    // The sums first: dx may lie in dout.
    if (a.with_weight) {
      const int64_t blocks = min(most_blocks, (a.rows + 7) / 8);
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
