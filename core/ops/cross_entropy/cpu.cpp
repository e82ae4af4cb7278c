// Token log-probabilities and their gradient on the CPU, rows split over the threads. With z = t x:
//   lse = row_max + log(sum(exp(z - row_max))),   log_prob = z[target] - lse
//   entropy = log(sum(exp(z - row_max))) - sum(exp(z - row_max) (z - row_max)) / sum(exp(z - row_max))
//   gradient: weight * (onehot(target) - softmax(x)), written (=) over the logits or to dlogits
// Row_max, the sums and z[target] of a slice of the columns come from the statistics of all slices. The
// gradient from lse, p = exp(z - lse):
//   t (weight (onehot(target) - p) - entropy_weight p (log p + entropy))

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "core/device/cpu/parallel.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

/// Sums run in f32 over this many elements and in double over the blocks.
constexpr int64_t block = 2048;

template <class T>
float maximum(const T* x, int64_t n) {
  Lanes most = Lanes{} + static_cast<float>(x[0]);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) most = max(load(x + i), most);
  float m = most[0];
  for (int l = 1; l < lanes; ++l) m = most[l] > m ? most[l] : m;
  for (; i < n; ++i) m = static_cast<float>(x[i]) > m ? static_cast<float>(x[i]) : m;
  return m;
}

/// The statistics of a row: maximum of z, sum of exp(z - maximum), z of the target, and the sum of
/// exp(z - maximum) (z - maximum).
struct RowStatistics {
  float maximum = std::numeric_limits<float>::lowest();
  double sum = 0;
  float at_target = 0;
  double moment = 0;
};

/// A lower bound of z - maximum as a factor of exp(z - maximum), which is 0 there: 0 * -inf is not a number.
constexpr float lowest_exponent = -200.0f;

/// Computes the sums for z = x * t, given the maximum; `keep` writes the exponentials over x. Entropies need
/// more digits than the log-probabilities of bf16 logits.
template <bool keep, bool moment, class T>
void sum_exponentials(T* x, int64_t n, float t, RowStatistics& s) {
  using Math = std::conditional_t<moment, SimdMath, MathFor<T>>;
  s.sum = s.moment = 0;
  for (int64_t begin = 0; begin < n; begin += block) {
    T* const from = x + begin;
    Lanes sum = {}, moments = {};
    for_lanes(std::min(n - begin, block), [&](int64_t i, auto part) {
      const Lanes exponent = part.load(from + i) * t - s.maximum, e = Math::exp(exponent);
      if constexpr (keep) part.store(from + i, e);
      sum += part.existing(e);
      if constexpr (moment) moments += part.existing(e * max(Lanes{} + lowest_exponent, exponent));
    });
    s.sum += static_cast<double>(sum_lanes(sum));
    if constexpr (moment) s.moment += static_cast<double>(sum_lanes(moments));
  }
}

/// `target`: a column, or -1.
template <bool keep, bool moment, class T>
RowStatistics statistics_of(T* x, int64_t v, int64_t target, float t) {
  RowStatistics s;
  s.maximum = std::max(s.maximum, maximum(x, v) * t);
  if (target >= 0) s.at_target = static_cast<float>(x[target]) * t;
  sum_exponentials<keep, moment>(x, v, t, s);
  return s;
}

/// Combines row r of the statistics (slices, N, 3 or 4) of all slices.
RowStatistics combined(const Tensor& slices, int64_t r) {
  const int64_t width = slices.dim(2);
  const auto at = [&](int64_t s) { return data_of<const float>(slices) + (s * slices.dim(1) + r) * width; };
  RowStatistics all;
  for (int64_t s = 0; s < slices.dim(0); ++s) all.maximum = std::max(all.maximum, at(s)[0]);
  for (int64_t s = 0; s < slices.dim(0); ++s) {
    const float exponent = at(s)[0] - all.maximum;
    const auto sum = static_cast<double>(at(s)[1]), factor = static_cast<double>(exp_f32(exponent));
    all.sum += sum * factor;
    all.at_target += at(s)[2];
    if (width == 4)
      all.moment += factor * (static_cast<double>(at(s)[3]) +
                              static_cast<double>(std::max(lowest_exponent, exponent)) * sum);
  }
  return all;
}

