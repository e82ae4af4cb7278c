#pragma once
// Our own blocked attention on a GPU (Dao et al. 2022), included by cuda.cu alone: what runs where no library
// takes the shape. f32 arithmetic on f32 or bf16, any head dimension up to 256, no tensor cores.
// Deterministic: every element of dq, dk and dv is summed by one thread in ascending order.

#include "core/device/kernel.h"
#include "core/ops/attention/flash/keep.cuh"
#include "core/ops/kernel_table.h"

namespace nrl::ops::NRL_GPU {
namespace {

// A block has `own` rows, each shared by `team` threads, and goes through the other side in tiles of `tile`
// rows.
constexpr int own = 16, team = 8, tile = 32, flash_threads = own * team;
constexpr int scores_per_thread = tile / team;
constexpr size_t mask_bytes = own * tile / attention::keys_per_block;

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
  const int *cu_q = nullptr, *cu_k = nullptr;
  int64_t queries = 0, lse_step = 0, window = 0;
  int group = 1, d = 0;
  float scale = 1;
  bool causal = true;
  KeepMask mask;
};

/// A sequence's rows, and which keys a query sees: local key j and query i with j <= i + shift.
struct Sequence {
  int64_t q_begin, k_begin;
  int queries, keys;
  int64_t shift;
  template <class T>
  __device__ Sequence(const FlashArguments<T>& a, int s)
      : q_begin(a.cu_q[s]),
        k_begin(a.cu_k[s]),
        queries(static_cast<int>(a.cu_q[s + 1] - a.cu_q[s])),
        keys(static_cast<int>(a.cu_k[s + 1] - a.cu_k[s])),
        shift(keys - queries) {}
};
template <class T>
__device__ __forceinline__ bool visible(const FlashArguments<T>& a, const Sequence& s, int i, int j) {
  if (i >= s.queries || j >= s.keys) return false;
  if (!a.causal) return true;
  return j <= i + s.shift && (a.window == 0 || j > i + s.shift - a.window);
}

/// Rows [begin, begin + count) of a head into shared memory as f32, zero behind the end of the sequence. The
/// pitch is one longer than d: rows then start in different banks.
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

/// Over the threads of a row.
__device__ __forceinline__ float team_max(float v) {
#pragma unroll
  for (int o = team / 2; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(kernel::all_lanes, v, o));
  return v;
}
__device__ __forceinline__ float team_sum(float v) {
#pragma unroll
  for (int o = team / 2; o; o >>= 1) v += __shfl_xor_sync(kernel::all_lanes, v, o);
  return v;
}

/// Keys that any query of [q0, q0 + rows) sees, from a multiple of `step` on.
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

/// Queries that see any key of [k0, k0 + rows), from a multiple of `step` on.
template <class T>
__device__ __forceinline__ void query_range(const FlashArguments<T>& a, const Sequence& s, int k0, int rows,
                                            int step, int64_t& begin, int64_t& end) {
  begin = 0;
  end = s.queries;
  if (!a.causal) return;
  begin = k0 - s.shift < 0 ? 0 : (k0 - s.shift) / step * step;
  if (a.window > 0 && k0 + rows - 1 - s.shift + a.window < end) end = k0 + rows - 1 - s.shift + a.window;
}

/// Per: elements of a row that a thread holds, d <= Per * team. Dropped: probabilities are.
template <class T, int Per, bool Dropped>
__global__ void __launch_bounds__(flash_threads) flash_forward_kernel(FlashArguments<T> a) {
  const Sequence s(a, static_cast<int>(blockIdx.z));
  const int head = static_cast<int>(blockIdx.y), q0 = static_cast<int>(blockIdx.x) * own;
  if (q0 >= s.queries) return;
  NRL_DYN_SHARED(float, memory);
  const int pitch = a.d + 1, r = static_cast<int>(threadIdx.x) / team,
            lane = static_cast<int>(threadIdx.x) % team;
  float *q = memory, *k = q + own * pitch, *v = k + tile * pitch, *p = v + tile * pitch;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(p + own * tile);
  load_tile(q, a.q, s.q_begin, head, q0, own, s.queries, a.d);
  float peak = -INFINITY, sum = 0, out[Per];
#pragma unroll
  for (int i = 0; i < Per; ++i) out[i] = 0;
  int begin, end;
  key_range(a, s, q0, own, tile, begin, end);
  for (int k0 = begin; k0 < end; k0 += tile) {
    __syncthreads();
    load_tile(k, a.k, s.k_begin, head / a.group, k0, tile, s.keys, a.d);
    load_tile(v, a.v, s.k_begin, head / a.group, k0, tile, s.keys, a.d);
    if constexpr (Dropped) a.mask.template draw<own, tile>(mask, s.q_begin + q0, head, k0);
    __syncthreads();
    float score[scores_per_thread], top = -INFINITY;
#pragma unroll
    for (int c = 0; c < scores_per_thread; ++c) {
      const int j = lane + c * team;
      score[c] =
          visible(a, s, q0 + r, k0 + j) ? a.scale * dot_rows(q + r * pitch, k + j * pitch, a.d) : -INFINITY;
      top = fmaxf(top, score[c]);
    }
    const float highest = fmaxf(peak, team_max(top));
    // Nothing seen yet: the difference of infinities would be NaN.
    const float rescale = highest == -INFINITY ? 1.0f : __expf(peak - highest);
    float part = 0;
#pragma unroll
    for (int c = 0; c < scores_per_thread; ++c) {
      const float e = score[c] == -INFINITY ? 0.0f : __expf(score[c] - highest);
      bool stays = true;
      if constexpr (Dropped) stays = kept<tile>(mask, r, lane + c * team);
      p[r * tile + lane + c * team] = stays ? e : 0.0f;
      part += e;
    }
    sum = sum * rescale + team_sum(part);
    peak = highest;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Per; ++i) {
      const int e = lane + i * team;
      if (e >= a.d) break;
      float o = out[i] * rescale;
      for (int j = 0; j < tile; ++j) o += p[r * tile + j] * v[j * pitch + e];
      out[i] = o;
    }
  }
  if (q0 + r >= s.queries) return;
  const int64_t row = s.q_begin + q0 + r;
  const float inverse = sum == 0 ? 0.0f : (Dropped ? a.mask.scale : 1.0f) / sum;
#pragma unroll
  for (int i = 0; i < Per; ++i) {
    const int e = lane + i * team;
    if (e < a.d) a.out(row, head)[e] = T(out[i] * inverse);
  }
  if (lane == 0 && a.lse) a.lse[head * a.lse_step + row] = sum == 0 ? -INFINITY : peak + logf(sum);
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

template <class T, int Per, bool Dropped>
__global__ void __launch_bounds__(flash_threads) flash_dq_kernel(FlashArguments<T> a) {
  const Sequence s(a, static_cast<int>(blockIdx.z));
  const int head = static_cast<int>(blockIdx.y), q0 = static_cast<int>(blockIdx.x) * own;
  if (q0 >= s.queries) return;
  NRL_DYN_SHARED(float, memory);
  const int pitch = a.d + 1, r = static_cast<int>(threadIdx.x) / team,
            lane = static_cast<int>(threadIdx.x) % team;
  float *q = memory, *g = q + own * pitch, *k = g + own * pitch, *v = k + tile * pitch,
        *ds = v + tile * pitch;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(ds + own * tile);
  load_tile(q, a.q, s.q_begin, head, q0, own, s.queries, a.d);
  load_tile(g, a.dout, s.q_begin, head, q0, own, s.queries, a.d);
  const bool real = q0 + r < s.queries;
  const int64_t row = s.q_begin + q0 + r;
  const float lse = real ? a.lse[head * a.lse_step + row] : 0.0f,
              delta = real ? a.delta[head * a.queries + row] : 0.0f;
  float dq[Per];
#pragma unroll
  for (int i = 0; i < Per; ++i) dq[i] = 0;
  int begin, end;
  key_range(a, s, q0, own, tile, begin, end);
  for (int k0 = begin; k0 < end; k0 += tile) {
    __syncthreads();
    load_tile(k, a.k, s.k_begin, head / a.group, k0, tile, s.keys, a.d);
    load_tile(v, a.v, s.k_begin, head / a.group, k0, tile, s.keys, a.d);
    if constexpr (Dropped) a.mask.template draw<own, tile>(mask, s.q_begin + q0, head, k0);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < scores_per_thread; ++c) {
      const int j = lane + c * team;
      float x = 0;
      if (visible(a, s, q0 + r, k0 + j)) {
        const float p = __expf(a.scale * dot_rows(q + r * pitch, k + j * pitch, a.d) - lse);
        float dp = dot_rows(g + r * pitch, v + j * pitch, a.d);
        if constexpr (Dropped) dp = kept<tile>(mask, r, j) ? dp * a.mask.scale : 0.0f;
        x = a.scale * p * (dp - delta);
      }
      ds[r * tile + j] = x;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Per; ++i) {
      const int e = lane + i * team;
      if (e >= a.d) break;
      for (int j = 0; j < tile; ++j) dq[i] += ds[r * tile + j] * k[j * pitch + e];
    }
  }
  if (!real) return;
#pragma unroll
  for (int i = 0; i < Per; ++i) {
    const int e = lane + i * team;
    if (e < a.d) a.dq(row, head)[e] = T(dq[i]);
  }
}

