// Distillation from k log-probabilities per row on the GPU.
//
//   gather_columns   out = the logits at the ids, 0 outside the slice; a thread per id
//   topk_kl          score and gradient of the divergence over the ids (kl_row.h); a warp per row, sums in
//   f64 scatter_columns  dlogits = p (rest constant + rest slope log p), then the gradient at the ids; a
//   block
//                    per row, which goes through it in chunks of one vector per thread
//
// All outputs are written (=).

#include "core/device/kernel.h"
#include "core/ops/distillation/kl_row.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/rows.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;
using distillation::KlFactors;
using distillation::KlRow;
using distillation::KlSums;
using distillation::LogSoftmax;

constexpr int threads = 256;

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
  table.gather_columns = gather_launch;
  table.topk_kl = topk_kl_launch;
  table.scatter_columns = scatter_launch;
}

}  // namespace nrl::ops::NRL_GPU
