// Distillation from k log-probabilities per row on the GPU.
//
//   top_columns      ids and values of the k largest, in their order; a block per row, which goes through it
//                    four times to find the k-th and once to write, 8 neighbors to a thread (select.cuh)
//   gather_columns   out = the logits at the ids, 0 outside the slice; a thread per id
//   topk_kl          score and gradient of the divergence over the ids (kl_row.h); a warp per row, sums in
//   f64 scatter_columns  dlogits = p (rest constant + rest slope log p), then the gradient at the ids; a
//   block
//                    per row, which goes through it in chunks of one vector per thread
//
// All outputs are written (=).

#include "core/device/kernel.h"
#include "core/ops/distillation/kl_row.h"
#include "core/ops/distillation/order.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/rows.cuh"
#include "core/ops/shared/gpu/select.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;
using distillation::KlFactors;
using distillation::KlRow;
using distillation::KlSums;
using distillation::LogSoftmax;

constexpr int threads = 256;

constexpr int top_threads = 512, top_ahead = 8;

/// A row of logits of consecutive tokens.
template <class T>
struct LogitsOfRows {
  const T* logits;
  int64_t stride;
  int count, first_column;

  struct Row {
    const T* logits;
    int first_column;
    __device__ __forceinline__ unsigned order(int i) const { return distillation::order_of(value(i)); }
    __device__ __forceinline__ float value(int i) const { return static_cast<float>(logits[i]); }
    __device__ __forceinline__ int id(int i) const { return first_column + i; }
  };
  __device__ __forceinline__ Row row(int64_t r) const { return {logits + r * stride, first_column}; }
};

/// A row of several parts, of `width` numbers each.
struct PartsOfRows {
  const int* ids;
  const float* values;
  int64_t rows;
  int count;
  Divider width;

  struct Row {
    const PartsOfRows& all;
    int64_t r;
    __device__ __forceinline__ int64_t at(int i) const {
      const auto part = static_cast<int64_t>(all.width.short_quotient(static_cast<unsigned>(i)));
      return (part * all.rows + r) * all.width.divisor() + i - part * all.width.divisor();
    }
    __device__ __forceinline__ unsigned order(int i) const {
      return id(i) < 0 ? distillation::no_order : distillation::order_of(value(i));
    }
    __device__ __forceinline__ float value(int i) const { return all.values[at(i)]; }
    __device__ __forceinline__ int id(int i) const { return all.ids[at(i)]; }
  };
  __device__ __forceinline__ Row row(int64_t r) const { return {*this, r}; }
};

template <class Rows>
__global__ void __launch_bounds__(top_threads) top_kernel(Rows from, int k, int* ids, float* values) {
  constexpr int ahead = top_ahead;
  NRL_SHARED(int, sums_of_warps, [2][2][top_threads / warp]);  // double-buffered: one barrier per count
  const int thread = static_cast<int>(threadIdx.x);
  const auto row = from.row(blockIdx.x);
  ids += int64_t{blockIdx.x} * k;
  values += int64_t{blockIdx.x} * k;
  const Limit limit = limit_of<top_threads>(
      [&](const auto& each) {
#pragma unroll 4
        for (int i = thread; i < from.count; i += top_threads) each(row.order(i));
      },
      k);
  int taken = 0, equals = 0, turn = 0;
  for (int base = 0; base < from.count; base += top_threads * ahead, turn ^= 1) {
    // A thread reads neighbors, so that threads and numbers have the same order.
    const int i = base + thread * ahead;
    unsigned fits = 0, equal = 0;  // bits of the numbers
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      const unsigned order = i + j < from.count ? row.order(i + j) : distillation::no_order;
      if (order > limit.order) fits |= 1u << j;
      if (order == limit.order && order != distillation::no_order) equal |= 1u << j;
    }
    int before = sum_before(__popc(equal), sums_of_warps[0][turn], equals);
#pragma unroll
    for (int j = 0; j < ahead; ++j)
      if (equal >> j & 1 && before++ < limit.equals) fits |= 1u << j;
    before = sum_before(__popc(fits), sums_of_warps[1][turn], taken);
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (!(fits >> j & 1)) continue;
      ids[before] = row.id(i + j);
      values[before++] = row.value(i + j);
    }
  }
  for (int j = taken + thread; j < k; j += top_threads) {
    ids[j] = -1;
    values[j] = -INFINITY;
  }
}

