// The router on the CPU; formulas in core/ops/router.h. Tokens are split over the threads.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"
#include "core/ops/shared/scratch.h"
#include "core/ops/step.h"

namespace nrl::ops::NRL_ISA {
namespace {

constexpr float low = -std::numeric_limits<float>::infinity();
/// As in DeepSeek-V3: keeps the quotient finite where all chosen scores underflow.
constexpr float tiny = 1e-20f;
constexpr int64_t grain_elements = 4096;

int64_t row_grain(int64_t experts) {
  return std::max<int64_t>(1, grain_elements / experts);
}

/// s = the scores of one row.
void scores(RouterScore kind, const float* x, int64_t experts, float* s) {
  if (kind == RouterScore::sigmoid) {
#pragma omp simd
    for (int64_t e = 0; e < experts; ++e) s[e] = 1.0f / (1.0f + exp_f32(-x[e]));
    return;
  }
  float most = low, sum = 0;
  for (int64_t e = 0; e < experts; ++e) most = std::max(most, x[e]);
#pragma omp simd
  for (int64_t e = 0; e < experts; ++e) s[e] = exp_f32(x[e] - most);
  for (int64_t e = 0; e < experts; ++e) sum += s[e];
  const float scale = 1.0f / sum;
#pragma omp simd
  for (int64_t e = 0; e < experts; ++e) s[e] *= scale;
}

float log_sum_exp(const float* x, int64_t experts, float* buffer) {
  float most = low, sum = 0;
  for (int64_t e = 0; e < experts; ++e) most = std::max(most, x[e]);
#pragma omp simd
  for (int64_t e = 0; e < experts; ++e) buffer[e] = exp_f32(x[e] - most);
  for (int64_t e = 0; e < experts; ++e) sum += buffer[e];
  return most + std::log(sum);
}

float sum_of(const float* s, int64_t experts) {
  float sum = 0;
  for (int64_t e = 0; e < experts; ++e) sum += s[e];
  return sum;
}

/// Index of the largest value, the first of equals; it is then set to -infinity.
int64_t take_largest(float* values, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; ++i)
    if (values[i] > values[best]) best = i;
  values[best] = low;
  return best;
}

/// Sets the values of experts in groups that are not chosen to -infinity.
void choose_groups(const RouterRule& rule, int64_t experts, float* values) {
  if (rule.group_top_k == rule.groups) return;
  const int64_t size = experts / rule.groups;
  const int64_t counted = std::clamp<int64_t>(rule.top_k / rule.group_top_k, 1, size);
  float group[max_experts], members[max_experts];
  bool chosen[max_experts] = {};
  for (int64_t g = 0; g < rule.groups; ++g) {
    std::copy_n(values + g * size, size, members);
    group[g] = 0;
    for (int64_t i = 0; i < counted; ++i) {
      const float best = *std::max_element(members, members + size);
      take_largest(members, size);
      group[g] += best;
    }
  }
  for (int64_t i = 0; i < rule.group_top_k; ++i) chosen[take_largest(group, rule.groups)] = true;
  for (int64_t e = 0; e < experts; ++e)
    if (!chosen[e / size]) values[e] = low;
}

void forward_kernel(Exec& exec, const RouterForward& a) {
  const int64_t n = a.logits.dim(0), experts = a.logits.dim(1), k = a.rule.top_k;
  const float* bias = data_of<const float>(a.bias);
  cpu::parallel_for(exec.threads, n, row_grain(experts), [&](int64_t begin, int64_t end) {
    float s[max_experts], values[max_experts];
    for (int64_t t = begin; t < end; ++t) {
      scores(a.rule.score, data_of<const float>(a.logits) + t * experts, experts, s);
      for (int64_t e = 0; e < experts; ++e) values[e] = bias ? s[e] + bias[e] : s[e];
      choose_groups(a.rule, experts, values);
      int32_t* expert = data_of<int32_t>(a.expert) + t * k;
      float* prob = data_of<float>(a.prob) + t * k;
      float sum = 0;
      for (int64_t c = 0; c < k; ++c) {
        expert[c] = static_cast<int32_t>(take_largest(values, experts));
        prob[c] = s[expert[c]];
        sum += prob[c];
      }
      const float factor = a.rule.normalize ? a.rule.scale / (sum + tiny) : a.rule.scale;
      for (int64_t c = 0; c < k; ++c) prob[c] *= factor;
    }
  });
}

void counts_kernel(Exec& exec, const RouterCounts& a) {
  const int64_t segments = a.counts.dim(0), experts = a.counts.dim(1), k = a.expert.dim(1),
                n = a.expert.dim(0);
  cpu::parallel_for(exec.threads, segments, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int32_t* counts = data_of<int32_t>(a.counts) + b * experts;
      std::fill_n(counts, experts, 0);
      const int32_t* expert = data_of<const int32_t>(a.expert);
      const int64_t from = std::max<int64_t>(b * a.segment - a.first, 0),
                    to = std::min((b + 1) * a.segment - a.first, n);
      for (int64_t i = from * k; i < to * k; ++i) ++counts[expert[i]];
    }
  });
  if (!a.sum) return;
  for (int64_t b = 0; b < segments; ++b)
    for (int64_t e = 0; e < experts; ++e)
      data_of<int32_t>(a.sum)[e] += data_of<const int32_t>(a.counts)[b * experts + e];
}

