// Distillation from k log-probabilities per row on the CPU, rows split over the threads:
//   top_columns      ids and values of the k largest: the order of the k-th from counts of 11 bits at a time
//   gather_columns   out = the logits at the ids, 0 outside the slice
//   topk_kl          score and gradient of the divergence over the ids (kl_row.h)
//   scatter_columns  dlogits = p (rest constant + rest slope log p), and the gradient at the ids
// All outputs are written (=).

#include <algorithm>
#include <cmath>

#include "core/device/cpu/parallel.h"
#include "core/ops/distillation.h"
#include "core/ops/distillation/kl_row.h"
#include "core/ops/distillation/order.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

using distillation::KlFactors;
using distillation::KlRow;
using distillation::KlSums;
using distillation::LogSoftmax;

constexpr int64_t grain_elements = 8192;
int64_t grain(int64_t width) {
  return std::max<int64_t>(1, grain_elements / width);
}

/// Which numbers are among the largest: those above `order`, and of those at it the first `equals`.
struct Limit {
  uint32_t order;
  int64_t equals;
};

/// The limit of the k largest of order_at(0), ..., order_at(count - 1).
template <class OrderAt>
Limit limit_of(const OrderAt& order_at, int64_t count, int64_t k) {
  constexpr int digit_bits = 11, digits = 1 << digit_bits;
  Limit limit{0, k};
  uint32_t known = 0;  // bits of the digits before
  for (int bits = 32; bits > 0;) {
    const int shift = std::max(bits - digit_bits, 0);
    const uint32_t mask = (uint32_t{1} << (bits - shift)) - 1;
    int32_t counts[digits] = {};
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t order = order_at(i);
      if ((order & known) == limit.order) ++counts[order >> shift & mask];
    }
    uint32_t d = mask;
    for (; d > 0 && counts[d] < limit.equals; --d) limit.equals -= counts[d];
    limit.order |= d << shift;
    known |= mask << shift;
    bits = shift;
  }
  return limit;
}

/// Calls take(i) for the k largest in ascending order; fewer if fewer are there.
template <class OrderAt, class Take>
void for_largest(const OrderAt& order_at, int64_t count, int64_t k, const Take& take) {
  const Limit limit = limit_of(order_at, count, k);
  int64_t equals = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t order = order_at(i);
    if (order < limit.order || order == distillation::no_order) continue;
    if (order > limit.order || equals++ < limit.equals) take(i);
  }
}

void top_kernel(Exec& exec, const TopColumns& a) {
  const int64_t n = a.ids.dim(0), k = a.ids.dim(1);
  const auto rows = [&](int64_t width, const auto& row) {
    cpu::parallel_for(exec.threads, n, grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        int32_t* ids = data_of<int32_t>(a.ids) + r * k;
        float* values = data_of<float>(a.values) + r * k;
        int64_t taken = 0;
        row(r, [&](int64_t id, float value) {
          ids[taken] = static_cast<int32_t>(id);
          values[taken++] = value;
        });
        std::fill(ids + taken, ids + k, -1);
        std::fill(values + taken, values + k, -INFINITY);
      }
    });
  };
  if (!a.logits) {
    const int64_t m = a.part_ids.dim(2), count = a.part_ids.dim(0) * m;
    rows(count, [&](int64_t r, const auto& put) {
      const auto at = [&](int64_t i) { return (i / m * n + r) * m + i % m; };
      const auto* ids = data_of<const int32_t>(a.part_ids);
      const auto* values = data_of<const float>(a.part_values);
      for_largest(
          [&](int64_t i) {
            return ids[at(i)] < 0 ? distillation::no_order : distillation::order_of(values[at(i)]);
          },
          count, k, [&](int64_t i) { put(ids[at(i)], values[at(i)]); });
    });
    return;
  }
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() {
    rows(a.logits.dim(1), [&](int64_t r, const auto& put) {
      const T* x = data_of<const T>(a.logits) + r * a.logits.step(0);
      for_largest([x](int64_t i) { return distillation::order_of(static_cast<float>(x[i])); },
                  a.logits.dim(1), k, [&](int64_t i) { put(a.first_column + i, static_cast<float>(x[i])); });
    });
  });
}

void gather_kernel(Exec& exec, const GatherColumns& a) {
  const int64_t n = a.ids.dim(0), k = a.ids.dim(1), v = a.logits.dim(1);
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() {
    cpu::parallel_for(exec.threads, n, grain(k), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* x = data_of<const T>(a.logits) + r * a.logits.step(0);
        const int32_t* ids = data_of<const int32_t>(a.ids) + r * k;
        float* out = data_of<float>(a.out) + r * k;
        for (int64_t j = 0; j < k; ++j) {
          const int64_t column = ids[j] - a.first_column;
          out[j] = column >= 0 && column < v ? static_cast<float>(x[column]) : 0.0f;
        }
      }
    });
  });
}

/// The log-softmax of k numbers of a row.
LogSoftmax log_softmax(const float* x, int64_t k, float scale) {
  float most = x[0];
#pragma omp simd reduction(max : most)
  for (int64_t j = 0; j < k; ++j) most = std::max(most, x[j]);
  LogSoftmax of{scale, most * scale, 0.0f};
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < k; ++j) sum += exp_f32(of.scaled(x[j]));
  of.log_sum = std::log(sum);
  return of;
}

