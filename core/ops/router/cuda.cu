// The router on the GPU; formulas in core/ops/router.h. A warp handles a token: its lanes hold the experts
// lane, lane + 32, ..., whose scores are in shared memory.
//
// forward_kernel     writes expert, prob (=)
// counts_kernel      a block per segment; writes counts (=). Integer atomics: the order does not matter.
// balance_kernel     a block per group of tokens; writes partial sums (=, workspace)
// balance_sum_kernel one block; adds them to the metrics (+=)
// backward_kernel    writes dlogits (=)
// bias_kernel        one block; adds to bias (+=)

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/rows.cuh"
#include "core/ops/shared/scratch.h"
#include "core/ops/step.h"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

constexpr int warps = 4, threads = warps * warp;
constexpr float tiny = 1e-20f;

struct Best {
  float value;
  int index;
};
/// The larger value, of equals the smaller index.
__device__ __forceinline__ Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}
__device__ __forceinline__ Best warp_best(Best v) {
#pragma unroll
  for (int o = warp / 2; o; o >>= 1) {
    const Best other{__shfl_xor_sync(all_lanes, v.value, o), __shfl_xor_sync(all_lanes, v.index, o)};
    v = better(v, other);
  }
  return v;
}

/// Index of the largest of the warp's values, which is then set to -infinity.
__device__ __forceinline__ int take_largest(float* values, int count, int lane) {
  Best best{-INFINITY, count};
  for (int e = lane; e < count; e += warp) best = better(best, {values[e], e});
  best = warp_best(best);
  // All are -infinity or NaN.
  if (best.index >= count) best.index = 0;
  __syncwarp();
  if (lane == best.index % warp) values[best.index] = -INFINITY;
  __syncwarp();
  return best.index;
}

/// s = the scores of a row, in shared memory. Returns logsumexp for softmax.
__device__ __forceinline__ float scores(RouterScore kind, const float* __restrict__ x, int experts, int lane,
                                        float* s) {
  if (kind == RouterScore::sigmoid) {
    for (int e = lane; e < experts; e += warp) s[e] = 1.0f / (1.0f + expf(-x[e]));
    __syncwarp();
    return 0;
  }
  float most = -INFINITY, sum = 0;
  for (int e = lane; e < experts; e += warp) most = fmaxf(most, x[e]);
  most = warp_max(most);
  for (int e = lane; e < experts; e += warp) {
    s[e] = expf(x[e] - most);
    sum += s[e];
  }
  sum = warp_sum(sum);
  const float scale = 1.0f / sum;
  for (int e = lane; e < experts; e += warp) s[e] *= scale;
  __syncwarp();
  return most + logf(sum);
}

__device__ __forceinline__ float log_sum_exp(const float* __restrict__ x, int experts, int lane) {
  float most = -INFINITY, sum = 0;
  for (int e = lane; e < experts; e += warp) most = fmaxf(most, x[e]);
  most = warp_max(most);
  for (int e = lane; e < experts; e += warp) sum += expf(x[e] - most);
  return most + logf(warp_sum(sum));
}

/// Sets the values of experts in groups that are not chosen to -infinity. `group`, `chosen`: scratch of a
/// row, an element per group.
__device__ __forceinline__ void choose_groups(const RouterRule& rule, int experts, float* values,
                                              float* group, float* chosen, int lane) {
  const int groups = static_cast<int>(rule.groups), count = static_cast<int>(rule.group_top_k);
  if (count == groups) return;
  const int size = experts / groups;
  int counted = static_cast<int>(rule.top_k) / count;
  counted = counted < 1 ? 1 : counted > size ? size : counted;
  for (int g = lane; g < groups; g += warp) {
    const float* members = values + g * size;
    float sum = 0;
    Best last{INFINITY, -1};
    for (int i = 0; i < counted; ++i) {
      Best best{-INFINITY, size};
      for (int m = 0; m < size; ++m)
        if (members[m] < last.value || (members[m] == last.value && m > last.index))
          best = better(best, {members[m], m});
      sum += best.value;
      last = best;
    }
    group[g] = sum;
    chosen[g] = 0;
  }
  __syncwarp();
  for (int i = 0; i < count; ++i) {
    const int g = take_largest(group, groups, lane);
    if (lane == 0) chosen[g] = 1;
  }
  __syncwarp();
  for (int e = lane; e < experts; e += warp)
    if (chosen[e / size] == 0) values[e] = -INFINITY;
  __syncwarp();
}

