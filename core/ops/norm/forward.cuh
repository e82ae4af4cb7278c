#pragma once
// Forward kernels of the norms; included by cuda.cu alone.

#include "core/ops/kernel_table.h"
#include "core/ops/shared/gpu/dropout_mask.cuh"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

template <class T>
struct ForwardArguments {
  Rows<const T> x, residual;
  Rows<T> sum, out;
  FloatVector weight, bias;
  float *mean, *rstd;
  unsigned* amax;  ///< the bits of a float >= 0, which order as the floats do
  int64_t rows, d;
  float eps, inverse_d;
  bool dropped;
  int64_t first_row;
  DropoutMask mask;
};

/// The larger of peak and |v|, as bits: NaN is above everything and stays.
__device__ __forceinline__ unsigned peak_of(unsigned peak, float v) {
  return max(peak, __float_as_uint(v) & 0x7fffffffu);
}

/// Combines the block's largest output into *amax; in any order the same result. Every thread calls it.
template <class T>
__device__ __forceinline__ void combine_amax(unsigned* amax, unsigned peak) {
  NRL_SHARED(unsigned, peaks, [32]);
#pragma unroll
  for (int o = kernel::warp / 2; o; o >>= 1) peak = max(peak, __shfl_xor_sync(kernel::all_lanes, peak, o));
  const int lane = threadIdx.x % kernel::warp, warps = blockDim.x / kernel::warp;
  if (lane == 0) peaks[threadIdx.x / kernel::warp] = peak;
  __syncthreads();
  if (threadIdx.x >= kernel::warp) return;
  peak = lane < warps ? peaks[lane] : 0;
#pragma unroll
  for (int o = kernel::warp / 2; o; o >>= 1) peak = max(peak, __shfl_xor_sync(kernel::all_lanes, peak, o));
  // Rounding keeps the order, so the largest rounded value is the rounded largest value.
  if (lane == 0) atomicMax(amax, __float_as_uint(static_cast<float>(T(__uint_as_float(peak)))));
}

/// Rows held in registers: `lanes` threads share a row, each has up to N packs of it.
template <class T, NormKind kind, bool dropped, int N>
__global__ void __launch_bounds__(256, 3) norm_rows_kernel(ForwardArguments<T> a, int lanes) {
  constexpr int E = per_pack<T>;
  constexpr bool layer = kind == NormKind::layer;
  RowGroup group(lanes);
  const int groups = static_cast<int>(blockDim.x) / lanes, d = static_cast<int>(a.d);
  const uint64_t stream = dropped ? a.mask.stream() : 0;
  unsigned peak = 0;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * groups; first < a.rows;
       first += static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t row = first + group.index();
    const int end = row < a.rows ? d : 0;  // no columns for threads without a row
    Pack<T, E> packs[N];
    const T* x = a.x[row];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = (group.lane() + k * lanes) * E;
      if (c < end) packs[k].load(x + c);
    }
    if (a.residual.data) {
      const T* residual = a.residual[row];
      T* sum = a.sum[row];
      Pack<T, E> others[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int c = (group.lane() + k * lanes) * E;
        if (c < end) others[k].load(residual + c);
      }
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int c = (group.lane() + k * lanes) * E;
        if (c >= end) continue;
        float v[E], other[E];
        packs[k].get(v);
        others[k].get(other);
        if constexpr (dropped) a.mask.apply(stream, (a.first_row + row) * a.d + c, v);
#pragma unroll
        for (int i = 0; i < E; ++i) v[i] += other[i];
        packs[k].set(v);
        packs[k].store(sum + c);
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
      if (layer && (group.lane() + k * lanes) * E >= end) continue;
      float v[E];
      packs[k].get(v);
#pragma unroll
      for (int i = 0; i < E; ++i) squares += (v[i] - mean) * (v[i] - mean);
    }
    const float rstd = rsqrtf(group.sum(squares) * a.inverse_d + a.eps);
    T* out = a.out[row];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int c = (group.lane() + k * lanes) * E;
      if (c >= end) continue;
      float v[E], weight[E], bias[E] = {};
      packs[k].get(v);
      a.weight.get(c, weight);
      if (layer && a.bias.data) a.bias.get(c, bias);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        v[i] = (v[i] - mean) * rstd * weight[i] + bias[i];
        peak = peak_of(peak, v[i]);
      }
      packs[k].set(v);
      packs[k].store(out + c);
    }
    if (group.lane() == 0 && end > 0) {
      if (a.mean) a.mean[row] = mean;
      if (a.rstd) a.rstd[row] = rstd;
    }
  }
  if (a.amax) combine_amax<T>(a.amax, peak);
}

