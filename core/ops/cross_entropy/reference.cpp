#include "core/ops/shared/reference.h"

namespace nrl::ops::reference {
namespace {

void cross_entropy_rows(Exec&, const CrossEntropy& a) {
  const int64_t v = a.logits.dim(1);
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    const int64_t target = index(a.target, r);
    double m = load(a.logits, r, 0), total = 0;
    for (int64_t i = 0; i < v; ++i) m = std::max(m, load(a.logits, r, i));
    for (int64_t i = 0; i < v; ++i) total += std::exp(load(a.logits, r, i) - m);
    const double lse = m + std::log(total);
    store(a.log_prob, r, target < 0 ? 0.0 : load(a.logits, r, target) - lse);
    if (a.lse) store(a.lse, r, lse);
    if (!a.weight) continue;
    const double weight = target < 0 ? 0.0 : load(a.weight, r);
    // The gradient may lie over the logits of its row.
    std::vector<double> gradient(static_cast<size_t>(v));
    for (int64_t i = 0; i < v; ++i) {
      const double probability = std::exp(load(a.logits, r, i) - lse);
      gradient[static_cast<size_t>(i)] = weight * ((i == target ? 1.0 : 0.0) - probability);
    }
    const Tensor& out = a.dlogits ? a.dlogits : a.logits;
    for (int64_t i = 0; i < v; ++i) store(out, r, i, gradient[static_cast<size_t>(i)]);
  }
}

}  // namespace

void fill_cross_entropy(KernelTable& table) {
  table.cross_entropy = cross_entropy_rows;
}

}  // namespace nrl::ops::reference
