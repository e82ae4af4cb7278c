#pragma once
// The numbers that the losses of policies read beside the tokens of rollouts (algorithm grpo).

#include <memory>

#include "apps/data/examples/example_batches.h"
#include "apps/data/examples/sequence_numbers.h"
#include "core/config/config.h"

namespace nrl::train {

/// True if a step on rollouts reads the log-probabilities of the policy before the update; else it compares
/// with its own ones, or compares nothing.
bool reads_old_log_probs(const Config& config);

/// plan::PolicyColumn of the rows of rollouts. `reference` and `old`, by row, may be null: the numbers of the
/// reference are then 0, and the examples have the old ones, or the sampler's take their place. Advantages
/// are computed of all examples together, however steps divide them. Reports token_mult_prob_error,
/// sampling_importance_ratio and is_oob_ratio of a step where old and sampler's log-probabilities are known
/// (docs/post-training.md).
std::shared_ptr<data::StepNumbers> policy_numbers(const Config& config,
                                                  std::shared_ptr<const data::Examples> examples,
                                                  std::shared_ptr<const data::SequenceNumbers> reference,
                                                  std::shared_ptr<const data::SequenceNumbers> old);

}  // namespace nrl::train