void topk_kl_kernel(Exec& exec, const TopkKl& a) {
  const int64_t n = a.student.dim(0), k = a.student.dim(1);
  const KlFactors f = distillation::factors_of(a);
  const auto* targets = data_of<const int32_t>(a.target);
  const auto* weights = data_of<const float>(a.weight);
  const auto* lse = data_of<const float>(a.lse);
  const auto* entropy = data_of<const float>(a.entropy);
  auto* rest = data_of<float>(a.rest);
  const float loss_scale = a.loss_scale ? static_cast<float>(*data_of<const double>(a.loss_scale)) : 1.0f;
  cpu::parallel_for(exec.threads, n, grain(8 * k), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = data_of<const float>(a.student) + r * k;
      const float* t = data_of<const float>(a.teacher) + r * k;
      float* g = weights ? data_of<float>(a.gradient) + r * k : nullptr;
      float& score = data_of<float>(a.score)[r];
      if (targets[r] < 0) {
        score = 0.0f;
        if (g) std::fill(g, g + k, 0.0f);
        if (rest) rest[2 * r] = rest[2 * r + 1] = 0.0f;
        continue;
      }
      const LogSoftmax teacher = log_softmax(t, k, f.inverse_temperature),
                       student = f.zero_outside ? LogSoftmax{f.inverse_temperature, lse[r], 0.0f}
                                                : log_softmax(x, k, f.inverse_temperature);
      double forward = 0, reverse = 0, inside = 0;
#pragma omp simd reduction(+ : forward, reverse, inside)
      for (int64_t j = 0; j < k; ++j) {
        const float log_p = student(x[j]), log_q = teacher(t[j]), log_ratio = log_p - log_q;
        const float p = exp_f32(log_p);
        forward -= static_cast<double>(exp_f32(log_q) * log_ratio);
        reverse += static_cast<double>(p * (f.zero_outside ? -log_q : log_ratio));
        inside += static_cast<double>(p);
      }
      const float weight = weights ? weights[r] * loss_scale : 0.0f;
      const KlRow row =
          distillation::finish(f, {forward, reverse, inside}, entropy ? entropy[r] : 0.0f, weight);
      score = row.score;
      if (!g) continue;
#pragma omp simd
      for (int64_t j = 0; j < k; ++j) {
        const float log_p = student(x[j]), log_q = teacher(t[j]);
        g[j] = distillation::gradient(f, row, weight, exp_f32(log_p), exp_f32(log_q), log_p - log_q);
      }
      if (rest) rest[2 * r] = row.rest_constant, rest[2 * r + 1] = row.rest_slope;
    }
  });
}

/// `out` may be the first half of x.
template <class T, class O>
void scatter_row(const T* x, O* out, int64_t v, float scale, float lse, float constant, float slope) {
  if (constant == 0.0f && slope == 0.0f) {
    std::fill(out, out + v, O());
    return;
  }
  for_lanes(v, [=](int64_t i, auto part) {
    part.store(out + i, distillation::rest<MathFor<O>>(part.load(x + i) * scale - lse, constant, slope));
  });
}

template <class T, class O>
void scatter_rows(Exec& exec, const ScatterColumns& a, const Tensor& dlogits) {
  const int64_t n = a.ids.dim(0), k = a.ids.dim(1), v = a.logits.dim(1);
  const auto* rest = data_of<const float>(a.rest);
  cpu::parallel_for(exec.threads, n, grain(v), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      O* out = data_of<O>(dlogits) + r * dlogits.step(0);
      scatter_row(data_of<const T>(a.logits) + r * a.logits.step(0), out, v, a.inverse_temperature,
                  rest ? data_of<const float>(a.lse)[r] : 0.0f, rest ? rest[2 * r] : 0.0f,
                  rest ? rest[2 * r + 1] : 0.0f);
      const int32_t* ids = data_of<const int32_t>(a.ids) + r * k;
      const float* gradient = data_of<const float>(a.gradient) + r * k;
      for (int64_t j = 0; j < k; ++j) {
        const int64_t column = ids[j] - a.first_column;
        if (column >= 0 && column < v) store(out[column], gradient[j]);
      }
    }
  });
}

void scatter_kernel(Exec& exec, const ScatterColumns& a) {
  if (!a.dlogits)
    for_f32_or_bf16(a.logits.dtype, [&]<class T>() { scatter_rows<T, T>(exec, a, a.logits); });
  else if (a.dlogits.dtype == DType::f16)
    scatter_rows<float, f16>(exec, a, a.dlogits);
  else
    scatter_rows<float, bf16>(exec, a, a.dlogits);
}

}  // namespace

void fill_distillation(KernelTable& table) {
  table.top_columns = top_kernel;
  table.gather_columns = gather_kernel;
  table.topk_kl = topk_kl_kernel;
  table.scatter_columns = scatter_kernel;
}

}  // namespace nrl::ops::NRL_ISA
