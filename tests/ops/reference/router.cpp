#include "tests/ops/reference/reference.h"

namespace nrl::ops::reference {
namespace {

std::vector<double> row_of(const Tensor& logits, int64_t t) {
  std::vector<double> x(static_cast<size_t>(logits.dim(1)));
  for (size_t e = 0; e < x.size(); ++e) x[e] = load(logits, t, static_cast<int64_t>(e));
  return x;
}

double log_sum_exp(const std::vector<double>& x) {
  const double most = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double v : x) sum += std::exp(v - most);
  return most + std::log(sum);
}

std::vector<double> scores(RouterScore kind, const std::vector<double>& x) {
  std::vector<double> s(x.size());
  const double lse = log_sum_exp(x);
  for (size_t e = 0; e < x.size(); ++e)
    s[e] = kind == RouterScore::sigmoid ? 1 / (1 + std::exp(-x[e])) : std::exp(x[e] - lse);
  return s;
}

/// The indices of the `count` largest values, in descending order, the first of equals first.
std::vector<size_t> largest(const std::vector<double>& values, int64_t count) {
  std::vector<size_t> order(values.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  order.resize(static_cast<size_t>(count));
  return order;
}

void forward(Exec&, const RouterForward& a) {
  const RouterRule& rule = a.rule;
  for (int64_t t = 0; t < a.logits.dim(0); ++t) {
    const std::vector<double> s = scores(rule.score, row_of(a.logits, t));
    std::vector<double> values = s;
    for (size_t e = 0; e < s.size(); ++e)
      if (a.bias) values[e] += load(a.bias, static_cast<int64_t>(e));
    if (rule.group_top_k < rule.groups) {
      const size_t size = s.size() / static_cast<size_t>(rule.groups);
      std::vector<double> group;
      for (size_t g = 0; g < static_cast<size_t>(rule.groups); ++g) {
        const std::vector<double> members(values.begin() + static_cast<std::ptrdiff_t>(g * size),
                                          values.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
        const int64_t counted =
            std::clamp<int64_t>(rule.top_k / rule.group_top_k, 1, static_cast<int64_t>(size));
        double sum = 0;
        for (const size_t m : largest(members, counted)) sum += members[m];
        group.push_back(sum);
      }
      std::vector<bool> chosen(group.size());
      for (const size_t g : largest(group, rule.group_top_k)) chosen[g] = true;
      for (size_t e = 0; e < s.size(); ++e)
        if (!chosen[e / size]) values[e] = -INFINITY;
    }
    const std::vector<size_t> expert = largest(values, rule.top_k);
    double sum = 1e-20;
    for (const size_t e : expert) sum += s[e];
    for (size_t c = 0; c < expert.size(); ++c) {
      const auto column = static_cast<int64_t>(c);
      static_cast<int32_t*>(a.expert.data)[t * rule.top_k + column] = static_cast<int32_t>(expert[c]);
      store(a.prob, t, column, s[expert[c]] * static_cast<double>(rule.scale) / (rule.normalize ? sum : 1.0));
    }
  }
}

void counts(Exec&, const RouterCounts& a) {
  auto* counts = static_cast<int32_t*>(a.counts.data);
  std::fill_n(counts, a.counts.numel(), 0);
  for (int64_t t = 0; t < a.expert.dim(0); ++t)
    for (int64_t c = 0; c < a.expert.dim(1); ++c) {
      const auto e = static_cast<int64_t>(load(a.expert, t, c));
      ++counts[(a.first + t) / a.segment * a.counts.dim(1) + e];
      if (a.sum) ++static_cast<int32_t*>(a.sum.data)[e];
    }
}

/// The tokens of all experts of a segment.
double counted(const Tensor& counts, int64_t segment) {
  double sum = 0;
  for (int64_t e = 0; e < counts.dim(1); ++e) sum += load(counts, segment, e);
  return std::max(sum, 1.0);
}

void balance(Exec&, const RouterBalance& a) {
  const int64_t n = a.logits.dim(0), experts = a.logits.dim(1), segments = a.counts ? a.counts.dim(0) : 0;
  const auto d = [](int64_t x) { return static_cast<double>(x); };
  double aux = 0, z = 0, most = 0, all = 0;
  for (int64_t t = 0; t < n; ++t) {
    const std::vector<double> x = row_of(a.logits, t), s = scores(a.rule.score, x);
    z += std::pow(log_sum_exp(x), 2);
    if (!a.counts) continue;
    double sum = 0, part = 0;
    for (size_t e = 0; e < s.size(); ++e) {
      sum += s[e];
      part += s[e] * load(a.counts, (a.first + t) / a.segment, static_cast<int64_t>(e));
    }
    aux += part / sum / counted(a.counts, (a.first + t) / a.segment);
  }
  for (int64_t e = 0; e < experts; ++e) {
    double of_expert = 0;
    for (int64_t b = 0; b < segments; ++b) of_expert += load(a.counts, b, e);
    most = std::max(most, of_expert);
    all += of_expert;
  }
  auto* metrics = static_cast<double*>(a.metrics.data);
  const auto share = static_cast<double>(a.share);
  metrics[0] += share * aux * d(experts) / static_cast<double>(a.total);
  metrics[1] += share * z / static_cast<double>(a.total);
  if (!a.counts || !a.load) return;
  metrics[2] += share * most / (all / d(experts));
}

void backward(Exec&, const RouterBackward& a) {
  const int64_t n = a.logits.dim(0), experts = a.logits.dim(1), k = a.rule.top_k;
  const double loss_scale = a.loss_scale ? load(a.loss_scale, 0) : 1.0;
  const double scale = static_cast<double>(a.rule.scale), z = static_cast<double>(a.z) * loss_scale;
  for (int64_t t = 0; t < n; ++t) {
    const std::vector<double> x = row_of(a.logits, t), s = scores(a.rule.score, x);
    std::vector<double> ds(s.size());
    if (a.aux != 0) {
      const int64_t segment = (a.first + t) / a.segment;
      double sum = 0, mean = 0;
      for (const double v : s) sum += v;
      std::vector<double> dq(s.size());
      for (size_t e = 0; e < s.size(); ++e) {
        dq[e] = loss_scale * static_cast<double>(a.aux) * static_cast<double>(experts) *
                load(a.counts, segment, static_cast<int64_t>(e)) /
                (counted(a.counts, segment) * static_cast<double>(a.total));
        mean += dq[e] * s[e] / sum;
      }
      for (size_t e = 0; e < s.size(); ++e) ds[e] = (dq[e] - mean) / sum;
    }
    double sum = 0, weighted = 0;
    for (int64_t c = 0; c < k; ++c) {
      const double chosen = s[load(a.expert, t, c)];
      sum += chosen;
      weighted += chosen * load(a.dprob, t, c);
    }
    for (int64_t c = 0; c < k; ++c) {
      const double g = load(a.dprob, t, c);
      ds[load(a.expert, t, c)] += scale * (a.rule.normalize ? (g - weighted / sum) / sum : g);
    }
    double mean = 0;
    for (size_t e = 0; e < s.size(); ++e) mean += s[e] * ds[e];
    const double lse = log_sum_exp(x);
    for (size_t e = 0; e < s.size(); ++e) {
      const double through =
          a.rule.score == RouterScore::sigmoid ? ds[e] * s[e] * (1 - s[e]) : s[e] * (ds[e] - mean);
      store(a.dlogits, t, static_cast<int64_t>(e),
            through + z * 2 * lse / static_cast<double>(a.total) * std::exp(x[e] - lse));
    }
  }
}

void bias(Exec&, const RouterBias& a) {
  if (load(a.scalars, StepScalar::skip) != 0) return;
  const int64_t experts = a.bias.dim(0);
  double mean = 0;
  for (int64_t e = 0; e < experts; ++e) mean += load(a.counts, e);
  mean /= static_cast<double>(experts);
  for (int64_t e = 0; e < experts; ++e) {
    const double sign = load(a.counts, e) < mean ? 1 : load(a.counts, e) > mean ? -1 : 0;
    store(a.bias, e, load(a.bias, e) + sign * static_cast<double>(a.rate));
  }
}

}  // namespace

void fill_router(KernelTable& table) {
  table.router_forward = forward;
  table.router_counts = counts;
  table.router_balance = balance;
  table.router_backward = backward;
  table.router_bias = bias;
}

}  // namespace nrl::ops::reference