/// e^x of a vector of results that are rounded to T, or of one number.
template <class T, class V>
NRL_INLINE V exp_for(V x) {
  if constexpr (std::is_same_v<V, float>)
    return exp_f32(x);
  else
    return MathFor<T>::exp(x);
}

/// Writes `of` each of the v elements of a row to `out`, which may be its memory, and adds `weight` at the
/// target (a column, or -1).
template <class T, class Out, class Function>
void write_gradient(const T* x, Out* out, int64_t v, int64_t target, float weight, const Function& of) {
  const float at_target = target >= 0 ? of(static_cast<float>(x[target])) + weight : 0.0f;
  for_lanes(v, [=](int64_t i, auto part) { part.store(out + i, of(part.load(x + i))); });
  if (target >= 0) store(out[target], at_target);
}

/// Calls body(row) with row r of the matrix that the gradient is written to: `dlogits`, or else the logits.
template <class T, class Body>
void with_gradient_row(const Tensor& logits, const Tensor& dlogits, int64_t r, const Body& body) {
  if (!dlogits)
    body(data_of<T>(logits) + r * logits.stride[0]);
  else if (dlogits.dtype == DType::f16)
    body(data_of<f16>(dlogits) + r * dlogits.stride[0]);
  else
    body(data_of<bf16>(dlogits) + r * dlogits.stride[0]);
}

float loss_scale_of(const Tensor& loss_scale) {
  return loss_scale ? static_cast<float>(*data_of<const double>(loss_scale)) : 1.0f;
}

/// Calls body(r) for the rows of the logits in parallel.
template <class Body>
void for_rows(Exec& exec, const Tensor& logits, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, 8192 / logits.dim(1));
  cpu::parallel_for(exec.threads, logits.dim(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}

/// The column of a target in a slice of v columns; -1: the slice does not have it.
int64_t column_of(int32_t target, int64_t first_column, int64_t v) {
  const int64_t column = target - first_column;
  return target >= 0 && column >= 0 && column < v ? column : -1;
}

template <class T>
void statistics_rows(Exec& exec, const CrossEntropyStatistics& a) {
  const int64_t v = a.logits.dim(1), width = a.out.dim(1);
  for_rows(exec, a.logits, [&](int64_t r) {
    T* x = data_of<T>(a.logits) + r * a.logits.stride[0];
    const int64_t column = column_of(data_of<const int32_t>(a.target)[r], a.first_column, v);
    const RowStatistics s = width == 4 ? statistics_of<false, true>(x, v, column, a.inverse_temperature)
                                       : statistics_of<false, false>(x, v, column, a.inverse_temperature);
    float* out = data_of<float>(a.out) + width * r;
    out[0] = s.maximum, out[1] = static_cast<float>(s.sum), out[2] = s.at_target;
    if (width == 4) out[3] = static_cast<float>(s.moment);
  });
}

void statistics_kernel(Exec& exec, const CrossEntropyStatistics& a) {
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() { statistics_rows<T>(exec, a); });
}