__global__ void __launch_bounds__(threads)
    forward_kernel(RouterRule rule, const float* __restrict__ logits, const float* __restrict__ bias,
                   int64_t n, int experts, int* __restrict__ expert, float* __restrict__ prob) {
  NRL_DYN_SHARED(float, shared);
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int64_t t = int64_t{blockIdx.x} * warps + w;
  if (t >= n) return;
  // Scores, values to choose by; scores and marks of groups.
  float* s = shared + w * 4 * experts;
  float *values = s + experts, *group = values + experts, *chosen = group + experts;
  scores(rule.score, logits + t * experts, experts, lane, s);
  for (int e = lane; e < experts; e += warp) values[e] = bias ? s[e] + bias[e] : s[e];
  __syncwarp();
  choose_groups(rule, experts, values, group, chosen, lane);
  const int k = static_cast<int>(rule.top_k);
  int mine = 0;
  float sum = 0;
  for (int c = 0; c < k; ++c) {
    const int e = take_largest(values, experts, lane);
    if (lane == c) mine = e;
    sum += s[e];
  }
  const float factor = rule.normalize ? rule.scale / (sum + tiny) : rule.scale;
  if (lane >= k) return;
  expert[t * k + lane] = mine;
  prob[t * k + lane] = s[mine] * factor;
}

__global__ void __launch_bounds__(256)
    counts_kernel(const int* __restrict__ expert, int64_t n, int k, int64_t segment, int64_t first,
                  int experts, int* __restrict__ counts, int* __restrict__ sum) {
  NRL_SHARED(int, count, [max_experts]);
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  const int64_t begin = int64_t{blockIdx.x} * segment - first, end = begin + segment;
  const int64_t from = begin > 0 ? begin : 0, to = end < n ? end : n;
  for (int64_t i = from * k + threadIdx.x; i < to * k; i += blockDim.x) atomicAdd(&count[expert[i]], 1);
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += blockDim.x) {
    counts[int64_t{blockIdx.x} * experts + e] = count[e];
    if (sum) atomicAdd(&sum[e], count[e]);
  }
}

__global__ void __launch_bounds__(threads)
    balance_kernel(RouterScore kind, const float* __restrict__ logits, const int* __restrict__ counts,
                   int64_t n, int64_t segment, int64_t first, int experts, double* __restrict__ aux_part,
                   double* __restrict__ z_part) {
  NRL_DYN_SHARED(float, shared);
  NRL_SHARED(double, sums, [warps][2]);
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  float* s = shared + w * experts;
  double aux = 0, z = 0;
  const int64_t begin = n * blockIdx.x / gridDim.x, end = n * (blockIdx.x + 1) / gridDim.x;
  for (int64_t t = begin + w; t < end; t += warps) {
    const float* x = logits + t * experts;
    const float lse = log_sum_exp(x, experts, lane);
    z += static_cast<double>(lse) * static_cast<double>(lse);
    if (!counts) continue;
    scores(kind, x, experts, lane, s);
    const int* chosen = counts + (first + t) / segment * experts;
    float part = 0, sum = 0, counted = 0;
    for (int e = lane; e < experts; e += warp) {
      part += s[e] * static_cast<float>(chosen[e]);
      sum += s[e];
      counted += static_cast<float>(chosen[e]);
    }
    aux += static_cast<double>(warp_sum(part) / (warp_sum(sum) + tiny) / fmaxf(warp_sum(counted), 1.0f));
    __syncwarp();
  }
  if (lane == 0) {
    sums[w][0] = aux;
    sums[w][1] = z;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < warps; ++i) {
    aux += sums[i][0];
    z += sums[i][1];
  }
  aux_part[blockIdx.x] = aux;
  z_part[blockIdx.x] = z;
}

