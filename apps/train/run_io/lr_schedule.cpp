#include "apps/train/run_io/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "core/base/error.h"

namespace nrl {

LrDecay lr_decay_from(std::string_view name) {
  if (name == "constant") return LrDecay::constant;
  if (name == "linear") return LrDecay::linear;
  if (name == "cosine") return LrDecay::cosine;
  if (name == "WSD" || name == "wsd") return LrDecay::wsd;
  if (name == "inverse-square-root" || name == "inverse_square_root") return LrDecay::inverse_square_root;
  fail(Exit::config,
       "lr_decay_style: '{}' is not a learning rate schedule; use one of constant, linear, cosine, WSD, "
       "inverse-square-root",
       name);
}

LrScaling lr_scaling_from(std::string_view name) {
  if (name == "none") return LrScaling::none;
  if (name == "linear") return LrScaling::linear;
  if (name == "sqrt") return LrScaling::sqrt;
  fail(Exit::config, "lr_scaling.rule: '{}' is unknown; use one of none, linear, sqrt", name);
}

void check(const LrSchedule& s) {
  if (!std::isfinite(s.lr) || s.lr < 0)
    fail(Exit::config, "lr: {} is not a learning rate; it must be finite and at least 0", s.lr);
  if (!std::isfinite(s.min_lr) || s.min_lr < 0)
    fail(Exit::config, "min_lr: {} is not a learning rate; it must be finite and at least 0", s.min_lr);
  if (s.warmup_steps < 0)
    fail(Exit::config, "lr_warmup_iters: {} is negative; use 0 for no warm-up", s.warmup_steps);
  if (s.decay == LrDecay::constant) return;
  if (s.min_lr > s.lr)
    fail(Exit::config, "min_lr: {} is greater than lr {}; lower min_lr or use lr_decay_style: constant",
         s.min_lr, s.lr);
  if (s.decay_steps < 1)
    fail(Exit::config, "lr_decay_iters: {} is too small; the decay needs at least 1 step", s.decay_steps);
  if (s.decay_steps < s.warmup_steps)
    fail(Exit::config,
         "lr_decay_iters: the decay ends at step {}, before the warm-up does ({} steps); lengthen "
         "lr_decay_iters or shorten lr_warmup_iters",
         s.decay_steps, s.warmup_steps);
  if (s.decay != LrDecay::wsd) return;
  if (s.wsd_decay_steps < 1)
    fail(Exit::config, "lr_wsd_decay_iters: {} is too small; WSD needs a decay of at least 1 step",
         s.wsd_decay_steps);
  if (s.wsd_decay_steps > s.decay_steps - s.warmup_steps)
    fail(Exit::config,
         "lr_wsd_decay_iters: a decay of {} steps that ends at step {} begins before the warm-up's end ({}); "
         "at most {} steps fit",
         s.wsd_decay_steps, s.decay_steps, s.warmup_steps, s.decay_steps - s.warmup_steps);
}

double learning_rate(const LrSchedule& s, int64_t step) {
  if (s.warmup_steps > 0 && step <= s.warmup_steps)
    return s.lr * static_cast<double>(step) / static_cast<double>(s.warmup_steps);
  if (s.decay == LrDecay::constant) return s.lr;
  if (step > s.decay_steps) return s.min_lr;
  if (s.decay == LrDecay::inverse_square_root) {
    const auto warmup = static_cast<double>(std::max<int64_t>(s.warmup_steps, 1));
    const auto at = static_cast<double>(std::max<int64_t>(step, 1));
    return std::max(s.min_lr, s.lr * std::sqrt(warmup / at));
  }
  const int64_t begin = s.decay == LrDecay::wsd ? s.decay_steps - s.wsd_decay_steps : s.warmup_steps;
  if (step <= begin) return s.lr;
  // begin < step <= decay_steps: the length is not 0.
  const double ratio = static_cast<double>(step - begin) / static_cast<double>(s.decay_steps - begin);
  const double share =
      s.decay == LrDecay::cosine ? 0.5 * (1 + std::cos(std::numbers::pi * ratio)) : 1 - ratio;
  return s.min_lr + share * (s.lr - s.min_lr);
}

double scaled_lr(double base, LrScaling rule, int64_t global_batch, int64_t base_batch) {
  if (rule == LrScaling::none) return base;
  if (global_batch < 1 || base_batch < 1)
    fail(Exit::config, "lr_scaling: global batch {} and base_batch_size {} must both be at least 1",
         global_batch, base_batch);
  const double ratio = static_cast<double>(global_batch) / static_cast<double>(base_batch);
  return base * (rule == LrScaling::linear ? ratio : std::sqrt(ratio));
}

}  // namespace nrl
