#pragma once
// The learning rate as a pure function of the step, with the shapes of Megatron-LM's parameter scheduler.

#include <cstdint>
#include <string_view>

namespace nrl {

/// Shape after the warm-up. `wsd` is warm-up, stable, decay (Hu et al., "MiniCPM", 2024) with a linear decay.
enum class LrDecay { constant, linear, cosine, wsd, inverse_square_root };

/// "constant", "linear", "cosine", "WSD" (or "wsd"), "inverse-square-root" (or with underscores).
/// Error(Exit::config) names the allowed ones.
LrDecay lr_decay_from(std::string_view name);

struct LrSchedule {
  LrDecay decay = LrDecay::constant;
  double lr = 0;                ///< the highest rate, reached at the end of the warm-up
  double min_lr = 0;            ///< the rate at decay_steps and after it (not used by `constant`)
  int64_t warmup_steps = 0;     ///< linear from 0; 0 = none
  int64_t decay_steps = 0;      ///< the step at which the decay ends, counted from the start of the run
  int64_t wsd_decay_steps = 0;  ///< `wsd` only: length of the final decay, which ends at decay_steps
};

/// Refuses (Exit::config) rates that are negative or not finite, min_lr > lr, negative step counts, and a
/// decay that ends before the warm-up (for `wsd`: that begins before the warm-up's end).
void check(const LrSchedule& schedule);

/// The rate that update number `step` (from 1) is made with. Needs a schedule that passed check().
///   step <= warmup            lr * step / warmup
///   constant                  lr
///   step > decay_steps        min_lr
///   inverse_square_root       max(min_lr, lr * sqrt(max(warmup, 1) / step))
///   linear, cosine            min_lr + c * (lr - min_lr), c = 1 - r or (1 + cos(pi r)) / 2,
///                             r = (step - warmup) / (decay_steps - warmup)
///   wsd                       c = 1 up to decay_steps - wsd_decay_steps, then linear to 0
double learning_rate(const LrSchedule& schedule, int64_t step);

enum class LrScaling { none, linear, sqrt };
/// "none", "linear", "sqrt"; Error(Exit::config) otherwise.
LrScaling lr_scaling_from(std::string_view name);

/// The rate for a global batch given one tuned at `base_batch` (samples): base, base * g / b or
/// base * sqrt(g / b).
double scaled_lr(double base, LrScaling rule, int64_t global_batch, int64_t base_batch);

}  // namespace nrl
