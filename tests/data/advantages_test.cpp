// Advantages from rewards and groups, against values computed by hand.
#include "apps/data/examples/advantages.h"

#include <cmath>
#include <string>
#include <vector>

#include "tests/catch.h"

using namespace nrl;
using namespace nrl::data;

namespace {

constexpr double tight = 1e-13;

void check_values(const std::vector<double>& found, const std::vector<double>& expected) {
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    CHECK(std::abs(found[i] - expected[i]) <= tight * std::max(1.0, std::abs(expected[i])));
  }
}

}  // namespace

TEST_CASE("advantages: baselines and divisors of one group of four", "[advantages]") {
  using enum AdvantageStd;
  const std::vector<double> rewards = {1, 0, 0, 0};
  const std::vector<int64_t> groups = {5, 5, 5, 5};
  // The rewards have the mean 1/4 and the variance (9/16 + 3/16) / 3 = 1/4. Without one of the zeros: the
  // mean 1/3 and the variance (4/9 + 2/9) / 2 = 1/3.
  const double s = 0.5 + 1e-4, others = std::sqrt(1.0 / 3) + 1e-6;
  struct Case {
    bool leave_one_out;
    AdvantageStd std;
    std::vector<double> expected;
  };
  const Case cases[] = {
      {false, none, {0.75, -0.25, -0.25, -0.25}},
      {true, none, {1, -1.0 / 3, -1.0 / 3, -1.0 / 3}},
      {false, group, {0.75 / s, -0.25 / s, -0.25 / s, -0.25 / s}},
      {true, group, {1 / s, -1 / (3 * s), -1 / (3 * s), -1 / (3 * s)}},
      {false, batch, {0.75 / s, -0.25 / s, -0.25 / s, -0.25 / s}},
      // The others of the first one are equal: its advantage is not divided.
      {true, leave_one_out, {1, -1 / (3 * others), -1 / (3 * others), -1 / (3 * others)}},
      {false, leave_one_out, {0.75, -0.25 / others, -0.25 / others, -0.25 / others}},
  };
  for (const Case& c : cases) {
    CAPTURE(c.leave_one_out, name_of(c.std));
    const Advantages found = advantages(rewards, groups, {.leave_one_out = c.leave_one_out, .std = c.std});
    check_values(found.values, c.expected);
    CHECK(found.groups == 1);
    CHECK(found.unstable_groups == (c.std == leave_one_out ? 1 : 0));
    CHECK(found.degenerate_groups() == found.unstable_groups);
  }
}

TEST_CASE("advantages: the default is the mean of the others and the group's standard deviation",
          "[advantages]") {
  // Groups 2, 4 and 6, 0 in turn: standard deviations sqrt(2) and sqrt(18).
  const std::vector<double> rewards = {2, 6, 4, 0};
  const std::vector<int64_t> groups = {1, 0, 1, 0};
  const double a = std::sqrt(2.0) + 1e-4, b = std::sqrt(18.0) + 1e-4;
  const Advantages found = advantages(rewards, groups, {});
  check_values(found.values, {-2 / a, 6 / b, 2 / a, -6 / b});
  CHECK(found.groups == 2);
  CHECK(found.degenerate_groups() == 0);
}

TEST_CASE("advantages: the standard deviation of the batch is that of all rewards", "[advantages]") {
  // Mean 3, squares of the deviations 1, 9, 1, 9: variance 20 / 3.
  const std::vector<double> rewards = {2, 6, 4, 0};
  const std::vector<int64_t> groups = {1, 0, 1, 0};
  const double s = std::sqrt(20.0 / 3) + 1e-4;
  check_values(advantages(rewards, groups, {.leave_one_out = false, .std = AdvantageStd::batch}).values,
               {-1 / s, 3 / s, 1 / s, -3 / s});
  check_values(advantages(rewards, groups, {.leave_one_out = true, .std = AdvantageStd::batch}).values,
               {-2 / s, 6 / s, 2 / s, -6 / s});
}

TEST_CASE("advantages: groups without a comparison have none, and are counted", "[advantages]") {
  // Three equal rewards that have no exact mean in binary, one alone, and two that differ.
  const std::vector<double> rewards = {0.1, 0.1, 0.1, 7, 1, 2};
  const std::vector<int64_t> groups = {0, 0, 0, 1, 2, 2};
  for (const AdvantageStd std :
       {AdvantageStd::none, AdvantageStd::group, AdvantageStd::leave_one_out, AdvantageStd::batch})
    for (const bool leave_one_out : {false, true}) {
      CAPTURE(name_of(std), leave_one_out);
      const Advantages found = advantages(rewards, groups, {.leave_one_out = leave_one_out, .std = std});
      for (int i = 0; i < 4; ++i) CHECK(found.values[static_cast<size_t>(i)] == 0);
      CHECK(found.values[4] < 0);
      CHECK(found.values[4] == -found.values[5]);
      CHECK(found.groups == 3);
      CHECK(found.groups_of_one == 1);
      CHECK(found.equal_groups == 1);
      // One other has no standard deviation.
      CHECK(found.unstable_groups == (std == AdvantageStd::leave_one_out ? 1 : 0));
      CHECK(found.degenerate_groups() == 2 + found.unstable_groups);
    }
  const Advantages none = advantages({}, {}, {});
  CHECK(none.values.empty());
  CHECK(none.groups == 0);
}

TEST_CASE("advantages: others that nearly tie give a large advantage, which is counted", "[advantages]") {
  const std::vector<double> near = {1, 0, 0, 0.01}, far = {1, 0, 0.5, 0.2};
  const std::vector<int64_t> groups(4, 0);
  const AdvantageOptions options{.leave_one_out = true, .std = AdvantageStd::leave_one_out};
  // Others 0, 0, 0.01: mean 0.01 / 3, variance 0.0001 / 3.
  const Advantages found = advantages(near, groups, options);
  CHECK(std::abs(found.values[0] - (1 - 0.01 / 3) / (std::sqrt(0.0001 / 3) + 1e-6)) < 1e-9);
  CHECK(found.unstable_groups == 1);
  CHECK(advantages(far, groups, options).unstable_groups == 0);
  CHECK(advantages(near, groups, {}).unstable_groups == 0);
}

TEST_CASE("advantages: a shift of a group's rewards changes none, a factor none that is divided",
          "[advantages]") {
  const std::vector<double> rewards = {0.25, 1, 0.5, 3, 2, -1, 0, 8};
  const std::vector<int64_t> groups = {3, 3, 3, 3, 9, 9, 9, 9};
  std::vector<double> shifted = rewards, scaled = rewards;
  for (size_t i = 0; i < 4; ++i) shifted[i] += 1024;
  for (double& reward : scaled) reward *= 1 << 20;
  for (const AdvantageStd std : {AdvantageStd::none, AdvantageStd::group, AdvantageStd::leave_one_out})
    for (const bool leave_one_out : {false, true}) {
      const AdvantageOptions options{.leave_one_out = leave_one_out, .std = std};
      const auto values = advantages(rewards, groups, options).values;
      check_values(advantages(shifted, groups, options).values, values);
      const auto of_scaled = advantages(scaled, groups, options).values;
      for (size_t i = 0; i < values.size(); ++i) {
        if (std == AdvantageStd::none) {
          CHECK(of_scaled[i] == values[i] * (1 << 20));
        } else {
          CHECK(std::abs(of_scaled[i] - values[i]) < 1e-3 * std::abs(values[i]));  // the epsilon
        }
      }
    }
}
