#pragma once
// The learning rate of every step.

#include <cstdint>
#include <string>

namespace reference {

struct Schedule {
  std::string style = "cosine";  ///< constant, linear, cosine, WSD, inverse-square-root
  double lr = 0, min_lr = 0;
  int64_t warmup = 0;     ///< steps of the linear rise from 0
  int64_t end = 0;        ///< step at which min_lr is reached
  int64_t wsd_decay = 0;  ///< WSD: steps of the final decay
};

/// The rate of update `step`, counted from 1.
double learning_rate(const Schedule& schedule, int64_t step);

/// lr_scaling: the rate for batch size `batch` of a rate chosen for `base`.
double scaled_rate(double lr, const std::string& rule, int64_t batch, int64_t base);

}  // namespace reference
