#include <limits>

#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

struct RowStatistics {
  double maximum = -static_cast<double>(std::numeric_limits<float>::max()), sum = 0, at_target = 0;
};

RowStatistics statistics_of(const Tensor& logits, int64_t r, int64_t column) {
  RowStatistics s;
  for (int64_t i = 0; i < logits.dim(1); ++i) s.maximum = std::max(s.maximum, load(logits, r, i));
  for (int64_t i = 0; i < logits.dim(1); ++i) s.sum += std::exp(load(logits, r, i) - s.maximum);
  if (column >= 0 && column < logits.dim(1)) s.at_target = load(logits, r, column);
  return s;
}

RowStatistics combined(const Tensor& slices, int64_t r) {
  const auto at = [&](int64_t s, int64_t i) { return load_at(slices, (s * slices.dim(1) + r) * 3 + i); };
  RowStatistics all;
  for (int64_t s = 0; s < slices.dim(0); ++s) all.maximum = std::max(all.maximum, at(s, 0));
  for (int64_t s = 0; s < slices.dim(0); ++s) {
    all.sum += at(s, 1) * std::exp(at(s, 0) - all.maximum);
    all.at_target += at(s, 2);
  }
  return all;
}

/// The column of the target in the slice: out of its range if another slice has it or there is none.
int64_t column_of(int64_t target, int64_t first_column) {
  return target < 0 ? -1 : target - first_column;
}

void statistics_rows(Exec&, const CrossEntropyStatistics& a) {
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    const RowStatistics s = statistics_of(a.logits, r, column_of(index(a.target, r), a.first_column));
    store(a.out, r, 0, s.maximum);
    store(a.out, r, 1, s.sum);
    store(a.out, r, 2, s.at_target);
  }
}

void cross_entropy_rows(Exec&, const CrossEntropy& a) {
  const int64_t v = a.logits.dim(1);
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    const int64_t target = index(a.target, r), column = column_of(target, a.first_column);
    const RowStatistics s = a.statistics ? combined(a.statistics, r) : statistics_of(a.logits, r, column);
    const double lse = s.maximum + std::log(s.sum);
    store(a.log_prob, r, target < 0 ? 0.0 : s.at_target - lse);
    if (a.lse) store(a.lse, r, lse);
    if (!a.weight) continue;
    const double weight = target < 0 ? 0.0 : load(a.weight, r) * (a.loss_scale ? load(a.loss_scale, 0) : 1.0);
    // The gradient may lie over the logits of its row.
    std::vector<double> gradient(static_cast<size_t>(v));
    for (int64_t i = 0; i < v; ++i) {
      const double probability = std::exp(load(a.logits, r, i) - lse);
      gradient[i] = weight * ((i == column ? 1.0 : 0.0) - probability);
    }
    const Tensor& out = a.dlogits ? a.dlogits : a.logits;
    for (int64_t i = 0; i < v; ++i) store(out, r, i, gradient[i]);
  }
}

}  // namespace

void fill_cross_entropy(KernelTable& table) {
  table.cross_entropy = cross_entropy_rows;
  table.cross_entropy_statistics = statistics_rows;
}

}  // namespace nrl::ops::reference
