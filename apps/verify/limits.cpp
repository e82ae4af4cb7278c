#include "apps/verify/limits.h"

#include <algorithm>
#include <cmath>

namespace nrl::verify {

namespace {

// e4m3 rounds an element by 2^-4 of it at most, by 2.6 % in the mean square. It does so up to four times in
// what an update reads: a rank's gradient and the sum (ddp), and from the second step on what these lost in
// the step before. The roundings are independent: 2 * 2.6 % = 5.2 % of a tensor's gradient. Five times as
// much is allowed: the gradient of an expert with few tokens may be several times smaller than that of the
// step before, whose errors it carries. The update is a smooth function of the gradient (`epsilon`) and
// changes by no larger share. In a norm, rounding adds its square, 0.052^2 / 2 = 0.14 %. A loss differs with
// the weights that the step before updated: by 32 times as much as with bf16, which rounds by 2^-9.
constexpr Limits fp8_limits{.loss = 3e-4, .norm = 5e-3, .gradient = 2.5e-1, .weight = 2.5e-1};

// A token that chooses an expert by less than 16 bits tell apart goes to another one when sums are rounded in
// another order. Of an expert with few tokens that is up to a third of the gradient, and with FP8 operands,
// which move such choices more often, up to two thirds (tests/verify/tiny_moe.yaml). Ranks that exchange
// tokens round them with one scale where one rank has a scale for each microbatch, which moves the loss more
// than other choices do.
Limits other_choices(bool fp8) {
  if (fp8) return {.loss = 5e-3, .norm = 5e-2, .gradient = 8e-1, .weight = 8e-1};
  return {.loss = 2e-3, .norm = 2e-2, .gradient = 5e-1, .weight = 5e-1};
}

// In fp32 a token chooses another expert only if the weights differ, which they do by more than the rounding
// of sums if gradients or optimizer state are rounded. After one update that is too little for any token of
// tests/verify/tiny_moe.yaml; in 8 steps one of 256 does, which moves the loss by 3e-5 to 1.8e-4, the norm by
// 8e-4 and the gradient of its experts by 9 %. Allows a few tokens, or one of an expert that has few.
constexpr Limits choices_of_other_weights{.loss = 1e-3, .norm = 1e-2, .gradient = 3.5e-1, .weight = 5e-2};

// The unit in the last place of optimizer state, relative to e4m3's.
double unit_of_state(DType dtype) {
  switch (dtype) {
    case DType::e4m3:
      return 1;
    case DType::bf16:
      return 0x1p-4;
    case DType::f16:
      return 0x1p-7;
    default:
      return 0;
  }
}

Limits times(double factor, const Limits& limits) {
  return {.loss = factor * limits.loss,
          .norm = factor * limits.norm,
          .gradient = factor * limits.gradient,
          .weight = factor * limits.weight};
}

// The reference keeps its state in fp32. From the second step on an update reads state of the step before
// that was rounded at random, by 2^-3 * 0.4 at most in the mean square with e4m3: 5 %, in about half of what
// it reads. That is no more than fp8_limits allow for gradients in e4m3, and proportional to the unit of the
// format.
Limits limits_of_state(const precision::OptimizerFormats& formats) {
  return times(std::max(unit_of_state(formats.exp_avg), unit_of_state(formats.exp_avg_sq)), fp8_limits);
}

// Without master weights the layout and the reference round weights at random after each update, by half a
// unit of 2^-7 at most in the mean square, of which weight_errors() make 0.0039 / 0.03 = 0.13. Gradients that
// differ in their last bits have other random bits, and the roundings of updates are independent: the root of
// 2 times as much, and of the number of updates. Losses and gradients of such weights, which the passes read,
// differ by no more than twice as much as with other sums in bf16.
Limits limits_of_weights(int64_t updates) {
  const double steps = std::sqrt(static_cast<double>(std::max<int64_t>(updates, 1)));
  return times(steps, {.loss = 4e-3, .norm = 4e-2, .gradient = 1e-1, .weight = 1.9e-1});
}

// Ranks agree on the scales, so that a layout rounds the same numbers to FP8 in the same way, but for the few
// that lie so near the middle of two FP8 numbers that sums in another order (1e-7) move them over it. Such a
// number is off by up to 2^-3, and the numbers that follow from it move others: a tenth of the gradient of a
// tensor, and a quarter in the next step, which begins with other weights.
constexpr Limits fp8_operands{.loss = 2e-3, .norm = 5e-2, .gradient = 5e-1, .weight = 5e-1};

Limits limits_of_arithmetic(const precision::Recipe& recipe, bool tf32, DType wire, int64_t microbatches) {
  if (recipe.quantizes_any()) return fp8_operands;
  if (wire == DType::e4m3) return fp8_limits;
  if (recipe.activations() == DType::bf16 || recipe.weights() == DType::bf16)
    return {.loss = 2e-3, .norm = 2e-2, .gradient = 5e-2, .weight = 6e-2};
  // f16 rounds by 2^-11, an eighth of bf16.
  if (recipe.activations() == DType::f16 || recipe.weights() == DType::f16)
    return {.loss = 5e-4, .norm = 5e-3, .gradient = 2e-2, .weight = 2e-2};
  // Gradients in bf16 are rounded once per microbatch and rank, whose gradients of a bias partly cancel: 5e-3
  // of a bias of keys on 8 ranks, where the same layouts differ by 1.4e-6 with gradients in fp32. The loss of
  // a reward model depends on differences of scores: 8.5e-5 after a step with both kinds of rounding. Errors
  // of many microbatches grow with the root of their number: 1.7e-2 of a bias with 24.
  const bool kept = recipe.optimizer().main_gradients == DType::bf16;
  if (wire == DType::bf16 || kept)
    return times(kept ? std::sqrt(std::max(1.0, static_cast<double>(microbatches) / 8)) : 1,
                 {.loss = 2e-4, .norm = 2e-3, .gradient = 1e-2, .weight = 1.5e-2});
  if (tf32) return {.loss = 2e-4, .norm = 2e-3, .gradient = 5e-3, .weight = 5e-3};
  return {.loss = 1e-6, .norm = 1e-5, .gradient = 1e-5, .weight = 1e-5};
}

}  // namespace

Limits limits_for(const precision::Recipe& recipe, bool tf32, DType wire, bool experts, int64_t updates,
                  int64_t microbatches) {
  const auto either = [](const Limits& a, const Limits& b) {
    return Limits{.loss = std::max(a.loss, b.loss),
                  .norm = std::max(a.norm, b.norm),
                  .gradient = std::max(a.gradient, b.gradient),
                  .weight = std::max(a.weight, b.weight)};
  };
  Limits limits =
      either(limits_of_arithmetic(recipe, tf32, wire, microbatches), limits_of_state(recipe.optimizer()));
  if (!recipe.optimizer().master) limits = either(limits, limits_of_weights(updates));
  const bool fp8 = recipe.quantizes_any();
  if (!experts) return limits;
  if (fp8 || recipe.activations() != DType::f32) return either(limits, other_choices(fp8));
  const precision::OptimizerFormats& formats = recipe.optimizer();
  const bool kept = formats.main_gradients != DType::f32;
  const bool other_weights = wire != DType::f32 || kept || unit_of_state(formats.exp_avg) > 0 ||
                             unit_of_state(formats.exp_avg_sq) > 0;
  // Rounded in each microbatch, they make other weights at once.
  return other_weights && updates > (kept ? 0 : 1) ? either(limits, choices_of_other_weights) : limits;
}

double epsilon(int64_t parameters) {
  return 1 / std::sqrt(static_cast<double>(parameters));
}

std::vector<double> gradient_errors(const std::vector<Difference>& differences) {
  double squares = 0, elements = 0;
  for (const Difference& d : differences) {
    squares += d.reference_norm * d.reference_norm;
    elements += static_cast<double>(d.numel);
  }
  const double typical = std::sqrt(squares / elements);
  std::vector<double> errors;
  for (const Difference& d : differences) {
    const double floor = 1e-2 * typical * std::sqrt(static_cast<double>(d.numel));
    errors.push_back(d.norm == 0 ? 0 : d.norm / std::max(d.reference_norm, floor));
  }
  return errors;
}

std::vector<double> weight_errors(const std::vector<Difference>& differences) {
  std::vector<double> errors;
  for (const Difference& d : differences)
    errors.push_back(d.norm /
                     (learning_rate * std::sqrt(static_cast<double>(d.numel)) + 0.03 * d.reference_norm));
  return errors;
}

}  // namespace nrl::verify
