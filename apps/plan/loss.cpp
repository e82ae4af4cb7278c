#include "apps/plan/loss.h"

#include "core/ops/pair_loss.h"

namespace nrl::plan {

using model::Dependence;

bool has_sequence_ratios(PolicyObjective type) {
  return type == PolicyObjective::gspo || type == PolicyObjective::rloo;
}

bool needs_reference(const Config& config) {
  switch (config.algorithm) {
    case Algorithm::dpo:
      return config.preference.loss_type != PreferenceLoss::simpo &&
             config.preference.loss_type != PreferenceLoss::orpo;
    case Algorithm::grpo:
      return config.loss_fn.reference_policy_kl_penalty > 0;
    case Algorithm::distill:
      return generates_rollouts(config);
    case Algorithm::pretrain:
    case Algorithm::sft:
    case Algorithm::rm:
      break;
  }
  return false;
}

bool keeps_reference(const Config& config) {
  return needs_reference(config) && generates_rollouts(config) && !config.policy.lora.enabled &&
         !config.loss_fn.reference_model;
}

model::LossNeeds loss_needs(const Config& config) {
  switch (config.algorithm) {
    case Algorithm::pretrain:
    case Algorithm::sft:
      break;
    case Algorithm::dpo:
    case Algorithm::rm:
      return {.dependence = Dependence::sequence, .sequence_values = ops::PairValue::count};
    case Algorithm::grpo: {
      const PolicyLossConfig& loss = config.loss_fn;
      const bool sequences = has_sequence_ratios(loss.type);
      return {.dependence = sequences ? Dependence::sequence : Dependence::token,
              .entropy = loss.entropy_coef != 0,
              .inverse_temperature = 1 / config.rollout.temperature,
              .columns = std::vector<model::ColumnSpec>(PolicyColumn::count),
              .sequence_values = sequences ? policy_sequence_values : 0};
    }
    case Algorithm::distill: {
      const DistillationConfig& d = config.distillation;
      return {.entropy = d.zero_outside_topk && d.kl_type != KlDirection::forward,
              .inverse_temperature = 1 / d.temperature,
              .columns = {{DType::i32, d.topk}, {DType::f32, d.topk}},
              .divergence = ops::TopkKl::Options{.type = d.kl_type,
                                                 .mixed_weight = d.mixed_kl_weight,
                                                 .temperature = d.temperature,
                                                 .zero_outside = d.zero_outside_topk}};
    }
  }
  return {};
}

}  // namespace nrl::plan
