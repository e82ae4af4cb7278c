#pragma once
// Top-k and top-p (nucleus sampling, Holtzman et al., 2019) as a restriction of logits before sampling.

#include <cstdint>
#include <span>

namespace nrl::rollout {

struct Likeliest {
  double temperature = 1;  ///< above 0
  int64_t top_k = 0;       ///< 0: all
  double top_p = 1;
};

/// Keeps the likeliest of the first `usable` tokens of softmax(logits / temperature): the top_k largest, of
/// equal ones the smaller, and of these the fewest with a probability of top_p, at least one. All other
/// logits become -inf; all become NaN if one is.
void keep_likeliest(std::span<float> logits, int64_t usable, const Likeliest& options);

}  // namespace nrl::rollout
