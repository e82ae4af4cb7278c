#pragma once
// Blocked attention on a GPU without tensor cores (Dao et al. 2022), included by cuda.cu alone: the fallback
// where cuDNN does not support the problem. Reads f32, bf16 or f16, computes in f32, head dimensions up to
// 256.
//
//   forward   s_ij = scale q_i . k_j, m_i = max_j s_ij, l_i = sum_j exp(s_ij - m_i),
//             out_i = sum_j drop(exp(s_ij - m_i)) v_j / l_i, lse_i = m_i + log(l_i)
//   backward  P_ij = exp(s_ij - lse_i), delta_i = dout_i . out_i, dS_ij = scale P_ij (drop(dout_i . v_j) -
//   delta_i),
//             dq_i = sum_j dS_ij k_j, dk_j = sum_i dS_ij q_i, dv_j = sum_i drop(P_ij) dout_i
//
// All outputs are written (=). Grid: (blocks of block_m rows, heads, sequences); the rows are queries in the
// forward and dq kernels, keys in the dkv kernel. Deterministic: one thread sums each element of dq, dk and
// dv, in ascending order.

#include "core/device/kernel.h"
#include "core/device/runtime.h"
#include "core/ops/attention/flash/keep.cuh"
#include "core/ops/kernel_table.h"