__global__ void __launch_bounds__(256)
    balance_sum_kernel(const double* __restrict__ aux_part, const double* __restrict__ z_part, int parts,
                       const int* __restrict__ counts, int64_t segments, int experts, double aux_factor,
                       double z_factor, double load_factor, double* __restrict__ metrics) {
  NRL_SHARED(int, most, [256]);
  NRL_SHARED(double, all, [256]);
  int largest = 0;
  double counted = 0;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += 256) {
    int sum = 0;
    for (int64_t b = 0; b < segments; ++b) sum += counts[b * experts + e];
    largest = largest > sum ? largest : sum;
    counted += static_cast<double>(sum);
  }
  most[threadIdx.x] = largest;
  all[threadIdx.x] = counted;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < 256; ++i) {
    largest = largest > most[i] ? largest : most[i];
    counted += all[i];
  }
  double aux = 0, z = 0;
  for (int i = 0; i < parts; ++i) {
    aux += aux_part[i];
    z += z_part[i];
  }
  metrics[0] += aux_factor * aux;
  metrics[1] += z_factor * z;
  metrics[2] += load_factor * static_cast<double>(largest) / (counted > 1 ? counted : 1.0);
}

template <class T>
__global__ void __launch_bounds__(threads)
    backward_kernel(RouterRule rule, const float* __restrict__ logits, const int* __restrict__ expert,
                    const float* __restrict__ dprob, const int* __restrict__ counts, int64_t n,
                    int64_t segment, int64_t first, int experts, float slope, float z_slope,
                    const double* __restrict__ loss_scale, T* __restrict__ dlogits) {
  NRL_DYN_SHARED(float, shared);
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int64_t t = int64_t{blockIdx.x} * warps + w;
  if (t >= n) return;
  if (loss_scale) {
    slope *= static_cast<float>(*loss_scale);
    z_slope *= static_cast<float>(*loss_scale);
  }
  float *s = shared + w * 2 * experts, *ds = s + experts;
  const float* x = logits + t * experts;
  scores(rule.score, x, experts, lane, s);
  float inverse = 0, mean = 0;
  if (slope != 0) {
    const int* chosen = counts + (first + t) / segment * experts;
    float sum = 0, counted = 0;
    for (int e = lane; e < experts; e += warp) {
      sum += s[e];
      counted += static_cast<float>(chosen[e]);
    }
    inverse = 1.0f / (warp_sum(sum) + tiny);
    slope /= fmaxf(warp_sum(counted), 1.0f);
    for (int e = lane; e < experts; e += warp)
      mean += s[e] * inverse * (slope * static_cast<float>(chosen[e]));
    mean = warp_sum(mean);
    for (int e = lane; e < experts; e += warp)
      ds[e] = (slope * static_cast<float>(chosen[e]) - mean) * inverse;
  } else {
    for (int e = lane; e < experts; e += warp) ds[e] = 0;
  }
  __syncwarp();
  const int k = static_cast<int>(rule.top_k);
  const int own = lane < k ? expert[t * k + lane] : 0;
  const float score = lane < k ? s[own] : 0.0f, d = lane < k ? dprob[t * k + lane] : 0.0f;
  const float inverse_chosen = 1.0f / (warp_sum(score) + tiny);
  const float weighted = warp_sum(score * d) * inverse_chosen;
  if (lane < k) ds[own] += rule.normalize ? rule.scale * inverse_chosen * (d - weighted) : rule.scale * d;
  __syncwarp();
  float through = 0;
  if (rule.score == RouterScore::softmax)
    for (int e = lane; e < experts; e += warp) through += s[e] * ds[e];
  through = warp_sum(through);
  const float lse = z_slope != 0 ? log_sum_exp(x, experts, lane) : 0.0f;
  for (int e = lane; e < experts; e += warp) {
    float dx = rule.score == RouterScore::sigmoid ? ds[e] * s[e] * (1.0f - s[e]) : s[e] * (ds[e] - through);
    if (z_slope != 0) dx += z_slope * lse * expf(x[e] - lse);
    dlogits[t * experts + e] = T(dx);
  }
}

__global__ void __launch_bounds__(256)
    bias_kernel(const int* __restrict__ counts, const double* __restrict__ scalars, int experts, float rate,
                float* __restrict__ bias) {
  NRL_SHARED(long long, sums, [256]);
  if (scalars[StepScalar::skip] != 0) return;
  long long sum = 0;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += 256) sum += counts[e];
  sums[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < 256; ++i) sum += sums[i];
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += 256) {
    const long long below = sum - static_cast<long long>(experts) * counts[e];
    bias[e] += below > 0 ? rate : below < 0 ? -rate : 0.0f;
  }
}

