#pragma once
// The scalars of an optimizer step, kept in device memory so that the host does not wait for them: whether
// the step is taken, how gradients are clipped, Adam's corrections.

#include "core/ops/exec.h"

namespace nrl::ops {

/// Indices of a (StepScalar::count) f64 tensor. Integers are exact up to 2^53.
struct StepScalar {
  static constexpr int max_metrics = 12;
  enum Index : int {
    // Summed over the data-parallel ranks in one all_reduce of `sums` elements from the first on.
    squared_norm,                  ///< of the gradients
    metrics,                       ///< max_metrics sums that the objective names; the first must be finite
    stop = metrics + max_metrics,  ///< > 0: a rank was asked to stop
    router,                        ///< of experts: aux loss, z loss, load (ops::RouterBalance)
    sums = router + 3,
    // Set by the host before the step.
    learning_rate = sums,
    // A finite step is skipped if loss_factor != 0 and loss_factor x the first metric exceeds loss_limit, or
    // if
    // norm_limit > 0 and its gradient norm exceeds that.
    loss_factor,
    loss_limit,
    norm_limit,
    // Carried from step to step (and through checkpoints).
    updates,           ///< updates applied so far
    skipped_in_a_row,  ///< steps that were not finite, up to now; without overflows and limits
    loss_scale,        ///< what loss weights of the next step are multiplied by; 0: 1
    clean_steps,       ///< steps without overflow since the loss scale changed
    // Set by decide_step.
    skip,  ///< 1: this step must not change anything
    grad_norm,
    grad_scale,       ///< what gradients are multiplied by: the clip factor / the loss scale
    correction1,      ///< 1 - beta1^updates, of this update
    correction2,      ///< 1 - beta2^updates
    overflow,         ///< 1: the step is skipped and its loss scale was too large
    limited,          ///< 1: the step is skipped because of a limit
    used_loss_scale,  ///< of this step
    count
  };
};

/// A loss scale that adapts: halved by every overflow, doubled after `growth_interval` steps without.
inline constexpr double initial_loss_scale = 65536, smallest_loss_scale = 1, largest_loss_scale = 0x1p60;

/// From the summed scalars: grad_norm = sqrt(squared_norm) / loss_scale; skip unless it and the first metric
/// are finite; otherwise updates += 1, grad_scale = min(1, max_norm / (grad_norm + 1e-6)) / loss_scale, and
/// the corrections. One thread.
///
/// With `growth_interval` gradients that are not finite are an overflow if the first metric is finite and the
/// loss scale is above smallest_loss_scale: the step is skipped, but not counted in skipped_in_a_row.
///
/// A finite step beyond a limit is skipped and ends a row of skipped steps.
struct DecideStep {
  Tensor scalars;       ///< (StepScalar::count) f64
  double max_norm = 0;  ///< 0: gradients are not clipped
  double beta1 = 0.9, beta2 = 0.999;
  int64_t max_skipped =
      0;  ///< > 0: after so many skipped steps in a row all further ones are skipped as well
  int64_t growth_interval = 0;  ///< 0: the loss scale does not change
};
void decide_step(Exec& exec, const DecideStep& a);
Cost cost(const Exec& exec, const DecideStep& a);

}  // namespace nrl::ops