namespace nrl::ops::NRL_GPU {
namespace {

// Each block handles block_m rows (threads_per_row threads per row) and iterates over tiles of block_n rows
// of the other side.
constexpr int block_m = 16, threads_per_row = 8, block_n = 32, flash_threads = block_m * threads_per_row;
constexpr int scores_per_thread = block_n / threads_per_row;
constexpr size_t mask_bytes = block_m * block_n / attention::keys_per_block;

/// One of q, k, v, out, ... as rows of heads: element (row, head, i).
template <class T>
struct HeadRows {
  T* data = nullptr;
  int64_t row_step = 0, head_step = 0;
  HeadRows() = default;
  explicit HeadRows(const Tensor& t)
      : data(static_cast<T*>(t.data)), row_step(t.stride[0]), head_step(t.stride[1]) {}
  __device__ __forceinline__ T* operator()(int64_t row, int64_t head) const {
    return data + row * row_step + head * head_step;
  }
};

template <class T>
struct FlashArguments {
  HeadRows<T> q, k, v, out, dout, dq, dk, dv;
  float *lse = nullptr, *delta = nullptr;  ///< (heads, queries)
  // Of mma_backward.cuh alone.
  float* dq_sums = nullptr;                       ///< (heads, queries, d), columns permuted
  unsigned *turns = nullptr, *tickets = nullptr;  ///< (heads, queries), of the first query of a tile; one
  const int *cu_q = nullptr, *cu_k = nullptr;
  int64_t queries = 0, lse_step = 0, window = 0;
  int group = 1, d = 0;
  float scale = 1;
  bool causal = true;
  KeepMask mask;
};

/// A sequence's rows, and which keys a query sees: local key j and query i with j <= i + shift.
struct Sequence {
  int q_begin, k_begin, queries, keys, shift;
  template <class T>
  __device__ Sequence(const FlashArguments<T>& a, int s)
      : q_begin(a.cu_q[s]),
        k_begin(a.cu_k[s]),
        queries(a.cu_q[s + 1] - a.cu_q[s]),
        keys(a.cu_k[s + 1] - a.cu_k[s]),
        shift(keys - queries) {}
};
template <class T>
__device__ __forceinline__ bool visible(const FlashArguments<T>& a, const Sequence& s, int i, int j) {
  if (i >= s.queries || j >= s.keys) return false;
  if (!a.causal) return true;
  return j <= i + s.shift && (a.window == 0 || j > i + s.shift - a.window);
}

/// Loads rows [begin, begin + count) of a head into shared memory as f32, zero past the end of the sequence.
/// The stride is d + 1, so that rows start in different banks.
template <class T>
__device__ void load_tile(float* to, const HeadRows<T>& from, int64_t first, int head, int begin, int count,
                          int end, int d) {
  for (int e = static_cast<int>(threadIdx.x); e < count * d; e += flash_threads) {
    const int r = e / d, i = e % d;
    to[r * (d + 1) + i] = begin + r < end ? static_cast<float>(from(first + begin + r, head)[i]) : 0.0f;
  }
}

__device__ __forceinline__ float dot_rows(const float* a, const float* b, int d) {
  float s = 0;
  for (int i = 0; i < d; ++i) s += a[i] * b[i];
  return s;
}

/// Reductions over the threads of a row.
__device__ __forceinline__ float row_reduce_max(float v) {
#pragma unroll
  for (int o = threads_per_row / 2; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(kernel::all_lanes, v, o));
  return v;
}
__device__ __forceinline__ float row_reduce_sum(float v) {
#pragma unroll
  for (int o = threads_per_row / 2; o; o >>= 1) v += __shfl_xor_sync(kernel::all_lanes, v, o);
  return v;
}

/// Keys that any query of [q0, q0 + rows) sees; `begin` is rounded down to a multiple of `step`.
template <class T>
__device__ __forceinline__ void key_range(const FlashArguments<T>& a, const Sequence& s, int q0, int rows,
                                          int step, int& begin, int& end) {
  begin = 0;
  end = s.keys;
  if (!a.causal) return;
  const int64_t last = q0 + rows - 1 + s.shift + 1, first = q0 + s.shift - a.window + 1;
  if (last < end) end = last < 0 ? 0 : static_cast<int>(last);
  if (a.window > 0 && first > 0) begin = static_cast<int>(first) / step * step;
}

/// Queries that see any key of [k0, k0 + rows); `begin` is rounded down to a multiple of `step`.
template <class T>
__device__ __forceinline__ void query_range(const FlashArguments<T>& a, const Sequence& s, int k0, int rows,
                                            int step, int64_t& begin, int64_t& end) {
  begin = 0;
  end = s.queries;
  if (!a.causal) return;
  begin = k0 - s.shift < 0 ? 0 : (k0 - s.shift) / step * step;
  if (a.window > 0 && k0 + rows - 1 - s.shift + a.window < end) end = k0 + rows - 1 - s.shift + a.window;
}

/// A thread holds PerThread elements of its row of out, d <= PerThread * threads_per_row. Dropped: with
/// dropout of the probabilities.
template <class T, int PerThread, bool Dropped>
__global__ void __launch_bounds__(flash_threads) flash_forward_kernel(FlashArguments<T> a) {
  const Sequence s(a, static_cast<int>(blockIdx.z));
  const int head = static_cast<int>(blockIdx.y), q0 = static_cast<int>(blockIdx.x) * block_m;
  if (q0 >= s.queries) return;
  NRL_DYN_SHARED(float, memory);
  const int smem_stride = a.d + 1, r = static_cast<int>(threadIdx.x) / threads_per_row,
            column = static_cast<int>(threadIdx.x) % threads_per_row;
  float *q = memory, *k = q + block_m * smem_stride, *v = k + block_n * smem_stride,
        *p = v + block_n * smem_stride;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(p + block_m * block_n);
  load_tile(q, a.q, s.q_begin, head, q0, block_m, s.queries, a.d);
  float row_max = -INFINITY, row_sum = 0, out[PerThread];
#pragma unroll
  for (int i = 0; i < PerThread; ++i) out[i] = 0;
  int begin, end;
  key_range(a, s, q0, block_m, block_n, begin, end);
  for (int k0 = begin; k0 < end; k0 += block_n) {
    __syncthreads();
    load_tile(k, a.k, s.k_begin, head / a.group, k0, block_n, s.keys, a.d);
    load_tile(v, a.v, s.k_begin, head / a.group, k0, block_n, s.keys, a.d);
    if constexpr (Dropped) a.mask.template draw<block_m, block_n>(mask, s, q0, head, k0);
    __syncthreads();
    float score[scores_per_thread], tile_max = -INFINITY;
#pragma unroll
    for (int c = 0; c < scores_per_thread; ++c) {
      const int j = column + c * threads_per_row;
      score[c] = visible(a, s, q0 + r, k0 + j)
                     ? a.scale * dot_rows(q + r * smem_stride, k + j * smem_stride, a.d)
                     : -INFINITY;
      tile_max = fmaxf(tile_max, score[c]);
    }
    const float new_max = fmaxf(row_max, row_reduce_max(tile_max));
    // No key seen yet: the difference of infinities would be NaN.
    const float rescale = new_max == -INFINITY ? 1.0f : __expf(row_max - new_max);
    float tile_sum = 0;
#pragma unroll
    for (int c = 0; c < scores_per_thread; ++c) {
      const float e = score[c] == -INFINITY ? 0.0f : __expf(score[c] - new_max);
      bool stays = true;
      if constexpr (Dropped) stays = kept<block_n>(mask, r, column + c * threads_per_row);
      p[r * block_n + column + c * threads_per_row] = stays ? e : 0.0f;
      tile_sum += e;
    }
    row_sum = row_sum * rescale + row_reduce_sum(tile_sum);
    row_max = new_max;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PerThread; ++i) {
      const int e = column + i * threads_per_row;
      if (e >= a.d) break;
      float o = out[i] * rescale;
      for (int j = 0; j < block_n; ++j) o += p[r * block_n + j] * v[j * smem_stride + e];
      out[i] = o;
    }
  }
  if (q0 + r >= s.queries) return;
  const int64_t row = s.q_begin + q0 + r;
  const float inverse = row_sum == 0 ? 0.0f : (Dropped ? a.mask.scale : 1.0f) / row_sum;
#pragma unroll
  for (int i = 0; i < PerThread; ++i) {
    const int e = column + i * threads_per_row;
    if (e < a.d) a.out(row, head)[e] = T(out[i] * inverse);
  }
  if (column == 0 && a.lse)
    a.lse[head * a.lse_step + row] = row_sum == 0 ? -INFINITY : row_max + logf(row_sum);
}

/// delta = sum over d of dout * out, one warp per (query, head).
template <class T>
__global__ void __launch_bounds__(flash_threads) flash_delta_kernel(FlashArguments<T> a, int heads) {
  const int warps = flash_threads / kernel::warp, lane = static_cast<int>(threadIdx.x) % kernel::warp;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / kernel::warp;
  const int64_t row = at / heads;
  const int head = static_cast<int>(at % heads);
  if (row >= a.queries) return;
  float s = 0;
  for (int i = lane; i < a.d; i += kernel::warp)
    s += static_cast<float>(a.dout(row, head)[i]) * static_cast<float>(a.out(row, head)[i]);
  s = kernel::warp_sum(s);
  if (lane == 0) a.delta[head * a.queries + row] = s;
}

template <class T, int PerThread, bool Dropped>
__global__ void __launch_bounds__(flash_threads) flash_dq_kernel(FlashArguments<T> a) {
  const Sequence s(a, static_cast<int>(blockIdx.z));
  const int head = static_cast<int>(blockIdx.y), q0 = static_cast<int>(blockIdx.x) * block_m;
  if (q0 >= s.queries) return;
  NRL_DYN_SHARED(float, memory);
  const int smem_stride = a.d + 1, r = static_cast<int>(threadIdx.x) / threads_per_row,
            column = static_cast<int>(threadIdx.x) % threads_per_row;
  float *q = memory, *dout = q + block_m * smem_stride, *k = dout + block_m * smem_stride,
        *v = k + block_n * smem_stride, *ds = v + block_n * smem_stride;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(ds + block_m * block_n);
  load_tile(q, a.q, s.q_begin, head, q0, block_m, s.queries, a.d);
  load_tile(dout, a.dout, s.q_begin, head, q0, block_m, s.queries, a.d);
  const bool real = q0 + r < s.queries;
  const int64_t row = s.q_begin + q0 + r;
  const float lse = real ? a.lse[head * a.lse_step + row] : 0.0f,
              delta = real ? a.delta[head * a.queries + row] : 0.0f;
  float dq[PerThread];
#pragma unroll
  for (int i = 0; i < PerThread; ++i) dq[i] = 0;
  int begin, end;
  key_range(a, s, q0, block_m, block_n, begin, end);
  for (int k0 = begin; k0 < end; k0 += block_n) {
    __syncthreads();
    load_tile(k, a.k, s.k_begin, head / a.group, k0, block_n, s.keys, a.d);
    load_tile(v, a.v, s.k_begin, head / a.group, k0, block_n, s.keys, a.d);
    if constexpr (Dropped) a.mask.template draw<block_m, block_n>(mask, s, q0, head, k0);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < scores_per_thread; ++c) {
      const int j = column + c * threads_per_row;
      float dscore = 0;
      if (visible(a, s, q0 + r, k0 + j)) {
        const float p = __expf(a.scale * dot_rows(q + r * smem_stride, k + j * smem_stride, a.d) - lse);
        float dp = dot_rows(dout + r * smem_stride, v + j * smem_stride, a.d);
        if constexpr (Dropped) dp = kept<block_n>(mask, r, j) ? dp * a.mask.scale : 0.0f;
        dscore = a.scale * p * (dp - delta);
      }
      ds[r * block_n + j] = dscore;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PerThread; ++i) {
      const int e = column + i * threads_per_row;
      if (e >= a.d) break;
      for (int j = 0; j < block_n; ++j) dq[i] += ds[r * block_n + j] * k[j * smem_stride + e];
    }
  }
  if (!real) return;
#pragma unroll
  for (int i = 0; i < PerThread; ++i) {
    const int e = column + i * threads_per_row;
    if (e < a.d) a.dq(row, head)[e] = T(dq[i]);
  }
}

