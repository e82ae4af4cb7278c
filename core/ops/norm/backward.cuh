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
// norm_rows_backward_kernel: a block has a contiguous range of rows; `threads_per_row` neighboring threads
// hold a row in registers, N packs of E elements (16 bytes) each.
// For longer rows norm_columns_kernel (a thread per E columns, blockIdx.x numbers ranges of rows) makes the
// partial sums and norm_long_rows_backward_kernel (a block per row) dx.

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

/// What a thread has of a row: N packs of dout and x, and the row's statistics.
template <class T, NormKind kind, int N>
struct RowPart {
  static constexpr int E = per_pack<T>;
  Pack<T, E> dout[N], x[N];
  float mean = 0, rstd = 0;

  __device__ __forceinline__ void load(const BackwardArguments<T>& a, int64_t row, int lane, int stride) {
    const T *dout_row = a.dout[row], *x_row = a.x[row];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = (lane + k * stride) * E;
      if (c >= a.d) continue;
      dout[k].load(dout_row + c);
      x[k].load(x_row + c);
    }
    if constexpr (kind == NormKind::layer) mean = a.mean[row];
    rstd = a.rstd[row];
  }
};

/// dx and the partial sums in one pass, for rows of up to threads_per_row * N packs. A thread keeps the sums
/// of its columns in registers. `prefetch`: it loads its part of the next row before the reduction over this
/// one; blocks of 1024 threads have too few registers for that.
template <class T, NormKind kind, int N, int max_block, int min_blocks, bool prefetch>
__global__ void __launch_bounds__(max_block, min_blocks)
    norm_rows_backward_kernel(BackwardArguments<T> a, int threads_per_row) {
  constexpr int E = per_pack<T>;
  constexpr bool layer = kind == NormKind::layer;
  NRL_DYN_SHARED(float, sums);
  RowGroup group(threads_per_row);
  const int rows_per_block = static_cast<int>(blockDim.x) / threads_per_row, d = static_cast<int>(a.d);
  float dweight[N][E] = {}, dbias[layer ? N : 1][E] = {};
  unsigned amax = 0;
  const RowRange range(a.rows);
  const int rows = static_cast<int>(range.end - range.begin);
  RowPart<T, kind, N> part;
  if (group.index() < rows) part.load(a, range.begin + group.index(), group.lane(), threads_per_row);
  for (int first = 0; first < rows; first += rows_per_block) {
    const int index = first + group.index();
    const int64_t row = range.begin + index;
    const bool has_next = index + rows_per_block < rows;
    const int end = index < rows ? d : 0;  // a thread without a row has no columns
    const float mean = part.mean, rstd = part.rstd;
    float sum_dy_centered = 0, sum_dy = 0;  // of dy * (x - mean) and of dy
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = (group.lane() + k * threads_per_row) * E;
      if (c >= end) continue;
      float g[E], v[E], weight[E];
      part.dout[k].get(g);
      part.x[k].get(v);
      a.weight.get(c, weight);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        const float dy = g[i] * weight[i], centered = v[i] - mean;
        sum_dy_centered += dy * centered;
        dweight[k][i] += g[i] * (centered * rstd);
        if constexpr (layer) {
          sum_dy += dy;
          dbias[k][i] += g[i];
        }
      }
    }
    // Issued here to overlap with the reduction; loading earlier would raise register pressure.
    Pack<T, E> residual[N];
    if (a.dresidual.data) {
      const T* residual_row = a.dresidual[row];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int c = (group.lane() + k * threads_per_row) * E;
        if (c < end) residual[k].load(residual_row + c);
      }
    }
    RowPart<T, kind, N> next;
    if (prefetch && has_next) next.load(a, row + rows_per_block, group.lane(), threads_per_row);
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
      const int c = (group.lane() + k * threads_per_row) * E;
      if (c >= end) continue;
      float g[E], v[E], weight[E], residual_v[E] = {};
      part.dout[k].get(g);
      part.x[k].get(v);
      a.weight.get(c, weight);
      if (a.dresidual.data) residual[k].get(residual_v);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        g[i] = rstd * (g[i] * weight[i] - mean_dy - (v[i] - mean) * rstd * mean_dy_xhat) + residual_v[i];
      }
      if (a.amax) add_magnitudes(amax, g);
      part.dout[k].set(g);
      part.dout[k].store(dx + c);
    }
    if constexpr (prefetch) {
      part = next;
    } else if (has_next) {
      part.load(a, row + rows_per_block, group.lane(), threads_per_row);
    }
  }
  if (a.amax) combine_amax<T>(a.amax, amax);
  if (!a.with_weight) return;
  for (int which = 0; which < (layer ? 2 : 1); ++which) {
    float* row_sums = sums + static_cast<int64_t>(group.index()) * d;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = (group.lane() + k * threads_per_row) * E;
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

/// Longest row of norm_rows_backward_kernel, in packs, and the threads of a block with several rows.
constexpr int64_t max_row_packs = 1024;
constexpr int default_block = 256;

/// Launches norm_rows_backward_kernel and returns its number of blocks, the same on every GPU. As many share
/// a multiprocessor as registers allow.
template <class T, NormKind kind, int N, int max_block, int min_blocks, bool prefetch>
int launch_rows(Exec& exec, const BackwardArguments<T>& a) {
  const int64_t packs = a.d / per_pack<T>, wanted = (packs + N - 1) / N;
  const int threads_per_row = wanted <= kernel::warp ? power_of_two(wanted) : round_up(wanted, kernel::warp),
            rows_per_block = max(1, default_block / threads_per_row),
            threads = rows_per_block * threads_per_row;
  const int resident = max_block * min_blocks / threads;
  const int64_t blocks = min(partial_blocks(exec, resident), (a.rows + rows_per_block - 1) / rows_per_block);
  const size_t shared = a.with_weight ? static_cast<size_t>(rows_per_block) * a.d * sizeof(float) : 0;
  NRL_LAUNCH((norm_rows_backward_kernel<T, kind, N, max_block, min_blocks, prefetch>),
             static_cast<unsigned>(blocks), threads, shared, exec.stream, a, threads_per_row);
  return static_cast<int>(blocks);
}

template <class T, NormKind kind>
void backward(Exec& exec, const NormBackward& b) {
  constexpr bool layer = kind == NormKind::layer;
  BackwardArguments<T> a{};
  a.dout = Rows<const T>(b.dout);
  a.x = Rows<const T>(b.x);
  a.dresidual = Rows<const T>(b.dresidual);
  a.dx = Rows<T>(b.dx);
  a.weight = FloatVector<T>(b.weight);
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
  if (packed && packs <= max_row_packs) {
    int blocks = 0;
    if constexpr (layer) {  // with the sums of dbias
      blocks = packs <= 256   ? launch_rows<T, kind, 1, 256, 3, true>(exec, a)
               : packs <= 512 ? launch_rows<T, kind, 1, 512, 1, true>(exec, a)
                              : launch_rows<T, kind, 1, 1024, 1, false>(exec, a);
    } else {
      blocks = packs <= 512 ? launch_rows<T, kind, 1, 512, 2, true>(exec, a)
                            : launch_rows<T, kind, 2, 512, 1, true>(exec, a);
    }
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
