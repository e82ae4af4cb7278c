#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

void gather(Exec&, const GatherColumns& a) {
  for (int64_t r = 0; r < a.ids.dim(0); ++r)
    for (int64_t j = 0; j < a.ids.dim(1); ++j) {
      const int64_t column = static_cast<int64_t>(load(a.ids, r, j)) - a.first_column;
      store(a.out, r, j, column >= 0 && column < a.logits.dim(1) ? load(a.logits, r, column) : 0.0);
    }
}

/// By sorting.
void top(Exec&, const TopColumns& a) {
  const int64_t n = a.ids.dim(0), k = a.ids.dim(1);
  for (int64_t r = 0; r < n; ++r) {
    std::vector<std::pair<double, int64_t>> all;  // number and id
    if (a.logits) {
      for (int64_t i = 0; i < a.logits.dim(1); ++i)
        all.emplace_back(load(a.logits, r, i), a.first_column + i);
    } else {
      for (int64_t p = 0; p < a.part_ids.dim(0); ++p)
        for (int64_t i = 0; i < a.part_ids.dim(2); ++i)
          if (const double id = load(a.part_ids, p * n + r, i); id >= 0)
            all.emplace_back(load(a.part_values, p * n + r, i), static_cast<int64_t>(id));
    }
    std::ranges::stable_sort(all, [](const auto& x, const auto& y) {
      return std::isnan(x.first) != std::isnan(y.first) ? std::isnan(x.first) : x.first > y.first;
    });
    all.resize(std::min(all.size(), static_cast<size_t>(k)));
    std::ranges::sort(all, {}, [](const auto& x) { return x.second; });
    for (int64_t j = 0; j < k; ++j) {
      const bool there = j < std::ssize(all);
      static_cast<int32_t*>(a.ids.data)[r * k + j] =
          there ? static_cast<int32_t>(all[static_cast<size_t>(j)].second) : -1;
      store(a.values, r, j, there ? all[static_cast<size_t>(j)].first : -INFINITY);
    }
  }
}

std::vector<double> row_of(const Tensor& t, int64_t r) {
  std::vector<double> row;
  for (int64_t j = 0; j < t.dim(1); ++j) row.push_back(load(t, r, j));
  return row;
}

/// log-softmax of the numbers, which are divided by t first.
std::vector<double> log_softmax(std::vector<double> x, double t) {
  double most = x[0], sum = 0;
  for (double& e : x) most = std::max(most, e /= t);
  for (const double e : x) sum += std::exp(e - most);
  for (double& e : x) e -= most + std::log(sum);
  return x;
}

void topk_kl(Exec&, const TopkKl& a) {
  const TopkKl::Options& o = a.options;
  const double t = o.temperature;
  const double forward_part = o.type == KlDirection::mixed ? o.mixed_weight : o.type == KlDirection::forward;
  for (int64_t r = 0; r < a.student.dim(0); ++r) {
    const bool counts = index(a.target, r) >= 0;
    const double weight =
        a.weight && counts ? load(a.weight, r) * (a.loss_scale ? load(a.loss_scale, 0) : 1.0) : 0.0;
    const std::vector<double> log_q = log_softmax(row_of(a.teacher, r), t);
    std::vector<double> log_p = o.zero_outside ? row_of(a.student, r) : log_softmax(row_of(a.student, r), t);
    if (o.zero_outside)
      for (double& e : log_p) e = e / t - load(a.lse, r);
    double forward = 0, reverse = 0, own_entropy = 0, outside = 1;
    for (size_t j = 0; j < log_p.size(); ++j) {
      const double p = std::exp(log_p[j]);
      forward += std::exp(log_q[j]) * (log_q[j] - log_p[j]);
      reverse += p * (log_p[j] - log_q[j]);
      own_entropy -= p * log_p[j];
      outside -= p;
    }
    // The other tokens have the rest of the entropy, and q = exp(-100).
    if (o.zero_outside && forward_part < 1)
      reverse += -(load(a.entropy, r) - own_entropy) + 100.0 * std::max(outside, 0.0);
    store(a.score, r, counts ? -t * t * (forward_part * forward + (1 - forward_part) * reverse) : 0.0);
    if (!a.weight) continue;
    for (size_t j = 0; j < log_p.size(); ++j) {
      const double p = std::exp(log_p[j]), q = std::exp(log_q[j]);
      const double slope = forward_part * (p - q) + (1 - forward_part) * p * (log_p[j] - log_q[j] - reverse);
      store(a.gradient, r, static_cast<int64_t>(j), counts ? -weight * t * slope : 0.0);
    }
    if (!a.rest) continue;
    store(a.rest, r, 0, -weight * t * (forward_part + (1 - forward_part) * (100.0 - reverse)));
    store(a.rest, r, 1, -weight * t * (1 - forward_part));
  }
}

void scatter(Exec&, const ScatterColumns& a) {
  const int64_t v = a.logits.dim(1);
  for (int64_t r = 0; r < a.ids.dim(0); ++r) {
    // The gradient may lie over the logits of its row.
    std::vector<double> gradient(static_cast<size_t>(v));
    for (int64_t i = 0; a.rest && i < v; ++i) {
      const double constant = load(a.rest, r, 0), slope = load(a.rest, r, 1);
      const double log_p = load(a.logits, r, i) * static_cast<double>(a.inverse_temperature) - load(a.lse, r);
      const double p = std::exp(log_p);
      gradient[i] = (constant == 0 && slope == 0) || p == 0 ? 0.0 : p * (constant + slope * log_p);
    }
    for (int64_t j = 0; j < a.ids.dim(1); ++j) {
      const int64_t column = static_cast<int64_t>(load(a.ids, r, j)) - a.first_column;
      if (column >= 0 && column < v) gradient[column] = load(a.gradient, r, j);
    }
    const Tensor& out = a.dlogits ? a.dlogits : a.logits;
    for (int64_t i = 0; i < v; ++i) store(out, r, i, gradient[i]);
  }
}

}  // namespace

void fill_distillation(KernelTable& table) {
  table.top_columns = top;
  table.gather_columns = gather;
  table.topk_kl = topk_kl;
  table.scatter_columns = scatter;
}

}  // namespace nrl::ops::reference