/// The block's rows are keys; it iterates over the queries of all heads that read them.
template <class T, int PerThread, bool Dropped>
__global__ void __launch_bounds__(flash_threads) flash_dkv_kernel(FlashArguments<T> a) {
  const Sequence s(a, static_cast<int>(blockIdx.z));
  const int kv_head = static_cast<int>(blockIdx.y), k0 = static_cast<int>(blockIdx.x) * block_m;
  if (k0 >= s.keys) return;
  NRL_DYN_SHARED(float, memory);
  const int smem_stride = a.d + 1, r = static_cast<int>(threadIdx.x) / threads_per_row,
            column = static_cast<int>(threadIdx.x) % threads_per_row;
  float *k = memory, *v = k + block_m * smem_stride, *q = v + block_m * smem_stride,
        *dout = q + block_n * smem_stride, *p = dout + block_n * smem_stride, *ds = p + block_m * block_n,
        *lse = ds + block_m * block_n, *delta = lse + block_n;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(delta + block_n);
  load_tile(k, a.k, s.k_begin, kv_head, k0, block_m, s.keys, a.d);
  load_tile(v, a.v, s.k_begin, kv_head, k0, block_m, s.keys, a.d);
  float dk[PerThread], dv[PerThread];
#pragma unroll
  for (int i = 0; i < PerThread; ++i) dk[i] = dv[i] = 0;
  int64_t begin, end;
  query_range(a, s, k0, block_m, block_n, begin, end);
  for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; ++head) {
    for (int64_t first = begin; first < end; first += block_n) {
      const int q0 = static_cast<int>(first);
      __syncthreads();
      load_tile(q, a.q, s.q_begin, head, q0, block_n, s.queries, a.d);
      load_tile(dout, a.dout, s.q_begin, head, q0, block_n, s.queries, a.d);
      if (threadIdx.x < block_n && q0 + static_cast<int>(threadIdx.x) < s.queries) {
        const int64_t at = s.q_begin + q0 + threadIdx.x;
        lse[threadIdx.x] = a.lse[head * a.lse_step + at];
        delta[threadIdx.x] = a.delta[head * a.queries + at];
      }
      if constexpr (Dropped) a.mask.template draw<block_n, block_m>(mask, s, q0, head, k0);
      __syncthreads();
#pragma unroll
      for (int c = 0; c < scores_per_thread; ++c) {
        const int i = column + c * threads_per_row;
        float prob = 0, dscore = 0;
        if (visible(a, s, q0 + i, k0 + r)) {
          prob = __expf(a.scale * dot_rows(q + i * smem_stride, k + r * smem_stride, a.d) - lse[i]);
          float dp = dot_rows(dout + i * smem_stride, v + r * smem_stride, a.d);
          if constexpr (Dropped) {
            const bool stays = kept<block_m>(mask, i, r);
            dp = stays ? dp * a.mask.scale : 0.0f;
            dscore = a.scale * prob * (dp - delta[i]);
            prob = stays ? prob * a.mask.scale : 0.0f;
          } else {
            dscore = a.scale * prob * (dp - delta[i]);
          }
        }
        p[r * block_n + i] = prob;
        ds[r * block_n + i] = dscore;
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < PerThread; ++n) {
        const int e = column + n * threads_per_row;
        if (e >= a.d) break;
        for (int i = 0; i < block_n; ++i) {
          dk[n] += ds[r * block_n + i] * q[i * smem_stride + e];
          dv[n] += p[r * block_n + i] * dout[i * smem_stride + e];
        }
      }
    }
  }
  if (k0 + r >= s.keys) return;
  const int64_t row = s.k_begin + k0 + r;
