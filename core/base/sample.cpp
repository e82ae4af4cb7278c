#include "core/base/sample.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/base/error.h"
#include "core/base/philox.h"

namespace nrl {
namespace {

// The regularized incomplete beta function by its continued fraction (Press et al., Numerical Recipes, 6.4).
double incomplete_beta(double a, double b, double x) {
  if (x <= 0) return 0;
  if (x >= 1) return 1;
  if (x > (a + 1) / (a + b + 2)) return 1 - incomplete_beta(b, a, 1 - x);
  constexpr double tiny = 1e-300;
  const auto nonzero = [](double v) { return std::abs(v) < tiny ? tiny : v; };
  double c = 1, d = 1 / nonzero(1 - (a + b) * x / (a + 1)), f = d;
  for (int m = 1; m <= 500; ++m) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    d = 1 / nonzero(1 + even * d);
    c = nonzero(1 + even / c);
    f *= d * c;
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    d = 1 / nonzero(1 + odd * d);
    c = nonzero(1 + odd / c);
    f *= d * c;
    if (std::abs(d * c - 1) < 1e-14) break;
  }
  const double front =
      std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log1p(-x);
  return std::exp(front) * f / a;
}

// Draws whole blocks of neighbors, which may wrap around the end, until there are as many values as before.
class Blocks {
 public:
  Blocks(std::span<const double> values, const Resampling& how, std::string_view name)
      : values_(values), stream_(20'240'613, name) {
    const auto n = static_cast<double>(values.size());
    const auto block = static_cast<size_t>(std::max(5.0, std::ceil(std::cbrt(n))));
    length_ = std::clamp<size_t>(how.block > 0 ? static_cast<size_t>(how.block) : block, 1, values.size());
    drawn_.resize(values.size());
  }

  std::span<const double> draw() {
    const size_t n = values_.size();
    size_t at = 0;
    while (at < n) {
      const size_t first = static_cast<size_t>(uint64_t{stream_.bits(element_++)} * n >> 32);
      for (size_t i = 0; i < length_ && at < n; ++i) drawn_[at++] = values_[(first + i) % n];
    }
    return drawn_;
  }

 private:
  std::span<const double> values_;
  PhiloxStream stream_;
  uint64_t element_ = 0;
  size_t length_ = 1;
  std::vector<double> drawn_;
};

double median_of(std::span<const double> values, std::vector<double>& scratch) {
  scratch.assign(values.begin(), values.end());
  const size_t n = scratch.size(), middle = n / 2;
  std::nth_element(scratch.begin(), scratch.begin() + static_cast<long>(middle), scratch.end());
  if (n % 2) return scratch[middle];
  return (scratch[middle] + *std::max_element(scratch.begin(), scratch.begin() + static_cast<long>(middle))) /
         2;
}

Interval middle_95(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double q) {
    const double place = q * static_cast<double>(values.size() - 1);
    const auto low = static_cast<size_t>(place);
    const size_t high = std::min(low + 1, values.size() - 1);
    return values[low] + (place - static_cast<double>(low)) * (values[high] - values[low]);
  };
  return {at(0.025), at(0.975)};
}

}  // namespace

double quantile(std::vector<double> values, double q) {
  NRL_CHECK(!values.empty() && q >= 0 && q <= 1, "quantile {} of {} values", q, values.size());
  std::sort(values.begin(), values.end());
  const double place = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(place);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (place - static_cast<double>(low)) * (values[high] - values[low]);
}

double median(std::vector<double> values) {
  NRL_CHECK(!values.empty(), "median of no value");
  std::vector<double> scratch;
  return median_of(values, scratch);
}

double median_deviation(const std::vector<double>& values) {
  const double middle = median(values);
  std::vector<double> distances;
  for (const double v : values) distances.push_back(std::abs(v - middle));
  return median(std::move(distances));
}

double mean(std::span<const double> values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

double deviation(std::span<const double> values) {
  if (values.size() < 2) return 0;
  const double m = mean(values);
  double squares = 0;
  for (const double v : values) squares += (v - m) * (v - m);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

double student_t(double q, int64_t freedom) {
  NRL_CHECK(q > 0 && q < 1 && freedom > 0, "quantile {} of t with {} degrees of freedom", q, freedom);
  if (q < 0.5) return -student_t(1 - q, freedom);
  const auto nu = static_cast<double>(freedom);
  const auto below = [&](double t) { return 1 - incomplete_beta(nu / 2, 0.5, nu / (nu + t * t)) / 2; };
  double low = 0, high = 1;
  while (below(high) < q && high < 1e12) high *= 2;
  for (int i = 0; i < 200 && high - low > 1e-12 * high; ++i) {
    const double middle = (low + high) / 2;
    (below(middle) < q ? low : high) = middle;
  }
  return (low + high) / 2;
}

Interval mean_interval(std::span<const double> values) {
  const double m = mean(values);
  if (values.size() < 2) return {m, m};
  const auto n = static_cast<double>(values.size());
  const double half =
      student_t(0.975, static_cast<int64_t>(values.size()) - 1) * deviation(values) / std::sqrt(n);
  return {m - half, m + half};
}

Interval ratio_interval(std::span<const double> a, std::span<const double> b, const Resampling& how) {
  NRL_CHECK(!a.empty() && !b.empty(), "ratio of {} and {} values", b.size(), a.size());
  Blocks from_a(a, how, "a"), from_b(b, how, "b");
  std::vector<double> ratios, scratch;
  for (int i = 0; i < how.resamples; ++i) {
    const double below = median_of(from_a.draw(), scratch);
    ratios.push_back(median_of(from_b.draw(), scratch) / below);
  }
  return middle_95(std::move(ratios));
}

Interval paired_ratio_interval(std::span<const double> a, std::span<const double> b, const Resampling& how) {
  NRL_CHECK(a.size() == b.size() && !a.empty(), "pairs of {} and {} values", a.size(), b.size());
  std::vector<double> ratios, scratch;
  for (size_t i = 0; i < a.size(); ++i) ratios.push_back(b[i] / a[i]);
  return bootstrap(
      ratios, [&](std::span<const double> drawn) { return median_of(drawn, scratch); }, how);
}

Interval bootstrap(std::span<const double> values,
                   const std::function<double(std::span<const double>)>& statistic, const Resampling& how) {
  NRL_CHECK(!values.empty(), "bootstrap of no value");
  Blocks blocks(values, how, "bootstrap");
  std::vector<double> drawn;
  for (int i = 0; i < how.resamples; ++i) drawn.push_back(statistic(blocks.draw()));
  return middle_95(std::move(drawn));
}

double trend_score(std::span<const double> values) {
  const size_t n = values.size();
  if (n < 4) return 0;
  double sum = 0;
  std::map<double, double> ties;
  for (size_t i = 0; i < n; ++i) {
    ties[values[i]] += 1;
    for (size_t j = 0; j < i; ++j) sum += values[i] > values[j] ? 1 : values[i] < values[j] ? -1 : 0;
  }
  const auto term = [](double t) { return t * (t - 1) * (2 * t + 5); };
  double variance = term(static_cast<double>(n));
  for (const auto& [value, count] : ties) variance -= term(count);
  variance /= 18;
  if (variance <= 0 || sum == 0) return 0;
  return (sum > 0 ? sum - 1 : sum + 1) / std::sqrt(variance);
}

}  // namespace nrl
