// Attention to a paged cache on the GPU; contract in core/ops/paged.h. Writes (=) out and the caches' rows.
//
//   s_j = scale q . k_j,  m = max_j s_j,  l = sum_j exp(s_j - m),  out = sum_j exp(s_j - m) v_j / l
//
// cache_write_kernel  a block per row of keys and values
// paged_kernel        a block of 4 warps per (row of q, key head), for up to `heads` query heads at a time.
// The
//                     warps take tiles of 32 keys in turn, a lane per key for the scores and a lane per
//                     column for the sums over values, each with its own maximum (online softmax); then they
//                     join. A row costs the same in a prompt as in decoding: keys come from the L2 cache for
//                     the rows that share them.

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

constexpr int paged_threads = 128, paged_warps = paged_threads / warp, copy_threads = 128;

/// Word: what a thread copies at a time; widths and steps are in words.
template <class Word>
__global__ void __launch_bounds__(copy_threads)
    cache_write_kernel(const Word* keys, int64_t key_step, const Word* values, int64_t value_step,
                       const int* __restrict__ slots, Word* key_cache, Word* value_cache, int width) {
  const int64_t row = blockIdx.x;
  const int64_t slot = slots[row];
  if (slot < 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < width; i += copy_threads) {
    key_cache[slot * width + i] = keys[row * key_step + i];
    value_cache[slot * width + i] = values[row * value_step + i];
  }
}

template <class Word>
void copy_rows(Exec& exec, const CacheWrite& a) {
  const auto words = [&](int64_t elements) {
    return elements * size_of(a.keys.dtype) / static_cast<int64_t>(sizeof(Word));
  };
  NRL_LAUNCH(cache_write_kernel<Word>, static_cast<unsigned>(a.keys.dim(0)), copy_threads, 0, exec.stream,
             static_cast<const Word*>(a.keys.data), words(a.keys.step(0)),
             static_cast<const Word*>(a.values.data), words(a.values.step(0)),
             static_cast<const int*>(a.slots.data), static_cast<Word*>(a.key_cache.data),
             static_cast<Word*>(a.value_cache.data), static_cast<int>(words(a.keys.dim(1))));
}

void cache_write_launch(Exec& exec, const CacheWrite& a) {
  if (packed_rows(a.keys) && packed_rows(a.values) && packed_rows(a.key_cache) && packed_rows(a.value_cache))
    return copy_rows<uint4>(exec, a);
  if (a.keys.dtype == DType::f32) return copy_rows<float>(exec, a);
  copy_rows<uint16_t>(exec, a);
}

struct PagedArguments {
  const void *q, *keys, *values;
  void* out;
  int64_t q_step, q_head, out_step, out_head;  ///< elements between rows and heads
  const int *cu_q, *context, *table;
  int sequences, table_width, kv_heads, group, d, page;
  int64_t window;
  float scale;

  explicit PagedArguments(const AttentionPaged& a)
      : q(a.q.data),
        keys(a.keys.data),
        values(a.values.data),
        out(a.out.data),
        q_step(a.q.step(0)),
        q_head(a.q.step(1)),
        out_step(a.out.step(0)),
        out_head(a.out.step(1)),
        cu_q(static_cast<const int*>(a.cu_q.data)),
        context(static_cast<const int*>(a.context.data)),
        table(static_cast<const int*>(a.block_table.data)),
        sequences(static_cast<int>(a.context.dim(0))),
        table_width(static_cast<int>(a.block_table.dim(1))),
        kv_heads(static_cast<int>(a.keys.dim(1))),
        group(static_cast<int>(a.q.dim(1) / a.keys.dim(1))),
        d(static_cast<int>(a.q.dim(2))),
        page(static_cast<int>(a.page)),
        window(a.window),
        scale(a.scale) {}

