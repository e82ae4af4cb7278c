// Token log-probabilities and their gradient on the GPU; a block per row of logits.
//
//   lse = row_max + log(sum(exp(x - row_max)))          log_prob = x[target] - lse
//   gradient: weight * (onehot(target) - softmax(x))
//
// First pass, from the last chunk of the row to the first: maximum and sum by online softmax (Milakov &
// Gimelshein 2018). Writes (=) log_prob and lse. Second pass, from the first chunk to the last, so that what
// was read last comes from the L2 cache; the chunks read first are kept in shared memory (RowPlan). Writes
// (=) the gradient over the logits, in their type, or with f32 logits to dlogits in bf16 or f16.
//
// For a slice of the columns, statistics_kernel writes (=) maximum, sum and x[target] of each row. They
// replace the first pass, so that no chunk is kept in shared memory.

#include "core/device/kernel.h"
#include "core/ops/cross_entropy/row_plan.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

constexpr int units = RowPlan::row_units;
/// Initial maximum; finite, so that -inf - lowest is not NaN.
constexpr float lowest = -3.4028234663852886e38f;

enum class Gradient : uint8_t { none, over_logits, bf16_copy, f16_copy };

struct Arguments {
  void* logits;
  int64_t stride;
  void* dlogits;  ///< Gradient::bf16_copy, f16_copy
  int64_t dlogits_stride;
  int64_t v;
  const int32_t* target;
  const float* weight;       ///< null: Gradient::none
  const double* loss_scale;  ///< null: 1
  float *log_prob, *lse;
  int kept;                 ///< chunks in shared memory
  int first_column;         ///< the token of column 0
  const float* statistics;  ///< (slices, n, 3), of a slice
  int slices;
  int64_t n;
};

/// The running maximum and the sum of exp(x - maximum).
struct Online {
  float maximum = lowest, sum = 0.0f;

  template <int n>
  __device__ __forceinline__ void add(const float (&x)[n]) {
    float m = maximum;
#pragma unroll
    for (int i = 0; i < n; ++i) m = fmaxf(m, x[i]);
    sum *= GpuMath::exp(maximum - m);
#pragma unroll
    for (int i = 0; i < n; ++i) sum += GpuMath::exp(x[i] - m);
    maximum = m;
  }
};

/// A row as its threads see it: vectors of 16 bytes, in chunks, and the few elements before the first 16-byte
/// boundary and after the last (the edge, one for each of the first threads). Of a chunk, thread t has the
/// vectors (chunk * units + k) * blockDim.x + t, k < units.
template <class T>
struct Row {
  static constexpr int size = per_pack<T>;  ///< elements of a vector
  using Vectors = Pack<T>[units];

  T* x;
  int front, vectors, chunks, edge;

  __device__ Row(T* row, int64_t v) : x(row) {
    const auto off = static_cast<unsigned>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    front = static_cast<int>(min(v, static_cast<int64_t>((size - off) % size)));
    vectors = static_cast<int>((v - front) / size);
    const int per_chunk = units * static_cast<int>(blockDim.x);
    chunks = (vectors + per_chunk - 1) / per_chunk;
    const int back = static_cast<int>(v - front - int64_t{size} * vectors), t = static_cast<int>(threadIdx.x);
    edge = t < front ? t : t < front + back ? t + size * vectors : -1;
  }
  __device__ int vector(int chunk, int k) const {
    return (chunk * units + k) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  }
  __device__ T* at(int vector) const { return x + front + int64_t{size} * vector; }

  /// Absent vectors are -infinity, which adds nothing to a sum of exponentials.
  __device__ __forceinline__ void load(int chunk, Vectors& out) const {
    float absent[size];
#pragma unroll
    for (int e = 0; e < size; ++e) absent[e] = -INFINITY;
#pragma unroll
    for (int k = 0; k < units; ++k) {
      const int i = vector(chunk, k);
      if (i < vectors)
        out[k].load(at(i));
      else
        out[k].set(absent);
    }
  }
  /// Adds a thread's vectors of a chunk, eight elements at a time: more would take too many registers.
  static __device__ __forceinline__ void add(Online& online, const Vectors& x) {
    constexpr int together = 8 / size;
#pragma unroll
    for (int k = 0; k < units; k += together) {
      float v[8];
#pragma unroll
      for (int j = 0; j < together; ++j) {
        float part[size];
        x[k + j].get(part);
#pragma unroll
        for (int e = 0; e < size; ++e) v[j * size + e] = part[e];
      }
      online.add(v);
    }
  }
};

/// Rounds four elements to bf16 or f16; `p` is at an 8-byte boundary when `aligned`.
template <class T>
__device__ __forceinline__ void store_rounded(T* p, const float (&g)[4], bool aligned) {
  if (aligned) {
    store_floats(p, g);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) p[e] = T(g[e]);
  }
}

/// The column of a target in a slice of v columns; -1: the slice does not have it.
__device__ __forceinline__ int column_of(int target, int first_column, int64_t v) {
  const int column = target - first_column;
  return target >= 0 && column >= 0 && column < v ? column : -1;
}