void top_launch(Exec& exec, const TopColumns& t) {
  const auto launch = [&](const auto& from) {
    using Rows = std::remove_cvref_t<decltype(from)>;
    NRL_LAUNCH(top_kernel<Rows>, static_cast<unsigned>(t.ids.dim(0)), top_threads, 0, exec.stream, from,
               static_cast<int>(t.ids.dim(1)), static_cast<int*>(t.ids.data),
               static_cast<float*>(t.values.data));
  };
  if (!t.logits) {
    const int64_t width = t.part_ids.dim(2);
    return launch(PartsOfRows{.ids = static_cast<const int*>(t.part_ids.data),
                              .values = static_cast<const float*>(t.part_values.data),
                              .rows = t.part_ids.dim(1),
                              .count = static_cast<int>(t.part_ids.dim(0) * width),
                              .width = Divider(width)});
  }
  for_f32_or_bf16(t.logits.dtype, [&]<class T>() {
    launch(LogitsOfRows<T>{.logits = static_cast<const T*>(t.logits.data),
                           .stride = t.logits.step(0),
                           .count = static_cast<int>(t.logits.dim(1)),
                           .first_column = static_cast<int>(t.first_column)});
  });
}

template <class T>
struct GatherArguments {
  const T* logits;
  int64_t stride, v;
  const int32_t* ids;
  float* out;
  int64_t count;  ///< n k
  int first_column;
  Divider k;
};

template <class T>
__global__ void __launch_bounds__(threads) gather_kernel(GatherArguments<T> a) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x; i < a.count;
       i += static_cast<int64_t>(gridDim.x) * threads) {
    const int64_t column = int64_t{a.ids[i]} - a.first_column;
    a.out[i] = column >= 0 && column < a.v ? static_cast<float>(a.logits[a.k.quotient(i) * a.stride + column])
                                           : 0.0f;
  }
}

void gather_launch(Exec& exec, const GatherColumns& g) {
  for_f32_or_bf16(g.logits.dtype, [&]<class T>() {
    GatherArguments<T> a{};
    a.logits = static_cast<const T*>(g.logits.data);
    a.stride = g.logits.step(0);
    a.v = g.logits.dim(1);
    a.ids = static_cast<const int32_t*>(g.ids.data);
    a.out = static_cast<float*>(g.out.data);
    a.count = g.ids.numel();
    a.first_column = static_cast<int>(g.first_column);
    a.k = Divider(g.ids.dim(1));
    NRL_LAUNCH(gather_kernel<T>, grid_for(a.count, threads, exec.multiprocessors), threads, 0, exec.stream,
               a);
  });
}

struct KlArguments {
  const float *student, *teacher;
  const int32_t* target;
  const float *lse, *entropy;
  const float* weight;       ///< null: no gradient
  const double* loss_scale;  ///< null: 1
  float *score, *gradient, *rest;
  int64_t n;
  int k;
  KlFactors factors;
};

__device__ __forceinline__ double warp_sum_double(double v) {
#pragma unroll
  for (int o = warp / 2; o; o >>= 1) v += __shfl_xor_sync(all_lanes, v, o);
  return v;
}

/// The log-softmax of k numbers of a row, the same in all lanes of a warp.
__device__ __forceinline__ LogSoftmax log_softmax(const float* x, int k, int lane, float scale) {
  float most = -INFINITY;
  for (int j = lane; j < k; j += warp) most = fmaxf(most, x[j]);
  LogSoftmax of{scale, warp_max(most) * scale, 0.0f};
  float sum = 0;
  for (int j = lane; j < k; j += warp) sum += GpuMath::exp(of.scaled(x[j]));
  of.log_sum = logf(warp_sum(sum));
  return of;
}