template <class T>
void cross_entropy_rows(Exec& exec, const CrossEntropy& a) {
  constexpr bool f32 = std::is_same_v<T, float>;
  const int64_t v = a.logits.dim(1);
  const float t = a.inverse_temperature, loss_scale = loss_scale_of(a.loss_scale);
  const float* weights = data_of<const float>(a.weight);
  float* log_probs = data_of<float>(a.log_prob);
  float* lses = data_of<float>(a.lse);
  float* entropies = data_of<float>(a.entropy);
  for_rows(exec, a.logits, [&](int64_t r) {
    T* x = data_of<T>(a.logits) + r * a.logits.stride[0];
    const int32_t target = data_of<const int32_t>(a.target)[r];
    const float weight = weights && target >= 0 ? weights[r] * loss_scale : 0.0f;
    if (target < 0) log_probs[r] = 0.0f;
    if (target < 0 && entropies) entropies[r] = 0.0f;
    if (target >= 0 || lses) {
      const int64_t column = column_of(target, a.first_column, v);
      const bool keep = f32 && weight != 0.0f;
      RowStatistics s = a.statistics ? combined(a.statistics, r)
                        : keep       ? statistics_of<f32, false>(x, v, column, t)
                        : entropies  ? statistics_of<false, true>(x, v, column, t)
                                     : statistics_of<false, false>(x, v, column, t);
      const double log_sum = std::log(s.sum), lse = static_cast<double>(s.maximum) + log_sum;
      if (target >= 0) log_probs[r] = static_cast<float>(static_cast<double>(s.at_target) - lse);
      if (target >= 0 && entropies) entropies[r] = static_cast<float>(log_sum - s.moment / s.sum);
      if (lses) lses[r] = static_cast<float>(lse);
      if (weight != 0.0f) {
        const float scale = static_cast<float>(-static_cast<double>(weight) / s.sum);
        if (keep && a.statistics) sum_exponentials<f32, false>(x, v, t, s);
        with_gradient_row<T>(a.logits, a.dlogits, r, [&](auto* out) {
          if constexpr (f32)  // x holds exp(x - row_max)
            write_gradient(x, out, v, column, weight, [scale](auto e) { return e * scale; });
          else  // kept exponentials would be rounded, so they are computed again
            write_gradient(x, out, v, column, weight,
                           [scale, row_max = s.maximum](auto e) { return exp_for<T>(e - row_max) * scale; });
        });
      }
    }
    if (weights && weight == 0.0f)
      with_gradient_row<T>(a.logits, a.dlogits, r,
                           [v]<class Out>(Out* out) { std::fill(out, out + v, Out()); });
  });
}

void cross_entropy_kernel(Exec& exec, const CrossEntropy& a) {
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() { cross_entropy_rows<T>(exec, a); });
}

template <class T>
void gradient_rows(Exec& exec, const CrossEntropyGradient& a) {
  const int64_t v = a.logits.dim(1);
  const float t = a.inverse_temperature, scale = loss_scale_of(a.loss_scale) * t;
  for_rows(exec, a.logits, [&](int64_t r) {
    const auto of_row = [r](const Tensor& vector) { return vector ? data_of<const float>(vector)[r] : 0.0f; };
    const T* x = data_of<T>(a.logits) + r * a.logits.stride[0];
    const int32_t target = data_of<const int32_t>(a.target)[r];
    const int64_t column = column_of(target, a.first_column, v);
    const float weight = target >= 0 ? of_row(a.weight) * scale : 0.0f,
                entropy_weight = target >= 0 ? of_row(a.entropy_weight) * scale : 0.0f;
    const float lse = of_row(a.lse), entropy = of_row(a.entropy);
    with_gradient_row<T>(a.logits, a.dlogits, r, [&]<class Out>(Out* out) {
      if (weight == 0.0f && entropy_weight == 0.0f)
        std::fill(out, out + v, Out());
      else if (entropy_weight == 0.0f)
        write_gradient(x, out, v, column, weight,
                       [=](auto e) { return exp_for<Out>(e * t - lse) * -weight; });
      else
        write_gradient(x, out, v, column, weight, [=](auto e) {
          const auto log_p = e * t - lse, least = decltype(e){} + lowest_exponent;
          const auto above = log_p > least ? log_p : least;
          return exp_for<Out>(log_p) * (-weight - entropy_weight * (above + entropy));
        });
    });
  });
}

void gradient_kernel(Exec& exec, const CrossEntropyGradient& a) {
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() { gradient_rows<T>(exec, a); });
}

}  // namespace

void fill_cross_entropy(KernelTable& table) {
  table.cross_entropy = cross_entropy_kernel;
  table.cross_entropy_statistics = statistics_kernel;
  table.cross_entropy_gradient = gradient_kernel;
}

}  // namespace nrl::ops::NRL_ISA
