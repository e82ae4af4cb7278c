// Token log-probabilities and their gradient on the GPU; a block per row of logits. With z = t x:
//
//   lse = row_max + log(sum(exp(z - row_max)))          log_prob = z[target] - lse
//   entropy = log(sum(exp(z - row_max))) - sum(exp(z - row_max) (z - row_max)) / sum(exp(z - row_max))
//   gradient: weight * (onehot(target) - softmax(x))
//   from lse: t (weight * (onehot(target) - p) - entropy_weight * p (log p + entropy)),  p = exp(z - lse)
//
// First pass, from the last chunk of the row to the first: maximum and sum by online softmax (Milakov &
// Gimelshein 2018). Writes (=) log_prob and lse. Second pass, from the first chunk to the last, so that what
// was read last comes from the L2 cache; the chunks read first are kept in shared memory (RowPlan). Writes
// (=) the gradient over the logits, in their type, or with f32 logits to dlogits in bf16 or f16.
//
// For a slice of the columns, statistics_kernel writes (=) maximum, sums and z[target] of each row. They
// replace the first pass, so that no chunk is kept in shared memory. gradient_kernel writes (=) the gradient
// from lse in one pass, as the second pass does.

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

/// A lower bound of z - maximum as a factor of exp(z - maximum), which is 0 there: 0 * -inf is not a number.
constexpr float lowest_exponent = -200.0f;

struct RowArguments {
  void* logits;
  int64_t stride;
  void* dlogits;  ///< Gradient::bf16_copy, f16_copy
  int64_t dlogits_stride;
  int64_t v;
  const int32_t* target;
  const float* weight;       ///< null: Gradient::none
  const double* loss_scale;  ///< null: 1
  int first_column;          ///< the token of column 0
  float t;                   ///< the inverse temperature

  template <class Op>
  explicit RowArguments(const Op& a)
      : logits(a.logits.data),
        stride(a.logits.stride[0]),
        dlogits(a.dlogits.data),
        dlogits_stride(a.dlogits.stride[0]),
        v(a.logits.dim(1)),
        target(static_cast<const int32_t*>(a.target.data)),
        weight(static_cast<const float*>(a.weight.data)),
        loss_scale(static_cast<const double*>(a.loss_scale.data)),
        first_column(static_cast<int>(a.first_column)),
        t(a.inverse_temperature) {}
};

struct Arguments : RowArguments {
  using RowArguments::RowArguments;
  float *log_prob = nullptr, *lse = nullptr, *entropy = nullptr;
  int kept = 0;                       ///< chunks in shared memory
  const float* statistics = nullptr;  ///< (slices, n, width), of a slice
  int slices = 0, width = 0;
  int64_t n = 0;
};

struct GradientArguments : RowArguments {
  using RowArguments::RowArguments;
  const float *lse = nullptr, *entropy = nullptr, *entropy_weight = nullptr;
};

/// The running maximum of z, the sum of exp(z - maximum), and with `moment` the sum of
/// exp(z - maximum) (z - maximum). z = t x, or with `plain` x.
template <bool plain, bool moment>
struct Online {
  float t, maximum = lowest, sum = 0.0f, moments = 0.0f;

  __device__ explicit Online(float inverse_temperature) : t(inverse_temperature) {}