/// Own rows are keys; goes through the queries of all heads that read them.
template <class T, int Per, bool Dropped>
__global__ void __launch_bounds__(flash_threads) flash_dkv_kernel(FlashArguments<T> a) {
  const Sequence s(a, static_cast<int>(blockIdx.z));
  const int kv_head = static_cast<int>(blockIdx.y), k0 = static_cast<int>(blockIdx.x) * own;
  if (k0 >= s.keys) return;
  NRL_DYN_SHARED(float, memory);
  const int pitch = a.d + 1, r = static_cast<int>(threadIdx.x) / team,
            lane = static_cast<int>(threadIdx.x) % team;
  float *k = memory, *v = k + own * pitch, *q = v + own * pitch, *g = q + tile * pitch, *p = g + tile * pitch,
        *ds = p + own * tile, *lse = ds + own * tile, *delta = lse + tile;
  [[maybe_unused]] auto* const mask = reinterpret_cast<unsigned char*>(delta + tile);
  load_tile(k, a.k, s.k_begin, kv_head, k0, own, s.keys, a.d);
  load_tile(v, a.v, s.k_begin, kv_head, k0, own, s.keys, a.d);
  float dk[Per], dv[Per];
#pragma unroll
  for (int i = 0; i < Per; ++i) dk[i] = dv[i] = 0;
  int64_t begin, end;
  query_range(a, s, k0, own, tile, begin, end);
  for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; ++head) {
    for (int64_t first = begin; first < end; first += tile) {
      const int q0 = static_cast<int>(first);
      __syncthreads();
      load_tile(q, a.q, s.q_begin, head, q0, tile, s.queries, a.d);
      load_tile(g, a.dout, s.q_begin, head, q0, tile, s.queries, a.d);
      if (threadIdx.x < tile && q0 + static_cast<int>(threadIdx.x) < s.queries) {
        const int64_t at = s.q_begin + q0 + threadIdx.x;
        lse[threadIdx.x] = a.lse[head * a.lse_step + at];
        delta[threadIdx.x] = a.delta[head * a.queries + at];
      }
      if constexpr (Dropped) a.mask.template draw<tile, own>(mask, s.q_begin + q0, head, k0);
      __syncthreads();
#pragma unroll
      for (int c = 0; c < scores_per_thread; ++c) {
        const int i = lane + c * team;
        float prob = 0, x = 0;
        if (visible(a, s, q0 + i, k0 + r)) {
          prob = __expf(a.scale * dot_rows(q + i * pitch, k + r * pitch, a.d) - lse[i]);
          float dp = dot_rows(g + i * pitch, v + r * pitch, a.d);
          if constexpr (Dropped) {
            const bool stays = kept<own>(mask, i, r);
            dp = stays ? dp * a.mask.scale : 0.0f;
            x = a.scale * prob * (dp - delta[i]);
            prob = stays ? prob * a.mask.scale : 0.0f;
          } else {
            x = a.scale * prob * (dp - delta[i]);
          }
        }
        p[r * tile + i] = prob;
        ds[r * tile + i] = x;
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < Per; ++n) {
        const int e = lane + n * team;
        if (e >= a.d) break;
        for (int i = 0; i < tile; ++i) {
          dk[n] += ds[r * tile + i] * q[i * pitch + e];
          dv[n] += p[r * tile + i] * g[i * pitch + e];
        }
      }
    }
  }
  if (k0 + r >= s.keys) return;
  const int64_t row = s.k_begin + k0 + r;
