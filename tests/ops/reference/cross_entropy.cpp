#include <limits>

#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

/// As CrossEntropyStatistics::out.
struct RowStatistics {
  double maximum = -static_cast<double>(std::numeric_limits<float>::max()), sum = 0, at_target = 0,
         moment = 0;
};

/// x e^x; 0 for e^x = 0.
double moment_of(double x) {
  return x > -1000 || std::isnan(x) ? x * std::exp(x) : 0.0;
}

RowStatistics statistics_of(const Tensor& logits, int64_t r, int64_t column, double t) {
  RowStatistics s;
  const auto z = [&](int64_t i) { return load(logits, r, i) * t; };
  for (int64_t i = 0; i < logits.dim(1); ++i) s.maximum = std::max(s.maximum, z(i));
  for (int64_t i = 0; i < logits.dim(1); ++i) {
    s.sum += std::exp(z(i) - s.maximum);
    s.moment += moment_of(z(i) - s.maximum);
  }
  if (column >= 0 && column < logits.dim(1)) s.at_target = z(column);
  return s;
}

RowStatistics combined(const Tensor& slices, int64_t r) {
  const int64_t width = slices.dim(2);
  const auto at = [&](int64_t s, int64_t i) { return load_at(slices, (s * slices.dim(1) + r) * width + i); };
  RowStatistics all;
  for (int64_t s = 0; s < slices.dim(0); ++s) all.maximum = std::max(all.maximum, at(s, 0));
  for (int64_t s = 0; s < slices.dim(0); ++s) {
    const double exponent = at(s, 0) - all.maximum;
    all.sum += at(s, 1) * std::exp(exponent);
    all.at_target += at(s, 2);
    if (width == 4) all.moment += at(s, 3) * std::exp(exponent) + at(s, 1) * moment_of(exponent);
  }
  return all;
}

/// The column of the target in the slice: out of its range if another slice has it or there is none.
int64_t column_of(int64_t target, int64_t first_column) {
  return target < 0 ? -1 : target - first_column;
}

void statistics_rows(Exec&, const CrossEntropyStatistics& a) {
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    const RowStatistics s = statistics_of(a.logits, r, column_of(index(a.target, r), a.first_column),
                                          static_cast<double>(a.inverse_temperature));
    store(a.out, r, 0, s.maximum);
    store(a.out, r, 1, s.sum);
    store(a.out, r, 2, s.at_target);
    if (a.out.dim(1) == 4) store(a.out, r, 3, s.moment);
  }
}

/// The gradient of a row of logits, which it may overwrite, with t the inverse temperature:
///   t (weight (onehot(column) - p) - entropy_weight p (log p + entropy)),   p = exp(t x - lse)
struct RowGradient {
  double t, lse, weight, entropy_weight, entropy;

  void write(const Tensor& logits, int64_t r, int64_t column, const Tensor& out) const {
    std::vector<double> gradient(static_cast<size_t>(logits.dim(1)));
    for (int64_t i = 0; i < logits.dim(1); ++i) {
      const double log_p = load(logits, r, i) * t - lse, p = std::exp(log_p);
      gradient[i] =
          t * (weight * ((i == column ? 1.0 : 0.0) - p) - entropy_weight * (moment_of(log_p) + p * entropy));
    }
    for (int64_t i = 0; i < logits.dim(1); ++i) store(out, r, i, gradient[i]);
  }
};

/// Element r times the loss scale; 0 for an absent vector or a row without a target.
double weight_of(const Tensor& weights, const Tensor& loss_scale, const Tensor& target, int64_t r) {
  if (!weights || index(target, r) < 0) return 0.0;
  return load(weights, r) * (loss_scale ? load(loss_scale, 0) : 1.0);
}

void cross_entropy_rows(Exec&, const CrossEntropy& a) {
  const auto t = static_cast<double>(a.inverse_temperature);
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    const int64_t target = index(a.target, r), column = column_of(target, a.first_column);
    const RowStatistics s = a.statistics ? combined(a.statistics, r) : statistics_of(a.logits, r, column, t);
    const double lse = s.maximum + std::log(s.sum);
    store(a.log_prob, r, target < 0 ? 0.0 : s.at_target - lse);
    if (a.lse) store(a.lse, r, lse);
    if (a.entropy) store(a.entropy, r, target < 0 ? 0.0 : std::log(s.sum) - s.moment / s.sum);
    if (a.weight)
      RowGradient{.t = t,
                  .lse = lse,
                  .weight = weight_of(a.weight, a.loss_scale, a.target, r),
                  .entropy_weight = 0,
                  .entropy = 0}
          .write(a.logits, r, column, a.dlogits ? a.dlogits : a.logits);
  }
}

void gradient_rows(Exec&, const CrossEntropyGradient& a) {
  for (int64_t r = 0; r < a.logits.dim(0); ++r)
    RowGradient{.t = static_cast<double>(a.inverse_temperature),
                .lse = load(a.lse, r),
                .weight = weight_of(a.weight, a.loss_scale, a.target, r),
                .entropy_weight = weight_of(a.entropy_weight, a.loss_scale, a.target, r),
                .entropy = a.entropy ? load(a.entropy, r) : 0.0}
        .write(a.logits, r, column_of(index(a.target, r), a.first_column), a.dlogits ? a.dlogits : a.logits);
}

}  // namespace

void fill_cross_entropy(KernelTable& table) {
  table.cross_entropy = cross_entropy_rows;
  table.cross_entropy_statistics = statistics_rows;
  table.cross_entropy_gradient = gradient_rows;
}

}  // namespace nrl::ops::reference
