#include "apps/data/examples/advantages.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <map>

#include "core/base/error.h"

namespace nrl::data {
namespace {

constexpr double std_epsilon = 1e-4, leave_one_out_epsilon = 1e-6;
constexpr double small_std = 0.1;  // of the others, relative to the group's

bool all_equal(std::span<const double> numbers) {
  return std::adjacent_find(numbers.begin(), numbers.end(), std::not_equal_to<>()) == numbers.end();
}

// The mean; exact if all numbers are equal, so that their deviations are 0.
double mean_of(std::span<const double> numbers) {
  double sum = 0;
  for (const double number : numbers) sum += number - numbers[0];
  return numbers[0] + sum / static_cast<double>(numbers.size());
}

double std_of(std::span<const double> numbers) {
  if (numbers.size() < 2) return 0;
  const double mean = mean_of(numbers);
  double squares = 0;
  for (const double number : numbers) squares += (number - mean) * (number - mean);
  return std::sqrt(squares / static_cast<double>(numbers.size() - 1));
}

}  // namespace

Advantages advantages(std::span<const double> rewards, std::span<const int64_t> groups,
                      const AdvantageOptions& options) {
  NRL_CHECK(rewards.size() == groups.size(), "{} rewards, {} groups", rewards.size(), groups.size());
  NRL_CHECK(std::all_of(rewards.begin(), rewards.end(), [](double r) { return std::isfinite(r); }));
  Advantages out{.values = std::vector<double>(rewards.size())};
  std::map<int64_t, std::vector<size_t>> members;
  for (size_t i = 0; i < groups.size(); ++i) members[groups[i]].push_back(i);
  const double batch_std = rewards.empty() ? 0 : std_of(rewards);
  for (const auto& [number, group] : members) {
    ++out.groups;
    if (group.size() == 1) {
      ++out.groups_of_one;
      continue;
    }
    std::vector<double> of_group;
    for (const size_t i : group) of_group.push_back(rewards[i]);
    if (all_equal(of_group)) {
      ++out.equal_groups;
      continue;
    }
    const double group_mean = mean_of(of_group), group_std = std_of(of_group);
    const auto n = static_cast<double>(group.size());
    const double factor = options.leave_one_out ? n / (n - 1) : 1;  // r - mean of others = factor (r - mean)
    bool unstable = false;
    for (size_t j = 0; j < group.size(); ++j) {
      double divisor = 1;
      switch (options.std) {
        case AdvantageStd::none:
          break;
        case AdvantageStd::group:
          divisor = group_std + std_epsilon;
          break;
        case AdvantageStd::leave_one_out: {
          std::vector<double> others = of_group;
          others.erase(others.begin() + static_cast<ptrdiff_t>(j));
          const double others_std = std_of(others);
          if (others_std > 0) divisor = others_std + leave_one_out_epsilon;
          unstable = unstable || others_std < small_std * group_std;
          break;
        }
        case AdvantageStd::batch:
          divisor = batch_std + std_epsilon;
          break;
      }
      out.values[group[j]] = factor * (of_group[j] - group_mean) / divisor;
    }
    if (unstable) ++out.unstable_groups;
  }
  return out;
}

void whiten(std::span<double> numbers) {
  if (numbers.empty()) return;
  const double mean = mean_of(numbers);
  double squares = 0;
  for (const double number : numbers) squares += (number - mean) * (number - mean);
  const double divisor = std::sqrt(std::max(squares / static_cast<double>(numbers.size()), 1e-8));
  for (double& number : numbers) number = (number - mean) / divisor;
}

}  // namespace nrl::data