/// (m, sum of exp(x - m), x[target]) of each row; a block per row.
template <class T>
__global__ void __launch_bounds__(512)
    statistics_kernel(T* logits, int64_t stride, int64_t v, const int32_t* target, int first_column,
                      float* out) {
  const int64_t r = blockIdx.x;
  const Row<T> row(logits + r * stride, v);
  Online online;
  if (row.edge >= 0) online.add({static_cast<float>(row.x[row.edge])});
  typename Row<T>::Vectors x;
  if (row.chunks > 0) row.load(0, x);
  for (int c = 0; c < row.chunks; ++c) {
    typename Row<T>::Vectors next;
    if (c + 1 < row.chunks) row.load(c + 1, next);
    row.add(online, x);
#pragma unroll
    for (int k = 0; k < units; ++k) x[k] = next[k];
  }
  const float row_max = block_max(online.maximum);
  const float sum = block_sum(online.sum * GpuMath::exp(online.maximum - row_max));
  if (threadIdx.x > 0) return;
  const int column = column_of(target[r], first_column, v);
  out[3 * r] = row_max;
  out[3 * r + 1] = sum;
  out[3 * r + 2] = column >= 0 ? static_cast<float>(row.x[column]) : 0.0f;
}

template <class T, Gradient gradient, bool sliced>
__global__ void __launch_bounds__(512, 2) row_kernel(Arguments a) {
  constexpr bool copies = gradient == Gradient::bf16_copy || gradient == Gradient::f16_copy;
  static_assert(!copies || std::is_same_v<T, float>);
  using Copy = std::conditional_t<gradient == Gradient::f16_copy, f16, bf16>;
  using Vectors = typename Row<T>::Vectors;
  NRL_DYN_SHARED(Pack<T>, cache);
  const int64_t r = blockIdx.x;
  const Row<T> row(static_cast<T*>(a.logits) + r * a.stride, a.v);
  const int first_kept = row.chunks - min(a.kept, row.chunks);
  auto slot = [&](int chunk, int k) { return row.vector(chunk - first_kept, k); };
  const int token = a.target[r], target = sliced ? column_of(token, a.first_column, a.v) : token;
  const float loss_scale = a.loss_scale ? static_cast<float>(*a.loss_scale) : 1.0f;
  const float weight = gradient != Gradient::none && token >= 0 ? a.weight[r] * loss_scale : 0.0f;
  const bool leader = threadIdx.x == 0;
  const float x_target = leader && target >= 0 ? static_cast<float>(row.x[target]) : 0.0f;
  float edge = -INFINITY, row_max = 0.0f, sum = 1.0f;

  // The load of the next chunk overlaps with the sum of this one.
  float all_target = x_target;  // leader
  if constexpr (sliced) {
    auto at = [&](int s) { return a.statistics + (s * a.n + r) * 3; };
    row_max = lowest;
    for (int s = 0; s < a.slices; ++s) row_max = fmaxf(row_max, at(s)[0]);
    sum = all_target = 0.0f;
    for (int s = 0; s < a.slices; ++s) {
      sum += at(s)[1] * GpuMath::exp(at(s)[0] - row_max);
      all_target += at(s)[2];
    }
    if (gradient != Gradient::none && row.edge >= 0) edge = static_cast<float>(row.x[row.edge]);
  } else if (target >= 0 || a.lse) {
    Online online;
    if (row.edge >= 0) edge = static_cast<float>(row.x[row.edge]);
    online.add({edge});
    Vectors x;
    if (row.chunks > 0) row.load(row.chunks - 1, x);
    for (int c = row.chunks - 1; c >= 0; --c) {
      Vectors next;
      if (c > 0) row.load(c - 1, next);
      if (gradient != Gradient::none && c >= first_kept) {
#pragma unroll
        for (int k = 0; k < units; ++k) cache[slot(c, k)] = x[k];
      }
      row.add(online, x);
#pragma unroll
      for (int k = 0; k < units; ++k) x[k] = next[k];
    }
    row_max = block_max(online.maximum);
    sum = block_sum(online.sum * GpuMath::exp(online.maximum - row_max));
  }
  if (leader) {
    const float log_sum = logf(sum);
    a.log_prob[r] = token >= 0 ? (all_target - row_max) - log_sum : 0.0f;
    if (a.lse) a.lse[r] = row_max + log_sum;
  }
  if constexpr (gradient == Gradient::none) return;
  // The leader has read x_target. (Without slices, the sums above have a barrier.)
  if constexpr (sliced) __syncthreads();

  // Over the logits, a thread writes the vectors that it has read itself. A 16-bit row in the first half of
  // its own f32 logits has its chunk c over chunks up to c. The barrier in the loop ensures that all threads
  // have read those before the chunk is written.
  const float scale = -weight / sum;
  const bool clear = weight == 0.0f;
  auto gradient_of = [&](float x) { return clear ? 0.0f : GpuMath::exp(x - row_max) * scale; };
  Copy* dlogits = copies ? static_cast<Copy*>(a.dlogits) + r * a.dlogits_stride : nullptr;
  const bool aligned = reinterpret_cast<uintptr_t>(dlogits + row.front) % 8 == 0;
  auto fetch = [&](int chunk, Vectors& out) {
    if (clear) return;
    if (chunk < first_kept) return row.load(chunk, out);
#pragma unroll
    for (int k = 0; k < units; ++k) out[k] = cache[slot(chunk, k)];
  };
  Vectors x;
  if (row.chunks > 0) fetch(0, x);
  for (int c = 0; c < row.chunks; ++c) {
    Vectors next;
    if (c + 1 < row.chunks) fetch(c + 1, next);
    if constexpr (copies) __syncthreads();
#pragma unroll
    for (int k = 0; k < units; ++k) {
      const int i = row.vector(c, k);
      float g[Row<T>::size];
      x[k].get(g);
#pragma unroll
      for (float& e : g) e = gradient_of(e);
      if (i >= row.vectors) continue;
      if constexpr (copies) {
        store_rounded(dlogits + row.front + int64_t{4} * i, g, aligned);
      } else {
        store_floats(row.at(i), g);
      }
    }
#pragma unroll
    for (int k = 0; k < units; ++k) x[k] = next[k];
  }
  __syncthreads();
  auto put = [&](int64_t i, float g) {
    if constexpr (copies) {
      dlogits[i] = Copy(g);
    } else {
      row.x[i] = static_cast<T>(g);
    }
  };
  if (row.edge >= 0) put(row.edge, gradient_of(edge) + (row.edge == target ? weight : 0.0f));
  const bool inside = target >= row.front && target < row.front + int64_t{Row<T>::size} * row.vectors;
  if (leader && inside) put(target, gradient_of(x_target) + weight);
}