#pragma unroll
  for (int n = 0; n < Per; ++n) {
    const int e = lane + n * team;
    if (e >= a.d) continue;
    a.dk(row, kv_head)[e] = T(dk[n]);
    a.dv(row, kv_head)[e] = T(dv[n]);
  }
}

template <class T, class Attention>
FlashArguments<T> flash_arguments(const Attention& a) {
  NRL_CHECK(a.lengths.longest > 0 && a.q.dim(2) <= 256);  // the front has said so
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
  f.mask = KeepMask(a.dropout, a.q.dim(1));
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

/// With delta in the workspace.
template <class T>
FlashArguments<T> flash_backward_arguments(Exec& exec, const AttentionBackward& a) {
  FlashArguments<T> f = flash_arguments<T>(a);
  f.dout = HeadRows<T>(a.dout);
  f.dq = HeadRows<T>(a.dq);
  f.dk = HeadRows<T>(a.dk);
  f.dv = HeadRows<T>(a.dv);
  const int heads = static_cast<int>(a.q.dim(1));
  f.delta = reinterpret_cast<float*>(exec.workspace.data);
  NRL_CHECK(exec.workspace.size >= static_cast<size_t>(heads * f.queries) * sizeof(float));
  constexpr int warps = flash_threads / kernel::warp;
  const auto blocks = static_cast<unsigned>((f.queries * heads + warps - 1) / warps);
  if (f.queries > 0) NRL_LAUNCH((flash_delta_kernel<T>), blocks, flash_threads, 0, exec.stream, f, heads);
  return f;
}

/// Calls run(integral_constant) with the smallest number of elements per thread that holds a row.
template <class Run>
void with_row_size(int d, const Run& run) {
  if (d <= 4 * team) return run(std::integral_constant<int, 4>());
  if (d <= 8 * team) return run(std::integral_constant<int, 8>());
  if (d <= 16 * team) return run(std::integral_constant<int, 16>());
  run(std::integral_constant<int, 32>());
}

template <class T>
void flash_forward_of(Exec& exec, const AttentionForward& a) {
  const FlashArguments<T> f = flash_arguments<T>(a);
  const dim3 grid(flash_blocks(a, own), static_cast<unsigned>(a.q.dim(1)), flash_sequences(a));
  const size_t shared =
      sizeof(float) * static_cast<size_t>((own + 2 * tile) * (f.d + 1) + own * tile) + mask_bytes;
  with_row_size(f.d, [&](auto per) {
    with_dropout(f.mask, [&](auto dropped) {
      NRL_LAUNCH((flash_forward_kernel<T, decltype(per)::value, decltype(dropped)::value>), grid,
                 flash_threads, shared, exec.stream, f);
    });
  });
}

template <class T>
void flash_backward_of(Exec& exec, const AttentionBackward& a) {
  const FlashArguments<T> f = flash_backward_arguments<T>(exec, a);
  const auto heads = static_cast<unsigned>(a.q.dim(1)), kv_heads = static_cast<unsigned>(a.k.dim(1));
  const unsigned blocks = flash_blocks(a, own), sequences = flash_sequences(a);
  const size_t both = static_cast<size_t>((2 * own + 2 * tile) * (f.d + 1));
  with_row_size(f.d, [&](auto per) {
    with_dropout(f.mask, [&](auto dropped) {
      NRL_LAUNCH((flash_dq_kernel<T, decltype(per)::value, decltype(dropped)::value>),
                 dim3(blocks, heads, sequences), flash_threads,
                 sizeof(float) * (both + own * tile) + mask_bytes, exec.stream, f);
      NRL_LAUNCH((flash_dkv_kernel<T, decltype(per)::value, decltype(dropped)::value>),
                 dim3(blocks, kv_heads, sequences), flash_threads,
                 sizeof(float) * (both + 2 * own * tile + 2 * tile) + mask_bytes, exec.stream, f);
    });
  });
}

}  // namespace
}  // namespace nrl::ops::NRL_GPU