/// The reciprocal of all tokens of a segment.
float inverse_count(const int32_t* counts, int64_t experts) {
  int64_t sum = 0;
  for (int64_t e = 0; e < experts; ++e) sum += counts[e];
  return 1.0f / static_cast<float>(std::max<int64_t>(sum, 1));
}

void balance_kernel(Exec& exec, const RouterBalance& a) {
  const int64_t n = a.logits.dim(0), experts = a.logits.dim(1), segments = a.counts ? a.counts.dim(0) : 0;
  const int32_t* counts = data_of<const int32_t>(a.counts);
  // Fixed pieces, so that the sums do not depend on the number of threads.
  constexpr int64_t pieces = 16;
  double aux[pieces] = {}, z[pieces] = {};
  cpu::parallel_for(exec.threads, pieces, 1, [&](int64_t first, int64_t last) {
    float s[max_experts];
    for (int64_t p = first; p < last; ++p)
      for (int64_t t = n * p / pieces; t < n * (p + 1) / pieces; ++t) {
        const float* x = data_of<const float>(a.logits) + t * experts;
        const double lse = static_cast<double>(log_sum_exp(x, experts, s));
        z[p] += lse * lse;
        if (!a.counts) continue;
        scores(a.rule.score, x, experts, s);
        const int32_t* chosen = counts + (a.first + t) / a.segment * experts;
        float part = 0;
        for (int64_t e = 0; e < experts; ++e) part += s[e] * static_cast<float>(chosen[e]);
        aux[p] += static_cast<double>(part * inverse_count(chosen, experts) / (sum_of(s, experts) + tiny));
      }
  });
  double aux_sum = 0, z_sum = 0;
  for (int64_t p = 0; p < pieces; ++p) {
    aux_sum += aux[p];
    z_sum += z[p];
  }
  int64_t most = 0, all = 0;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t sum = 0;
    for (int64_t b = 0; b < segments; ++b) sum += counts[b * experts + e];
    most = std::max(most, sum);
    all += sum;
  }
  const auto count = [](int64_t x) { return static_cast<double>(x); };
  const double share = static_cast<double>(a.share);
  double* metrics = data_of<double>(a.metrics);
  metrics[0] += share * aux_sum * count(experts) / count(a.total);
  metrics[1] += share * z_sum / count(a.total);
  if (!a.load) return;
  metrics[2] += share * count(most) * count(experts) / count(std::max<int64_t>(all, 1));
}

