#pragma once
// The inputs of each algorithm's objective beside tokens and targets.

#include "apps/model/spec/loss_rule.h"
#include "core/config/config.h"

namespace nrl::plan {

/// MicroBatch::columns of the loss of a policy, (N) f32 each (ops::PolicyLoss).
struct PolicyColumn {
  enum Index : int {
    normalizer,
    advantage,
    old,         ///< log-probability of the old policy; unread where the step's own are the old ones
    reference,   ///< unread without a penalty
    importance,  ///< weight
    count
  };
};
/// MicroBatch::sequence_values of losses with ratios of whole sequences: tokens with a loss.
inline constexpr int64_t policy_sequence_values = 1;

/// True for losses with ratios of whole sequences.
bool has_sequence_ratios(PolicyObjective type);
/// True if the loss reads log-probabilities of a reference, or logits of a teacher that runs beside the
/// student, which must be computed before training.
bool needs_reference(const Config& config);

/// True if a copy of the weights that training began with is kept beside the trained ones, because rollouts
/// are compared with it as long as the run generates them; a policy with adapters has it without a copy.
bool keeps_reference(const Config& config);

/// The needs of the configured algorithm's objective.
model::LossNeeds loss_needs(const Config& config);

}  // namespace nrl::plan