  /// The sums with another maximum.
  __device__ __forceinline__ float sum_at(float m) const { return sum * GpuMath::exp(maximum - m); }
  __device__ __forceinline__ float moments_at(float m) const {
    const float exponent = maximum - m;
    return (moments + fmaxf(exponent, lowest_exponent) * sum) * GpuMath::exp(exponent);
  }
  template <int n>
  __device__ __forceinline__ void add(const float (&logits)[n]) {
    float x[n], m = maximum;
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = plain ? logits[i] : logits[i] * t;
#pragma unroll
    for (int i = 0; i < n; ++i) m = fmaxf(m, x[i]);
    if constexpr (moment) moments = moments_at(m);
    sum = sum_at(m);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float e = GpuMath::exp(x[i] - m);
      sum += e;
      if constexpr (moment) moments += e * fmaxf(x[i] - m, lowest_exponent);
    }
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
  template <class Sums>
  static __device__ __forceinline__ void add(Sums& online, const Vectors& x) {
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

/// (m, sum of exp(z - m), z[target]), and with `moment` the sum of exp(z - m) (z - m), of each row; a block
/// per row.
template <class T, bool moment>
__global__ void __launch_bounds__(512)
    statistics_kernel(T* logits, int64_t stride, int64_t v, const int32_t* target, int first_column, float t,
                      float* out) {
  const int64_t r = blockIdx.x;
  const Row<T> row(logits + r * stride, v);
  Online<false, moment> online(t);
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
  const float sum = block_sum(online.sum_at(row_max));
  const float moments = moment ? block_sum(online.moments_at(row_max)) : 0.0f;
  if (threadIdx.x > 0) return;
  const int column = column_of(target[r], first_column, v);
  out += (moment ? 4 : 3) * r;
  out[0] = row_max;
  out[1] = sum;
  out[2] = column >= 0 ? static_cast<float>(row.x[column]) * t : 0.0f;
  if (moment) out[3] = moments;
}

/// Writes the gradient of row r: `of` each logit, plus `weight` at the target (a column, or -1). `fetch` gets
/// the vectors of a chunk, `edge` is the thread's logit at the edge, x_target the logit of the target for
/// thread 0, which must have read it before any thread calls this.
///
/// Over the logits, a thread writes the vectors that it has read itself. A 16-bit row in the first half of
/// its own f32 logits has its chunk c over chunks up to c. The barrier in the loop ensures that all threads
/// have read those before the chunk is written.
template <Gradient gradient, class T, class Fetch, class Function>
__device__ __forceinline__ void write_gradient(const RowArguments& a, const Row<T>& row, int64_t r,
                                               int target, float weight, float x_target, float edge,
                                               const Fetch& fetch, const Function& of) {
  constexpr bool copies = gradient == Gradient::bf16_copy || gradient == Gradient::f16_copy;
  static_assert(!copies || std::is_same_v<T, float>);
  using Copy = std::conditional_t<gradient == Gradient::f16_copy, f16, bf16>;
  Copy* dlogits = copies ? static_cast<Copy*>(a.dlogits) + r * a.dlogits_stride : nullptr;
  const bool aligned = reinterpret_cast<uintptr_t>(dlogits + row.front) % 8 == 0;
  typename Row<T>::Vectors x;
  if (row.chunks > 0) fetch(0, x);
  for (int c = 0; c < row.chunks; ++c) {
    typename Row<T>::Vectors next;
    if (c + 1 < row.chunks) fetch(c + 1, next);
    if constexpr (copies) __syncthreads();
#pragma unroll
    for (int k = 0; k < units; ++k) {
      const int i = row.vector(c, k);
      float g[Row<T>::size];
      x[k].get(g);
#pragma unroll
      for (float& e : g) e = of(e);
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
  if (row.edge >= 0) put(row.edge, of(edge) + (row.edge == target ? weight : 0.0f));
  const bool inside = target >= row.front && target < row.front + int64_t{Row<T>::size} * row.vectors;
  if (threadIdx.x == 0 && inside) put(target, of(x_target) + weight);
}

template <class T, Gradient gradient, bool moment, bool sliced>
__global__ void __launch_bounds__(512, 2) row_kernel(Arguments a) {
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
  float edge = -INFINITY, row_max = 0.0f, sum = 1.0f, moments = 0.0f;

  // The load of the next chunk overlaps with the sum of this one.
  float z_target = gradient == Gradient::none ? x_target * a.t : x_target;  // leader
  if constexpr (sliced) {
    auto at = [&](int s) { return a.statistics + (s * a.n + r) * a.width; };
    row_max = lowest;
    for (int s = 0; s < a.slices; ++s) row_max = fmaxf(row_max, at(s)[0]);
    sum = z_target = 0.0f;
    for (int s = 0; s < a.slices; ++s) {
      const float exponent = at(s)[0] - row_max, factor = GpuMath::exp(exponent);
      sum += at(s)[1] * factor;
      z_target += at(s)[2];
      if constexpr (moment) moments += (at(s)[3] + fmaxf(exponent, lowest_exponent) * at(s)[1]) * factor;
    }
    if (gradient != Gradient::none && row.edge >= 0) edge = static_cast<float>(row.x[row.edge]);
  } else if (target >= 0 || a.lse) {
    Online<gradient != Gradient::none, moment> online(a.t);
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
    sum = block_sum(online.sum_at(row_max));
    if constexpr (moment) moments = block_sum(online.moments_at(row_max));
  }
  if (leader) {
    const float log_sum = logf(sum);
    a.log_prob[r] = token >= 0 ? (z_target - row_max) - log_sum : 0.0f;
    if constexpr (moment) a.entropy[r] = token >= 0 ? log_sum - moments / sum : 0.0f;
    if (a.lse) a.lse[r] = row_max + log_sum;
  }
  if constexpr (gradient != Gradient::none) {
    // The leader has read x_target. (Without slices, the sums above have a barrier.)
    if constexpr (sliced) __syncthreads();
    const float scale = -weight / sum;
    const bool clear = weight == 0.0f;
    auto fetch = [&](int chunk, Vectors& out) {
      if (clear) return;
      if (chunk < first_kept) return row.load(chunk, out);
#pragma unroll
      for (int k = 0; k < units; ++k) out[k] = cache[slot(chunk, k)];
    };
    write_gradient<gradient>(a, row, r, target, weight, x_target, edge, fetch,
                             [&](float x) { return clear ? 0.0f : GpuMath::exp(x - row_max) * scale; });
  }
}

template <class T, Gradient gradient, bool entropy>
__global__ void __launch_bounds__(512, 2) gradient_kernel(GradientArguments a) {
  const int64_t r = blockIdx.x;
  const Row<T> row(static_cast<T*>(a.logits) + r * a.stride, a.v);
  const int token = a.target[r], target = column_of(token, a.first_column, a.v);
  const float scale = (a.loss_scale ? static_cast<float>(*a.loss_scale) : 1.0f) * a.t, lse = a.lse[r];
  const float weight = token >= 0 ? a.weight[r] * scale : 0.0f;
  const float entropy_weight = entropy && token >= 0 ? a.entropy_weight[r] * scale : 0.0f;
  const float row_entropy = entropy ? a.entropy[r] : 0.0f;
  const float x_target = threadIdx.x == 0 && target >= 0 ? static_cast<float>(row.x[target]) : 0.0f;
  const float edge = row.edge >= 0 ? static_cast<float>(row.x[row.edge]) : 0.0f;
  __syncthreads();  // thread 0 has read x_target
  const bool clear = weight == 0.0f && entropy_weight == 0.0f;
  auto fetch = [&](int chunk, typename Row<T>::Vectors& out) {
    if (!clear) row.load(chunk, out);
  };
  write_gradient<gradient>(a, row, r, target, weight, x_target, edge, fetch, [&](float x) {
    if (clear) return 0.0f;
    const float log_p = x * a.t - lse;
    float factor = -weight;
    if constexpr (entropy) factor -= entropy_weight * (fmaxf(log_p, lowest_exponent) + row_entropy);
    return GpuMath::exp(log_p) * factor;
  });
}

/// Calls body.operator()<type of the logits, way of the gradient>().
template <class Body>
void for_gradient(const Tensor& logits, const Tensor& dlogits, const Body& body) {
  if (!dlogits)
    for_f32_or_bf16(logits.dtype, [&]<class T>() { body.template operator()<T, Gradient::over_logits>(); });
  else if (dlogits.dtype == DType::f16)
    body.template operator()<float, Gradient::f16_copy>();
  else
    body.template operator()<float, Gradient::bf16_copy>();
}

void statistics_launch(Exec& exec, const CrossEntropyStatistics& a) {
  const int64_t v = a.logits.dim(1);
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() {
    const auto launch = [&]<bool moment>(std::bool_constant<moment>) {
      NRL_LAUNCH((statistics_kernel<T, moment>), static_cast<unsigned>(a.logits.dim(0)),
                 row_plan(exec, v, a.logits.dtype, false).threads, 0, exec.stream,
                 static_cast<T*>(a.logits.data), a.logits.stride[0], v,
                 static_cast<const int32_t*>(a.target.data), static_cast<int>(a.first_column),
                 a.inverse_temperature, static_cast<float*>(a.out.data));
    };
    a.out.dim(1) == 4 ? launch(std::true_type()) : launch(std::false_type());
  });
}

template <bool sliced>
void rows_launch(Exec& exec, const CrossEntropy& a) {
  const int64_t n = a.logits.dim(0), v = a.logits.dim(1);
  RowPlan plan = row_plan(exec, v, a.logits.dtype, static_cast<bool>(a.weight));
  if (sliced) plan.kept = 0;
  if (sliced && !a.weight) plan.threads = warp;  // no pass over the logits
  Arguments args(a);
  args.log_prob = static_cast<float*>(a.log_prob.data);
  args.lse = static_cast<float*>(a.lse.data);
  args.entropy = static_cast<float*>(a.entropy.data);
  args.kept = plan.kept;
  args.statistics = static_cast<const float*>(a.statistics.data);
  args.slices = a.statistics ? static_cast<int>(a.statistics.dim(0)) : 0;
  args.width = a.entropy ? 4 : 3;
  args.n = n;
  const auto blocks = static_cast<unsigned>(n);
  const auto shared = static_cast<size_t>(plan.kept * plan.chunk_bytes());
  if (a.weight) {
    for_gradient(a.logits, a.dlogits, [&]<class T, Gradient gradient>() {
      NRL_LAUNCH((row_kernel<T, gradient, false, sliced>), blocks, plan.threads, shared, exec.stream, args);
    });
    return;
  }
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() {
    if (a.entropy) {
      NRL_LAUNCH((row_kernel<T, Gradient::none, true, sliced>), blocks, plan.threads, shared, exec.stream,
                 args);
    } else {
      NRL_LAUNCH((row_kernel<T, Gradient::none, false, sliced>), blocks, plan.threads, shared, exec.stream,
                 args);
    }
  });
}

void gradient_launch(Exec& exec, const CrossEntropyGradient& a) {
  GradientArguments args(a);
  args.lse = static_cast<const float*>(a.lse.data);
  args.entropy = static_cast<const float*>(a.entropy.data);
  args.entropy_weight = static_cast<const float*>(a.entropy_weight.data);
  const auto blocks = static_cast<unsigned>(a.logits.dim(0));
  const int threads = row_plan(exec, args.v, a.logits.dtype, false).threads;
  for_gradient(a.logits, a.dlogits, [&]<class T, Gradient gradient>() {
    if (a.entropy_weight) {
      NRL_LAUNCH((gradient_kernel<T, gradient, true>), blocks, threads, 0, exec.stream, args);
    } else {
      NRL_LAUNCH((gradient_kernel<T, gradient, false>), blocks, threads, 0, exec.stream, args);
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
  table.cross_entropy_gradient = gradient_launch;
}

}  // namespace nrl::ops::NRL_GPU
