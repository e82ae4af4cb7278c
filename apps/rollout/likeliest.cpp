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
  // Kept, because it would be allocated for every token.
  thread_local std::vector<int32_t> order;
  order.resize(static_cast<size_t>(usable));
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  int64_t keep = options.top_k > 0 ? std::min(options.top_k, usable) : usable;
  if (keep < usable) std::nth_element(order.begin(), order.begin() + keep - 1, order.end(), likelier);
  if (options.top_p < 1) {
    const auto logit = [&](int64_t i) { return logits[static_cast<size_t>(order[static_cast<size_t>(i)])]; };
    float top = never;
    for (int64_t i = 0; i < keep; ++i) top = std::max(top, logit(i));
    const auto weight = [&](int64_t i) {
      return std::exp(static_cast<double>(logit(i) - top) / options.temperature);
    };
    double total = 0, sum = 0;
    for (int64_t i = 0; i < keep; ++i) total += weight(i);
    int64_t count = 0;
    // Few tokens have most of the probability: sorts no more of them than are needed.
    for (int64_t sorted = 0, next = 256; sorted < keep; sorted = next, next *= 4) {
      next = std::min(next, keep);
      if (next < keep)
        std::nth_element(order.begin() + sorted, order.begin() + next, order.begin() + keep, likelier);
      std::sort(order.begin() + sorted, order.begin() + next, likelier);
      while (count < next && (count == 0 || sum < options.top_p * total)) sum += weight(count++);
      if (count < next) break;
    }
    keep = count;
  }
  for (int64_t i = keep; i < usable; ++i) logits[static_cast<size_t>(order[static_cast<size_t>(i)])] = never;
}

}  // namespace nrl::rollout
