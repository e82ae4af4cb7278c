#pragma once
// Enumerations of the objectives of post-training.

#include "core/base/enum_names.h"

namespace nrl {

/// How a pair of a chosen and a rejected sequence is scored; core/ops/pair_loss.h has the formulas.
NRL_ENUM(PreferenceLoss, (sigmoid, robust, hinge, ipo, apo_zero, apo_down, simpo, orpo),
         ("sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "simpo", "orpo"),
         (, {"dpo", "sigmoid"}))
/// The surrogate of a policy gradient; core/ops/policy_loss.h has the formulas.
NRL_ENUM(PolicyObjective, (clip, cispo, reinforce, gspo, rloo),
         ("clip", "cispo", "reinforce", "gspo", "rloo"), (, {"ppo", "clip"}, {"grpo", "clip"}))
/// The mean that is the loss of a policy.
NRL_ENUM(LossAggregation,
         (token_mean, sequence_mean_token_mean, sequence_mean_token_sum, sequence_mean_token_sum_norm),
         ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum",
          "sequence_mean_token_sum_norm"),
         (, {"dapo", "token_mean"}, {"grpo", "sequence_mean_token_mean"},
          {"dr_grpo", "sequence_mean_token_sum_norm"}))
/// Estimators of the KL divergence from the reference (Schulman, "Approximating KL Divergence").
NRL_ENUM(KlEstimator, (k1, k2, k3), ("k1", "k2", "k3"), ())
/// The divergence between teacher and student in distillation; core/ops/distillation.h has the formulas.
NRL_ENUM(KlDirection, (forward, reverse, mixed), ("forward", "reverse", "mixed"), ())

}  // namespace nrl