__global__ void __launch_bounds__(threads) topk_kl_kernel(KlArguments a) {
  constexpr int rows = threads / warp;
  const int lane = static_cast<int>(threadIdx.x) % warp;
  const KlFactors f = a.factors;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * rows + threadIdx.x / warp; r < a.n;
       r += static_cast<int64_t>(gridDim.x) * rows) {
    const float *x = a.student + r * a.k, *t = a.teacher + r * a.k;
    float* g = a.weight ? a.gradient + r * a.k : nullptr;
    if (a.target[r] < 0) {
      if (g)
        for (int j = lane; j < a.k; j += warp) g[j] = 0.0f;
      if (lane == 0) {
        a.score[r] = 0.0f;
        if (a.rest) a.rest[2 * r] = a.rest[2 * r + 1] = 0.0f;
      }
      continue;
    }
    const LogSoftmax teacher = log_softmax(t, a.k, lane, f.inverse_temperature),
                     student = f.zero_outside ? LogSoftmax{f.inverse_temperature, a.lse[r], 0.0f}
                                              : log_softmax(x, a.k, lane, f.inverse_temperature);
    KlSums sums;
    for (int j = lane; j < a.k; j += warp) {
      const float log_p = student(x[j]), log_q = teacher(t[j]), log_ratio = log_p - log_q;
      const float p = GpuMath::exp(log_p);
      sums.forward -= static_cast<double>(GpuMath::exp(log_q) * log_ratio);
      sums.reverse += static_cast<double>(p * (f.zero_outside ? -log_q : log_ratio));
      sums.inside += static_cast<double>(p);
    }
    sums.forward = warp_sum_double(sums.forward);
    sums.reverse = warp_sum_double(sums.reverse);
    sums.inside = warp_sum_double(sums.inside);
    const float loss_scale = a.loss_scale ? static_cast<float>(*a.loss_scale) : 1.0f;
    const float weight = a.weight ? a.weight[r] * loss_scale : 0.0f;
    const KlRow row = distillation::finish(f, sums, a.entropy ? a.entropy[r] : 0.0f, weight);
    if (lane == 0) {
      a.score[r] = row.score;
      if (a.rest) a.rest[2 * r] = row.rest_constant, a.rest[2 * r + 1] = row.rest_slope;
    }
    if (!g) continue;
    for (int j = lane; j < a.k; j += warp) {
      const float log_p = student(x[j]), log_q = teacher(t[j]);
      g[j] = distillation::gradient(f, row, weight, GpuMath::exp(log_p), GpuMath::exp(log_q), log_p - log_q);
    }
  }
}

void topk_kl_launch(Exec& exec, const TopkKl& t) {
  KlArguments a{};
  a.student = static_cast<const float*>(t.student.data);
  a.teacher = static_cast<const float*>(t.teacher.data);
  a.target = static_cast<const int32_t*>(t.target.data);
  a.lse = static_cast<const float*>(t.lse.data);
  a.entropy = static_cast<const float*>(t.entropy.data);
  a.weight = static_cast<const float*>(t.weight.data);
  a.loss_scale = static_cast<const double*>(t.loss_scale.data);
  a.score = static_cast<float*>(t.score.data);
  a.gradient = static_cast<float*>(t.gradient.data);
  a.rest = static_cast<float*>(t.rest.data);
  a.n = t.student.dim(0);
  a.k = static_cast<int>(t.student.dim(1));
  a.factors = distillation::factors_of(t);
  NRL_LAUNCH(topk_kl_kernel, grid_for(a.n, threads / warp, exec.multiprocessors), threads, 0, exec.stream, a);
}