void statistics_launch(Exec& exec, const CrossEntropyStatistics& a) {
  const int64_t v = a.logits.dim(1);
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() {
    NRL_LAUNCH(statistics_kernel<T>, static_cast<unsigned>(a.logits.dim(0)),
               row_plan(exec, v, a.logits.dtype, false).threads, 0, exec.stream,
               static_cast<T*>(a.logits.data), a.logits.stride[0], v,
               static_cast<const int32_t*>(a.target.data), static_cast<int>(a.first_column),
               static_cast<float*>(a.out.data));
  });
}

template <bool sliced>
void rows_launch(Exec& exec, const CrossEntropy& a) {
  const int64_t n = a.logits.dim(0), v = a.logits.dim(1);
  RowPlan plan = row_plan(exec, v, a.logits.dtype, static_cast<bool>(a.weight));
  if (sliced) plan.kept = 0;
  if (sliced && !a.weight) plan.threads = warp;  // no pass over the logits
  Arguments args{};
  args.logits = a.logits.data;
  args.stride = a.logits.stride[0];
  args.dlogits = a.dlogits.data;
  args.dlogits_stride = a.dlogits.stride[0];
  args.v = v;
  args.target = static_cast<const int32_t*>(a.target.data);
  args.weight = static_cast<const float*>(a.weight.data);
  args.loss_scale = static_cast<const double*>(a.loss_scale.data);
  args.log_prob = static_cast<float*>(a.log_prob.data);
  args.lse = static_cast<float*>(a.lse.data);
  args.kept = plan.kept;
  args.first_column = static_cast<int>(a.first_column);
  args.statistics = static_cast<const float*>(a.statistics.data);
  args.slices = a.statistics ? static_cast<int>(a.statistics.dim(0)) : 0;
  args.n = n;
  const auto blocks = static_cast<unsigned>(n);
  const auto shared = static_cast<size_t>(plan.kept * plan.chunk_bytes());
  if (a.dlogits) {
    if (a.dlogits.dtype == DType::f16)
      NRL_LAUNCH((row_kernel<float, Gradient::f16_copy, sliced>), blocks, plan.threads, shared, exec.stream,
                 args);
    else
      NRL_LAUNCH((row_kernel<float, Gradient::bf16_copy, sliced>), blocks, plan.threads, shared, exec.stream,
                 args);
    return;
  }
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() {
    if (a.weight) {
      NRL_LAUNCH((row_kernel<T, Gradient::over_logits, sliced>), blocks, plan.threads, shared, exec.stream,
                 args);
    } else {
      NRL_LAUNCH((row_kernel<T, Gradient::none, sliced>), blocks, plan.threads, shared, exec.stream, args);
    }
  });
}

void cross_entropy_launch(Exec& exec, const CrossEntropy& a) {
  a.statistics ? rows_launch<true>(exec, a) : rows_launch<false>(exec, a);
}

}  // namespace

void fill_cross_entropy(KernelTable& table) {
  table.cross_entropy = cross_entropy_launch;
  table.cross_entropy_statistics = statistics_launch;
}

}  // namespace nrl::ops::NRL_GPU
