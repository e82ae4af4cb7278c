#pragma once
// Forward kernels of the norms; included by cuda.cu alone.
//
//   sum = dropout(x) + residual, when there is a residual; x itself otherwise
//   rms:    rstd = 1 / sqrt(mean(sum^2) + eps)   out = sum * rstd * weight
//   layer:  rstd = 1 / sqrt(var(sum) + eps)      out = (sum - mean) * rstd * weight + bias
//
// Reads x, residual, weight, bias. Writes (=) sum, mean and rstd, and if they are wanted out and amax =
// max(amax, |out|). The sum is rounded to T before it is normalized.
//
// norm_rows_kernel: `threads_per_row` neighboring threads hold a row in registers, N packs of E elements (16
// bytes) each; a block has one row or a few short ones. Other blocks of the multiprocessor load meanwhile.
// norm_long_rows_kernel: a block per row, which reads the row again in every pass.

#include "core/ops/kernel_table.h"
#include "core/ops/shared/element.h"
#include "core/ops/shared/gpu/amax.cuh"
#include "core/ops/shared/gpu/dropout_mask.cuh"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

template <class T>
struct ForwardArguments {
  Rows<const T> x, residual;
  Rows<T> sum, out;
  FloatVector<T> weight, bias;
  float *mean, *rstd;
  unsigned* amax;  ///< the bits of a float >= 0, which order as the floats do
  int64_t rows, d;
  float eps, inverse_d;
  bool dropped;
  int64_t first_row;
  const int* mask_rows;  ///< instead of 0, 1, ...; may be null
  DropoutMask mask;

  /// Whether the output is computed.
  __device__ __forceinline__ bool normalizes() const { return out.data || amax; }

  /// The row of the dropout mask.
  __device__ __forceinline__ int64_t mask_row(int64_t row) const {
    return first_row + (mask_rows ? mask_rows[row] : row);
  }
};

/// For rows of up to threads_per_row * N packs.
template <class T, NormKind kind, bool dropped, int N>
__global__ void __launch_bounds__(256, 3) norm_rows_kernel(ForwardArguments<T> a, int threads_per_row) {
  constexpr int E = per_pack<T>;
  constexpr bool layer = kind == NormKind::layer;
  RowGroup group(threads_per_row);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / threads_per_row) + group.index();
  const int column = group.lane() * E, step = threads_per_row * E;
  const int end = row < a.rows ? static_cast<int>(a.d) : 0;  // a thread without a row has no columns
  unsigned amax = 0;
  Pack<T, E> packs[N];
  const auto load = [&](const Rows<const T>& from, Pack<T, E>(&to)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (column + k * step < end) to[k].load(from[row] + column + k * step);
  };
  load(a.x, packs);
  if (a.residual.data) {
    const uint64_t stream = dropped ? a.mask.stream() : 0;
    Pack<T, E> others[N];
    load(a.residual, others);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = column + k * step;
      if (c >= end) continue;
      float v[E], other[E];
      packs[k].get(v);
      others[k].get(other);
      if constexpr (dropped) a.mask.apply(stream, a.mask_row(row) * a.d + c, v);
#pragma unroll
      for (int i = 0; i < E; ++i) v[i] += other[i];
      packs[k].set(v);
      packs[k].store(a.sum[row] + c);
    }
  }
  float mean = 0;
  if constexpr (layer) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float v[E];
      packs[k].get(v);
#pragma unroll
      for (int i = 0; i < E; ++i) mean += v[i];
    }
    mean = group.sum(mean) * a.inverse_d;
  }
  float squares = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (layer && column + k * step >= end) continue;
    float v[E];
    packs[k].get(v);
#pragma unroll
    for (int i = 0; i < E; ++i) squares += (v[i] - mean) * (v[i] - mean);
  }
  const float rstd = rsqrtf(group.sum(squares) * a.inverse_d + a.eps);
  const int computed = a.normalizes() ? end : 0;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int c = column + k * step;
    if (c >= computed) continue;
    float v[E], weight[E], bias[E] = {};
    packs[k].get(v);
    a.weight.get(c, weight);
    if (layer && a.bias.data) a.bias.get(c, bias);
#pragma unroll
    for (int i = 0; i < E; ++i) {
      v[i] = element::normalized(v[i], mean, rstd, weight[i]) + bias[i];
    }
    if (a.amax) add_magnitudes(amax, v);
    packs[k].set(v);
    if (a.out.data) packs[k].store(a.out[row] + c);
  }
  if (group.lane() == 0 && end > 0) {
    if (a.mean) a.mean[row] = mean;
    if (a.rstd) a.rstd[row] = rstd;
  }
  if (a.amax) combine_amax<T>(a.amax, amax);
}