template <class T>
T* data_of(const Tensor& t) {
  return static_cast<T*>(t.data);
}

unsigned blocks_for(int64_t n) {
  return static_cast<unsigned>((n + warps - 1) / warps);
}

void forward_launch(Exec& exec, const RouterForward& a) {
  const int experts = static_cast<int>(a.logits.dim(1));
  NRL_LAUNCH(forward_kernel, blocks_for(a.logits.dim(0)), threads, sizeof(float) * warps * 4 * experts,
             exec.stream, a.rule, data_of<const float>(a.logits), data_of<const float>(a.bias),
             a.logits.dim(0), experts, data_of<int>(a.expert), data_of<float>(a.prob));
}

void counts_launch(Exec& exec, const RouterCounts& a) {
  NRL_LAUNCH(counts_kernel, static_cast<unsigned>(a.counts.dim(0)), 256, 0, exec.stream,
             data_of<const int>(a.expert), a.expert.dim(0), static_cast<int>(a.expert.dim(1)), a.segment,
             a.first, static_cast<int>(a.counts.dim(1)), data_of<int>(a.counts), data_of<int>(a.sum));
}

void balance_launch(Exec& exec, const RouterBalance& a) {
  const int64_t n = a.logits.dim(0), segments = a.counts ? a.counts.dim(0) : 0;
  const int experts = static_cast<int>(a.logits.dim(1));
  const int parts = static_cast<int>(n < exec.partials() ? n : exec.partials());
  Scratch scratch("router_balance", exec.workspace);
  const size_t bytes = static_cast<size_t>(parts) * sizeof(double);
  auto* aux = reinterpret_cast<double*>(scratch.bytes(bytes));
  auto* z = reinterpret_cast<double*>(scratch.bytes(bytes));
  if (parts > 0)
    NRL_LAUNCH(balance_kernel, static_cast<unsigned>(parts), threads, sizeof(float) * warps * experts,
               exec.stream, a.rule.score, data_of<const float>(a.logits), data_of<const int>(a.counts), n,
               a.segment, a.first, experts, aux, z);
  const auto d = [](int64_t v) { return static_cast<double>(v); };
  const double share = static_cast<double>(a.share);
  NRL_LAUNCH(balance_sum_kernel, 1, 256, 0, exec.stream, aux, z, parts, data_of<const int>(a.counts),
             segments, experts, share * d(experts) / d(a.total), share / d(a.total),
             a.load ? share * d(experts) : 0.0, data_of<double>(a.metrics));
}

void backward_launch(Exec& exec, const RouterBackward& a) {
  const int64_t n = a.logits.dim(0);
  const int experts = static_cast<int>(a.logits.dim(1));
  const float slope = a.aux * static_cast<float>(experts) / static_cast<float>(a.total);
  for_float_type(a.dlogits.dtype, [&]<class T>() {
    NRL_LAUNCH((backward_kernel<T>), blocks_for(n), threads, sizeof(float) * warps * 2 * experts, exec.stream,
               a.rule, data_of<const float>(a.logits), data_of<const int>(a.expert),
               data_of<const float>(a.dprob), data_of<const int>(a.counts), n, a.segment, a.first, experts,
               slope, 2.0f * a.z / static_cast<float>(a.total), data_of<const double>(a.loss_scale),
               data_of<T>(a.dlogits));
  });
}

void bias_launch(Exec& exec, const RouterBias& a) {
  NRL_LAUNCH(bias_kernel, 1, 256, 0, exec.stream, data_of<const int>(a.counts),
             data_of<const double>(a.scalars), static_cast<int>(a.bias.dim(0)), a.rate,
             data_of<float>(a.bias));
}

}  // namespace

void fill_router(KernelTable& table) {
  table.router_forward = forward_launch;
  table.router_counts = counts_launch;
  table.router_balance = balance_launch;
  table.router_backward = backward_launch;
  table.router_bias = bias_launch;
}

}  // namespace nrl::ops::NRL_GPU
