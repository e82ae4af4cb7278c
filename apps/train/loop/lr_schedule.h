#pragma once
// The learning rate as a pure function of the step, with the shapes of Megatron-LM's parameter scheduler.

#include <cstdint>

#include "core/config/config.h"

namespace nrl::train {

struct LrSchedule {
  LrDecayStyle decay = LrDecayStyle::constant;
  double lr = 0;                ///< peak learning rate, reached at the end of the warm-up
  double min_lr = 0;            ///< learning rate from decay_steps on (not used by `constant`)
  int64_t warmup_steps = 0;     ///< linear from 0; 0: no warm-up
  int64_t decay_steps = 0;      ///< step at which the decay ends, counted from the start of the run
  int64_t wsd_decay_steps = 0;  ///< `wsd` only: length of the final decay, which ends at decay_steps
  int64_t period = 0;           ///< `step`: steps between reductions; `cyclical`: of a cycle
  double factor = 1;            ///< `step` only: of a reduction
};

/// The schedule of a validated configuration for `max_steps` > 0 steps of `global_batch` samples.
LrSchedule make_lr_schedule(const PolicyConfig& policy, int64_t max_steps, int64_t global_batch);

/// The learning rate of step `step` (from 1). The warm-up must end before the decay ends, and before the
/// final decay of WSD begins.
///   step <= warmup            lr * step / warmup
///   constant                  lr
///   step                      max(min_lr, lr * factor^floor((step - warmup - 1) / period))
///   cyclical                  min_lr + |1 - 2 r| * (lr - min_lr), r = (step - warmup) / period mod 1
///   step > decay_steps        min_lr
///   inverse_square_root       max(min_lr, lr * sqrt(max(warmup, 1) / step))
///   linear, cosine            min_lr + c * (lr - min_lr), c = 1 - r or (1 + cos(pi r)) / 2,
///                             r = (step - warmup) / (decay_steps - warmup)
///   wsd                       c = 1 up to decay_steps - wsd_decay_steps, then linear to 0
double learning_rate(const LrSchedule& schedule, int64_t step);

/// Scales a learning rate tuned for `base_batch` samples to `global_batch`: base, base * g / b or
/// base * sqrt(g / b).
double scaled_lr(double base, LrScalingRule rule, int64_t global_batch, int64_t base_batch);

}  // namespace nrl::train
