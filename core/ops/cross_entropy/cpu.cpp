// Token log-probabilities and their gradient on the CPU, rows split over the threads:
//   lse = row_max + log(sum(exp(x - row_max))),   log_prob = x[target] - lse
//   gradient: weight * (onehot(target) - softmax(x)), written (=) over the logits or to dlogits
// Of a slice of the columns, row_max, the sum and x[target] come from the statistics of all slices.

#include <limits>

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

/// Sum of exp(x - m); `keep` writes the exponentials over x.
template <bool keep, class T>
double exponentials(T* x, int64_t n, float m) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += block) {
    T* const from = x + begin;
    Lanes s = {};
    for_lanes(std::min(n - begin, block), [&](int64_t i, auto part) {
      const Lanes e = MathFor<T>::exp(part.load(from + i) - m);
      if constexpr (keep) part.store(from + i, e);
      s += part.existing(e);
    });
    total += static_cast<double>(sum_lanes(s));
  }
  return total;
}

/// The gradient over f32 logits, which hold exp(x - row_max), into dlogits, which may be their memory.
/// `target`: a column, or -1.
template <class T>
void gradient(const float* x, T* dlogits, int64_t v, int64_t target, float weight, float scale) {
  const float at_target = target >= 0 ? x[target] * scale + weight : 0.0f;
  for_lanes(v, [=](int64_t i, auto part) { part.store(dlogits + i, part.load(x + i) * scale); });
  if (target >= 0) store(dlogits[target], at_target);
}

/// The gradient over bf16 logits. Kept exponentials would be rounded, so they are computed again.
void gradient(bf16* x, int64_t v, int64_t target, float weight, float scale, float row_max) {
  const float at_target =
      target >= 0 ? exp_f32(static_cast<float>(x[target]) - row_max) * scale + weight : 0.0f;
  for_lanes(v, [=](int64_t i, auto part) {
    part.store(x + i, RoundedMath::exp(part.load(x + i) - row_max) * scale);
  });
  if (target >= 0) store(x[target], at_target);
}

/// The maximum of a row, the sum of the exponentials and the logit of the target.
struct RowStatistics {
  float maximum = std::numeric_limits<float>::lowest();
  double sum = 0;
  float at_target = 0;
};

/// `keep` writes the exponentials over x.
template <bool keep, class T>
RowStatistics statistics_of(T* x, int64_t v, int64_t target) {
  RowStatistics s;
  s.maximum = std::max(s.maximum, maximum(x, v));
  if (target >= 0) s.at_target = static_cast<float>(x[target]);
  s.sum = exponentials<keep>(x, v, s.maximum);
  return s;
}

/// Combines row r of the statistics (slices, N, 3) of all slices.
RowStatistics combined(const Tensor& slices, int64_t r) {
  const auto at = [&](int64_t s) { return data_of<const float>(slices) + (s * slices.dim(1) + r) * 3; };
  RowStatistics all;
  for (int64_t s = 0; s < slices.dim(0); ++s) all.maximum = std::max(all.maximum, at(s)[0]);
  for (int64_t s = 0; s < slices.dim(0); ++s) {
    all.sum += static_cast<double>(at(s)[1]) * static_cast<double>(exp_f32(at(s)[0] - all.maximum));
    all.at_target += at(s)[2];
  }
  return all;
}

/// The column of a target in a slice of v columns; -1: the slice does not have it.
int64_t column_of(int32_t target, int64_t first_column, int64_t v) {
  const int64_t column = target - first_column;
  return target >= 0 && column >= 0 && column < v ? column : -1;
}

template <class T>
void statistics_rows(Exec& exec, const CrossEntropyStatistics& a) {
  const int64_t v = a.logits.dim(1);
  cpu::parallel_for(
      exec.threads, a.logits.dim(0), std::max<int64_t>(1, 8192 / v), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          T* x = data_of<T>(a.logits) + r * a.logits.stride[0];
          const int32_t target = data_of<const int32_t>(a.target)[r];
          const RowStatistics s = statistics_of<false>(x, v, column_of(target, a.first_column, v));
          float* out = data_of<float>(a.out) + 3 * r;
          out[0] = s.maximum, out[1] = static_cast<float>(s.sum), out[2] = s.at_target;
        }
      });
}

void statistics_kernel(Exec& exec, const CrossEntropyStatistics& a) {
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() { statistics_rows<T>(exec, a); });
}

template <class T>
void cross_entropy_rows(Exec& exec, const CrossEntropy& a) {
  constexpr bool f32 = std::is_same_v<T, float>;
  const int64_t n = a.logits.dim(0), v = a.logits.dim(1);
  const int32_t* targets = data_of<const int32_t>(a.target);
  const float* weights = data_of<const float>(a.weight);
  const float loss_scale = a.loss_scale ? static_cast<float>(*data_of<const double>(a.loss_scale)) : 1.0f;
  float* log_probs = data_of<float>(a.log_prob);
  float* lses = data_of<float>(a.lse);
  cpu::parallel_for(exec.threads, n, std::max<int64_t>(1, 8192 / v), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T* x = data_of<T>(a.logits) + r * a.logits.stride[0];
      uint16_t* dlogits = a.dlogits ? data_of<uint16_t>(a.dlogits) + r * a.dlogits.stride[0] : nullptr;
      const int32_t target = targets[r];
      const float weight = weights && target >= 0 ? weights[r] * loss_scale : 0.0f;
      if (target < 0 && !lses) {
        log_probs[r] = 0.0f;
      } else {
        const int64_t column = column_of(target, a.first_column, v);
        const bool keep = f32 && weight != 0.0f;
        const RowStatistics s = a.statistics ? combined(a.statistics, r)
                                : keep       ? statistics_of<f32>(x, v, column)
                                             : statistics_of<false>(x, v, column);
        if (keep && a.statistics) exponentials<f32>(x, v, s.maximum);
        const double lse = static_cast<double>(s.maximum) + std::log(s.sum);
        log_probs[r] = target >= 0 ? static_cast<float>(static_cast<double>(s.at_target) - lse) : 0.0f;
        if (lses) lses[r] = static_cast<float>(lse);
        if (weight != 0.0f) {
          const float scale = static_cast<float>(-static_cast<double>(weight) / s.sum);
          if constexpr (!f32)
            gradient(x, v, column, weight, scale, s.maximum);
          else if (!dlogits)
            gradient(x, x, v, column, weight, scale);
          else if (a.dlogits.dtype == DType::f16)
            gradient(x, reinterpret_cast<f16*>(dlogits), v, column, weight, scale);
          else
            gradient(x, reinterpret_cast<bf16*>(dlogits), v, column, weight, scale);
        }
      }
      if (weights && weight == 0.0f)
        dlogits ? std::fill(dlogits, dlogits + v, uint16_t{0}) : std::fill(x, x + v, T());
    }
  });
}

void cross_entropy_kernel(Exec& exec, const CrossEntropy& a) {
  for_f32_or_bf16(a.logits.dtype, [&]<class T>() { cross_entropy_rows<T>(exec, a); });
}

}  // namespace

void fill_cross_entropy(KernelTable& table) {
  table.cross_entropy = cross_entropy_kernel;
  table.cross_entropy_statistics = statistics_kernel;
}

}  // namespace nrl::ops::NRL_ISA
