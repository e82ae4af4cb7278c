#include "tests/reference/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>

namespace reference {

double learning_rate(const Schedule& s, int64_t step) {
  const auto t = static_cast<double>(step), warmup = static_cast<double>(s.warmup);
  if (step <= s.warmup) return s.lr * t / warmup;
  if (s.style == "constant") return s.lr;
  if (step > s.end) return s.min_lr;
  if (s.style == "inverse-square-root")
    return std::max(s.min_lr, s.lr * std::sqrt(std::max(warmup, 1.0) / t));
  // From lr to min_lr over (start, end].
  const int64_t start = s.style == "WSD" ? s.end - s.wsd_decay : s.warmup;
  if (step <= start) return s.lr;
  const double passed = static_cast<double>(step - start) / static_cast<double>(s.end - start);
  if (s.style == "linear" || s.style == "WSD") return s.min_lr + (1 - passed) * (s.lr - s.min_lr);
  if (s.style == "cosine")
    return s.min_lr + 0.5 * (1 + std::cos(std::numbers::pi * passed)) * (s.lr - s.min_lr);
  throw std::runtime_error("lr_decay_style " + s.style);
}

double scaled_rate(double lr, const std::string& rule, int64_t batch, int64_t base) {
  const double ratio = static_cast<double>(batch) / static_cast<double>(base);
  if (rule == "none") return lr;
  if (rule == "linear") return lr * ratio;
  if (rule == "sqrt") return lr * std::sqrt(ratio);
  throw std::runtime_error("lr_scaling.rule " + rule);
}

}  // namespace reference