struct ScatterArguments {
  const void* logits;
  void* dlogits;
  int64_t stride, dlogits_stride;
  int64_t v;
  const int32_t* ids;
  const float *gradient, *rest, *lse;
  int k, first_column;
  float inverse_temperature;
};

/// E: elements of a vector, 1 where rows are not aligned for more.
template <class T, class O, int E>
__global__ void __launch_bounds__(threads) scatter_kernel(ScatterArguments a) {
  const int64_t r = blockIdx.x;
  const T* x = static_cast<const T*>(a.logits) + r * a.stride;
  O* out = static_cast<O*>(a.dlogits) + r * a.dlogits_stride;
  const float constant = a.rest ? a.rest[2 * r] : 0.0f, slope = a.rest ? a.rest[2 * r + 1] : 0.0f;
  const bool clear = constant == 0.0f && slope == 0.0f;
  const float lse = clear ? 0.0f : a.lse[r];
  for (int64_t begin = 0; begin < a.v; begin += threads * E) {
    const int64_t i = begin + threadIdx.x * E;
    float g[E] = {};
    if (!clear && i < a.v) {
      load_floats(x + i, g);
#pragma unroll
      for (float& e : g) e = distillation::rest<GpuMath>(e * a.inverse_temperature - lse, constant, slope);
    }
    // A 16-bit row in the first half of its own f32 logits has this chunk over chunks up to this one.
    if constexpr (!std::is_same_v<T, O>) __syncthreads();
    if (i < a.v) store_floats(out + i, g);
  }
  __syncthreads();
  for (int j = static_cast<int>(threadIdx.x); j < a.k; j += threads) {
    const int64_t column = int64_t{a.ids[r * a.k + j]} - a.first_column;
    const float g = a.gradient[r * a.k + j];
    // The ids of padding are not distinct: its zeros are there already.
    if (clear && g == 0.0f) continue;
    if (column >= 0 && column < a.v) out[column] = static_cast<O>(g);
  }
}

template <class T, class O>
void scatter_rows(Exec& exec, const ScatterColumns& s, const Tensor& dlogits) {
  ScatterArguments a{};
  a.logits = s.logits.data;
  a.dlogits = dlogits.data;
  a.stride = s.logits.step(0);
  a.dlogits_stride = dlogits.step(0);
  a.v = s.logits.dim(1);
  a.ids = static_cast<const int32_t*>(s.ids.data);
  a.gradient = static_cast<const float*>(s.gradient.data);
  a.rest = static_cast<const float*>(s.rest.data);
  a.lse = static_cast<const float*>(s.lse.data);
  a.k = static_cast<int>(s.ids.dim(1));
  a.first_column = static_cast<int>(s.first_column);
  a.inverse_temperature = s.inverse_temperature;
  const auto blocks = static_cast<unsigned>(s.ids.dim(0));
  if (packed_rows(s.logits) && packed_rows(dlogits)) {
    NRL_LAUNCH((scatter_kernel<T, O, per_pack<T>>), blocks, threads, 0, exec.stream, a);
  } else {
    NRL_LAUNCH((scatter_kernel<T, O, 1>), blocks, threads, 0, exec.stream, a);
  }
}

void scatter_launch(Exec& exec, const ScatterColumns& a) {
  if (!a.dlogits)
    for_f32_or_bf16(a.logits.dtype, [&]<class T>() { scatter_rows<T, T>(exec, a, a.logits); });
  else if (a.dlogits.dtype == DType::f16)
    scatter_rows<float, f16>(exec, a, a.dlogits);
  else
    scatter_rows<float, bf16>(exec, a, a.dlogits);
}

}  // namespace

void fill_distillation(KernelTable& table) {
  table.top_columns = top_launch;
  table.gather_columns = gather_launch;
  table.topk_kl = topk_kl_launch;
  table.scatter_columns = scatter_launch;
}

}  // namespace nrl::ops::NRL_GPU
