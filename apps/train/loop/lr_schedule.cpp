#include "apps/train/loop/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/base/error.h"
#include "core/config/load.h"

namespace nrl::train {

LrSchedule make_lr_schedule(const PolicyConfig& policy, int64_t max_steps, int64_t global_batch) {
  const SchedulerConfig& c = policy.scheduler;
  const LrScalingConfig& scaling = policy.optimizer.lr_scaling;
  LrSchedule s;
  s.decay = c.lr_decay_style;
  s.lr = scaled_lr(policy.optimizer.lr, scaling.rule, global_batch, scaling.base_batch_size);
  s.min_lr = scaled_lr(c.min_lr, scaling.rule, global_batch, scaling.base_batch_size);
  s.decay_steps = decay_end(c, max_steps);
  s.warmup_steps = warmup_steps(c, s.decay_steps);
  s.wsd_decay_steps = c.lr_wsd_decay_iters.value_or(0);
  s.period = (s.decay == LrDecayStyle::step ? c.lr_step_iters : c.lr_cycle_iters).value_or(0);
  s.factor = c.lr_step_factor;
  NRL_CHECK(c.ends() || s.decay == LrDecayStyle::constant || (s.min_lr <= s.lr && s.period >= 1),
            "the configuration was not checked");
  NRL_CHECK(!c.ends() || (s.min_lr <= s.lr && s.decay_steps >= 1 && s.warmup_steps <= s.decay_steps),
            "the configuration was not checked");
  NRL_CHECK(s.decay != LrDecayStyle::wsd ||
                (s.wsd_decay_steps >= 1 && s.wsd_decay_steps <= s.decay_steps - s.warmup_steps),
            "the configuration was not checked");
  return s;
}

double learning_rate(const LrSchedule& s, int64_t step) {
  if (s.warmup_steps > 0 && step <= s.warmup_steps)
    return s.lr * static_cast<double>(step) / static_cast<double>(s.warmup_steps);
  if (s.decay == LrDecayStyle::constant) return s.lr;
  if (s.decay == LrDecayStyle::step) {
    const int64_t reductions = (step - s.warmup_steps - 1) / s.period;
    return std::max(s.min_lr, s.lr * std::pow(s.factor, static_cast<double>(reductions)));
  }
  if (s.decay == LrDecayStyle::cyclical) {
    const auto at = static_cast<double>((step - s.warmup_steps) % s.period);
    return s.min_lr + std::fabs(1 - 2 * at / static_cast<double>(s.period)) * (s.lr - s.min_lr);
  }
  if (step > s.decay_steps) return s.min_lr;
  if (s.decay == LrDecayStyle::inverse_square_root) {
    const auto warmup = static_cast<double>(std::max<int64_t>(s.warmup_steps, 1));
    const auto at = static_cast<double>(std::max<int64_t>(step, 1));
    return std::max(s.min_lr, s.lr * std::sqrt(warmup / at));
  }
  const int64_t begin = s.decay == LrDecayStyle::wsd ? s.decay_steps - s.wsd_decay_steps : s.warmup_steps;
  if (step <= begin) return s.lr;
  // begin < step <= decay_steps, so the divisor is positive.
  const double ratio = static_cast<double>(step - begin) / static_cast<double>(s.decay_steps - begin);
  const double coefficient =
      s.decay == LrDecayStyle::cosine ? 0.5 * (1 + std::cos(std::numbers::pi * ratio)) : 1 - ratio;
  return s.min_lr + coefficient * (s.lr - s.min_lr);
}

double scaled_lr(double base, LrScalingRule rule, int64_t global_batch, int64_t base_batch) {
  if (rule == LrScalingRule::none) return base;
  const double ratio = static_cast<double>(global_batch) / static_cast<double>(base_batch);
  return base * (rule == LrScalingRule::linear ? ratio : std::sqrt(ratio));
}

}  // namespace nrl::train
