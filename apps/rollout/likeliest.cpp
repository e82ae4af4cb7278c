#include "apps/rollout/likeliest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace nrl::rollout {

void keep_likeliest(std::span<float> logits, int64_t usable, const Likeliest& options) {
  constexpr float never = -std::numeric_limits<float>::infinity();
  // Comparisons with NaN give no order. A row of NaN has no token to sample.
  if (std::any_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); }))
    return std::fill(logits.begin(), logits.end(), std::numeric_limits<float>::quiet_NaN());
  std::fill(logits.begin() + usable, logits.end(), never);
  // Kept, because the exponentials of a large vocabulary take longer than the choice.
  thread_local std::vector<int32_t> order;
  thread_local std::vector<double> weights;
  order.resize(static_cast<size_t>(usable));
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  int64_t keep = options.top_k > 0 ? std::min(options.top_k, usable) : usable;
  if (keep < usable) std::nth_element(order.begin(), order.begin() + keep - 1, order.end(), likelier);
  if (options.top_p < 1) {
    std::sort(order.begin(), order.begin() + keep, likelier);
    weights.resize(static_cast<size_t>(keep));
    const float top = logits[static_cast<size_t>(order[0])];
    double total = 0, sum = 0;
    for (size_t i = 0; i < weights.size(); ++i)
      total += weights[i] =
          std::exp(static_cast<double>(logits[static_cast<size_t>(order[i])] - top) / options.temperature);
    int64_t count = 0;
    while (count < keep && (count == 0 || sum < options.top_p * total))
      sum += weights[static_cast<size_t>(count++)];
    keep = count;
  }
  for (int64_t i = keep; i < usable; ++i) logits[static_cast<size_t>(order[static_cast<size_t>(i)])] = never;
}

}  // namespace nrl::rollout