#pragma unroll
  for (int n = 0; n < PerThread; ++n) {
    const int e = column + n * threads_per_row;
    if (e >= a.d) continue;
    a.dk(row, kv_head)[e] = T(dk[n]);
    a.dv(row, kv_head)[e] = T(dv[n]);
  }
}

template <class T, class Attention>
FlashArguments<T> flash_arguments(const Attention& a) {
  NRL_CHECK(a.lengths.longest > 0 && a.q.dim(2) <= 256);  // checked by attention_forward()
  FlashArguments<T> f;
  f.q = HeadRows<T>(a.q);
  f.k = HeadRows<T>(a.k);
  f.v = HeadRows<T>(a.v);
  f.out = HeadRows<T>(a.out);
  f.lse = static_cast<float*>(a.lse.data);
  f.cu_q = static_cast<const int*>(a.cu_q.data);
  f.cu_k = static_cast<const int*>(a.cu_k.data);
  f.queries = a.q.dim(0);
  f.lse_step = a.lse ? a.lse.stride[0] : 0;
  f.window = a.window;
  f.group = static_cast<int>(a.q.dim(1) / a.k.dim(1));
  f.d = static_cast<int>(a.q.dim(2));
  f.scale = a.scale;
  f.causal = a.causal;
  f.mask = KeepMask(a);
  return f;
}