template <class T>
void backward(Exec& exec, const RouterBackward& a) {
  const int64_t n = a.logits.dim(0), experts = a.logits.dim(1), k = a.rule.top_k;
  // dLoss / dq of an expert, per share of the tokens.
  const float loss_scale = a.loss_scale ? static_cast<float>(*data_of<const double>(a.loss_scale)) : 1.0f;
  const float slope = loss_scale * (a.aux * static_cast<float>(experts) / static_cast<float>(a.total));
  const float z_slope = loss_scale * (2.0f * a.z / static_cast<float>(a.total));
  cpu::parallel_for(exec.threads, n, row_grain(experts), [&](int64_t begin, int64_t end) {
    float s[max_experts], ds[max_experts], dx[max_experts];
    for (int64_t t = begin; t < end; ++t) {
      const float* x = data_of<const float>(a.logits) + t * experts;
      const int32_t* expert = data_of<const int32_t>(a.expert) + t * k;
      const float* dprob = data_of<const float>(a.dprob) + t * k;
      scores(a.rule.score, x, experts, s);
      std::fill_n(ds, experts, 0.0f);
      if (a.aux != 0) {
        const int32_t* counts = data_of<const int32_t>(a.counts) + (a.first + t) / a.segment * experts;
        const float inverse = 1.0f / (sum_of(s, experts) + tiny),
                    per_count = slope * inverse_count(counts, experts);
        float mean = 0;
        for (int64_t e = 0; e < experts; ++e) {
          ds[e] = per_count * static_cast<float>(counts[e]);
          mean += s[e] * inverse * ds[e];
        }
        for (int64_t e = 0; e < experts; ++e) ds[e] = (ds[e] - mean) * inverse;
      }
      float sum = 0, weighted = 0;
      for (int64_t c = 0; c < k; ++c) {
        sum += s[expert[c]];
        weighted += s[expert[c]] * dprob[c];
      }
      const float inverse = 1.0f / (sum + tiny);
      for (int64_t c = 0; c < k; ++c)
        ds[expert[c]] += a.rule.normalize ? a.rule.scale * inverse * (dprob[c] - weighted * inverse)
                                          : a.rule.scale * dprob[c];
      if (a.rule.score == RouterScore::sigmoid) {
        for (int64_t e = 0; e < experts; ++e) dx[e] = ds[e] * s[e] * (1.0f - s[e]);
      } else {
        float mean = 0;
        for (int64_t e = 0; e < experts; ++e) mean += s[e] * ds[e];
        for (int64_t e = 0; e < experts; ++e) dx[e] = s[e] * (ds[e] - mean);
      }
      if (a.z != 0) {
        const float lse = log_sum_exp(x, experts, ds);
        scores(RouterScore::softmax, x, experts, ds);
        for (int64_t e = 0; e < experts; ++e) dx[e] += z_slope * lse * ds[e];
      }
      T* out = data_of<T>(a.dlogits) + t * experts;
      for (int64_t e = 0; e < experts; ++e) store(out[e], dx[e]);
    }
  });
}

void backward_kernel(Exec& exec, const RouterBackward& a) {
  for_float_type(a.dlogits.dtype, [&]<class T>() { backward<T>(exec, a); });
}

void bias_kernel(Exec&, const RouterBias& a) {
  if (data_of<const double>(a.scalars)[StepScalar::skip] != 0) return;
  const int64_t experts = a.bias.dim(0);
  const int32_t* counts = data_of<const int32_t>(a.counts);
  float* bias = data_of<float>(a.bias);
  int64_t sum = 0;
  for (int64_t e = 0; e < experts; ++e) sum += counts[e];
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t below = sum - experts * counts[e];
    bias[e] += below > 0 ? a.rate : below < 0 ? -a.rate : 0.0f;
  }
}

}  // namespace

void fill_router(KernelTable& table) {
  table.router_forward = forward_kernel;
  table.router_counts = counts_kernel;
  table.router_balance = balance_kernel;
  table.router_backward = backward_kernel;
  table.router_bias = bias_kernel;
}

}  // namespace nrl::ops::NRL_ISA