  /// The sequence of a row: the first one that ends behind it.
  __device__ __forceinline__ int sequence_of(int row) const {
    int low = 0, high = sequences - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (cu_q[middle + 1] > row)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};

/// E: elements of a load of keys; PerLane: columns of a lane, d <= PerLane * 32.
/// The number of blocks keeps ptxas from saving registers by spills.
template <class T, int E, int heads, int PerLane>
__global__ void __launch_bounds__(paged_threads, 4) paged_kernel(PagedArguments a) {
  NRL_DYN_SHARED(float, memory);  // q (heads, d); out of each warp (warps, heads, d)
  NRL_SHARED(float, p, [paged_warps][heads][warp]);
  NRL_SHARED(float, maxima, [paged_warps][heads]);
  NRL_SHARED(float, sums, [paged_warps][heads]);
  const int row = static_cast<int>(blockIdx.x), kv_head = static_cast<int>(blockIdx.y), d = a.d;
  const int t = static_cast<int>(threadIdx.x), lane = t % warp, w = t / warp;
  const int s = a.sequence_of(row);
  const int position = a.context[s] - (a.cu_q[s + 1] - row), end = position + 1;
  const int begin =
      a.window > 0 && position - a.window + 1 > 0 ? static_cast<int>(position - a.window + 1) : 0;
  const int* const table = a.table + int64_t{s} * a.table_width;
  const int64_t step = int64_t{a.kv_heads} * d;
  const auto offset = [&](int j) {
    return (int64_t{table[j / a.page]} * a.page + j % a.page) * step + int64_t{kv_head} * d;
  };
  const T* const keys = static_cast<const T*>(a.keys);
  const T* const values = static_cast<const T*>(a.values);
  float* const partial = memory + heads * d;
  for (int first = 0; first < a.group; first += heads) {
    const int head = kv_head * a.group + first;
    for (int e = t; e < heads * d; e += paged_threads)
      memory[e] = first + e / d < a.group
                      ? a.scale * static_cast<float>(static_cast<const T*>(
                                      a.q)[row * a.q_step + (head + e / d) * a.q_head + e % d])
                      : 0.0f;
    __syncthreads();
    float m[heads], l[heads], out[heads][PerLane];
#pragma unroll
    for (int g = 0; g < heads; ++g) {
      m[g] = -INFINITY, l[g] = 0;
#pragma unroll
      for (int c = 0; c < PerLane; ++c) out[g][c] = 0;
    }
    for (int tile = begin / warp * warp + w * warp; tile < end; tile += paged_threads) {
      const int j = tile + lane;
      const bool seen = j >= begin && j < end;
      const T* const k = keys + offset(seen ? j : end - 1);
      float score[heads];
#pragma unroll
      for (int g = 0; g < heads; ++g) score[g] = 0;
      for (int i = 0; i < d; i += E) {
        float x[E];
        load_floats(k + i, x);
#pragma unroll
        for (int g = 0; g < heads; ++g)
#pragma unroll
          for (int e = 0; e < E; ++e) score[g] += memory[g * d + i + e] * x[e];
      }
#pragma unroll
      for (int g = 0; g < heads; ++g) {
        // A tile has a key that is seen, so that the new maximum is a number.
        const float new_m = fmaxf(m[g], warp_max(seen ? score[g] : -INFINITY));
        const float rescale = __expf(m[g] - new_m), e = seen ? __expf(score[g] - new_m) : 0.0f;
        m[g] = new_m;
        l[g] = l[g] * rescale + warp_sum(e);
        p[w][g][lane] = e;
#pragma unroll
        for (int c = 0; c < PerLane; ++c) out[g][c] *= rescale;
      }
      __syncwarp();
      const int count = end - tile < warp ? end - tile : warp;
      for (int r = 0; r < count; ++r) {
        const T* const v = values + offset(tile + r);
#pragma unroll
        for (int c = 0; c < PerLane; ++c) {
          const int i = lane + c * warp;
          const float x = i < d ? static_cast<float>(v[i]) : 0.0f;
#pragma unroll
          for (int g = 0; g < heads; ++g) out[g][c] += p[w][g][r] * x;
        }
      }
      __syncwarp();
    }
#pragma unroll
    for (int g = 0; g < heads; ++g) {
      if (lane == 0) maxima[w][g] = m[g], sums[w][g] = l[g];
#pragma unroll
      for (int c = 0; c < PerLane; ++c)
        if (lane + c * warp < d) partial[(w * heads + g) * d + lane + c * warp] = out[g][c];
    }
    __syncthreads();
    for (int e = t; e < heads * d; e += paged_threads) {
      const int g = e / d;
      if (first + g >= a.group) continue;
      float most = maxima[0][g], sum = 0, value = 0;  // warp 0 has the first tile
      for (int i = 1; i < paged_warps; ++i) most = fmaxf(most, maxima[i][g]);
      for (int i = 0; i < paged_warps; ++i) {
        const float factor = __expf(maxima[i][g] - most);
        sum += factor * sums[i][g];
        value += factor * partial[(i * heads + g) * d + e % d];
      }
      static_cast<T*>(a.out)[row * a.out_step + (head + g) * a.out_head + e % d] = T(value / sum);
    }
    __syncthreads();
  }
}

template <class T, int E, int heads, int PerLane>
void launch_paged(Exec& exec, const AttentionPaged& a) {
  const size_t bytes = static_cast<size_t>((1 + paged_warps) * heads * a.q.dim(2)) * sizeof(float);
  NRL_LAUNCH((paged_kernel<T, E, heads, PerLane>),
             dim3(static_cast<unsigned>(a.q.dim(0)), static_cast<unsigned>(a.keys.dim(1))), paged_threads,
             bytes, exec.stream, PagedArguments(a));
}

template <class T, int PerLane>
void paged_of(Exec& exec, const AttentionPaged& a) {
  if (a.q.dim(1) == a.keys.dim(1)) return launch_paged<T, per_pack<T>, 1, PerLane>(exec, a);
  launch_paged<T, per_pack<T>, 4, PerLane>(exec, a);
}

void attention_paged_launch(Exec& exec, const AttentionPaged& a) {
  for_float_type(a.q.dtype, [&]<class T>() {
    if (!packed_rows(a.keys)) return launch_paged<T, 1, 1, 8>(exec, a);
    if (a.q.dim(2) <= 64) return paged_of<T, 2>(exec, a);
    if (a.q.dim(2) <= 128) return paged_of<T, 4>(exec, a);
    paged_of<T, 8>(exec, a);
  });
}

}  // namespace

void fill_paged(KernelTable& table) {
  table.cache_write = cache_write_launch;
  table.attention_paged = attention_paged_launch;
}

}  // namespace nrl::ops::NRL_GPU