template <class Attention>
unsigned flash_blocks(const Attention& a, int rows) {
  return static_cast<unsigned>((a.lengths.longest + rows - 1) / rows);
}
template <class Attention>
unsigned flash_sequences(const Attention& a) {
  return static_cast<unsigned>(a.cu_q.dim(0) - 1);
}

template <class T>
FlashArguments<T> flash_backward_arguments(const AttentionBackward& a) {
  FlashArguments<T> f = flash_arguments<T>(a);
  f.dout = HeadRows<T>(a.dout);
  f.dq = HeadRows<T>(a.dq);
  f.dk = HeadRows<T>(a.dk);
  f.dv = HeadRows<T>(a.dv);
  return f;
}

/// Calls run(integral_constant) with the smallest number of elements per thread that holds a row.
template <class Run>
void with_row_size(int d, const Run& run) {
  if (d <= 4 * threads_per_row) return run(std::integral_constant<int, 4>());
  if (d <= 8 * threads_per_row) return run(std::integral_constant<int, 8>());
  if (d <= 16 * threads_per_row) return run(std::integral_constant<int, 16>());
  run(std::integral_constant<int, 32>());
}

template <class T>
void flash_forward_of(Exec& exec, const AttentionForward& a) {
  const FlashArguments<T> f = flash_arguments<T>(a);
  const dim3 grid(flash_blocks(a, block_m), static_cast<unsigned>(a.q.dim(1)), flash_sequences(a));
  const size_t shared =
      sizeof(float) * static_cast<size_t>((block_m + 2 * block_n) * (f.d + 1) + block_m * block_n) +
      mask_bytes;
  with_row_size(f.d, [&](auto per) {
    with_dropout(f.mask, [&](auto dropped) {
      NRL_LAUNCH((flash_forward_kernel<T, decltype(per)::value, decltype(dropped)::value>), grid,
                 flash_threads, shared, exec.stream, f);
    });
  });
}

template <class T>
void flash_backward_of(Exec& exec, const AttentionBackward& a) {
  FlashArguments<T> f = flash_backward_arguments<T>(a);
  const auto heads = static_cast<unsigned>(a.q.dim(1)), kv_heads = static_cast<unsigned>(a.k.dim(1));
  f.delta = reinterpret_cast<float*>(exec.workspace.data);
  NRL_CHECK(exec.workspace.size >= static_cast<size_t>(heads * f.queries) * sizeof(float));
  constexpr int warps = flash_threads / kernel::warp;
  const auto delta_blocks = static_cast<unsigned>((f.queries * heads + warps - 1) / warps);
  if (delta_blocks > 0)
    NRL_LAUNCH((flash_delta_kernel<T>), delta_blocks, flash_threads, 0, exec.stream, f,
               static_cast<int>(heads));
  const unsigned blocks = flash_blocks(a, block_m), sequences = flash_sequences(a);
  const size_t both = static_cast<size_t>((2 * block_m + 2 * block_n) * (f.d + 1));
  const size_t shared = sizeof(float) * (both + 2 * block_m * block_n + 2 * block_n) + mask_bytes;
  if (exec.device && shared > exec.device->properties().shared_memory_optin)
    fail(Exit::unavailable,
         "the gradient of attention with this head dimension needs more shared memory per block than the GPU "
         "has");
  with_row_size(f.d, [&](auto per) {
    with_dropout(f.mask, [&](auto dropped) {
      NRL_LAUNCH((flash_dq_kernel<T, decltype(per)::value, decltype(dropped)::value>),
                 dim3(blocks, heads, sequences), flash_threads,
                 sizeof(float) * (both + block_m * block_n) + mask_bytes, exec.stream, f);
      NRL_LAUNCH((flash_dkv_kernel<T, decltype(per)::value, decltype(dropped)::value>),
                 dim3(blocks, kv_heads, sequences), flash_threads, shared, exec.stream, f);
    });
  });
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