/// Rows of any length and place: a block per row, which is read again for every step. A thread reads what it
/// has written itself.
template <class T, NormKind kind, int E>
__global__ void __launch_bounds__(512) norm_long_rows_kernel(ForwardArguments<T> a) {
  constexpr bool layer = kind == NormKind::layer;
  RowGroup block(static_cast<int>(blockDim.x));
  const uint64_t stream = a.dropped ? a.mask.stream() : 0;
  const int64_t step = static_cast<int64_t>(blockDim.x) * E, start = static_cast<int64_t>(threadIdx.x) * E;
  unsigned peak = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = a.x[row];
    float level = 0, squares = 0;
    if (a.residual.data) {
      const T* residual = a.residual[row];
      T* sum = a.sum[row];
      for (int64_t c = start; c < a.d; c += step) {
        Pack<T, E> pack, other_pack;
        float v[E], other[E];
        pack.load(x + c);
        other_pack.load(residual + c);
        pack.get(v);
        other_pack.get(other);
        if (a.dropped) a.mask.apply(stream, (a.first_row + row) * a.d + c, v);
#pragma unroll
        for (int i = 0; i < E; ++i) v[i] += other[i];
        pack.set(v);
        pack.store(sum + c);
      }
      x = sum;
    }
    float mean = 0;
    if constexpr (layer) {
      for (int64_t c = start; c < a.d; c += step) {
        Pack<T, E> pack;
        float v[E];
        pack.load(x + c);
        pack.get(v);
#pragma unroll
        for (int i = 0; i < E; ++i) level += v[i];
      }
      mean = block.sum(level) * a.inverse_d;
    }
    for (int64_t c = start; c < a.d; c += step) {
      Pack<T, E> pack;
      float v[E];
      pack.load(x + c);
      pack.get(v);
#pragma unroll
      for (int i = 0; i < E; ++i) squares += (v[i] - mean) * (v[i] - mean);
    }
    const float rstd = rsqrtf(block.sum(squares) * a.inverse_d + a.eps);
    T* out = a.out[row];
    for (int64_t c = start; c < a.d; c += step) {
      Pack<T, E> pack;
      float v[E], weight[E], bias[E] = {};
      pack.load(x + c);
      pack.get(v);
      a.weight.get(c, weight);
      if (layer && a.bias.data) a.bias.get(c, bias);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        v[i] = (v[i] - mean) * rstd * weight[i] + bias[i];
        peak = peak_of(peak, v[i]);
      }
      pack.set(v);
      pack.store(out + c);
    }
    if (threadIdx.x == 0) {
      if (a.mean) a.mean[row] = mean;
      if (a.rstd) a.rstd[row] = rstd;
    }
  }
  if (a.amax) combine_amax<T>(a.amax, peak);
}

template <class T, NormKind kind>
void forward(Exec& exec, const NormForward& f) {
  ForwardArguments<T> a{};
  a.x = Rows<const T>(f.x);
  a.residual = Rows<const T>(f.residual);
  a.sum = Rows<T>(f.sum);
  a.out = Rows<T>(f.out);
  a.weight = FloatVector(f.weight);
  a.bias = FloatVector(f.bias);
  a.mean = static_cast<float*>(f.mean.data);
  a.rstd = static_cast<float*>(f.rstd.data);
  a.amax = reinterpret_cast<unsigned*>(f.out.scales.amax);
  a.d = f.x.dim(-1);
  a.rows = f.x.numel() / a.d;
  a.eps = f.eps;
  a.inverse_d = 1.0f / static_cast<float>(a.d);
  a.dropped = f.dropout.p > 0;
  if (a.dropped) {
    a.first_row = f.dropout.first_row;
    a.mask = DropoutMask(f.dropout.p, f.dropout.seed, f.dropout.stream, f.dropout.step);
  }

  constexpr int E = per_pack<T>;
  const bool packed = packed_rows(f.x) && packed_rows(f.residual) && packed_rows(f.sum) &&
                      packed_rows(f.out) && kernel::aligned16(f.weight.data) &&
                      kernel::aligned16(f.bias.data);
  const int64_t packs = a.d / E;
  constexpr int deep = 4;  // packs of a thread: enough bytes under way, few enough registers
  if (packed && packs <= 256 * deep) {
    // A row takes part of a warp, a warp, or a block.
    const int per_thread = packs <= kernel::warp ? 1 : deep;
    const int lanes = packs <= kernel::warp          ? power_of_two(packs)
                      : packs <= kernel::warp * deep ? kernel::warp
                                                     : round_up((packs + deep - 1) / deep, kernel::warp);
    const int threads = lanes <= kernel::warp ? 256 : lanes;
    const unsigned grid = kernel::grid_for(a.rows, threads / lanes, exec.multiprocessors,
                                           lanes <= kernel::warp ? 16 : max(2, 2048 / threads));
    auto launch = [&]<bool dropped>() {
      if (per_thread == 1) {
        NRL_LAUNCH((norm_rows_kernel<T, kind, dropped, 1>), grid, threads, 0, exec.stream, a, lanes);
      } else {
        NRL_LAUNCH((norm_rows_kernel<T, kind, dropped, deep>), grid, threads, 0, exec.stream, a, lanes);
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
