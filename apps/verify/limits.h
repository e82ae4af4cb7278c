#pragma once
// How far a layout may be from one rank.

#include "apps/verify/compare.h"
#include "core/config/enums.h"
#include "precision/recipe.h"

namespace nrl::verify {

/// Limits of relative differences. Every layout adds the same numbers in another order, so that differences
/// are rounding errors: they grow with the formats that sums of several ranks are rounded to, not with the
/// number of steps (see `epsilon`).
struct Limits {
  double loss = 0;      ///< of the loss of a step
  double norm = 0;      ///< of the gradient norm
  double gradient = 0;  ///< of a tensor's gradient: ||g - g_ref|| / ||g_ref||
  double weight = 0;    ///< of a tensor's weights after the update
};
/// `tf32`: the GEMMs of a GPU may round f32 operands to TF32. `wire`: the type in which gradients travel.
/// `experts`: the model has layers with experts. `updates`: before the last step that is compared.
/// `microbatches`: of a rank and step.
Limits limits_for(const precision::Recipe& recipe, bool tf32, DType wire, bool experts = false,
                  int64_t updates = 1, int64_t microbatches = 1);

/// The learning rate of every step: large enough for an update that is missing to exceed Limits::weight.
inline constexpr double learning_rate = 1e-3;

/// The eps of AdamW in both runs, for a model of `parameters` elements. Adam divides a gradient by its own
/// size, so that with the usual eps rounding errors choose the sign of the update where a gradient is near
/// zero. With an eps of the size of a typical gradient the update is a smooth function of it.
double epsilon(int64_t parameters);

/// ||g - g_ref|| / ||g_ref|| of each tensor. A tensor whose gradient is zero but for rounding errors (such as
/// the bias of keys, which softmax cancels) counts as if every element was one hundredth of a typical one.
std::vector<double> gradient_errors(const std::vector<Difference>& differences);

/// ||w - w_ref|| / (lr sqrt(n) + 0.03 ||w_ref||) of each tensor of n elements: relative to what a step may
/// change, so that an update that is missing shows, with a share of the weights themselves, whose last digits
/// are rounded.
std::vector<double> weight_errors(const std::vector<Difference>& differences);

}  // namespace nrl::verify