/// For rows of any length and alignment. A thread reads again only what it wrote itself, so that no barrier
/// is needed between the passes.
template <class T, NormKind kind, int E>
__global__ void __launch_bounds__(512) norm_long_rows_kernel(ForwardArguments<T> a) {
  constexpr bool layer = kind == NormKind::layer;
  RowGroup block(static_cast<int>(blockDim.x));
  const uint64_t stream = a.dropped ? a.mask.stream() : 0;
  const int64_t stride = static_cast<int64_t>(blockDim.x) * E, start = static_cast<int64_t>(threadIdx.x) * E;
  unsigned amax = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = a.x[row];
    float sum_x = 0, squares = 0;
    if (a.residual.data) {
      const T* residual = a.residual[row];
      T* sum = a.sum[row];
      for (int64_t c = start; c < a.d; c += stride) {
        Pack<T, E> pack, other_pack;
        float v[E], other[E];
        pack.load(x + c);
        other_pack.load(residual + c);
        pack.get(v);
        other_pack.get(other);
        if (a.dropped) a.mask.apply(stream, a.mask_row(row) * a.d + c, v);
#pragma unroll
        for (int i = 0; i < E; ++i) v[i] += other[i];
        pack.set(v);
        pack.store(sum + c);
      }
      x = sum;
    }
    float mean = 0;
    if constexpr (layer) {
      for (int64_t c = start; c < a.d; c += stride) {
        Pack<T, E> pack;
        float v[E];
        pack.load(x + c);
        pack.get(v);
#pragma unroll
        for (int i = 0; i < E; ++i) sum_x += v[i];
      }
      mean = block.sum(sum_x) * a.inverse_d;
    }
    for (int64_t c = start; c < a.d; c += stride) {
      Pack<T, E> pack;
      float v[E];
      pack.load(x + c);
      pack.get(v);
#pragma unroll
      for (int i = 0; i < E; ++i) squares += (v[i] - mean) * (v[i] - mean);
    }
    const float rstd = rsqrtf(block.sum(squares) * a.inverse_d + a.eps);
    for (int64_t c = a.normalizes() ? start : a.d; c < a.d; c += stride) {
      Pack<T, E> pack;
      float v[E], weight[E], bias[E] = {};
      pack.load(x + c);
      pack.get(v);
      a.weight.get(c, weight);
      if (layer && a.bias.data) a.bias.get(c, bias);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        v[i] = element::normalized(v[i], mean, rstd, weight[i]) + bias[i];
      }
      if (a.amax) add_magnitudes(amax, v);
      pack.set(v);
      if (a.out.data) pack.store(a.out[row] + c);
    }
    if (threadIdx.x == 0) {
      if (a.mean) a.mean[row] = mean;
      if (a.rstd) a.rstd[row] = rstd;
    }
  }
  if (a.amax) combine_amax<T>(a.amax, amax);
}

template <class T, NormKind kind>
void forward(Exec& exec, const NormForward& f) {
  ForwardArguments<T> a{};
  a.x = Rows<const T>(f.x);
  a.residual = Rows<const T>(f.residual);
  a.sum = Rows<T>(f.sum);
  a.out = Rows<T>(f.out);
  a.weight = FloatVector<T>(f.weight, f.weight_offset);
  a.bias = FloatVector<T>(f.bias);
  a.mean = static_cast<float*>(f.mean.data);
  a.rstd = static_cast<float*>(f.rstd.data);
  a.amax = static_cast<unsigned*>(f.amax.data);
  a.d = f.x.dim(-1);
  a.rows = f.x.numel() / a.d;
  a.eps = f.eps;
  a.inverse_d = 1.0f / static_cast<float>(a.d);
  a.dropped = f.dropout.p > 0;
  if (a.dropped) {
    a.first_row = f.dropout.first_row;
    a.mask_rows = static_cast<const int*>(f.dropout.rows.data);
    a.mask = DropoutMask(f.dropout.p, f.dropout.seed, f.dropout.stream, f.dropout.step);
  }

  constexpr int E = per_pack<T>;
  const bool packed = packed_rows(f.x) && packed_rows(f.residual) && packed_rows(f.sum) &&
                      packed_rows(f.out) && kernel::aligned16(f.weight.data) &&
                      kernel::aligned16(f.bias.data);
  const int64_t packs = a.d / E;
  constexpr int packs_per_thread = 4;  // enough bytes in flight, few enough registers
  if (packed && packs <= 256 * packs_per_thread) {
    // Part of a warp, a warp, or a block shares a row.
    const bool one_pack = packs <= kernel::warp;
    const int threads_per_row =
        one_pack ? power_of_two(packs)
        : packs <= kernel::warp * packs_per_thread
            ? kernel::warp
            : round_up((packs + packs_per_thread - 1) / packs_per_thread, kernel::warp);
    const int threads = threads_per_row <= kernel::warp ? 128 : threads_per_row;
    const unsigned grid = kernel::blocks_for(a.rows, threads / threads_per_row);
    auto launch = [&]<bool dropped>() {
      if (one_pack) {
        NRL_LAUNCH((norm_rows_kernel<T, kind, dropped, 1>), grid, threads, 0, exec.stream, a,
                   threads_per_row);
      } else {
        NRL_LAUNCH((norm_rows_kernel<T, kind, dropped, packs_per_thread>), grid, threads, 0, exec.stream, a,
                   threads_per_row);
      }
    };
    a.dropped ? launch.template operator()<true>() : launch.template operator()<false>();
    return;
  }
  auto launch = [&]<int width>() {
    const int threads = min(512, round_up((a.d + 4 * width - 1) / (4 * width), kernel::warp));
    const unsigned grid = kernel::grid_for(a.rows, 1, exec.multiprocessors, max(8, 2048 / threads));
    NRL_LAUNCH((norm_long_rows_kernel<T, kind, width>), grid, threads, 0, exec.stream, a);
  };
  packed ? launch.template operator()<E>() : launch.template operator()<1>();
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
