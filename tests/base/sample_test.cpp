// Statistics of samples, against values from elsewhere and simulated samples of known distributions.

#include "core/base/sample.h"

#include <cmath>
#include <vector>

#include "core/base/philox.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

// Times of steps: neighbors depend on each other (0.5), and every 20th one is slow.
std::vector<double> step_times(uint64_t trial, size_t n, double scale, double noise = 0.02) {
  const PhiloxStream random(trial, scale == 1 ? "a" : "b");
  std::vector<double> out;
  double drift = random.normal(1'000'000);
  for (size_t i = 0; i < n; ++i) {
    drift = 0.5 * drift + std::sqrt(0.75) * random.normal(i);
    const bool slow = random.uniform(2'000'000 + i) < 0.05F;
    out.push_back(scale * 0.1 * (1 + noise * drift) * (slow ? 1.3 : 1));
  }
  return out;
}

}  // namespace

TEST_CASE("quantiles, medians and spreads", "[sample]") {
  CHECK(median({3, 1, 2}) == 2);
  CHECK(median({4, 1, 2, 3}) == 2.5);
  CHECK(median({7}) == 7);
  CHECK(quantile({1, 2, 3, 4}, 0) == 1);
  CHECK(quantile({4, 3, 2, 1}, 1) == 4);
  CHECK(quantile({1, 2, 3, 4}, 0.25) == Approx(1.75));  // numpy.quantile
  CHECK(quantile({1, 2, 3, 4, 10}, 0.95) == Approx(8.8));
  CHECK(median_deviation({1, 1, 2, 2, 4, 6, 9}) == 1);
  CHECK(deviation(std::vector<double>{2, 4, 4, 4, 5, 5, 7, 9}) == Approx(2.13809));
  CHECK(deviation(std::vector<double>{2}) == 0);
}

TEST_CASE("quantiles of Student's t are those of the tables", "[sample]") {
  CHECK(student_t(0.975, 1) == Approx(12.7062).epsilon(1e-5));
  CHECK(student_t(0.975, 2) == Approx(4.30265).epsilon(1e-5));
  CHECK(student_t(0.975, 9) == Approx(2.26216).epsilon(1e-5));
  CHECK(student_t(0.995, 30) == Approx(2.75000).epsilon(1e-5));
  CHECK(student_t(0.975, 1'000'000) == Approx(1.95996).epsilon(1e-5));
  CHECK(student_t(0.025, 9) == Approx(-2.26216).epsilon(1e-5));
  const Interval i = mean_interval(std::vector<double>{1, 2, 3, 4, 5});
  CHECK(i.low == Approx(3 - 1.96324).epsilon(1e-4));
  CHECK(i.high == Approx(3 + 1.96324).epsilon(1e-4));
  CHECK(mean_interval(std::vector<double>{4}).width() == 0);
}

TEST_CASE("the bootstrap covers the true value as often as it says", "[sample]") {
  int covered = 0;
  for (uint64_t trial = 0; trial < 1000; ++trial) {
    const PhiloxStream random(trial, "coverage");
    std::vector<double> values;
    for (uint64_t i = 0; i < 100; ++i) values.push_back(5 + random.normal(i));
    covered +=
        bootstrap(values, [](std::span<const double> v) { return mean(v); }, {.block = 1, .resamples = 400})
            .contains(5);
  }
  CHECK(covered >= 930);
  CHECK(covered <= 970);
}

TEST_CASE("the ratio of medians of dependent samples is covered", "[sample]") {
  int covered = 0;
  for (uint64_t trial = 0; trial < 1000; ++trial)
    covered += ratio_interval(step_times(trial, 200, 1), step_times(trial, 200, 1.05), {.resamples = 400})
                   .contains(1.05);
  // Blocks of six neighbors keep most of their dependence.
  CHECK(covered >= 920);
  CHECK(covered <= 975);
}

TEST_CASE("equal samples give equal intervals", "[sample]") {
  const std::vector<double> a = step_times(1, 40, 1), b = step_times(1, 40, 1.1);
  const Interval first = ratio_interval(a, b), again = ratio_interval(a, b);
  CHECK(first.low == again.low);
  CHECK(first.high == again.high);
  CHECK(first.contains(median(b) / median(a)));
  CHECK(paired_ratio_interval(a, a).width() == 0);
}

TEST_CASE("pairs that drift together have a narrow ratio", "[sample]") {
  std::vector<double> a, b;
  const PhiloxStream random(3, "pairs");
  for (uint64_t i = 0; i < 30; ++i) {
    a.push_back(1 + 0.3 * std::sin(static_cast<double>(i)));
    b.push_back(1.05 * a.back() * (1 + 0.002 * random.normal(i)));
  }
  const Interval paired = paired_ratio_interval(a, b);
  CHECK(paired.contains(1.05));
  CHECK(paired.width() < 0.005);
  CHECK(ratio_interval(a, b).width() > 0.05);
}

TEST_CASE("Mann and Kendall find trends", "[sample]") {
  CHECK(trend_score(std::vector<double>{1, 2, 3, 4, 5}) == Approx(9 / std::sqrt(50 / 3.0)));
  CHECK(trend_score(std::vector<double>{5, 4, 3, 2, 1}) == Approx(-9 / std::sqrt(50 / 3.0)));
  CHECK(trend_score(std::vector<double>{2, 2, 2, 2, 2}) == 0);
  CHECK(trend_score(std::vector<double>{1, 2, 3}) == 0);
  // One tie of two: the variance is (5 * 4 * 15 - 2 * 1 * 9) / 18.
  CHECK(trend_score(std::vector<double>{1, 2, 2, 3, 4}) == Approx(8 / std::sqrt(282 / 18.0)));
}
